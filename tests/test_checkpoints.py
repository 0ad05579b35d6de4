"""Damaged, foreign, hostile and random checkpoints: each loads and works, or names the file and the field."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    EncoderDecoderModel,
)

from hf_linattn import (
    CheckpointError,
    HfLinattnError,
    PatchConfig,
    PatchError,
    UnknownNameError,
    get_mechanisms,
    patch_model,
)
from hf_linattn.hub import load_checkpoint
from hf_linattn.mechanisms import MECHANISMS
from tests.helpers import logits_of, make_patched, make_tokenizer, make_tokens
from tests.models import make_model

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ADAPTER = "adapter_model.safetensors"
QUERY, FIRST_MAP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.hf_linattn.key_map.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    make_patched("llama", "hedgehog").save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, **options: Any):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


# -- the config -------------------------------------------------------------------------------------------------------

DAMAGES = [
    (lambda d: d["hf_linattn"].update(format_version=3), CheckpointError, "format_version 3 .*newer"),
    (lambda d: d["hf_linattn"].pop("groups"), CheckpointError, "groups"),
    (lambda d: d["hf_linattn"].update(num_layers=5), PatchError, "for 5 attention layers, the model has 2"),
    (lambda d: d["hf_linattn"]["groups"][0].update(mechanism="hedgehg"), UnknownNameError,
     r"mechanism 'hedgehg'; hf_linattn.groups\[0\] in config.json has it from another package, .* before loading$"),
    (lambda d: d["hf_linattn"]["groups"][0].update(mechanism="by_head", options={"plan": {"hedgehg": 0}}),
     UnknownNameError, "mechanism 'hedgehg'; .* from another package"),
    (lambda d: d["hf_linattn"]["groups"][0]["options"].update(x=1), HfLinattnError, "no option 'x'"),
    (lambda d: d.pop("hf_linattn"), CheckpointError, "no field 'hf_linattn'"),
    (lambda d: d.pop("base_config"), CheckpointError, "no field 'base_config'"),
    (lambda d: d.pop("base_model_type"), CheckpointError, "base_model_type None"),
    (lambda d: d.update(base_model_type="hf_linattn"), CheckpointError, "base_model_type 'hf_linattn'"),
    (lambda d: d.update(base_model_type="lama"), CheckpointError, "base_model_type 'lama'"),
]


def change_config(folder: Path, change) -> None:
    data = json.loads((folder / CONFIG).read_text())
    change(data)
    (folder / CONFIG).write_text(json.dumps(data))


@pytest.mark.parametrize(("change", "error", "message"), DAMAGES)
def test_a_damaged_config_names_the_field(folder, change, error, message):
    change_config(folder, change)
    with pytest.raises(error, match=message):
        load(folder)


def test_a_tokenizer_beside_a_mechanism_that_is_missing_says_so_too(folder):
    make_tokenizer().save_pretrained(folder)
    (folder / "tokenizer_config.json").unlink()
    change_config(folder, lambda d: d["hf_linattn"]["groups"][0].update(mechanism="gated_mean"))
    with pytest.raises(UnknownNameError, match=r"mechanism 'gated_mean'; .* from another package"):
        AutoTokenizer.from_pretrained(folder)


def test_fields_of_a_newer_version_are_left_out_with_a_warning(folder, caplog):
    def add(data):
        data["hf_linattn"]["made_by"] = "a newer version"
        data["hf_linattn"]["groups"][0]["note"] = 1

    expected = logits_of(load(folder), make_tokens(2, 9))
    change_config(folder, add)
    with caplog.at_level("WARNING", "hf_linattn"):
        loaded = load(folder)
    assert torch.equal(logits_of(loaded, make_tokens(2, 9)), expected)
    assert "hf_linattn.made_by" in caplog.text and "hf_linattn.groups[0].note" in caplog.text


def test_a_config_cut_short_is_named(folder):
    (folder / CONFIG).write_text((folder / CONFIG).read_text()[:150])
    with pytest.raises(OSError, match=f"{folder / CONFIG}' is not a valid JSON"):
        load(folder)


# -- the weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 20, 5000])
def test_weights_cut_short_are_named(folder, kept):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{folder / WEIGHTS}' is damaged"):
        load(folder)


def test_a_shard_cut_short_or_gone_is_named(folder):
    (folder / WEIGHTS).unlink()
    make_patched("llama", "hedgehog").save_pretrained(folder, max_shard_size="30KB")
    shard = sorted(folder.glob("model-*-of-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=f"{shard}' is damaged"):
        load(folder)
    shard.unlink()
    with pytest.raises(OSError, match=str(shard)):
        load(folder)
    (folder / INDEX).write_text((folder / INDEX).read_text()[:50])
    with pytest.raises(CheckpointError, match=f"{folder / INDEX}' is damaged"):
        load(folder)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "30KB"}], ids=["one file", "shards"])
def test_damaged_weights_of_a_variant_are_named(folder, options):
    make_patched("llama", "hedgehog").save_pretrained(folder, variant="fp16", **options)
    damaged = sorted(folder.glob("model.fp16*.safetensors"))[-1]
    damaged.write_bytes(damaged.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=f"{damaged}' is damaged"):
        load(folder, variant="fp16")


def test_config_weights_and_what_is_damaged_are_looked_for_in_one_place(folder):
    make_model("bert").save_pretrained(folder)
    part = folder / "part"
    make_patched("llama", "hedgehog").save_pretrained(part)
    assert type(load_checkpoint(folder, subfolder="part")) is type(make_model("llama"))
    (part / WEIGHTS).write_bytes(b"half")
    with pytest.raises(CheckpointError, match=f"{part / WEIGHTS}' is damaged"):
        load_checkpoint(folder, subfolder="part")


def test_a_renamed_file_is_missed(folder):
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    with pytest.raises(OSError, match=f"no file named {WEIGHTS}.* {folder}"):
        load(folder)


def rename_maps(tensors):
    for name in [name for name in tensors if ".hf_linattn." in name]:
        tensors[name.replace("map", "mapp")] = tensors.pop(name)


CHANGES = [
    (rename_maps, f"no '{FIRST_MAP}' and lack 4 tensors"),
    (lambda tensors: tensors.pop(QUERY), f"no '{QUERY}' and lack 1 tensors"),
    (lambda tensors: tensors.update({QUERY: torch.zeros(3, 3)}), rf"'{QUERY}' of shape \[3, 3\].* \[32, 32\]"),
    (lambda tensors: tensors.update({FIRST_MAP: torch.zeros(7)}), rf"'{FIRST_MAP}' of shape \[7\].* \[2, 8, 16\]"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_tensors_that_are_missing_renamed_or_of_another_shape_are_named(folder, change, message):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_weights_of_another_model_are_refused(folder, tmp_path):
    make_model("gpt2").save_pretrained(tmp_path / "gpt2")
    (folder / WEIGHTS).write_bytes((tmp_path / "gpt2" / WEIGHTS).read_bytes())
    for auto_class in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        with pytest.raises(CheckpointError, match=r"have no '.*' and lack \d+ tensors"):
            auto_class.from_pretrained(folder)


def test_what_a_model_was_made_without_starts_anew_and_nothing_else(tmp_path):
    """An Auto class makes a pooler, as of an unconverted encoder that was saved without one."""
    ids, encoder = make_tokens(2, 9), make_model("bert", "Model")
    with_pooler, encoder.pooler = encoder.pooler, None
    expected = patch_model(encoder, "hedgehog").eval()(ids).last_hidden_state
    encoder.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids).last_hidden_state, expected) and loaded.pooler is not None
    assert AutoModel.from_pretrained(tmp_path, add_pooling_layer=False).pooler is None
    tensors = load_file(tmp_path / WEIGHTS)
    dropped = "encoder.layer.1.output.dense.bias"
    save_file({name: x for name, x in tensors.items() if name != dropped}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"no '{dropped}' and lack 1 tensors.*add_pooling_layer=False"):
        AutoModel.from_pretrained(tmp_path)
    encoder.pooler = with_pooler
    encoder.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    del tensors["pooler.dense.bias"]
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no 'pooler.dense.bias' and lack 1 tensors"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "changed", "new"),
    [
        ("gpt2", {"add_cross_attention": True}, "transformer.h.0.crossattention.c_attn.weight"),
        ("gpt2", {"tie_word_embeddings": False}, "lm_head.weight"),
        ("llama", {"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_what_a_field_changed_on_loading_adds_starts_anew_and_nothing_else(tmp_path, name, changed, new):
    model = make_patched(name, "hedgehog")
    model.save_pretrained(tmp_path)
    tensors, before = load_file(tmp_path / WEIGHTS), model.state_dict()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, **changed, output_loading_info=True)
    assert new in info["missing_keys"]
    for tensor, value in loaded.state_dict().items():
        assert tensor in info["missing_keys"] or torch.equal(value, before[tensor])
    for dropped in (next(x for x in tensors if ".mlp." in x), next(x for x in tensors if ".hf_linattn." in x)):
        kept = {tensor: value for tensor, value in tensors.items() if tensor != dropped}
        save_file(kept, tmp_path / WEIGHTS, {"format": "pt"})
        with pytest.raises(CheckpointError, match=f"no '{dropped}' and lack 1 tensors"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **changed)


def test_a_converted_decoder_becomes_half_of_a_pair(tmp_path):
    make_patched("gpt2", "hedgehog").save_pretrained(tmp_path / "decoder")
    patch_model(make_model("bert", "Model"), "hedgehog").save_pretrained(tmp_path / "encoder")
    pair = EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "encoder", tmp_path / "decoder")
    assert len(get_mechanisms(pair)) == 4 and pair.decoder.config.add_cross_attention


def test_a_head_of_another_size_starts_anew_where_it_is_said_so(tmp_path):
    make_patched("bert", head="ForSequenceClassification", num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"'classifier.bias' of shape \[3\], config.json asks for \[5\]"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=5, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert logits_of(loaded, make_tokens(1, 5)).shape == (1, 5) and len(info["mismatched_keys"]) == 2


@pytest.fixture
def adapter(folder) -> Path:
    """The folder of an adapter of the model in `folder`, by whose name both are loaded."""
    adapted = get_peft_model(load(folder), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    return folder / "adapter"


LORA = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
OF_EITHER = [
    *((WEIGHTS, change, f"in '[^']*[0-9]' have .*{message}") for change, message in CHANGES),
    (ADAPTER, lambda tensors: tensors.pop(LORA), "in '[^']*/adapter' have no .*lora_A.* lack 1 tensors"),
]


@pytest.mark.parametrize(("file", "change", "message"), OF_EITHER)
def test_what_is_missing_or_misfits_in_an_adapter_or_its_base_is_named(folder, adapter, file, change, message):
    assert logits_of(load(adapter), make_tokens(1, 5)).isfinite().all()
    place = {WEIGHTS: folder, ADAPTER: adapter}[file] / file
    tensors = load_file(place)
    change(tensors)
    save_file(tensors, place, {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(adapter)


def test_an_adapter_that_peft_alone_loads_whole_is_left_to_it(folder):
    config = AdaLoraConfig(target_modules=["q_proj"], total_step=10)
    get_peft_model(load(folder), config).save_pretrained(folder / "adapter")
    with pytest.raises(CheckpointError, match=r"ranknum.* or load it with peft\.PeftModel"):
        load(folder / "adapter")


@pytest.mark.parametrize("file", [WEIGHTS, ADAPTER])
def test_a_damaged_file_of_an_adapter_or_its_base_is_named(folder, adapter, file):
    place = {WEIGHTS: folder, ADAPTER: adapter}[file] / file
    place.write_bytes(place.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=f"{place}' is damaged"):
        load(adapter)


# -- hostile configs --------------------------------------------------------------------------------------------------

EVIL = "open({marker!r}, 'w').write('ran')\nclass Evil:\n    pass\n"


@pytest.mark.parametrize("name", ["evil", "evil.Evil", "evil:Evil", "os.system", "__import__('evil')", "../evil.py"])
def test_nothing_in_a_checkpoint_is_imported_or_run(folder, tmp_path, monkeypatch, name):
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    monkeypatch.syspath_prepend(folder)  # even if it could be found
    hostile = [
        lambda d: d["hf_linattn"]["groups"][0].update(mechanism=name),
        lambda d: d["hf_linattn"]["groups"][0].update(mechanism="linear", options={"feature_map": name}),
        lambda d: d["hf_linattn"]["groups"][0].update(mechanism="hybrid", options={"linear": name}),
        lambda d: d["hf_linattn"]["groups"][0].update(mechanism="performer", options={"kernel": name}),
        lambda d: d["hf_linattn"]["groups"][0].update(options={"__class__": name}),
        lambda d: d.update(base_model_type=name),
    ]
    written = (folder / CONFIG).read_text()
    for change in hostile:
        (folder / CONFIG).write_text(written)
        change_config(folder, change)
        with pytest.raises(HfLinattnError):
            load(folder)
    (folder / CONFIG).write_text(written)
    change_config(folder, lambda d: d["base_config"].update(auto_map={"AutoModelForCausalLM": name}))
    change_config(folder, lambda d: d.update(auto_map={"AutoConfig": name, "AutoModelForCausalLM": name}))
    assert len(get_mechanisms(load(folder))) == 2  # what we registered comes before code that nobody trusted
    assert not marker.exists()


# -- random configs ---------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.integers(-3, 70), st.floats(), st.sampled_from([2**24 + 1, 2**31, 2**63, 10**30]))
WORDS = st.sampled_from(["", "learned", "softmax", "exact", "maximum", "hedgehog", "relu", "streaming", "kv", "0-1"])
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=3))
VALUES = st.recursive(SCALARS, lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(WORDS, x, max_size=2)))
SPACE = {"format_version": 1, "num_layers": 2}


@st.composite
def groups(draw):
    """A group of layers: a mechanism with some of its options at any value."""
    mechanism = draw(st.sampled_from(MECHANISMS.names()))
    fields = [field.name for field in dataclasses.fields(MECHANISMS.get(mechanism).config_class)]
    options = draw(st.dictionaries(st.sampled_from(fields), VALUES, max_size=3))
    return {"mechanism": mechanism, "options": options, "layers": draw(st.sampled_from([[0], [1], [0, 1]]))}


@st.composite
def documents(draw):
    """What may stand under `hf_linattn` in a config.json: mostly well formed, sometimes with any field replaced."""
    document = {**SPACE, "groups": draw(st.lists(groups(), max_size=2))}
    parts = [document, *document["groups"]]
    if draw(st.booleans()):
        across = {"num_layers": 1, "groups": draw(st.lists(groups(), max_size=2))}
        document.update(format_version=2, cross_attention=across)
        parts += [across, *across["groups"]]
    if draw(st.integers(0, 4)) == 0:
        place = draw(st.sampled_from(parts))
        name = draw(st.sampled_from(sorted(place)))
        if draw(st.booleans()):
            place[name] = draw(VALUES)
        else:
            del place[name]
    return document


def works_or_is_refused(document, models) -> None:
    """Read a document as loading does, patch with it, and compute with what came of it."""
    patched = []
    try:
        config = PatchConfig.from_dict(json.loads(json.dumps(document)))
        for model in models:
            if (config.cross is not None) == isinstance(model, BartForConditionalGeneration):
                patched.append(patch_model(copy.deepcopy(model), config))
    except HfLinattnError:
        return
    for model in patched:
        assert logits_of(model, make_tokens(2, 13)).isfinite().all()


def random_configs(count: int, **options) -> None:
    sizes = {f"{side}_{what}": 1 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    bart = BartConfig(vocab_size=96, d_model=8, max_position_embeddings=64, pad_token_id=0, **sizes)
    models = [make_model("bert"), make_model("gpt2"), BartForConditionalGeneration(bart).eval()]

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), **options)
    @given(documents())
    def check(document):
        works_or_is_refused(document, models)

    check()


def test_random_configs_work_or_are_refused():
    random_configs(150, derandomize=True)


@pytest.mark.slow
def test_ten_thousand_random_configs_work_or_are_refused():
    random_configs(10_000)
