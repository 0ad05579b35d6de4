"""What the measures of recall say of models whose answers are known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.result_files import ROOT
from hf_linattn.training.pretraining.measures import loss_by_position, measure_recall, needle_accuracy, pairs_accuracy
from hf_linattn.training.pretraining.mixture import Mixture, Stage
from tests.training.pretraining.test_rows import material

LENGTH = 128


def foreseeing(input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
    """Answer every position with the token that comes next."""
    following = F.pad(input_ids[:, 1:], (0, 1))
    return SimpleNamespace(logits=100.0 * F.one_hot(following, len(material().tokenizer)))


def near_sighted(input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
    """Foresee a token only if it stands among the 32 before it."""
    logits = foreseeing(input_ids, use_cache).logits
    for row, tokens in zip(logits, input_ids, strict=True):
        for place in range(len(tokens) - 1):
            row[place] *= tokens[place + 1] in tokens[max(0, place - 31) : place + 1]
    return SimpleNamespace(logits=logits)


def ignorant(input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
    return SimpleNamespace(logits=torch.zeros(*input_ids.shape, len(material().tokenizer)))


@pytest.mark.parametrize(("model", "right"), [(foreseeing, 1.0), (ignorant, 0.0)])
def test_who_foresees_everything_finds_every_needle_and_pair(model, right):
    assert needle_accuracy(model, material().tokenizer, "single_noise", 3) == right
    pairs = pairs_accuracy(model, material(), LENGTH, 20)
    assert pairs["accuracy"] == right and pairs["accuracy_by_distance"] == [right] * 4 and pairs["answers"] > 100


def test_who_sees_32_tokens_answers_only_what_is_near():
    near, *far = pairs_accuracy(near_sighted, material(), LENGTH, 20)["accuracy_by_distance"]
    assert near > 0.8 and max(far) < 0.1


def test_losses_are_those_of_the_position_in_nats():
    rows = Mixture(material(), "test", [Stage(LENGTH, 1.0, 0.25)], 8, 4 * LENGTH)
    assert loss_by_position(ignorant, rows) == pytest.approx([math.log(len(material().tokenizer))] * 8)

    def knowing_the_second_half(input_ids, use_cache):
        logits = foreseeing(input_ids, use_cache).logits
        logits[:, : LENGTH // 2 - 1] = 0
        return SimpleNamespace(logits=logits)

    losses = np.array(loss_by_position(knowing_the_second_half, rows))
    assert losses[:4] == pytest.approx(math.log(len(material().tokenizer))) and losses[4:] == pytest.approx(0)


def test_the_report_has_all_kinds():
    measured = measure_recall(foreseeing, material(), LENGTH, samples=2)
    assert measured["needles"] == dict.fromkeys(("single_noise", "single_text", "single_uuid"), 1.0)
    assert measured["positions"] == list(range(16, LENGTH + 1, 16))
    for name in ("mixture_loss", "recall_loss", "text_loss"):
        found = [loss for loss in measured[name] if loss is not None]  # an eighth may ask for nothing
        assert len(measured[name]) == 8 and found == pytest.approx([0] * len(found))
    assert None not in measured["text_loss"]


def test_the_bundled_llama_finds_what_stands_512_tokens_back():
    folder = ROOT / "recipes" / "pretrained" / "llama-recall"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert needle_accuracy(model, tokenizer, "single_noise", 10) >= 0.9
    assert sum(file.stat().st_size for file in folder.iterdir()) < 6e6
