"""Generated recall: every answer can be read off the row before it, at all distances, and a seed says all."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from transformers import AutoTokenizer

from hf_linattn.errors import DataError, OptionError
from hf_linattn.training.data import IGNORED_LABEL
from hf_linattn.training.pretraining.items import Material, pairs
from hf_linattn.training.pretraining.mixture import Mixture, Stage
from hf_linattn.training.pretraining.rows import KINDS, recall_row

LONG = Stage(64, 1.0)
STAGES = ((64, 0.5), (128, 0.25), (256, 0.25))


@cache
def material() -> Material:
    tokenizer = AutoTokenizer.from_pretrained("recipes/pretrained/llama")
    text = np.random.default_rng(0).integers(5, len(tokenizer), size=20_000)  # without any recurrence of its own
    return Material(tokenizer, text)


def rows(kind: str, length: int, count: int):
    return [recall_row(material(), length, np.random.default_rng(i), kind) for i in range(count)]


def copied(tokens: list[int], place: int, least: int) -> int:
    """Return what followed the longest earlier occurrence of the tokens that lead up to a place."""
    best, found = least - 1, -1
    for other in range(1, place):
        matched = 0
        while matched < other and tokens[other - 1 - matched] == tokens[place - 1 - matched]:
            matched += 1
        if matched > best:
            best, found = matched, tokens[other]
    return found


@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_stands_in_the_row_before_it(kind, length):
    for row in rows(kind, length, 20):
        assert row.input_ids.shape == row.labels.shape == (length,)
        labelled = np.full(length, IGNORED_LABEL)
        for start, stop, source in row.queries:
            assert source + stop - start <= start and stop > start
            assert (row.input_ids[source : source + stop - start] == row.input_ids[start:stop]).all()
            labelled[start:stop] = row.input_ids[start:stop]
        assert (row.labels == labelled).all(), "the answers, and nothing else, are trained"


@pytest.mark.parametrize("kind", ["pairs", "copies", "passages"])
def test_a_copier_answers_without_a_mistake(kind):
    right = [
        copied(row.input_ids.tolist(), place, least=1) == row.labels[place]
        for row in rows(kind, 192, 20)
        for place in np.flatnonzero(row.labels != IGNORED_LABEL)
    ]
    assert len(right) > 200 and np.mean(right) > 0.98  # two keys of two tokens may share the last one


def test_no_word_is_a_key_and_a_value_in_one_row_of_pairs():
    for seed in range(20):
        make, items = pairs(material(), 1024, np.random.default_rng(seed)), []
        items += (make(items) for _ in range(60))
        marks = set(items[0].question).intersection(*(item.question for item in items))
        keys = {token for item in items for token in item.question} - marks
        values = {token for item in items for token in item.statement[item.answer]}
        assert len(keys) > 50 and not keys & values


def test_the_value_of_a_needle_is_asked_for_by_its_key():
    decode, asked = material().tokenizer.decode, 0
    for row in rows("needles", 512, 40):
        for start, stop, source in row.queries:
            statement, question = decode(row.input_ids[max(0, source - 40) : source]), decode(row.input_ids[:start])
            key = max(re.findall(r"[A-Za-z-]+", question[-150:]), key=lambda word: (word in statement, "-" in word))
            value = decode(row.input_ids[start:stop]).strip()
            assert key in statement and re.fullmatch(r"\d{7}|[0-9a-f-]{36}", value), (statement, question[-150:])
            asked += 1
    assert asked > 100


def test_variables_have_the_values_that_running_the_row_gives():
    printed = 0
    for row in rows("variables", 512, 40):
        values: dict[str, str] = {}
        whole = material().tokenizer.decode(row.input_ids[: row.queries[-1].stop])
        for command, name, given in re.findall(r"(VAR|print) ([A-Za-z]+) = ?([A-Za-z]+|\d+)(?=\n|$)", whole):
            value = values.get(given, given)
            if command == "VAR":
                values[name] = value
            else:
                assert given == values[name] and given.isdigit()
                printed += 1
    assert printed > 300


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_asked_for_at_all_distances(kind):
    distances = [query.start - query.source for row in rows(kind, 1024, 150) for query in row.queries]
    shares, _ = np.histogram(distances, bins=8, range=(0, 1024))
    assert min(distances) < 16 and max(distances) > 880 and (shares > 0.001 * len(distances)).all(), shares


def test_shares_add_up_to_one():
    assert sum(kind.share for kind in KINDS.values()) == pytest.approx(1)


def mixture(split: str = "train", seed: int = 0, share: float = 0.25) -> Mixture:
    return Mixture(material(), split, [Stage(*stage, share) for stage in STAGES], 40, 512, seed)


def test_a_batch_depends_on_its_number_seed_and_split_alone():
    first, again = mixture(), mixture()
    backwards = [again[step] for step in reversed(range(40))][::-1]
    for step in range(40):
        for name, tokens in first[step].items():
            assert tokens.equal(backwards[step][name])
    for other in (mixture(seed=1), mixture("validation"), mixture("test")):
        assert not any(other[step]["input_ids"].equal(first[step]["input_ids"]) for step in range(40))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 1.0])
def test_rows_grow_and_the_share_of_recall_holds_in_every_stage(share):
    batches = mixture(share=share)
    lengths = [batches[step]["input_ids"].shape[1] for step in range(40)]
    assert lengths == [64] * 20 + [128] * 10 + [256] * 10
    for first, last in ((0, 20), (20, 30), (30, 40)):
        labels = [row for step in range(first, last) for row in batches[step]["labels"]]
        recalled = sum(bool((row == IGNORED_LABEL).any()) for row in labels)
        assert abs(recalled - share * len(labels)) <= 1
    with pytest.raises(IndexError):
        batches[40]


def test_short_rows_begin_anywhere_in_the_positions_of_the_longest():
    batches = mixture()
    positions = [batches[step]["position_ids"] for step in range(40)]
    for rows_of_step in positions:
        assert (rows_of_step.diff(dim=1) == 1).all()
    seen = np.unique(np.concatenate([rows_of_step.flatten().numpy() for rows_of_step in positions[:20]]))
    assert seen.tolist() == list(range(256)), "20 batches of 8 rows of 64 tokens leave no position out"
    assert all((rows_of_step == np.arange(256)).all() for rows_of_step in positions[30:])


def test_a_stage_may_have_one_kind_of_recall_alone():
    only, _ = stages = Stage(64, 0.5, 1.0, "variables"), Stage(64, 0.5, 1.0)
    batches, decode = Mixture(material(), "train", stages, 40, 512), material().tokenizer.decode
    assigned = [["VAR" in decode(row) for row in batches[step]["input_ids"]] for step in range(40)]
    assert only.kind == "variables" and np.mean(assigned[:20]) > 0.9 and np.mean(assigned[20:]) < 0.2


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (OptionError, "batch_tokens must be a multiple of 64", lambda: Mixture(material(), "test", [LONG], 4, 96)),
        (OptionError, "a stage's share of recall must be from 0 to 1", lambda: mixture(share=1.5)),
        (OptionError, "length must be at least 32", lambda: recall_row(material(), 16, np.random.default_rng(0))),
        (DataError, "give more text", lambda: Material(material().tokenizer, np.arange(50)).span(None, 64)),
    ],
)
def test_what_makes_no_rows_is_refused(error, message, make):
    with pytest.raises(error, match=message):
        make()
