"""Names of models: what loads again by the name of a patched one has its mechanisms, or says what to load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import AutoPeftModel, AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hf_linattn import CheckpointError, is_patched, patch_model, unpatch_model
from hf_linattn.pinning import NAME_IN_MEMORY
from tests.helpers import logits_of, make_patched, make_tokens
from tests.models import make_model

IDS = make_tokens(2, 9)
WITH_MECHANISMS: dict[str, Any] = {"modules_to_save": ["hf_linattn"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_adapter_does_not_name_the_softmax_model_as_its_base(tmp_path, name):
    make_model(name).save_pretrained(tmp_path / "base")
    model = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "hedgehog")
    assert not model.config._name_or_path, "TRL loads its reference model by this name"
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", **WITH_MECHANISMS))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(OSError, match=NAME_IN_MEMORY):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


def test_an_adapter_names_the_converted_model_that_was_loaded(tmp_path):
    make_patched("llama", "hedgehog").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **WITH_MECHANISMS)
    adapted = get_peft_model(model, lora).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert is_patched(loaded)
    torch.testing.assert_close(logits_of(loaded, IDS), logits_of(adapted, IDS))
    assert str(tmp_path / "base") not in (unpatch_model(model).name_or_path, model.config._name_or_path)


LORA = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}


def with_adapter(model, way, folder):
    """Give a model an adapter that was made for it, the way a user does."""
    if way == "add_adapter":
        model.add_adapter(LoraConfig(**LORA))
        return model
    made = get_peft_model(model, LoraConfig(**LORA))
    if way == "get_peft_model":
        return made
    made.save_pretrained(folder / "first")
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "first")


@pytest.mark.parametrize("way", ["get_peft_model", "from_pretrained", "add_adapter"])
def test_an_adapter_that_was_there_first_does_not_name_the_softmax_model_either(tmp_path, way):
    make_model("llama").save_pretrained(tmp_path / "base")
    adapted = with_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), way, tmp_path).eval()
    (config,), base = adapted.peft_config.values(), str(tmp_path / "base")
    assert config.base_model_name_or_path == base
    patch_model(adapted, "linear").save_pretrained(tmp_path / "adapter")
    for auto_class in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        with pytest.raises(OSError, match=NAME_IN_MEMORY):
            auto_class.from_pretrained(tmp_path / "adapter")
    unpatch_model(adapted).save_pretrained(tmp_path / "plain")
    assert config.base_model_name_or_path == base
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    torch.testing.assert_close(logits_of(loaded, IDS), logits_of(adapted, IDS))


def test_an_adapter_of_a_model_that_is_unpatched_does_not_name_the_converted_one(tmp_path):
    make_patched("llama", "linear").save_pretrained(tmp_path / "base")
    lora = LoraConfig(**LORA | {"target_modules": "all-linear"})
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora)
    unpatch_model(adapted).save_pretrained(tmp_path / "adapter")
    assert PeftConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path != str(tmp_path / "base")


@pytest.mark.parametrize("auto_class", [AutoPeftModel, AutoPeftModelForCausalLM])
def test_an_adapter_without_a_task_is_loaded_by_the_class_of_its_base(tmp_path, auto_class):
    make_patched("llama", "hedgehog").save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["hf_linattn"])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = auto_class.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits_of(loaded.eval(), IDS), logits_of(adapted, IDS))


def test_names_come_back(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    unpatch_model(patch_model(model, "linear"))
    assert model.name_or_path == model.model.name_or_path == model.config._name_or_path == str(tmp_path)


OWN_CONFIGS = {
    "another config": lambda folder: AutoConfig.from_pretrained(folder / "plain"),
    "one made here": lambda folder: make_model("llama").config,
    "the folder of another": lambda folder: folder / "plain",
    "that of before": lambda folder: AutoConfig.for_model("llama").from_dict(
        AutoConfig.from_pretrained(folder / "plain").to_dict(), _name_or_path=str(folder)
    ),
}


@pytest.mark.parametrize("way", OWN_CONFIGS)
def test_no_other_config_reads_a_converted_checkpoint(tmp_path, way):
    """`--config_name` of transformers' own scripts: config.json, which is not read then, alone says the conversion."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "plain")
    patch_model(model, "linear").save_pretrained(tmp_path)
    config, own_class = OWN_CONFIGS[way](tmp_path), type(make_model("llama"))
    with pytest.raises(CheckpointError, match="is converted: softmax would run on its weights; leave config out"):
        own_class.from_pretrained(tmp_path, config=config)
    if isinstance(config, PreTrainedConfig):
        with pytest.raises(CheckpointError, match="leave config out"):
            AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert not is_patched(own_class.from_pretrained(tmp_path / "plain", config=config))
    patch_model(make_model("llama"), "linear").save_pretrained(tmp_path / "plain" / "converted")
    root = {"subfolder": "converted", "config": AutoConfig.from_pretrained(tmp_path / "plain")}
    with pytest.raises(CheckpointError, match="leave config out"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **root)
    own = AutoConfig.from_pretrained(tmp_path)
    own.use_cache = False
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=own)
    assert is_patched(loaded) and not loaded.config.use_cache
