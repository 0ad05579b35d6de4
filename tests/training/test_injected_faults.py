"""Faults that a long training meets: losses that are no numbers, memory that runs out, text that does not fit."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_linattn.errors import DataError, OptionError
from hf_linattn.memory_errors import is_out_of_memory, size_said
from hf_linattn.report import Report
from hf_linattn.training import finetuning, trainers
from hf_linattn.training.stages.base import OneProcessStage
from tests.recipes.test_distill import flags, run
from tests.recipes.test_finetune import material, recorded

__all__ = ["material"]
SHORT = {"control": "none", "calibration_tokens": 0, "max_train_tokens": 1792, "logging_steps": 1, "window_dropout": 0}


def stage_of(trainer: trainers.RecoveryTrainer) -> str:
    return Path(trainer.args.output_dir).name


@pytest.fixture(scope="module")
def unbroken(material, tmp_path_factory) -> Path:
    """A run that met no fault."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    run(flags(material, out, **SHORT))
    return out


def failing(monkeypatch, fails) -> None:
    """Have losses for which `fails(trainer)` is true be no numbers."""
    real = trainers.RecoveryTrainer.compute_loss

    def compute_loss(trainer, model, *arguments, **options):
        loss = real(trainer, model, *arguments, **options)
        return loss * math.nan if model.training and fails(trainer) else loss

    monkeypatch.setattr(trainers.RecoveryTrainer, "compute_loss", compute_loss)


def rates(out: Path, stage: str) -> dict[int, float]:
    return {x["step"]: x["learning_rate"] for x in recorded(out, stage)["history"] if "learning_rate" in x}


def test_a_loss_that_is_no_number_sends_a_stage_back_to_its_checkpoint_with_half_the_rate(
    material, unbroken, tmp_path, monkeypatch, caplog
):
    out, steps = tmp_path / "out", []

    def fails(trainer) -> bool:
        stage, step = stage_of(trainer), trainer.state.global_step + 1
        steps.append((stage, step, trainer.args.learning_rate))
        full = {"transfer": 1e-2}.get(stage, 1e-3)
        return (stage, step) in (("transfer", 2), ("recovered_training", 6)) and trainer.args.learning_rate == full

    failing(monkeypatch, fails)
    run(flags(material, out, **SHORT | {"learning_rates": "1e-3 1e-9", "lr_search_tokens": 256}))
    assert recorded(out, "transfer")["learning_rate"] == 5e-3, "there was no checkpoint yet: it began anew"
    assert [s for stage, s, rate in steps if stage == "transfer" and rate == 5e-3] == [1, 2, 3, 4, 5, 6]
    done = recorded(out, "recovered_training")
    assert (done["learning_rate"], done["steps"]) == (5e-4, 8)
    assert [s for stage, s, rate in steps if stage == "recovered_training" and rate == 5e-4] == [5, 6, 7, 8]
    assert recorded(out, "recovered_training-halved") == {"steps": [6]}
    whole, halved = (rates(folder, "recovered_training") for folder in (unbroken, out))
    assert [halved[step] for step in range(1, 5)] == [whole[step] for step in range(1, 5)]
    assert [halved[step] for step in range(5, 8)] == pytest.approx([whole[step] / 2 for step in range(5, 8)])
    assert "stage recovered_training: the loss of step 6 is not finite; back to the last checkpoint" in caplog.text
    training = Report.load(out).training
    assert (training.recovered_learning_rate, training.learning_rate_grid) == (5e-4, (1e-3, 1e-9, 5e-4))


def test_a_stage_whose_loss_stays_no_number_stops_by_name_and_keeps_what_was_finite(material, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        failing(patch, lambda trainer: stage_of(trainer) == "recovered_training" and trainer.state.global_step == 5)
        message = r"learning_rates=0.001: the loss of the stage recovered_training is not finite at step 6, nor was it"
        with pytest.raises(OptionError, match=message + r" with 0.001 and 0.0005 \(steps 6, 6\); give a lower learn"):
            run(flags(material, out, **SHORT))
        assert (out / "stages/recovered_training/checkpoint-4").is_dir() and recorded(out, "transfer")
        with pytest.raises(OptionError, match=message):  # not tried from the full rate again
            run(flags(material, out, **SHORT))
    run(flags(material, out, **SHORT))  # the fault is gone
    assert recorded(out, "recovered_training")["learning_rate"] == 2.5e-4


def test_weights_that_are_not_finite_are_never_saved(material, tmp_path, monkeypatch):
    real = trainers.RecoveryTrainer._save_checkpoint
    tried = []

    def spoilt(trainer, model, trial):
        if stage_of(trainer) == "recovered_training" and trainer.state.global_step == 8 and len(tried) < 1:
            tried.append(trainer.args.learning_rate)
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).flatten()[0] = math.inf
        return real(trainer, model, trial)

    monkeypatch.setattr(trainers.RecoveryTrainer, "_save_checkpoint", spoilt)
    run(flags(material, tmp_path / "out", **SHORT))
    assert tried == [1e-3] and recorded(tmp_path / "out", "recovered_training-halved") == {"steps": [8]}
    assert recorded(tmp_path / "out", "recovered_training")["learning_rate"] == 5e-4


