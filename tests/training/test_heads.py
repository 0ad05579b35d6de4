"""Which checkpoints the recipes train: by head, over architectures; all others are refused before a weight is read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    BartConfig,
    BartForConditionalGeneration,
    BartForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_linattn import patch_model
from hf_linattn.errors import CheckpointError, OptionError, UnsupportedModelError
from hf_linattn.training import task
from hf_linattn.training.arguments import ModelArguments
from hf_linattn.training.heads import HEADS, trained_head
from tests.models import make_model

OTHERS = ("Model", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
SMALL = {
    BartForConditionalGeneration: BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=32),
    BartForSequenceClassification: BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=32),
    T5ForConditionalGeneration: T5Config(d_model=16, num_layers=1, d_ff=16, vocab_size=32),
    ViTForImageClassification: ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "gpt2", "llama"])
@pytest.mark.parametrize("head", OTHERS)
def test_another_head_is_refused_by_name_before_a_weight_is_read(monkeypatch, tmp_path, name, head):
    config = make_model(name).config
    config.architectures = [f"Some{head}"]
    config.save_pretrained(tmp_path)  # and no weights beside it
    works = [mapping[type(config)].__name__ for mapping in HEADS.values() if type(config) in mapping]
    with pytest.raises(UnsupportedModelError, match=f"was saved as Some{head}, whose head .* train") as refused:
        task.load_model(str(tmp_path))
    assert works and all(model in str(refused.value) for model in works), "it names those that work"


@pytest.mark.parametrize("model_class", SMALL, ids=lambda model_class: model_class.__name__)
def test_encoder_decoders_and_models_of_images_are_refused(tmp_path, model_class):
    config = SMALL[model_class]
    config.architectures = [model_class.__name__]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"was saved as {model_class.__name__}"):
        task.load_model(str(tmp_path))


def test_classes_that_do_not_fit_the_problem_are_refused_before_a_weight_is_read(tmp_path):
    config = make_model("bert", "ForSequenceClassification", num_labels=3, problem_type="regression").config
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(tmp_path)
    with pytest.raises(OptionError, match="give a classifier of one problem"):
        task.load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("bert", "ForPreTraining", "masked"),  # has the masked head, and another one beside it
        ("bert", "LMHeadModel", "causal"),
        ("roberta", "ForCausalLM", "causal"),
        ("modernbert", None, "masked"),
        ("llama", "ForSequenceClassification", "classification"),
    ],
)
@pytest.mark.parametrize("patched", [False, True])
def test_a_known_head_is_told_from_the_config(tmp_path, name, head, kind, patched):
    options = {"causal": {"is_decoder": True}, "classification": {"num_labels": 3}}
    model = make_model(name, head, **options.get(kind, {}))
    if patched:
        patch_model(model, "linear")
    model.save_pretrained(tmp_path)
    assert trained_head("m", AutoConfig.from_pretrained(tmp_path)) == kind
    assert task.task_of(task.load_model(str(tmp_path))) is task.TASKS[kind]


@pytest.mark.parametrize("missing", ["cls.predictions.transform.dense.weight", "bert.embeddings.LayerNorm.bias"])
def test_weights_that_are_missing_are_no_random_numbers(tmp_path, missing):
    make_model("bert").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[missing]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"has no weights for '{missing}' and lacks 1 tensors"):
        task.load_model(str(tmp_path))


def test_an_old_checkpoint_that_names_no_class_is_loaded_if_all_weights_are_there(tmp_path):
    model = make_model("bert")
    model.save_pretrained(tmp_path / "whole")
    make_model("bert", "Model").save_pretrained(tmp_path / "bare")
    for folder in ("whole", "bare"):
        file = tmp_path / folder / "config.json"
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "architectures"}))
    loaded = task.load_model(str(tmp_path / "whole")).state_dict()
    assert all(torch.equal(x, loaded[name]) for name, x in model.state_dict().items())
    with pytest.raises(CheckpointError, match="has no weights for 'cls"):
        task.load_model(str(tmp_path / "bare"))


@pytest.mark.parametrize("content", [None, "no model", '{"model_type": "unheard_of"}', "{}"])
def test_what_is_no_model_is_said_in_one_line(tmp_path, content):
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(content)
    said = "there is no such folder" if content is None else "cannot be read: .*"
    with pytest.raises(CheckpointError, match=rf"model_name_or_path='.*'(:)? {said}; give a folder") as refused:
        task.load_model(str(folder))
    assert "\n" not in str(refused.value)


def test_a_small_model_of_the_repository_is_said_to_be_there_alone(tmp_path, monkeypatch):
    ModelArguments("recipes/pretrained/llama", mechanism="linear")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="llama' is a small model that the repository alone has;"):
        ModelArguments("recipes/pretrained/llama", mechanism="linear")
