"""A model that starts as an induction circuit looks one back, then at what followed the same token before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_linattn.training.pretraining.architectures import ARCHITECTURES, build_model
from tests.training.pretraining.test_rows import material

REPEATED, LENGTH = 40, 80


def attention(name: str, start: bool) -> torch.Tensor:
    """Return the weights [layers, heads, N, N] of an untrained model on random tokens that come twice."""
    architecture = ARCHITECTURES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(architecture if start else replace(architecture, start=None), material().tokenizer)
        model.set_attn_implementation("eager")
        tokens = torch.randint(5, 2048, (1, REPEATED)).repeat(1, 2)
    with torch.no_grad():
        return torch.stack(model.eval()(tokens, output_attentions=True).attentions)[:, 0]


@pytest.mark.parametrize("name", ["llama-recall", "gpt2-recall"])
def test_the_first_layer_looks_one_back_and_the_second_behind_the_same_token(name):
    places = torch.arange(REPEATED + 1, LENGTH)
    for start, back, match in ((True, (0.5, 1.0), (0.08, 1.0)), (False, (0.0, 0.05), (0.0, 0.05))):
        weights = attention(name, start)
        one_back = weights[0, :, places, places - 1].mean(dim=1)
        behind_the_same = weights[1, :, places, places - REPEATED + 1].mean(dim=1)
        assert (one_back >= back[0]).all() and (one_back <= back[1]).all(), one_back
        assert (behind_the_same >= match[0]).all() and (behind_the_same <= match[1]).all(), behind_the_same


@pytest.mark.parametrize("name", ["llama-recall", "gpt2-recall"])
def test_a_trained_checkpoint_has_at_most_six_megabytes_and_a_quarter_of_its_layers_is_one(name):
    model = build_model(ARCHITECTURES[name], material().tokenizer)
    size = sum(weight.numel() for weight in model.parameters()) * ARCHITECTURES[name].saved_dtype.itemsize
    assert size < 6e6 and model.config.num_hidden_layers == 4


@pytest.mark.parametrize("name", ["llama-recall", "gpt2-recall"])
def test_a_quarter_of_the_tokens_is_recall_and_the_rows_end_at_1024(name):
    stages, tokens = ARCHITECTURES[name].stages, ARCHITECTURES[name].train_tokens / 1e6
    assert sum(stage.share for stage in stages) == pytest.approx(tokens)
    assert sum(stage.share * stage.recall for stage in stages) / tokens == pytest.approx(0.25, abs=0.01)
    assert stages[-1].share / tokens == pytest.approx(ARCHITECTURES[name].cooldown)
    assert stages[-1].length == max(stage.length for stage in stages) == 1024
    assert stages[0].kind == "copies" and stages[0].recall == 1, "the circuit that a model starts with, first"
