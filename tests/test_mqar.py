"""Associative recall: that the task can be solved by looking up, and only so, and what is measured of it."""

from __future__ import annotations

import torch

from benchmarks import mqar
from hf_linattn.mechanisms import MECHANISMS


def test_every_query_is_answered_by_the_value_that_follows_its_key():
    tokens, labels = mqar.make_batch(6, torch.Generator().manual_seed(0))
    assert tokens.shape == labels.shape == (6, mqar.LENGTH)
    for row, answers in zip(tokens.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(row[0 : 2 * mqar.PAIRS : 2], row[1 : 2 * mqar.PAIRS : 2], strict=True))
        assert len(pairs) == mqar.PAIRS, "no key comes twice"
        asked = {place: answer for place, answer in enumerate(answers) if answer != mqar.IGNORED}
        assert len(asked) == mqar.PAIRS and min(asked) >= 2 * mqar.PAIRS
        assert all(pairs[row[place]] == answer for place, answer in asked.items())
        others = [token for place, token in enumerate(row) if place >= 2 * mqar.PAIRS and place not in asked]
        assert set(others) <= {0}


def test_a_run_has_a_row_per_mechanism_with_the_bytes_of_its_state():
    rows = [("softmax", {}), ("linear", {})]
    document = mqar.run(rows, 2, 4, [1e-3])
    assert [row["mechanism"] for row in document["rows"]] == ["softmax", "linear"]
    heads, width = mqar.HEADS, mqar.WIDTH // mqar.HEADS
    exact, linear = (row["state_bytes"] for row in document["rows"])
    assert exact == mqar.LAYERS * 2 * heads * mqar.LENGTH * width * 4
    assert linear == mqar.LAYERS * heads * (width * (width + 1) + 1) * 4
    assert all(0 <= row["accuracy"] <= 1 for row in document["rows"])


def test_rows_are_of_softmax_and_of_constant_states():
    for name, options in mqar.ROWS:
        assert name == "softmax" or MECHANISMS.get(name).constant_state
        mqar.make_model(name, options)
