"""A classifier whose positions end before its documents: taught by its own answers over windows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_linattn.errors import OptionError
from hf_linattn.report import Report
from hf_linattn.training import pipeline
from hf_linattn.training.arguments import DISTILLATION, parse_arguments
from hf_linattn.training.preparation import prepare
from hf_linattn.training.stages.recovery import RecoveredTraining
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.recipes.test_classification import write_texts
from tests.recipes.test_finetune import command, recorded

TABLE = 6  # positions of the original
OPTIONS = {
    "mechanism": "linear", "mechanism_options": None, "label_column": "kind", "block_size": 12,
    "max_train_tokens": 768, "max_positions": 16, "kl_weight": 1.0, "ce_weight": 0.0, "learning_rates": "1e-3",
    "lr_search_tokens": None, "speed_lengths": "12",
}  # fmt: skip


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("documents")
    known = {"label2id": {"lacks": 0, "has": 1}, "id2label": {0: "lacks", 1: "has"}}
    model = make_model("bert", "ForSequenceClassification", std=0.4, max_position_embeddings=TABLE, **known)
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    files = {}
    for seed, (split, count) in enumerate({"train": 64, "validation": 12, "test": 20}.items()):
        files[f"{split}_file"] = str(folder / f"{split}.jsonl")
        write_texts(folder / f"{split}.jsonl", count, seed)
    return {"model_name_or_path": str(folder / "model"), **files}


def distill(material, out, **changes) -> Report:
    flags = command(material, out, **OPTIONS | changes)
    return pipeline.main(flags, DISTILLATION, "accelerate launch recipes/distill.py")


def read_in_windows(model, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits for the first window, and the mean over windows, half of one apart, by their tokens."""
    logits, counts, start = [], [], 0
    while not counts or start + 3 < len(ids):
        window = ids[start : start + TABLE]
        with torch.no_grad():
            logits.append(model(input_ids=torch.tensor([window])).logits[0].double())
        counts.append(len(window))
        start += 3
    return logits[0], sum(n * z for n, z in zip(counts, logits, strict=True)) / sum(counts)


def rows_of(material) -> list[dict]:
    return [json.loads(line) for line in Path(material["test_file"]).read_text().splitlines()]


def test_the_original_reads_windows_to_teach_and_to_be_compared(material, tmp_path, capsys):
    out = tmp_path / "out"
    report = distill(material, out)
    assert Report.load(out) == report
    original = AutoModelForSequenceClassification.from_pretrained(material["model_name_or_path"])
    tokenizer = AutoTokenizer.from_pretrained(material["model_name_or_path"])
    losses: dict[str, list[float]] = {"cut": [], "windows": []}
    for row in rows_of(material):
        read = read_in_windows(original, tokenizer(row["text"])["input_ids"][:12])
        for reading, logits in zip(losses, read, strict=True):
            losses[reading].append(-float(logits.log_softmax(-1)[int(row["kind"] == "has")]))
    for row in report.readings:
        assert row.perplexity == pytest.approx(math.exp(sum(losses[row.reading]) / 20), rel=1e-5), row.reading
        assert (row.max_length, row.stride) == (TABLE, 3 if row.reading == "windows" else None)
        assert [*row.metrics] == ["accuracy", "macro_f1", "matthews"]
    assert [row.reading for row in report.readings] == ["cut", "windows"]
    assert [row.metric for row in report.metrics] == ["accuracy", "macro_f1", "matthews"]
    assert recorded(out, "original_windows")["num_tokens"] == 20
    recovered = AutoModelForSequenceClassification.from_pretrained(out)
    assert recovered.config.max_position_embeddings == 16
    assert AutoTokenizer.from_pretrained(out).model_max_length == 16
    shown, page = capsys.readouterr().out, (out / "report.md").read_text()
    assert "original," in shown and "| original, windows |" in page
    assert "windows of 6 tokens every 3, logits pooled by tokens" in page


def test_the_teacher_has_its_own_positions_and_answers_for_whole_documents(material, tmp_path):
    flags = command(material, tmp_path / "out", **OPTIONS)
    run = prepare(parse_arguments(flags, DISTILLATION))
    teacher = RecoveredTraining().teacher(run)
    assert teacher.model.config.max_position_embeddings == TABLE
    batch = run.data.collator([run.data.train[i] for i in range(5)])
    got = teacher.outputs(run.convert(), batch).logits
    for ids, mask, pooled in zip(batch["input_ids"], batch["attention_mask"], got, strict=True):
        expected = read_in_windows(teacher.model, ids[mask.bool()].tolist())[1]
        torch.testing.assert_close(pooled.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("block_size", "warned"), [(6, 1), (7, 0)])
def test_positions_that_no_row_reaches_are_warned_of(material, tmp_path, caplog, block_size, warned):
    prepare(parse_arguments(command(material, tmp_path / "out", **OPTIONS | {"block_size": block_size}), DISTILLATION))
    said = [message for message in caplog.messages if "max_positions=16" in message]
    assert len(said) == warned
    assert all("block_size=6" in x and "the original's 6 positions" in x and "give block_size 16" in x for x in said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_positions": None}, r"block_size=12 is beyond the 6 positions .* max_positions=12 .* extend_positions"),
        ({"max_positions": 4}, "max_positions must be above 6"),
        ({"document_window": 7}, "document_window must be at most the 6 positions of the original, got 7"),
        ({"block_size": 5, "document_window": 6}, "document_window must be below block_size=5"),
        ({"document_stride": 7}, "document_stride must be at most 6"),
        ({"hidden_weight": 1.0}, "hidden_weight=1.0: the original reads windows of 6 tokens"),
        ({"document_window": 0, "document_stride": 2}, "document_stride=2: there are no windows"),
        (
            {"text_pair_column": "title"},
            "text_pair_column=title: pairs of more than 6 tokens have no windows; document_window 0 has",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_lengths_that_do_not_fit_are_refused_before_anything_is_written(material, tmp_path, changes, message):
    with pytest.raises(OptionError, match=message):
        distill(material, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()
