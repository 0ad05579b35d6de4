"""What a run will take is said before it starts: counted by hand, timed on copies, refused where it does not fit."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, set_hf_deepspeed_config

from hf_linattn.errors import OptionError
from hf_linattn.ops.runtime.cpu import KEPT
from hf_linattn.training import finetuning, price
from hf_linattn.training.arguments import DISTILLATION, parse_arguments
from hf_linattn.training.memory_limits import what_helps
from hf_linattn.training.pipeline import main
from hf_linattn.training.preparation import prepare
from hf_linattn.training.price import checkpoints_at_once, in_short, in_time, price_of, price_of_stage, stages_to_do
from hf_linattn.training.run_directory import RunDirectory
from hf_linattn.training.stages import TrainingStage, stages_of
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.recipes.test_distill import flags
from tests.recipes.test_finetune import material

__all__ = ["material"]


@pytest.fixture(scope="module")
def dry(material, tmp_path_factory) -> SimpleNamespace:
    """A plan that was printed alone."""
    out = tmp_path_factory.mktemp("dry") / "out"
    changes = {"long_tokens": 384, "long_block_size": 48, "transfer_tokens": 384, "learning_rates": "1e-3 3e-3"}
    given = flags(material, out, plan_steps=3, lr_search_tokens=256, control="full", **changes)
    found, real = [], price.price_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_linattn.training.pipeline.price_of", lambda run: found.append(real(run)) or found[0])
        console = Console(record=True, width=80)
        before = random_states()
        with pytest.raises(SystemExit) as end:
            main([*given, "--dry_run", "true"], DISTILLATION, "recipe", console=console)
    same = before == random_states()
    return SimpleNamespace(price=found[0], text=console.export_text(), code=end.value.code, out=out, same_state=same)


def random_states() -> tuple:
    """What PyTorch, Python and NumPy draw from."""
    of_numpy = np.random.get_state(legacy=False)["state"]["key"].tolist()
    return torch.random.get_rng_state().tolist(), random.getstate(), of_numpy


def test_a_dry_run_prints_the_stages_and_writes_nothing(dry):
    assert dry.code == 0 and not dry.out.exists() and dry.same_state
    steps = {stage.name: (stage.tokens, stage.steps) for stage in dry.price.stages}
    # of 128 tokens: 1792 of the run and two trials of 256; what transfer, calibration and long rows leave; an epoch
    # is 31 rows, so its eighth step has 96
    assert steps == {
        "control_training": ((14 + 4) * 128 - 32, 18), "transfer": (384, 3), "recovered_training": ((6 + 4) * 128, 10),
        "long_training": (4 * 96, 4),
    }  # fmt: skip
    for stage in dry.price.stages:
        assert f"{stage.place}/{dry.price.places} {stage.name}" in dry.text and in_short(stage.trained) in dry.text
        assert stage.seconds > 0 and stage.hours == pytest.approx(stage.steps * stage.seconds / 3600)
    test = dry.price.test  # original, converted, window, control and recovered read windows that overlap
    assert test.models == 5 and "test, 5 models" in dry.text and test.seconds > 0
    assert dry.price.hours == pytest.approx(test.hours + sum(stage.hours for stage in dry.price.stages))
    assert "layers: 2 hybrid" in dry.text and f"{in_time(dry.price.hours * 3600)} without validation" in dry.text
    assert "nothing was written" in dry.text and "…" not in dry.text, "it fits a console of 80 columns"


def test_parameters_memory_and_disk_are_those_counted_by_hand(material, dry):
    stages = {stage.name: stage for stage in dry.price.stages}
    model = AutoModelForCausalLM.from_pretrained(material["model_name_or_path"])
    count = sum(p.numel() for p in model.parameters())
    control, recovered = stages["control_training"], stages["recovered_training"]
    assert control.trained == count and recovered.trained < count / 2
    # weights, gradients and the two moments of AdamW, and a step
    assert 16 * count < control.peak_bytes < 16 * count + 4e6
    assert recovered.peak_bytes > 4 * (count + 3 * recovered.trained)
    assert control.kept_bytes >= 4 * count and stages["transfer"].kept_bytes == 0
    assert control.checkpoint_bytes == 2 * 12 * count, "save_steps 0.5: two checkpoints of weights and moments"
    assert dry.price.disk_bytes == control.checkpoint_bytes + sum(stage.kept_bytes for stage in stages.values())


def test_the_trainer_is_made_before_small_parameters_have_copies_as_in_the_training(material, tmp_path, monkeypatch):
    """A head whose bias has one would not be known as a plain projection, and all logits of a step counted."""
    make_model("bert", "LMHeadModel", is_decoder=True).save_pretrained(tmp_path / "bert")
    make_tokenizer().save_pretrained(tmp_path / "bert")
    changes = {"model_name_or_path": tmp_path / "bert", "dtype": "bfloat16", "mechanism": "linear", "control": "none"}
    absent = "mechanism_options", "window_dropout", "lora_rank", "calibration_tokens", "transfer_tokens"
    given = flags(material, tmp_path / "out", **changes, **dict.fromkeys(absent))
    run = prepare(parse_arguments(given, DISTILLATION))
    made, real = [], price.RecoveryTrainer
    monkeypatch.setattr(price, "RecoveryTrainer", lambda *given: made.append(real(*given)) or made[0])
    (stage,) = (stage for stage in stages_of(run.arguments) if isinstance(stage, TrainingStage))
    price_of_stage(run, stage, 1)
    assert isinstance(made[0]._head, torch.nn.Linear)


def test_models_are_loaded_whole_after_a_trainer_under_zero3(material, tmp_path, monkeypatch):
    run = prepare(parse_arguments(flags(material, tmp_path / "out", plan_steps=2, control="none"), DISTILLATION))
    stage = next(stage for stage in stages_of(run.arguments) if stage.name == "recovered_training")
    sharding = Mock(is_zero3=lambda: True)

    def made(*arguments, **options):
        set_hf_deepspeed_config(sharding)
        assert is_deepspeed_zero3_enabled()
        raise ZeroDivisionError

    for module, train in ((price, lambda: price_of_stage(run, stage, 1)), (finetuning, lambda: stage.run(run))):
        monkeypatch.setattr(module, "RecoveryTrainer", made)
        with pytest.raises(ZeroDivisionError):
            train()
        assert not is_deepspeed_zero3_enabled(), module


@pytest.mark.parametrize("shards", [False, True])
def test_a_plan_trains_in_the_dtypes_of_the_training(material, tmp_path, monkeypatch, shards):
    """FSDP shards the parameters of a layer as one, so none of them may have a copy in float32."""
    given = flags(material, tmp_path / "out", plan_steps=2, control="none", dtype="bfloat16", lora_rank=None)
    run, seen = prepare(parse_arguments(given, DISTILLATION)), []
    stage = next(stage for stage in stages_of(run.arguments) if stage.name == "recovered_training")

    def look(trainer, model, *arguments, **options):
        seen.append({p.dtype for p in model.parameters() if p.requires_grad})
        raise ZeroDivisionError

    monkeypatch.setattr(price.RecoveryTrainer, "shards", shards)
    monkeypatch.setattr(price.RecoveryTrainer, "compute_loss", look)
    for train in (lambda: price_of_stage(run, stage, 1), lambda: stage.run(run)):
        with pytest.raises(ZeroDivisionError):
            train()
    assert seen == 2 * [{torch.bfloat16} if shards else {torch.bfloat16, torch.float32}]


def test_what_is_done_is_not_counted_but_where_the_run_is_overwritten(tmp_path):
    given = ["--model_name_or_path", "m", "--mechanism", "linear", "--output_dir", str(tmp_path)]
    for anew in (False, True):
        arguments = parse_arguments([*given, "--overwrite_output_dir", str(anew)])
        run = SimpleNamespace(arguments=arguments, directory=RunDirectory(tmp_path, arguments.training))
        run.directory.record("control_training", {})
        names = [stage.name for stage in stages_of(arguments)]
        todo = {place: stage.name for place, stage in stages_to_do(run).items()}
        done = names.index("control_training") + 1
        assert todo == {i: name for i, name in enumerate(names, 1) if anew or i != done}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("no", 0.1, 1), 0), (("steps", 0.5, 1), 2), (("steps", 0.1, 1), 3), (("steps", 7, 4), 6),
        (("steps", 7, None), 10), (("steps", 0.5, None), 2), (("steps", 40, 1), 2),
    ],
)
def test_checkpoints_at_once(options, expected):
    names = ("save_strategy", "save_steps", "save_total_limit")
    assert checkpoints_at_once(SimpleNamespace(**dict(zip(names, options, strict=True))), steps=70) == expected


def test_adapters_help_where_the_recipe_knows_them():
    flags = ["--model_name_or_path", "m", "--mechanism", "linear", "--output_dir", "out"]
    assert "lora_rank" in what_helps(parse_arguments(flags, DISTILLATION))
    assert "lora_rank" not in what_helps(parse_arguments(flags))


def test_what_does_not_fit_is_refused_with_what_helps_before_anything_is_written(material, tmp_path, monkeypatch):
    arguments = parse_arguments(flags(material, tmp_path / "out", plan_steps=2, lora_rank=None), DISTILLATION)
    run = prepare(arguments)
    monkeypatch.setattr(price.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(OptionError, match=r"models and checkpoints need .* GB, 0\.00 GB are free; give lora_rank"):
        price_of(run)
    monkeypatch.setattr(price, "free_memory", lambda device: 1000)
    expected = "the stage control_training needs .* for gradients and optimizer .*; give lora_rank, .* control 'none'"
    with pytest.raises(OptionError, match=expected):
        price_of(run)
    monkeypatch.undo()

    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(price.RecoveryTrainer, "compute_loss", fail)
    size = "at a tensor of 3.22 GB"
    with pytest.raises(OptionError, match=f"control_training runs out of memory in a step, {size}.* gradient_checkp"):
        price_of(run)
    assert _get_current_dispatch_mode() is None and not KEPT.pauses, "nothing is counted any more"
    assert not Path(tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_ends_the_steps_that_are_timed(material, tmp_path, monkeypatch, caplog):
    """The run itself would go on, with another learning rate."""
    run = prepare(parse_arguments(flags(material, tmp_path / "out", plan_steps=3, lora_rank=None), DISTILLATION))
    stage = next(stage for stage in stages_of(run.arguments) if stage.name == "control_training")
    compute, broken = price.RecoveryTrainer.compute_loss, []

    def broken_loss(trainer, *arguments, **options):
        loss = compute(trainer, *arguments, **options)
        return loss * float("nan") if trainer.model.training and trainer.state.global_step in broken else loss

    monkeypatch.setattr(price.RecoveryTrainer, "compute_loss", broken_loss)
    whole, broken[:] = price_of_stage(run, stage, 1), [1]
    found = price_of_stage(run, stage, 1)
    assert "control_training: the loss of step 2 is not finite with learning rate 0.001; the plan has" in caplog.text
    assert found.seconds > 0 and (found.steps, found.peak_bytes) == (whole.steps, whole.peak_bytes)
    broken[:] = [0]
    said = r"control_training is not finite at step 1 with learning rate 0\.001, .* give dtype .*plan_steps 0, which"
    with pytest.raises(OptionError, match=said):
        price_of_stage(run, stage, 1)
