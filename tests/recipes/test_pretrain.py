"""pretrain.py makes a checkpoint from text of one's own, and nothing if it cannot."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.result_files import ROOT
from hf_linattn.training.task import load_model

WORDS = [f"{first}{last}" for first in ("re", "un", "over", "out") for last in ("turn", "run", "look", "side", "work")]


def write_splits(folder: Path, counts: dict[str, int]) -> dict[str, str]:
    """Write documents of 600 words each, in another order per document; return the arguments that name the files."""
    files = {}
    for split, count in counts.items():
        texts = [" ".join(WORDS[(i * (document + 3)) % 20] for i in range(600)) for document in range(count)]
        file = folder / f"{split}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        files[f"{split}_file"] = str(file)
    return files


def run(monkeypatch, **arguments: str) -> None:
    words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *words])
    runpy.run_path(str(ROOT / "recipes" / "pretrain.py"), run_name="__main__")


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_a_model_of_ones_own_text(tmp_path, monkeypatch, architecture):
    files = write_splits(tmp_path, {"train": 4, "validation": 1, "test": 2})
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    run(monkeypatch, architecture=architecture, output_dir=str(out), train_tokens="8192", evaluations="1", **files)
    log = json.loads((out / "training_log.json").read_text())
    for split, characters in log["characters"].items():
        documents = (tmp_path / f"{split}.jsonl").read_text().splitlines()
        assert characters == sum(len(json.loads(document)["text"]) for document in documents)
    assert log["arguments"]["train_file"] == files["train_file"]
    losses = [entry["loss"] for entry in log["history"] if "loss" in entry]
    assert losses[-1] < losses[0] and log["test_perplexity"] < 2048 / 2
    tokenizer, model = AutoTokenizer.from_pretrained(out), load_model(str(out), "float32")
    assert model.config.model_type == architecture and model.num_parameters() == log["parameters"]
    assert len(tokenizer(" overturn outside", add_special_tokens=False)["input_ids"]) == 2, "its words are tokens"
    causal = AutoConfig.from_pretrained(out).architectures[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert causal == (architecture != "bert")
    assert not (out / "old").exists() and {path.name for path in tmp_path.iterdir()} == {
        "out", "train.jsonl", "validation.jsonl", "test.jsonl",
    }  # fmt: skip


def test_what_was_there_stays_if_the_text_is_missing(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(SystemExit, match=r"^DataError: train_file='absent\.txt' does not exist.*$"):
        run(monkeypatch, architecture="llama", output_dir=str(out), train_file="absent.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (out / "old").exists()
