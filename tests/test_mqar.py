"""Associative recall: that the task can be solved by looking up, and only so, and what is measured of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.studies import mqar
from hf_linattn.mechanisms import MECHANISMS

pytestmark = pytest.mark.tools

SMALL = mqar.Stage(3, 12, 2)


def test_every_query_is_answered_by_the_value_that_follows_its_key():
    tokens, labels = mqar.make_batch(5, 21, torch.Generator().manual_seed(0))
    assert tokens.shape == labels.shape == (mqar.BATCH_SIZE, 21)
    for row, answers in zip(tokens.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        assert len(pairs) == 5, "no key comes twice"
        asked = {place: answer for place, answer in enumerate(answers) if answer != mqar.IGNORED}
        assert len(asked) == 5 and min(asked) >= 10
        assert all(pairs[row[place]] == answer for place, answer in asked.items())
        others = [token for place, token in enumerate(row) if place >= 10 and place not in asked]
        assert set(others) <= {0}
    assert len({tuple(row) for row in tokens.tolist()}) == mqar.BATCH_SIZE


def test_accuracy_counts_the_queries_that_are_answered_right():
    class Answers(nn.Module):
        """Looks up the first `known` pairs, and says 0 to other keys."""

        def __init__(self, known: int):
            super().__init__()
            self.known = known

        def forward(self, input_ids, use_cache):
            self.logits = torch.zeros(*input_ids.shape, mqar.VOCABULARY)
            keys, values = input_ids[:, 0 : 2 * self.known : 2], input_ids[:, 1 : 2 * self.known : 2]
            row, place, pair = (input_ids[:, :, None] == keys[:, None]).nonzero(as_tuple=True)
            self.logits[row, place, values[row, pair]] = 1.0
            return self

    assert mqar.accuracy(Answers(mqar.PAIRS)) == 1
    assert mqar.accuracy(Answers(mqar.PAIRS // 4)) == 1 / 4


def test_a_run_has_a_row_per_mechanism_with_the_bytes_of_its_state(tmp_path):
    document = mqar.run([("softmax", {}), ("hedgehog", {"feature_dim": 16})], [SMALL, SMALL], 2)
    assert [row["mechanism"] for row in document["rows"]] == ["softmax", "hedgehog"]
    exact, hedgehog = document["rows"]
    assert exact["state_bytes"] == mqar.LAYERS * 2 * mqar.LENGTH * mqar.WIDTH * 4
    assert hedgehog["state_bytes"] == mqar.LAYERS * (16 * (mqar.WIDTH + 1) + 1) * 4
    assert exact["converted"] == exact["calibrated"], "there is nothing to fit"
    assert all(0 <= row[stage] <= 1 for row in document["rows"] for stage in ("converted", "calibrated", "trained"))
    mqar.draw(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_rows_are_of_softmax_and_of_all_mechanisms_of_constant_state():
    named = {name for name, _ in mqar.ROWS}
    constant = {name for name in MECHANISMS.names() if MECHANISMS.get(name).constant_state}
    assert named == {"softmax"} | constant - {"by_head"}, "by_head only shares out heads, of which there is one here"