def too_much() -> None:
    """Ask for more memory than there can be."""
    torch.empty(2**50, dtype=torch.uint8)


def test_memory_that_runs_out_names_the_stage_the_tensor_and_what_goes_on(material, unbroken, tmp_path, monkeypatch):
    out = tmp_path / "out"
    compute, loss = OneProcessStage.run, trainers.RecoveryTrainer.compute_loss

    def measured(stage, context):
        return too_much() if stage.name == "converted" else compute(stage, context)

    with monkeypatch.context() as patch:
        patch.setattr(OneProcessStage, "run", measured)
        with pytest.raises(OptionError, match=r"stage converted runs out of memory, at a tensor of 1125899\.91 GB"):
            run(flags(material, out, **SHORT))
    for stage, said in (("transfer", RuntimeError), ("recovered_training", torch.OutOfMemoryError)):
        with monkeypatch.context() as patch:

            def taught(trainer, model, *arguments, stage=stage, said=said, **options):
                if model.training and stage_of(trainer) == stage and trainer.state.global_step == 5:
                    if said is RuntimeError:
                        too_much()
                    raise said("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB")
                return loss(trainer, model, *arguments, **options)

            patch.setattr(trainers.RecoveryTrainer, "compute_loss", taught)
            size = "1125899.91 GB" if said is RuntimeError else "2.15 GB"
            message = (
                f"the stage {stage} runs out of memory, at a tensor of {size}; go on from its last checkpoint, in this"
                " output_dir, with gradient_checkpointing true, or per_device_train_batch_size 2 and"
                " gradient_accumulation_steps 2, or"
            )
            with pytest.raises(OptionError, match=message):
                run(flags(material, out, **SHORT))
        assert list((out / "stages" / stage).glob("checkpoint-*"))
    seen = []
    real = finetuning.RecoveryTrainer.training_step

    def watch(trainer, model, inputs, *arguments):
        seen.append((trainer.state.global_step + 1, len(inputs["input_ids"])))
        return real(trainer, model, inputs, *arguments)

    monkeypatch.setattr(finetuning.RecoveryTrainer, "training_step", watch)
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    report = run(flags(material, out, **SHORT, **given))
    assert [step for step, _ in seen] == [5, 5, 6, 6, 7, 7, 8, 8], "from its last checkpoint, in halves"
    assert max(rows for _, rows in seen) == 2
    assert report.perplexity.recovered == pytest.approx(Report.load(unbroken).perplexity.recovered, rel=1e-4)


def test_only_memory_is_taken_for_memory():
    assert not is_out_of_memory(RuntimeError("shapes do not match")) and is_out_of_memory(MemoryError())
    assert size_said(MemoryError("Unable to allocate 2.00 PiB for an array")) == "at a tensor of 2251799.81 GB"
    assert size_said(torch.OutOfMemoryError("no memory.")) == "no memory"


# -- what does not fit is refused before anything is written ----------------------------------------------------------


def test_rows_of_a_last_stage_need_text_that_is_long_enough(material, tmp_path):
    longer = {"long_tokens": 256, "long_block_size": 48, "transfer_tokens": 0}
    short = tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps({"text": "w5 w6 w7 w8 w9"}) + "\n" for _ in range(400)))
    with pytest.raises(OptionError, match="long_block_size=48: the longest document of these rows has 7 tokens, no"):
        run(flags(material, tmp_path / "out", train_file=short, **SHORT, **longer))
    short.write_text(json.dumps({"text": " ".join(["w5"] * 40)}) + "\n")
    with pytest.raises(DataError, match="long_block_size=48, rows of a last stage: the text has 42 tokens, less than"):
        run(flags(material, tmp_path / "out", validation_file=short, **SHORT, **longer))
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_not_the_models_is_refused(material, tmp_path):
    own = AutoTokenizer.from_pretrained(material["model_name_or_path"])
    content = json.loads(own.backend_tokenizer.to_str())
    words = content["model"]["vocab"]
    for name, change in {"other": {"w5": words["w6"], "w6": words["w5"]}, "larger": {"w5": len(words) + 1000}}.items():
        shutil.copytree(material["model_name_or_path"], tmp_path / name)
        changed = json.dumps({**content, "model": {**content["model"], "vocab": {**words, **change}}})
        (tmp_path / name / "tokenizer.json").write_text(changed)
    with pytest.raises(OptionError, match=r"other' is not the tokenizer of .*: 2 of its \d+ tokens have other num"):
        run(flags(material, tmp_path / "out", tokenizer_name=tmp_path / "other", **SHORT))
    other, text = tmp_path / "text.jsonl", Path(material["test_file"]).read_text()
    other.write_text(text.replace("w5", "w6"))
    files = {f"{split}_file": other for split in ("train", "validation", "test")}
    for split in ("train", "validation", "test"):
        given = files | {f"{split}_file": material[f"{split}_file"], "model_name_or_path": tmp_path / "larger"}
        said = rf"larger': token \d+, 'w5', is beyond the \d+ tokens of .*, and the {split} rows hold it; give"
        with pytest.raises(OptionError, match=f"tokenizer_name=.*{said}"):
            run(flags(material, tmp_path / "out", **given, **SHORT))
    assert not (tmp_path / "out").exists()
