"""pretrain.py makes a checkpoint from text of one's own, and nothing if it cannot."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.result_files import ROOT
from hf_linattn.training.pretraining import measures
from hf_linattn.training.pretraining.architectures import ARCHITECTURES
from hf_linattn.training.pretraining.mixture import Mixture, Stage
from hf_linattn.training.task import load_model
from recipes import pretrain

WORDS = [f"{first}{last}" for first in ("re", "un", "over", "out") for last in ("turn", "run", "look", "side", "work")]


MANY_WORDS = [f"{first}{word}" for first in ("", "mis", "pre", "sub") for word in WORDS]


def write_splits(folder: Path, counts: dict[str, int], words: list[str] = WORDS) -> dict[str, str]:
    """Write documents of 600 words each, in another order per document; return the arguments that name the files."""
    files = {}
    for split, count in counts.items():
        texts = [" ".join(words[(i * (document + 3)) % len(words)] for i in range(600)) for document in range(count)]
        file = folder / f"{split}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        files[f"{split}_file"] = str(file)
    return files


def run(monkeypatch, **arguments: str) -> None:
    words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *words])
    runpy.run_path(str(ROOT / "recipes" / "pretrain.py"), run_name="__main__")


@pytest.mark.parametrize("architecture", ["bert", pytest.param("gpt2", marks=pytest.mark.exhaustive), "llama"])
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


TINY = {
    "llama-recall": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "intermediate_size": 64,
    },
    "gpt2-recall": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 64},
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["llama-recall", pytest.param("gpt2-recall", marks=pytest.mark.exhaustive)])
def test_a_model_that_looks_far_back_goes_on_where_it_was_stopped(tmp_path, monkeypatch, architecture):
    known = ARCHITECTURES[architecture]
    tiny = replace(known, sizes=known.sizes | TINY[architecture], stages=(Stage(32, 0.5, 0.5), Stage(64, 0.5, 0.25)))
    monkeypatch.setitem(ARCHITECTURES, architecture, tiny)
    options = {"architecture": architecture, "train_tokens": "5120", "batch_tokens": "256", "save_steps": "7"}
    options |= {"evaluations": "2", "recall_samples": "2", "checkpoint_dir": str(tmp_path / "kept")}
    options |= write_splits(tmp_path, {"train": 40, "validation": 1, "test": 1}, MANY_WORDS)
    trained_on: list[int] = []
    batch_of = Mixture.__getitem__

    def noted(batches: Mixture, step: int):
        if len(batches) == 20:
            trained_on.append(step)
        return batch_of(batches, step)

    monkeypatch.setattr(Mixture, "__getitem__", noted)
    run(monkeypatch, output_dir=str(tmp_path / "whole"), **options)
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == [".lock", "checkpoint-14", "checkpoint-20", "run.json"]
    shutil.rmtree(tmp_path / "kept" / "checkpoint-20")
    run(monkeypatch, output_dir=str(tmp_path / "resumed"), **options)
    assert trained_on == [*range(20), *range(14, 20)]
    weights, again = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    assert all(weight.equal(again[name]) for name, weight in weights.items())
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    assert AutoConfig.from_pretrained(tmp_path / "whole").dtype == torch.float32
    logs = [json.loads((tmp_path / name / "training_log.json").read_text()) for name in ("whole", "resumed")]
    assert logs[0]["recall"] == logs[1]["recall"] and logs[0]["history"] == logs[1]["history"]
    with pytest.raises(SystemExit, match=r"^OptionError: checkpoint_dir=.* holds a run with seed=0, got 1;"):
        run(monkeypatch, output_dir=str(tmp_path / "other"), seed="1", **options)
    assert not (tmp_path / "other").exists()
    (tmp_path / "short.txt").write_text(" ".join(MANY_WORDS[:5]))
    with pytest.raises(SystemExit, match=r"^DataError: the text of the test split has \d+ tokens, no more than the"):
        run(monkeypatch, output_dir=str(tmp_path / "other"), **options | {"test_file": str(tmp_path / "short.txt")})

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measures, "measure_recall", interrupted)
    with pytest.raises(SystemExit, match="130"):
        run(monkeypatch, output_dir=str(tmp_path / "unmeasured"), **options)
    unmeasured = load_file(tmp_path / "unmeasured" / "model.safetensors")
    assert all(weight.equal(unmeasured[name]) for name, weight in weights.items()) and len(trained_on) == 26
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {
        "training_log.json", *(path.name for path in (tmp_path / "unmeasured").iterdir())
    }  # fmt: skip


def test_a_run_of_documentation_goes_on_with_its_text_and_its_tokenizer(tmp_path, monkeypatch):
    known = ARCHITECTURES["llama-recall"]
    tiny = replace(known, sizes=known.sizes | TINY["llama-recall"], packages=("typer",))
    monkeypatch.setitem(ARCHITECTURES, "llama-recall", tiny)
    trained_on = []
    monkeypatch.setattr(pretrain, "train_on_mixture", lambda model, *given: trained_on.append(given) or [])
    monkeypatch.setattr(pretrain, "measure", lambda *_: 1.0)
    monkeypatch.setattr(pretrain, "recall_of", lambda *_: None)
    kept = tmp_path / "kept"

    def tokens_and_text(words: list[str]) -> tuple[dict[str, int], list[str]]:
        """Of a run under a Python whose documentation has these words."""
        text = Dataset.from_dict({"text": [" ".join(words)]})
        corpus = DatasetDict({split: text for split in ("train", "validation", "test")})
        monkeypatch.setattr(pretrain, "load_text_splits", lambda **_: corpus)
        options = pretrain.PretrainArguments("llama-recall", str(tmp_path / "out"), checkpoint_dir=str(kept))
        pretrain.train(options, tmp_path / "new")
        shutil.rmtree(tmp_path / "out")
        tokenizer, corpus, *_ = trained_on[-1]
        return tokenizer.get_vocab(), list(corpus["train"]["text"])

    tokens, text = tokens_and_text(WORDS * 3)
    assert tokens_and_text(MANY_WORDS * 3) == (tokens, text)
    (kept / "tokenizer.json").unlink()  # as of a run that was begun before it was kept
    others, same = tokens_and_text(MANY_WORDS * 3)
    assert same == text and others != tokens


def test_one_of_several_gpus_is_trained_on(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = pretrain.PretrainArguments("llama-recall", str(tmp_path / "out"), bf16=False)
    arguments = pretrain.training_arguments(options, tmp_path, 10, per_device_train_batch_size=1)
    assert arguments.device.type == "cpu" and (arguments.n_gpu, arguments.train_batch_size) == (1, 1)


@pytest.mark.parametrize(
    ("options", "processes", "message"),
    [
        ({"architecture": "bert", "checkpoint_dir": "kept"}, 1, "checkpoint_dir='kept': bert is trained in one go;"),
        ({"architecture": "llama-recall", "recall_samples": "0"}, 1, "recall_samples must be an integer >= 1, got 0"),
        ({"architecture": "bert", "batch_tokens": "256"}, 1, "batch_tokens must be a multiple of .*, got 256"),
        ({"architecture": "llama", "batch_tokens": "1000"}, 1, "batch_tokens must be a multiple of .*, got 1000"),
        ({"architecture": "llama", "batch_tokens": "-512"}, 1, "batch_tokens must be a multiple of .*, got -512"),
        ({"architecture": "bert", "train_tokens": "4096"}, 1, "train_tokens must be enough for a step of 2048 in"),
        ({"architecture": "llama", "evaluations": "0"}, 1, "evaluations must be an integer >= 1, got 0"),
        ({"architecture": "llama"}, 2, "WORLD_SIZE=2: the recipe is one process; run it as python recipes/pretrain"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, options, processes, message
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(SystemExit, match=f"^OptionError: {message}"):
        run(monkeypatch, output_dir=str(tmp_path / "out"), train_file="absent.txt", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "inside", [{"checkpoint_dir": "out"}, {"checkpoint_dir": "out/kept"}, {"test_file": "data/../out/test.jsonl"}]
)
def test_nothing_that_a_run_needs_lies_in_the_folder_that_it_replaces(tmp_path, monkeypatch, inside):
    monkeypatch.chdir(tmp_path)
    ((name, path),) = inside.items()
    with pytest.raises(SystemExit, match=rf"^OptionError: {name}='{path}' lies in output_dir='out', which is"):
        run(monkeypatch, architecture="llama-recall", output_dir="out", **inside)
    assert not list(tmp_path.iterdir())


def test_what_was_there_stays_if_the_text_is_missing(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(SystemExit, match=r"^DataError: train_file='absent\.txt' does not exist.*$"):
        run(monkeypatch, architecture="llama", output_dir=str(out), train_file="absent.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (out / "old").exists()
