"""Associative recall: that the task can be solved by looking up, and only so, and what is measured of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.result_files import MQAR_FILE, RESULTS, read
from benchmarks.studies import mqar, mqar_sweep
from benchmarks.tables.mqar import sweep_section, title_of
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


def test_the_committed_results_are_of_rows_that_are_measured():
    for row in read(RESULTS / MQAR_FILE)["rows"]:
        assert (row["mechanism"], row["options"]) in mqar.ROWS


def test_a_sweep_goes_on_with_the_rows_that_its_file_lacks_and_gives_others_the_rate_of_seed_0(tmp_path, monkeypatch):
    small = {"STEPS": 2, "SOFTMAX_STEPS": 2, "SEEDS": (0, 1), "BATCH_TOKENS": 64, "TEST_TOKENS": 128}
    points = {"PAIRS": (2, 4), "LENGTHS": (8, 16), "POINTS": [(2, 8), (2, 16), (4, 16)]}
    for name, value in {**small, **points, "ROWS": [("linear", {}), ("hedgehog", {"feature_dim": 16})]}.items():
        monkeypatch.setattr(mqar_sweep, name, value)
    measured, real = [], mqar_sweep.measure

    def interrupted(original, name, options, seed, rates):
        if len(measured) == 1:
            measured.append("interrupted")
            raise KeyboardInterrupt
        measured.append((name, seed, rates))
        return real(original, name, options, seed, rates)

    monkeypatch.setattr(mqar_sweep, "measure", interrupted)
    output = tmp_path / "sweep.json"
    with pytest.raises(KeyboardInterrupt):
        mqar_sweep.main(output, tmp_path / "originals", 10.0)
    mqar_sweep.main(output, tmp_path / "originals", 10.0)
    document = read(output)
    rates = [(row["rate"],) for row in document["rows"]]
    assert measured == [
        ("linear", 0, mqar_sweep.RATES), "interrupted", ("hedgehog", 0, mqar_sweep.RATES),
        ("linear", 1, rates[0]), ("hedgehog", 1, rates[1]),
    ]  # fmt: skip
    assert [row["run"] for row in document["rows"]] == [0, 1, 1, 1] and len(document["runs"]) == 2
    assert [row["state_bytes"] for row in document["rows"][:2]] == [2 * 4 * (n * 65 + 1) for n in (64, 16)]
    assert list(document["rows"][0]["trained"]) == ["2 | 8", "2 | 16", "4 | 16"]
    at = [row["trained"]["4 | 16"] for row in document["rows"][::2]]
    assert f"{50 * sum(at):.1f} ({100 * min(at):.1f} to {100 * max(at):.1f}) |\n" in sweep_section(document) + "\n"
    assert (tmp_path / "mqar_sweep.png").read_bytes().startswith(b"\x89PNG")


def test_rows_that_differ_in_a_word_alone_are_not_seeds_of_one() -> None:
    task = {"pairs": [2], "lengths": [8], "vocabulary": 16, "steps": 1, "batch_tokens": 16}
    first = {"mechanism": "linear", "options": {}, "state_bytes": 8, "trained": {"2 | 8": 0.25}}
    second = {**first, "options": {"decay": "learned"}, "trained": {"2 | 8": 0.75}}
    *_, learned, plain = sweep_section({"task": task, "rows": [first, second]}).splitlines()
    assert plain == "| `linear` |  | 8 | 1 | 25.0 | 25.0 |"
    assert learned == "| `linear` | `decay='learned'` | 8 | 1 | 75.0 | 75.0 |"
    assert title_of(first) != title_of(second)
