"""What is saved is what loads: parts, several configs, interrupted saves, and names that no other engine serves."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_linattn import CheckpointError, PatchError, get_mechanisms, is_patched, patch_model, unpatch_model
from hf_linattn.atomic_io import write_text, write_whole
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.saving import PLAIN_SAVE
from hf_linattn.support.tiny import tiny_config
from tests.helpers import logits_of, make_patched, make_tokens
from tests.models import SIZES, SPINE, TOKENS, fill, make_model
from tests.test_marked import answer, make_llava

IDS = make_tokens(2, 9)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- parts ------------------------------------------------------------------------------------------------------------


def make_pair(tmp_path: Path) -> PreTrainedModel:
    """An encoder and a decoder that were converted by themselves."""
    encoder = BertModel(BertConfig(**TOKENS, **SIZES))
    decoder = BertLMHeadModel(BertConfig(**TOKENS, **SIZES, is_decoder=True, add_cross_attention=True))
    for name, half in (("encoder", encoder), ("decoder", decoder)):
        patch_model(fill(half), "hedgehog").save_pretrained(tmp_path / name)
    made = EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "encoder", tmp_path / "decoder")
    made.config.decoder_start_token_id, made.config.pad_token_id = 1, 0
    return fill(made)


def make_towers(*towers: str, mechanism: str = "linear") -> Callable[[Path], PreTrainedModel]:
    def make(tmp_path: Path) -> PreTrainedModel:
        model = make_llava()
        for tower in towers:
            patch_model(getattr(model.model, tower), mechanism)
        return model

    return make


def make_body(tmp_path: Path) -> PreTrainedModel:
    model = make_model("llama")
    patch_model(model.base_model, "hedgehog")
    return model


IN_PARTS = {
    "text": (make_towers("language_model"), AutoModelForImageTextToText),
    "vision": (make_towers("vision_tower"), AutoModelForImageTextToText),
    "both": (make_towers("vision_tower", "language_model", mechanism="hedgehog"), AutoModelForImageTextToText),
    "pair": (make_pair, AutoModelForSeq2SeqLM),
    "body": (make_body, AutoModelForCausalLM),
}


def picture_answer(model: PreTrainedModel) -> torch.Tensor:
    if model.config.model_type != "llava":
        return answer(model)
    ids = make_tokens(2, 9)
    ids[:, 2:6] = model.config.image_token_id  # a picture of 2 x 2 patches
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return logits_of(model, ids, pixel_values=pixels)


@pytest.mark.parametrize("kind", IN_PARTS)
def test_a_whole_with_patched_parts_loads_bit_for_bit(tmp_path, kind):
    make, auto = IN_PARTS[kind]
    model = make(tmp_path)
    kept = type(model.config)
    expected = picture_answer(model)
    for place in ("first", "second"):  # what was loaded is saved again
        model.save_pretrained(tmp_path / place)
        loaded = auto.from_pretrained(tmp_path / place).eval()
        assert torch.equal(picture_answer(loaded), expected)
        assert list(get_mechanisms(loaded)) == list(get_mechanisms(model))
        if place == "first":
            assert type(model.config) is kept and "hf_linattn" not in vars(model.config)
        model = loaded
    unpatch_model(model)
    assert not is_patched(model) and not torch.equal(picture_answer(model), expected)


def test_a_whole_with_patched_parts_loads_as_another_class(tmp_path):
    model = make_towers("language_model")(tmp_path)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert {f"model.{path}" for path in get_mechanisms(loaded)} == set(get_mechanisms(model))


@pytest.mark.parametrize("in_parts", [True, False])
def test_the_text_model_alone_of_a_whole_is_refused_by_the_class_that_was_saved(tmp_path, in_parts):
    """Of an unconverted checkpoint of this kind transformers makes it."""
    config = tiny_config(transformers.Qwen3_5Config)
    config.vision_config.depth = 1
    whole = transformers.Qwen3_5ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    text = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(text) is transformers.Qwen3_5ForCausalLM
    patch_model(whole.model.language_model if in_parts else whole, "linear")
    whole.save_pretrained(tmp_path)
    said = "saved as Qwen3_5ForConditionalGeneration, .* with AutoModelForImageTextToText"
    with pytest.raises(CheckpointError, match=f"{tmp_path}' was {said}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(AutoModelForImageTextToText.from_pretrained(tmp_path)) is type(whole)
    patch_model(text, "linear").save_pretrained(tmp_path)
    assert is_patched(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_a_whole_whose_base_alone_is_patched_is_loaded_without_its_head(tmp_path):
    whole = make_model("llama")
    patch_model(whole.model, "hedgehog")
    whole.save_pretrained(tmp_path / "whole")
    loaded, ids = AutoModel.from_pretrained(tmp_path / "whole"), make_tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).last_hidden_state, whole.model(ids).last_hidden_state)
    assert list(get_mechanisms(loaded)) == list(get_mechanisms(whole.model))
    loaded.save_pretrained(tmp_path / "base")
    assert is_patched(AutoModel.from_pretrained(tmp_path / "base"))


@pytest.mark.parametrize("parts", [{}, [], {"model.tower": "linear"}, {"model.multi_modal_projector": None}])
def test_damaged_parts_are_named(tmp_path, parts):
    make_towers("language_model")(tmp_path).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (good,) = data["hf_linattn"]["parts"].values()
    data["hf_linattn"]["parts"] = {path: good if part is None else part for path, part in dict(parts).items()}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"hf_linattn.parts"):
        AutoModelForImageTextToText.from_pretrained(tmp_path)


def test_a_part_of_a_patched_whole_is_saved_marked_or_not_at_all(tmp_path):
    model = make_patched("llama", "linear")
    model.model.save_pretrained(tmp_path / "body")
    loaded = AutoModel.from_pretrained(tmp_path / "body").eval()
    assert torch.equal(loaded(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    towers = patch_model(make_llava(), "linear")
    with pytest.raises(PatchError, match=r"LlamaModel is part of a model that is patched as a whole.*save the whole"):
        towers.model.language_model.save_pretrained(tmp_path / "tower")
    assert not (tmp_path / "tower").exists()


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPINE)
def test_no_other_engine_finds_a_model_of_its_own(tmp_path, name):
    """Engines look architectures up in a table of their own, trying other endings, then the model type."""
    model = make_patched(name)
    model.save_pretrained(tmp_path)
    names = {known for known in dir(transformers) if isinstance(known, str)}
    in_file = json.loads((tmp_path / "config.json").read_text())
    assert in_file["model_type"] not in CONFIG_MAPPING_NAMES and list(in_file["auto_map"]) == ["AutoConfig"]
    in_memory = [model.config, AutoConfig.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path).config]
    for architectures in (in_file["architectures"], *(config.architectures for config in in_memory)):
        (architecture,) = architectures
        assert architecture == f"HfLinattn{type(model).__name__}"
        for ending in ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "Model", "ForSequenceClassification"):
            for other in ("ForCausalLM", "Model", "ForConditionalGeneration", ""):
                assert architecture.replace(ending, other) not in names
    assert "architectures" not in in_file["base_config"]
    unpatched = unpatch_model(AutoModel.from_pretrained(tmp_path))
    assert unpatched.config.architectures == [type(model).__name__]


def make_own(kind: str) -> PreTrainedModel:
    """Return a patched model whose classes are none of transformers, found as `AutoConfig` finds remote code."""

    class OwnConfig(LlamaConfig):
        model_type = kind

    class Own(LlamaForCausalLM):
        config_class = OwnConfig

    OwnConfig.register_for_auto_class()
    config = make_model("llama").config.to_dict() | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    if kind == "known":
        AutoConfig.register(kind, OwnConfig)
        AutoModelForCausalLM.register(OwnConfig, Own)
    return patch_model(Own(OwnConfig.from_dict(config | {"model_type": kind})), "linear").eval()


def test_classes_that_are_none_of_transformers_are_saved_once_they_are_registered(tmp_path, monkeypatch):
    for mapping in (CONFIG_MAPPING, AutoModelForCausalLM._model_mapping):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    for kind in ("unknown", "llama"):
        with pytest.raises(UnsupportedModelError, match=rf"OwnConfig is not what .*AutoConfig.register\('{kind}'"):
            make_own(kind).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model = make_own("known")
    model.save_pretrained(tmp_path)
    for trusted in ({}, {"trust_remote_code": True}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **trusted).eval()
        assert type(loaded) is type(model) and torch.equal(logits_of(loaded, IDS), logits_of(model, IDS))
    CONFIG_MAPPING._extra_content.pop("known")
    with pytest.raises(CheckpointError, match=r"'known', which is no.*AutoConfig.register\('known'"):
        AutoConfig.from_pretrained(tmp_path)


def test_a_config_that_adds_to_one_of_transformers_is_saved_as_that_one(tmp_path):
    class More(LlamaConfig):
        pass

    model = patch_model(LlamaForCausalLM(More.from_dict(make_model("llama").config.to_dict())), "linear").eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits_of(loaded, IDS), logits_of(model, IDS))


# -- interrupted saves ------------------------------------------------------------------------------------------------

SHARDS = {"one file": {}, "shards": {"max_shard_size": "60KB"}}
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def killed_at(moment: int, save: Callable[[], None]) -> bool:
    """Whether a process that saves was killed when it touched a file for the `moment`-th time; False: it got through.
    """
    child = os.fork()
    if child == 0:
        touched = 0

        def kill(event: str, args: object) -> None:
            nonlocal touched
            if event in EVENTS:
                touched += 1
                if touched == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        try:
            save()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


# what changes the kind of file has most moments; the other six are as these or have fewer
CHANGES = [("plain", "shards", "one file"), ("local", "one file", "shards")]


@pytest.mark.parametrize(
    ("first", "before", "after"),
    [
        pytest.param(*change, marks=[] if change in CHANGES else [pytest.mark.exhaustive])
        for change in product(["local", "plain"], SHARDS, SHARDS)
    ],
)
def test_a_save_killed_at_any_moment_leaves_the_old_the_new_or_an_error(tmp_path, first, before, after):
    old = make_model("llama") if first == "plain" else patch_model(make_model("llama"), "local", window_size=2)
    new = patch_model(make_model("llama", seed=1), "local", window_size=4)
    whole = [logits_of(model, IDS) for model in (old, new)]
    found, moment = set(), 1
    old.save_pretrained(tmp_path, **SHARDS[before])
    while killed_at(moment, lambda: new.save_pretrained(tmp_path, **SHARDS[after])):
        try:
            loaded = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path), IDS)
            found.add([torch.equal(loaded, logits) for logits in whole].index(True))
        except CheckpointError as error:
            assert "interrupted" in str(error)
            found.add(2)
            old.save_pretrained(tmp_path, **SHARDS[before])
        moment += 1
    assert found >= {0, 2} and moment > 10
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path), IDS), whole[1])
    assert not list(tmp_path.glob(".*")), "what killed saves have left is cleared"


def test_an_unpatched_model_replaces_a_patched_one_whole(tmp_path):
    make_patched("llama", "hedgehog").save_pretrained(tmp_path, max_shard_size="30KB")
    new, moment = make_model("llama", seed=1), 1
    while killed_at(moment, lambda: new.save_pretrained(tmp_path)):
        try:
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
            assert is_patched(loaded) or torch.equal(logits_of(loaded, IDS), logits_of(new, IDS))
        except CheckpointError:
            make_patched("llama", "hedgehog").save_pretrained(tmp_path, max_shard_size="30KB")
        moment += 1
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path), IDS), logits_of(new, IDS))


@pytest.mark.parametrize("before", SHARDS)
@pytest.mark.parametrize("after", SHARDS)
def test_a_save_leaves_no_weights_of_the_one_before(tmp_path, before, after):
    make_patched("llama", "hedgehog").save_pretrained(tmp_path, **SHARDS[before])
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "shard-00001-model-00001-of-00002.safetensors").write_text("of a distributed checkpoint")
    new = patch_model(make_model("llama", seed=1), "hedgehog")
    new.save_pretrained(tmp_path, **SHARDS[after])
    new.save_pretrained(tmp_path / "fresh", **SHARDS[after])
    fresh = {path.name for path in (tmp_path / "fresh").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == fresh | {"fresh", "notes.txt"}
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path), IDS), logits_of(new, IDS))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_what_is_written_has_the_mode_that_the_umask_gives(tmp_path, umask, mode):
    """safetensors writes files that their owner alone can read."""
    before = os.umask(umask)
    try:
        make_patched("llama", "hedgehog").save_pretrained(tmp_path / "model", max_shard_size="30KB")
        make_patched("llama", "linear").save_pretrained(tmp_path / "model")  # in place of the other
        tensors = {"a": torch.zeros(3)}
        write_whole(tmp_path / "adapter" / "weights.safetensors", lambda path: save_file(tensors, path))
        write_text(tmp_path / "adapter" / "text", "text")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == {path.name: mode for path in files}


def test_a_save_that_fails_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    make_patched("llama", "hedgehog").save_pretrained(tmp_path)
    before = contents(tmp_path)

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        make_patched("llama", "linear", seed=1).save_pretrained(tmp_path)
    assert contents(tmp_path) == before


def test_other_models_are_saved_as_ever(tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path / "one", max_shard_size="30KB")
    PLAIN_SAVE(model, tmp_path / "other", max_shard_size="30KB")
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
