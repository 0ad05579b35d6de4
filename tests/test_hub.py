"""Saving under a model type of our own and loading through the Auto classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from hf_linattn import (
    get_mechanisms,
    get_patch_config,
    is_patched,
    patch_model,
    unpatch_model,
)
from hf_linattn.hub import load_checkpoint
from hf_linattn.support.tiny import tiny_config
from tests.helpers import KINDS, OPTIONS, each_once, generate, logits_of, make_patched, make_tokenizer, make_tokens
from tests.models import ARCHITECTURES, SPINE, VOCAB_SIZE, make_model
from tests.test_marked import make_llava

AUTO = {"bert": AutoModelForMaskedLM, "gpt2": AutoModelForCausalLM, "llama": AutoModelForCausalLM}
SEQUENCE_HEADS = {name: "ForSequenceClassification" for name in SPINE}
each_family = pytest.mark.parametrize("name", SPINE)
each_patch = pytest.mark.parametrize(("name", "mechanism"), each_once(SPINE, KINDS))
IDS = make_tokens(2, 9)


def same_logits(loaded, model):
    return loaded.dtype == model.dtype and torch.equal(logits_of(loaded, IDS), logits_of(model, IDS))


@pytest.mark.covering(1)
@each_patch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_loads_bit_for_bit(tmp_path, name, mechanism, dtype):
    make_model(name).to(dtype).save_pretrained(tmp_path / "plain")  # read back, as Llama's rotations stay float32 then
    model = patch_model(AUTO[name].from_pretrained(tmp_path / "plain"), mechanism, **OPTIONS.get(mechanism, {}))
    assert model.dtype == dtype
    model.save_pretrained(tmp_path)
    loaded, info = AUTO[name].from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert get_patch_config(loaded) == get_patch_config(model)
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in loaded.state_dict().items())
    assert same_logits(loaded, model)


@each_family
def test_unpatching_a_loaded_model_gives_the_original(tmp_path, name):
    make_patched(name).save_pretrained(tmp_path)
    original = make_model(name)
    loaded = unpatch_model(AUTO[name].from_pretrained(tmp_path))
    assert type(loaded) is type(original) and type(loaded.config) is type(original.config)
    assert list(loaded.state_dict()) == list(original.state_dict())
    assert same_logits(loaded, original)
    loaded.save_pretrained(tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["model_type"] == original.config.model_type


PLANS = [
    {"performer": {"layers": 0, "num_features": 8}, "linear": 1},
    {"performer": {"layers": -1, "num_features": 8, "kernel": "hyperbolic", "seed": 7}},
    {"softmax": 0, "performer": {"layers": 1, "num_features": 8, "kernel": "relu", "redraw_interval": 3}},
]


@each_family
@pytest.mark.parametrize("plan", PLANS)
def test_plans_and_options_are_kept_also_when_saved_again(tmp_path, name, plan):
    model = patch_model(make_model(name), plan)
    model.save_pretrained(tmp_path / "first")
    loaded = AUTO[name].from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    again = AUTO[name].from_pretrained(tmp_path / "second")
    assert get_patch_config(again) == get_patch_config(model)
    assert same_logits(loaded, model) and same_logits(again, model)
    first, second = (json.loads((tmp_path / part / "config.json").read_text()) for part in ("first", "second"))
    assert first == second


@each_family
def test_shards_are_read(tmp_path, name):
    model = make_patched(name)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert same_logits(AUTO[name].from_pretrained(tmp_path), model)


@each_family
def test_other_heads_of_the_family_load_too(tmp_path, name):
    head = SEQUENCE_HEADS[name]
    model = make_patched(name, head=head, num_labels=3)
    model.save_pretrained(tmp_path / "classifier")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert same_logits(loaded, model) and logits_of(loaded, IDS).shape == (2, 3)
    make_patched(name).save_pretrained(tmp_path / "language")
    for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        warm = auto.from_pretrained(tmp_path / "language", num_labels=3)
        assert warm.config.num_labels == 3 and len(get_mechanisms(warm)) == 2
        assert torch.isfinite(logits_of(warm, IDS)).all()
    base = AutoModel.from_pretrained(tmp_path / "language")
    body = getattr(make_patched(name), make_model(name).base_model_prefix)
    with torch.no_grad():
        assert torch.equal(base(IDS).last_hidden_state, body(IDS).last_hidden_state)


@each_family
def test_loading_options_are_honoured(tmp_path, name):
    model = make_patched(name)
    model.save_pretrained(tmp_path)
    loaded = AUTO[name].from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    assert {p.dtype for p in loaded.parameters()} == {logits_of(loaded, IDS).dtype} == {torch.bfloat16}
    expected = logits_of(model, IDS)
    assert (logits_of(loaded, IDS) - expected).abs().mean() < 0.1 * expected.std()
    assert unpatch_model(loaded).config._attn_implementation == "eager"
    placed = AUTO[name].from_pretrained(tmp_path, device_map={"": "cpu"})
    assert same_logits(placed, model)


@each_family
def test_the_config_and_the_tokenizer_load(tmp_path, name):
    model = make_patched(name)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "hf_linattn"
    assert written["base_model_type"] == model.config.model_type
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.hidden_size == model.config.hidden_size and config.vocab_size == VOCAB_SIZE
    assert AutoTokenizer.from_pretrained(tmp_path)("w7 w9")["input_ids"] == [7, 9]
    fresh = AUTO[name].from_config(config)
    assert len(get_mechanisms(fresh)) == 2
    assert len(get_mechanisms(AUTO[name].from_config(config))) == 2  # a config is not used up


@pytest.mark.parametrize("name", SPINE)
def test_adapters_of_a_loaded_checkpoint_are_saved_and_loaded(tmp_path, name):
    make_patched(name, "hedgehog").save_pretrained(tmp_path / "converted")
    model, ids = AUTO[name].from_pretrained(tmp_path / "converted").eval(), make_tokens(2, 9)
    config = LoraConfig(target_modules="all-linear", modules_to_save=["hf_linattn"], init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    expected = logits_of(adapted, ids)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = AUTO[name].from_pretrained(tmp_path / "converted")
    assert torch.equal(logits_of(PeftModel.from_pretrained(loaded, tmp_path / "adapter").eval(), ids), expected)
    config = type(model.config).from_pretrained(tmp_path / "converted")
    assert (config.vocab_size, config.hf_linattn) == (model.config.vocab_size, model.config.hf_linattn)


def test_the_generation_config_is_kept(tmp_path):
    model = make_patched("llama")
    model.generation_config.repetition_penalty = 1.7
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.repetition_penalty == 1.7
    assert generate(loaded, IDS)[0].tolist() == generate(model, IDS)[0].tolist()


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModelForImageTextToText])
def test_a_headless_decoder_that_is_loaded_with_a_head_stops_where_it_did(tmp_path, auto):
    model = make_model("llama") if auto is AutoModelForCausalLM else make_llava()
    model.config.get_text_config().eos_token_id = [7, 9]
    patch_model(model.model, "linear").save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.bos_token_id) == ([7, 9], 1)
    assert loaded.config.get_text_config().eos_token_id == [7, 9]


def test_a_config_that_fails_to_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    model = make_patched("llama")
    model.save_pretrained(tmp_path)
    written = (tmp_path / "config.json").read_text()

    def stop(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", stop)
    with pytest.raises(OSError, match="disk full"):
        patch_model(make_model("llama"), "linear").save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == written


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(SPINE)))
def test_every_architecture_is_saved_and_loaded(tmp_path, name):
    model = make_patched(name)
    model.save_pretrained(tmp_path)
    auto = AutoModelForCausalLM if ARCHITECTURES[name].causal else AutoModelForMaskedLM
    assert same_logits(auto.from_pretrained(tmp_path), model)


@torch.no_grad()
@pytest.mark.parametrize("name", ["DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"])
def test_of_several_classes_for_a_config_the_one_that_was_saved_is_loaded(tmp_path, name):
    model = patch_model(getattr(transformers, name)(tiny_config(transformers.DeiTConfig)).eval(), "linear")
    model.save_pretrained(tmp_path)
    pixels = torch.rand(1, 3, model.config.image_size, model.config.image_size)
    for loaded in (transformers.AutoModelForImageClassification.from_pretrained(tmp_path), load_checkpoint(tmp_path)):
        assert type(loaded) is type(model) and is_patched(loaded)
        assert torch.equal(loaded(pixels).logits, model(pixels).logits)


def test_plain_checkpoints_are_loaded_as_ever(tmp_path):
    make_patched("llama").save_pretrained(tmp_path / "patched")
    AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    make_model("llama").save_pretrained(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(loaded) is transformers.LlamaForCausalLM and type(loaded.config) is transformers.LlamaConfig
    assert same_logits(loaded, make_model("llama"))
    assert OPTIONS and not hasattr(loaded, "_hf_linattn_patch")
