"""Rows that need what stands far back."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from transformers import AutoTokenizer

from benchmarks.studies.recall_text import SHARES, Writer, main, read_texts
from hf_linattn.training.data import load_text_splits

LLAMA = "recipes/pretrained/llama-recall"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return load_text_splits()["train"]["text"][:60]


@pytest.fixture(scope="module")
def writer(texts) -> Writer:
    return Writer(AutoTokenizer.from_pretrained(LLAMA), [texts[:30], texts[30:]], [2.0, 1.0], 1020, seed=0)


def test_what_a_row_repeats_stands_in_it_twice(writer):
    for _ in range(5):
        record = writer.tokenizer.decode(writer.records())
        values = re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", record)
        assert values and set(Counter(values).values()) == {2}
        passage = writer.tokenizer.decode(writer.repeated())
        lines = [line for line in re.split(r"(?<=[.!?])\s+|\n+", passage) if len(line) > 60]
        assert sum(passage.count(line) > 1 for line in lines) > 10


def test_rows_of_all_kinds_are_written_whole_and_of_one_length(texts, tmp_path):
    for name, part in (("a", texts[:30]), ("b", texts[30:])):
        rows = [{"text": text, "kind": "left out" if number < 10 else "kept"} for number, text in enumerate(part)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert read_texts(files[0], ["left out"]) == texts[10:30]
    tokenizer, written = AutoTokenizer.from_pretrained(LLAMA), []
    for name in ("one", "two"):
        main(LLAMA, tmp_path / name, files, [2.0, 1.0], ["left out"], rows=15, length=1020, seed=3)
        written.append((tmp_path / name).read_text())
    assert written[0] == written[1], "the same seed"
    rows = [json.loads(line) for line in written[0].splitlines()]
    assert Counter(row["kind"] for row in rows) == {kind: int(15 * share) for kind, share in SHARES.items()}
    for row in rows:
        tokens = len(tokenizer(row["text"], add_special_tokens=False)["input_ids"])
        assert tokens == 1020 or (row["kind"] == "recall" and abs(tokens - 1020) < 8)
