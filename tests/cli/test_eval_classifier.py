"""`hf-linattn eval` of classifiers: metrics, whole texts and windows, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from hf_linattn import extend_positions, patch_model
from hf_linattn.training.classification import SequenceClassification
from tests.helpers import WithoutFloat64, make_tokenizer
from tests.models import make_model
from tests.test_cli import answer, refuse

LABELS = ["no", "yes", "yes", "no", "yes", "no", "no"]
TEXTS = [" ".join(f"w{5 + (seed + 3 * i) % 20}" for i in range(2 + 3 * seed)) for seed in range(7)]
KNOWN = {"label2id": {"no": 0, "yes": 1}, "id2label": {0: "no", 1: "yes"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A classifier with 8 positions, its converted form with 24, a classifier of numbers, a broken one, and rows."""
    folder = tmp_path_factory.mktemp("eval")
    models = {
        name: make_model("bert", "ForSequenceClassification", std=0.6, max_position_embeddings=8, **options)
        for name, options in {"original": KNOWN, "number": {"num_labels": 1}, "broken": KNOWN}.items()
    }
    models["broken"].classifier.weight.data.fill_(math.nan)
    models["converted"] = patch_model(extend_positions(make_model(
        "bert", "ForSequenceClassification", std=0.6, max_position_embeddings=8, **KNOWN
    ), 24), "linear")  # fmt: skip
    models["question"] = make_model("bert", "ForQuestionAnswering")
    for name, model in models.items():
        model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]
    for first, name in ((0, "one"), (4, "two")):
        part = rows[first : first + 4]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "numbers.csv").write_text("body,score\n" + "".join(f"{t},{i / 2}\n" for i, t in enumerate(TEXTS)))
    return folder


def test_a_classifier_is_scored_on_the_rows_of_its_files(folder, monkeypatch):
    files = folder / "one.jsonl", folder / "two.jsonl"
    judge = SequenceClassification.judge

    def judge_there(*given):
        with WithoutFloat64():
            return judge(*given)

    monkeypatch.setattr(SequenceClassification, "judge", judge_there)
    found = json.loads(answer("eval", folder / "converted", *files, "--json"))
    model, tokenizer, right = patch_model(extend_positions(make_model(
        "bert", "ForSequenceClassification", std=0.6, max_position_embeddings=8, **KNOWN
    ), 24), "linear"), make_tokenizer(), 0  # fmt: skip
    for text, label in zip(TEXTS, LABELS, strict=True):
        with torch.no_grad():
            best = int(model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits.argmax())
        right += ("no", "yes")[best] == label
    assert (found["accuracy"], found["num_texts"], found["max_length"]) == (right / 7, 7, 24)
    assert [*found][-3:] == ["accuracy", "macro_f1", "matthews"] and found["document_window"] is None
    shown = answer("eval", folder / "converted", *files, "--metrics", "macro_f1", "--max-length", 5)
    assert shown.startswith("macro_f1 ") and "over 7 texts" in shown


def test_windows_read_what_is_longer_than_the_table(folder):
    files, whole = (folder / "one.jsonl", folder / "two.jsonl"), ("--document_window", 8, "--document_stride", 3)
    found = json.loads(answer("eval", folder / "original", *files, *whole, "--json"))
    model, tokenizer, right = make_model(
        "bert", "ForSequenceClassification", std=0.6, max_position_embeddings=8, **KNOWN
    ), make_tokenizer(), 0  # fmt: skip
    for text, label in zip(TEXTS, LABELS, strict=True):
        ids, total = tokenizer(text)["input_ids"], torch.zeros(2)
        for start in range(0, max(1, len(ids) - 8 + 3), 3):
            window = ids[start : start + 8]
            with torch.no_grad():
                total += len(window) * model(input_ids=torch.tensor([window])).logits[0]
        right += ("no", "yes")[int(total.argmax())] == label
    assert found["accuracy"] == right / 7
    assert (found["max_length"], found["document_window"], found["document_stride"]) == (None, 8, 3)


def test_numbers_are_scored_by_their_correlation(folder):
    columns = "--text_column", "body", "--label_column", "score"
    found = json.loads(answer("eval", folder / "number", folder / "numbers.csv", *columns, "--json"))
    assert [*found][-2:] == ["pearson", "spearman"] and -1 <= found["spearman"] <= 1


def test_files_of_several_formats_are_one_set(folder, tmp_path):
    (tmp_path / "two.csv").write_text("text,label\n" + "".join(f"{TEXTS[i]},{LABELS[i]}\n" for i in range(4, 7)))
    (tmp_path / "whole.jsonl").write_text('{"text": "w5 w6", "label": 1}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "w7 w8", "label": 0.5}\n')
    both = (folder / "one.jsonl", folder / "two.jsonl"), (folder / "one.jsonl", tmp_path / "two.csv")
    found, mixed = (json.loads(answer("eval", folder / "converted", *files, "--json")) for files in both)
    assert found == mixed
    numbers = tmp_path / "whole.jsonl", tmp_path / "half.jsonl"
    assert json.loads(answer("eval", folder / "number", *numbers, "--json"))["num_texts"] == 2


def test_names_of_classes_that_only_their_numbers_lead_to(folder, tmp_path):
    config = json.loads((folder / "converted" / "config.json").read_text())
    shutil.copytree(folder / "converted", tmp_path / "unnamed")
    del config["base_config"]["label2id"]
    (tmp_path / "unnamed" / "config.json").write_text(json.dumps(config))
    files = folder / "one.jsonl", folder / "two.jsonl", "--json"
    found, named = (json.loads(answer("eval", x, *files)) for x in (tmp_path / "unnamed", folder / "converted"))
    assert {**found, "model": ""} == {**named, "model": ""}


@pytest.mark.parametrize(
    ("model", "file", "options", "message"),
    [
        ("original", "one.jsonl", ("--max-length", 9), "max_length=9 is beyond the 8 positions .* extend_positions"),
        ("original", "one.jsonl", ("--document_window", 9), "document_window=9 is beyond the 8 positions"),
        ("original", "one.jsonl", ("--document_stride", 2), "document_stride=2: there are no windows"),
        ("original", "one.jsonl", ("--stride", 2), "stride='2' is an option of perplexity, not of classifiers"),
        ("original", "one.jsonl", ("--original", "x"), "original='x' is an option of .* embedding models, not of"),
        ("broken", "one.jsonl", ("--metrics", "nope"), "unknown metric 'nope'"),  # before a text is read
        ("original", "one.jsonl", ("--metrics", "pearson"), "metric 'pearson' is of regression"),
        ("original", "one.jsonl", ("--label_column", "labels"), "label_column='labels' is not a column"),
        ("original", "missing.jsonl", (), "files=.* does not exist; give the path of a file"),
        ("broken", "one.jsonl", (), "logits must be finite, or the model is broken: .* got .nan."),
        ("number", "one.jsonl", (), "holds string; name a column of numbers"),
        ("original", "one.jsonl", ("--suite", "language"), "MaskedLM; `hf-linattn eval MODEL ROWS.jsonl` sc"),
        ("question", "one.jsonl", (), "BertForQuestionAnswering has no causal or masked language-modelling head"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(folder, model, file, options, message):
    said = " ".join(refuse("eval", folder / model, folder / file, *options).split())
    assert re.search(message, said), said
