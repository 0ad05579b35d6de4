"""Classifiers of texts through the distillation recipe: converted, taught by the original classifier, and scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_linattn
from hf_linattn.report import Report
from hf_linattn.training import pipeline
from hf_linattn.training.api import Finetuning
from hf_linattn.training.arguments import DISTILLATION
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.recipes.test_finetune import command, recorded

TARGETS = ("w7", "w8")


def write_texts(file: Path, count: int, seed: int) -> None:
    """Texts of 3 to 11 words, in class `has` if one of the targets is among them."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for _ in range(count):
        length = int(torch.randint(3, 12, (), generator=generator))
        words = [f"w{int(i)}" for i in torch.randint(5, 40, (length,), generator=generator)]
        if torch.rand((), generator=generator) < 0.5:
            words[int(torch.randint(length, (), generator=generator))] = TARGETS[length % 2]
        kind = "has" if {*words} & {*TARGETS} else "lacks"
        lines.append(json.dumps({"text": " ".join(words), "kind": kind, "title": words[0]}))
    file.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama"))])
def test_a_classifier_is_converted_and_taught(name, tmp_path, capsys):
    names = {"lacks": 0, "has": 1}
    known = {"label2id": names, "id2label": {number: label for label, number in names.items()}}
    model = make_model(name, "ForSequenceClassification", std=0.1, **known)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    files = {}
    for seed, (split, count) in enumerate({"train": 400, "validation": 24, "test": 50}.items()):
        files[f"{split}_file"] = tmp_path / f"{split}.jsonl"
        write_texts(files[f"{split}_file"], count, seed)
    out = tmp_path / "out"
    report = pipeline.main(
        command(
            {"model_name_or_path": str(tmp_path / "model"), **files}, out, mechanism="hedgehog",
            mechanism_options=None, label_column="kind", block_size=12, max_train_tokens=9000,
            calibration_tokens=120, transfer_tokens=480, kl_weight=0.2, learning_rates="5e-3", lr_search_tokens=None,
            speed_lengths="12", max_test_documents=40,
        ),
        DISTILLATION,
        "accelerate launch recipes/distill.py",
    )  # fmt: skip
    assert Report.load(out) == report
    assert [stage.name for stage in report.stages] == ["converted", "calibration", "transfer", "recovered"]
    # of 7 tokens on average, where the options count rows of 12: 120, 480, and what is left in whole steps
    assert [stage.tokens // 7 for stage in report.stages] == [0, 10, 40, 700]
    assert report.evaluation.num_tokens == 40 and report.evaluation.stride is None
    assert report.accuracy.recovered > 0.8 > report.accuracy.original, "both can be right by chance at most"
    assert report.accuracy.control > 0.8 and report.perplexity.recovered < 0.8 * report.perplexity.converted
    assert recorded(out, "recovered_training")["steps"] == (9000 - 120 - 480) // 48
    tokenizer, right = AutoTokenizer.from_pretrained(out), 0
    recovered = AutoModelForSequenceClassification.from_pretrained(out)
    assert {m.config.mechanism for m in hf_linattn.get_mechanisms(recovered).values()} == {"hedgehog"}
    lines = files["test_file"].read_text().splitlines()
    for line in [lines[i * 50 // 40] for i in range(40)]:
        row = json.loads(line)
        with torch.no_grad():
            best = recovered(input_ids=torch.tensor([tokenizer(row["text"])["input_ids"][:12]])).logits.argmax()
        right += int(best) == names[row["kind"]]
    assert report.accuracy.recovered == right / 40
    shown = f"{report.accuracy.recovered:.1%}"
    assert shown in capsys.readouterr().out and shown in (out / "report.md").read_text()
    assert "40 texts of the test split" in (out / "report.md").read_text()
    assert [sample.recovered == sample.truth for sample in report.samples].count(True) >= 2
    assert {name for sample in report.samples for name in (sample.truth, sample.original, sample.control)} <= {*names}


def test_errors_of_large_numbers_have_no_perplexity(tmp_path):
    make_model("bert", "ForSequenceClassification", num_labels=1).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = {"text": [f"w{5 + i} w7" for i in range(24)], "label": [20.0 + 40 * (i % 4) for i in range(24)]}
    numbers = Dataset.from_dict(rows)
    options = {"max_train_tokens": 96, "block_size": 12, "learning_rates": [1e-3], "speed_lengths": [8]}
    options |= {"eval_dataset": numbers, "test_dataset": numbers, "plan_steps": 0, "control": "none"}
    report = Finetuning(tmp_path / "model", "linear", numbers, tmp_path / "out", **options).run()
    errors = report.squared_error
    assert report.perplexity is None and min(errors.original, errors.recovered) > 1000, "exp of it is not finite"
    assert report.ratio == errors.recovered / errors.original
    assert Report.load(tmp_path / "out") == report and "Infinity" not in (tmp_path / "out/report.json").read_text()
    written = (tmp_path / "out/report.md").read_text()
    assert "## Mean squared error" in written and f"{errors.recovered:,.4g}" in written
    assert "perplexity |" not in written
    assert f"mean squared error of {errors.recovered:,.4g}" in (tmp_path / "out/README.md").read_text()
