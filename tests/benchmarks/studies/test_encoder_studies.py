"""The studies of encoders, at a tiny size: rows go on where a run stopped, and softmax changes nothing."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from benchmarks.measure.classifiers import in_batches
from benchmarks.measure.provenance import without_folders
from benchmarks.measure.saved_models import save_whole
from benchmarks.result_files import CONTROL, CUT, PROBE, ROOT, WINDOWS
from benchmarks.studies import encoder_tasks, long_documents, long_documents_speed
from benchmarks.studies.encoder_tasks import CONVERSIONS, TASKS, Study
from benchmarks.tables.classifiers import documents_speed_table, documents_table, kept_share, tasks_table
from hf_linattn.errors import DataError
from tests.models import make_model

pytestmark = pytest.mark.tools
BERT = str(ROOT / "recipes" / "pretrained" / "bert")
WORDS = ("print", "return", "import", "class", "yield", "raise")


def write_sentences(folder: Path, name: str, columns: tuple[str, ...], count: int) -> None:
    """Write rows of which the first word of the first sentence tells the class."""
    draw = random.Random(name)
    rows = []
    for i in range(count):
        texts = [" ".join([WORDS[i % 2], *draw.choices(WORDS, k=draw.randint(1, 9))]) for _ in columns]
        rows.append({**dict(zip(columns, texts, strict=True)), "label": i % 2, "idx": i})
    write_rows(folder / f"{name}.jsonl", rows)


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_encoder_tasks_go_on_with_the_missing_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [replace(task, length=16, epochs=(1, 1), most=30) for task in TASKS[1:]]
    for task in tasks:
        for split, count in (("train", 40), ("validation", 9)):
            write_sentences(tmp_path, f"{task.name}_{split}", task.columns, count)
    monkeypatch.setattr(encoder_tasks, "BATCH", 8)
    output = tmp_path / "out" / "encoder_tasks.json"
    some = {name: CONVERSIONS[name] for name in (CONTROL, "linear")}

    def run(conversions: dict[str, encoder_tasks.Conversion]) -> list[dict]:
        Study(BERT, tmp_path, tmp_path, output).run(range(1), tasks, conversions)
        return json.loads(output.read_text())["rows"]

    first = run({CONTROL: some[CONTROL]})
    originals = tmp_path / Path(BERT).name
    for task in tasks:
        shutil.rmtree(originals / f"{task.name}-0")  # as in a fresh checkout, where the rows are
    assert run({CONTROL: some[CONTROL]}) == first and not [*originals.iterdir()], "none is needed"
    both = run(some)
    assert [row for row in both if row["row"] != "linear"] == first
    for task in tasks:
        rows = {row["row"]: row for row in both if row["task"] == task.name}
        assert rows[CONTROL]["converted"] == rows["original"]["score"], "softmax computes what the original does"
        assert rows["linear"]["texts"] == 27 and rows["linear"]["steps"] == rows[CONTROL]["steps"] == 3


def write_documents(folder: Path, name: str, count: int) -> None:
    """Write documents whose words tell the class, but for the first ones."""
    draw = random.Random(name)
    texts = [" ".join([*draw.choices(WORDS[2:], k=40), *[WORDS[i % 2]] * draw.randint(20, 40)]) for i in range(count)]
    write_rows(folder / f"{name}.jsonl", [{"text": text, "label": i % 2} for i, text in enumerate(texts)])


def test_long_documents_are_cut_read_in_windows_and_read_whole(tmp_path: Path) -> None:
    for split, count in (("train", 8), ("validation", 4), ("test", 6)):
        write_documents(tmp_path, f"sets_{split}", count)
    sizes = long_documents.Sizes(
        window=24, length=520, cut_epochs=1, epochs=1, batch_size=4, long_batch_size=4, taught=4160
    )
    output = tmp_path / "out" / "long_documents.json"
    readers = {name: long_documents.READINGS[name] for name in ("hedgehog", "softmax")}
    model = str(tmp_path / "embeddings")
    SentenceTransformer(BERT, device="cpu").save_pretrained(model, create_model_card=False)
    study = long_documents.Study(model, tmp_path, tmp_path, output, sizes)
    study.run([0, 1], ["sets"], {"softmax": readers["softmax"]}, heads_only=True)
    probes = [CUT, WINDOWS, "softmax"]
    assert [row["row"] for row in json.loads(output.read_text())["rows"]] == [PROBE + name for name in probes]
    study.run([0, 1], ["sets"], {"softmax": readers["softmax"]})
    shutil.rmtree(tmp_path / Path(model).name / "sets-1")
    study.run([0, 1], ["sets"], readers)
    rows = {(row["seed"], row["row"]): row for row in json.loads(output.read_text())["rows"]}
    first = [*(PROBE + name for name in probes), "cut", "windows", "softmax"]
    assert [name for seed, name in rows if seed == 0] == [*first, PROBE + "hedgehog", "hedgehog"]
    seen, *others = (rows[0, PROBE + name]["score"] for name in (CUT, WINDOWS, "softmax", "hedgehog"))
    assert others == [1, 1, 1] and seen < 1, "the words that tell the class stand behind the first window"
    own = ["cut", "windows", PROBE + "hedgehog", "hedgehog"]
    assert [name for seed, name in rows if seed == 1] == own, "softmax has one seed"
    assert rows[0, "windows"]["stride"] == 11 and rows[0, "hedgehog"]["steps"] == rows[0, "softmax"]["steps"] == 2
    assert all(0 <= row["score"] <= 1 for row in rows.values())
    table = documents_table(json.loads(output.read_text()))
    assert len(table.splitlines()) == 10 and "| probe, `hedgehog` |" in table
    assert f"{rows[0, 'softmax']['score']:.3f} |" in table


def test_a_document_is_timed_and_its_bytes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_documents_speed, "TIMES", replace(long_documents_speed.TIMES, budget=0.0, min_repeats=1))
    write_documents(tmp_path, "test", 20)
    output = tmp_path / "speed.json"
    long_documents_speed.main(BERT, tmp_path / "test.jsonl", [64, 520], ["linear"], output)
    document = json.loads(output.read_text())
    rows = {(row["tokens"], row["row"]): row for row in document["rows"]}
    assert rows[520, "softmax"]["times_faster"] == rows[520, "softmax"]["memory"] == 1
    assert rows[520, "linear"]["peak_bytes"] > 5 * rows[64, "linear"]["peak_bytes"] > 0
    ratio = rows[520, "linear"]["peak_bytes"] / rows[520, "softmax"]["peak_bytes"]
    assert rows[520, "linear"]["memory"] == ratio and f"({ratio:.2f})" in documents_speed_table(document)
    with pytest.raises(DataError, match="give more documents"):
        long_documents_speed.main(BERT, tmp_path / "test.jsonl", [5000], ["linear"], output)


def test_a_share_of_the_best_has_an_interval_of_its_differences() -> None:
    scores, bests = [0.5, 0.7, 0.6], [0.6, 0.8, 0.4]  # differences: -0.1, -0.1, 0.2
    share, low, high = kept_share(scores, bests)
    assert share == pytest.approx(1.0)
    assert high - share == share - low == pytest.approx(4.302653 * 0.3**0.5 / 10**0.5 / 3**0.5 / 0.6, rel=1e-5)
    rows = [
        {"task": "rte", "seed": seed, "row": name, "score": score, "converted": 0.25, "options": {}}
        for name, several in (("original", [0.6, 0.4, 0.2]), (CONTROL, [0.1, 0.8, 0.4]), ("linear", scores))
        for seed, score in enumerate(several)
    ]
    lines = tasks_table({"rows": rows}).splitlines()
    assert lines[0] == "3 seeds; tasks: RTE."
    assert lines[4:6] == ["| original |  |  | 0.400 |  |  |", "| control |  | 0.250 | 0.433 |  |  |"]
    assert lines[6].startswith("| `linear` |  | 0.250 | 0.600 | **1.000** | ")


def test_batches_hold_texts_of_like_lengths_in_random_order() -> None:
    lengths = [1 + i % 7 for i in range(37)]
    rows = Dataset.from_dict({"input_ids": [[i] * length for i, length in enumerate(lengths)]})
    found = [in_batches(rows, 5, seed)["input_ids"][:] for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2] and sorted(ids[0] for ids in found[0]) == list(range(37))
    firsts = [len(found[0][first]) for first in range(0, 35, 5)]
    assert firsts != sorted(firsts) and all(
        max(map(len, found[0][first : first + 5])) - min(map(len, found[0][first : first + 5])) <= 1
        for first in range(0, 35, 5)
    )
    assert [len(ids) for ids in found[0][35:]] == [7, 7], "the short batch comes last"


def test_commands_of_results_name_no_folder_of_their_machine() -> None:
    given = ["/a/b/model", "../../c/books", "--output", "runs/x.json", "0.5"]
    assert [without_folders(x) for x in given] == ["model", "books", "--output", "runs/x.json", "0.5"]


def test_a_model_that_a_study_keeps_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir()
            (folder / "config.json").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_whole(Broken(), tmp_path / "models" / "task-0")  # type: ignore[arg-type]
    assert not [*(tmp_path / "models").iterdir()]
    save_whole(make_model("bert"), tmp_path / "models" / "task-0")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["task-0"]
