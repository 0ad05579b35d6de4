"""extend_positions where there is nothing to extend, or no way to: the reason is named, and nothing changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel

from hf_linattn import extend_positions, patch_model
from hf_linattn.errors import OptionError, PatchError, UnsupportedModelError
from hf_linattn.support.tiny import tiny_config
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.positions.test_extend import NEW, OLD, make, read, said_by

RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
BUCKETS = {**RELATIVE, "position_buckets": 8}
FULL, SLIDING = "full_attention", "sliding_attention"
# model type -> what its config says otherwise, and the reason
REASONS: list[tuple[str, dict[str, Any], str]] = [
    ("t5", {}, "relative distances"),
    ("bloom", {}, "ALiBi"),
    ("vit", {}, "grid of image patches; .* interpolate_pos_encoding=True"),
    ("cvt", {}, "grid of patches, and no text has any; leave"),
    ("audio-spectrogram-transformer", {}, "grid of patches, and no text has any; leave"),
    ("mamba", {}, "no table"),
    ("canine", {}, "no table"),
    ("granitemoehybrid", {"layer_types": ["attention"] * 2}, "no layer that sees the whole input turns"),
    ("deberta", RELATIVE, "encoder.max_relative_positions would be 5000 in place of .* set it to"),
    ("deberta-v2", BUCKETS, "encoder.max_relative_positions would be 5000 in place of .* set it to"),
    ("deberta-v2", BUCKETS | {"position_biased_input": False}, "relative distances, which any length has"),
    ("mra", {"max_position_embeddings": 64}, r"num_block would be 624 in place of 4"),
]


@pytest.mark.parametrize("name, options, reason", REASONS)
def test_what_has_no_table_is_refused_with_the_reason(name, options, reason):
    model = AutoModel.from_config(tiny_config(transformers.CONFIG_MAPPING[name], **options))
    said = said_by(model)
    with pytest.raises(UnsupportedModelError, match=reason):
        extend_positions(model, 5000)
    assert said_by(model) == said


def test_layers_that_see_a_window_alone_are_nothing_to_scale():
    model = make("ModernBertModel")
    model.config = copy.deepcopy(model.config)
    model.config.rope_parameters |= {FULL: {}}
    with pytest.raises(UnsupportedModelError, match="no layer that sees the whole input turns by rope parameters"):
        extend_positions(model, NEW)
    assert model.config.rope_parameters[SLIDING]["rope_type"] == "default"


def test_a_longer_config_that_transformers_refuses_is_refused_before_anything_changes(monkeypatch):
    model = make("LlamaModel")
    before, said = read(model, OLD), said_by(model)

    def refuse(config) -> None:
        if (kind := config.rope_parameters["rope_type"]) != "default":
            raise ValueError(f"this model turns by default alone, not by {kind}")

    monkeypatch.setattr(transformers.LlamaConfig, "validate", refuse)
    for method in ("yarn", "linear", "dynamic"):
        with pytest.raises(UnsupportedModelError, match=rf"transformers refuses the longer config .*not by {method}"):
            extend_positions(model, NEW, method)
    assert torch.equal(read(model, OLD), before) and said_by(model) == said


def test_a_formula_without_a_result_is_refused():
    """That of `dynamic` divides by the turned dimensions less two; that of `yarn` needs a head_dim."""
    model = transformers.GPTNeoXModel(tiny_config(transformers.GPTNeoXConfig))
    size = model.config.hidden_size // model.config.num_attention_heads
    model.config.rope_parameters["partial_rotary_factor"] = 2 / size
    with pytest.raises(UnsupportedModelError, match=r"transformers refuses the longer config \(division by zero"):
        extend_positions(model, 5000, "dynamic")
    model = make("LlamaModel")
    model.config = copy.deepcopy(model.config)
    model.config.head_dim = None
    with pytest.raises(UnsupportedModelError, match=r"refuses the longer config .*NoneType.*; give another method"):
        extend_positions(model, NEW, "yarn")


@pytest.mark.parametrize(
    "name, length, method, message",
    [
        ("BertModel", OLD, None, f"max_length must be above {OLD}, the positions that BertModel has.*, got {OLD}"),
        ("RobertaModel", OLD, None, f"must be above {OLD}"), ("BertModel", 0, None, "max_length must be an integer"),
        ("LlamaModel", 3, None, f"must be above {OLD}"),
        ("BertModel", NEW, "yarn", "method must be one of copy, interpolate, mirror for BertModel.*got 'yarn'"),
        ("LlamaModel", NEW, "copy", "method must be one of yarn, linear, dynamic for LlamaModel.*got 'copy'"),
        ("MarianModel", NEW, "copy", "method must be left out for MarianModel.*got 'copy'"),
    ],
)  # fmt: skip
def test_lengths_and_methods_that_do_not_fit_are_refused_and_nothing_changes(name, length, method, message):
    model, tokenizer = make(name), make_tokenizer()
    before, said = read(model, 8), (model.config.to_dict(), tokenizer.model_max_length)
    with pytest.raises(OptionError, match=message):
        extend_positions(model, length, method, tokenizer=tokenizer)
    assert torch.equal(read(model, 8), before) and (model.config.to_dict(), tokenizer.model_max_length) == said


@pytest.mark.parametrize("name", ["BertModel", "LlamaModel"])
def test_what_is_no_tokenizer_is_refused_before_anything_is_longer(name):
    model = make(name)
    before, said = read(model, 8), model.config.to_dict()
    with pytest.raises(OptionError, match="tokenizer must be a tokenizer or None, got 'bert-base-uncased'"):
        extend_positions(model, NEW, tokenizer="bert-base-uncased")
    assert torch.equal(read(model, 8), before) and model.config.to_dict() == said


def test_a_patched_model_and_a_rope_type_of_its_own_are_refused():
    with pytest.raises(PatchError, match="is patched"):
        extend_positions(patch_model(make_model("bert"), "linear"), 100)
    model = extend_positions(make("LlamaModel"), NEW)
    with pytest.raises(UnsupportedModelError, match="rope type is 'yarn' already"):
        extend_positions(model, 2 * NEW)
