"""A training that stops and goes on: it takes the steps that were left, from the last checkpoint that is whole."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback

from hf_linattn import patch_model
from hf_linattn.errors import CheckpointError
from hf_linattn.training import finetuning
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.checkpoints import last_complete_checkpoint
from hf_linattn.training.not_finite import has_finite_weights
from tests.models import make_model
from tests.training.test_finetuning import make_data, make_training

STEPS = 7  # not a multiple of the steps in an epoch
OPTIONS = {
    "save_total_limit": None, "eval_steps": 1, "save_steps": 1, "lr_scheduler_type": "constant",
    "load_best_model_at_end": False,
}  # fmt: skip


def train(folder: Path, adapters: bool = False, rate: float = 3e-3, **options):
    model = patch_model(make_model("gpt2", std=0.05), "performer", num_features=16)
    if adapters:
        model = add_adapters(model, rank=2)
    training = make_training(folder.parent, **OPTIONS | options)
    result, _ = finetuning.fine_tune(model, make_data(model), training, folder, learning_rate=rate, max_steps=STEPS)
    return result, {name: x.clone() for name, x in model.state_dict().items()}


def copied(folder: Path, step: int, to: Path) -> Path:
    """Copy a checkpoint into another folder, where it stands alone."""
    target = to / f"checkpoint-{step}"
    shutil.copytree(folder / target.name, target, dirs_exist_ok=True)
    state = target / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"best_model_checkpoint": None}))
    return target


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "adapters"])
def unbroken(request, tmp_path_factory):
    """A training with a checkpoint after each step, and what it came to."""
    folder = tmp_path_factory.mktemp("unbroken") / "stage"
    return folder, request.param, *train(folder, request.param)


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", [STEPS, STEPS - 1, 2])
def test_a_training_takes_exactly_the_steps_that_were_left(unbroken, tmp_path, step):
    folder, adapters, result, weights = unbroken
    state = copied(folder, step, tmp_path / "stage") / "trainer_state.json"
    saved = json.loads(state.read_text())
    recorded = saved["stateful_callbacks"]["Clock"]["attributes"]
    assert 0 < recorded["before"] <= result["seconds"] + 0.05
    recorded["before"] += 1000
    state.write_text(json.dumps(saved))
    for _ in range(2):  # killed once more, when it had ended
        again, resumed = train(tmp_path / "stage", adapters)
        assert 1000 < again["seconds"] < 2000, "of all calls"
        assert (again["steps"], again["eval_loss"]) == (STEPS, result["eval_loss"])
        assert all(torch.equal(resumed[name], x) for name, x in weights.items())
        assert max(int(path.name.rpartition("-")[2]) for path in (tmp_path / "stage").iterdir()) == STEPS


def test_a_checkpoint_of_an_optimizer_with_other_groups_is_refused_by_its_folder(unbroken, tmp_path):
    """As of a version that divided parameters otherwise: here those of mechanisms have a rate of their own since."""
    folder, adapters, *_ = unbroken
    stage = copied(folder, 2, tmp_path / "stage").parent
    with pytest.raises(CheckpointError, match=rf"^'{stage}' holds checkpoints .*; delete this folder, and"):
        train(stage, adapters, mechanism_rate=2.0)


@pytest.mark.parametrize("before", [False, True])
def test_a_training_goes_on_with_its_own_rate(unbroken, tmp_path, monkeypatch, before):
    """Not with that of its checkpoint, also where the optimizer is loaded before, as DeepSpeed does it."""
    folder, adapters, *_ = unbroken
    stage = copied(folder, 2, tmp_path / "stage").parent
    load = finetuning.RecoveryTrainer._load_optimizer_and_scheduler

    def loaded(trainer, checkpoint):
        if before:
            trainer.optimizer.load_state_dict(torch.load(Path(checkpoint) / "optimizer.pt"))
        load(trainer, checkpoint)

    monkeypatch.setattr(finetuning.RecoveryTrainer, "_load_optimizer_and_scheduler", loaded)
    result, _ = train(stage, adapters, rate=1e-3, logging_steps=1)
    rates = [entry["learning_rate"] for entry in result["history"] if entry["step"] > 2 and "loss" in entry]
    assert rates == pytest.approx([1e-3] * (STEPS - 2))


@pytest.mark.parametrize(("rank", "finite"), [(0, False), (1, True)])
def test_shards_of_zero3_are_looked_at_for_numbers(monkeypatch, rank, finite):
    """The parameters themselves are empty; behind the end of the last shard nobody wrote."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    model = torch.nn.Linear(3, 1, bias=False)
    model.weight.data, model.weight.ds_numel, model.weight.ds_process_group = torch.empty(0), 3, None
    model.weight.ds_tensor = torch.tensor([1.0, math.inf])
    assert has_finite_weights(model) is finite


def test_patience_is_not_given_back_by_an_interruption(tmp_path, monkeypatch):
    """The loss of weights that stay as they are does not fall, so two evaluations after the first end the training."""
    options = {"early_stopping_patience": 2}
    monkeypatch.setattr(finetuning.RecoveryTrainer, "create_optimizer", still)
    result, _ = train(tmp_path / "whole", **options)
    assert result["steps"] == 3
    for step in (2, 3):  # before it was stopped, and after
        part = tmp_path / f"until-{step}"
        copied(tmp_path / "whole", step, part)
        assert train(part, **options)[0]["steps"] == 3


def still(trainer):
    """An optimizer that changes nothing."""
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    trainer.optimizer.step = lambda *args, **kwargs: None
    return trainer.optimizer


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.mark.parametrize("damage", [emptied, cut_short, Path.unlink], ids=lambda damage: damage.__name__)
def test_a_checkpoint_with_any_file_damaged_is_passed_over(unbroken, tmp_path, caplog, damage):
    folder, adapters, *_ = unbroken
    weights = ["adapter_model.safetensors", "adapter_config.json"] if adapters else ["model.safetensors"]
    for name in ("checkpoint-old", "checkpoint-", "other"):
        (tmp_path / name).mkdir()
    for name in [*FILES, *weights]:
        for step in (5, 6):
            copied(folder, step, tmp_path)
        assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
        caplog.clear()
        damage(tmp_path / "checkpoint-6" / name)
        assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5"), name
        assert "checkpoint-6 is half-written" in caplog.text and name in caplog.text


def test_a_checkpoint_needs_its_best_one_and_the_random_state_of_every_process(unbroken, tmp_path):
    folder, *_ = unbroken
    best, state = copied(folder, 2, tmp_path), copied(folder, 3, tmp_path) / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"best_model_checkpoint": str(best)}))
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
    assert last_complete_checkpoint(tmp_path, processes=2) is None
    cut_short(next(best.glob("*.safetensors")))
    assert last_complete_checkpoint(tmp_path) is None


@pytest.mark.parametrize("step", [STEPS - 1, STEPS])
def test_a_training_that_was_moved_goes_on_and_ends_with_its_best_weights(unbroken, tmp_path, step):
    folder, adapters, *_ = unbroken
    best, last = (copied(folder, number, tmp_path / "stage") for number in (2, step))
    state, former = last / "trainer_state.json", str(tmp_path / "former" / best.name)
    named = {"best_model_checkpoint": former, "best_global_step": 2, "best_metric": 0.0}
    state.write_text(json.dumps(json.loads(state.read_text()) | named))
    result, weights = train(tmp_path / "stage", adapters, load_best_model_at_end=True)
    assert (result["steps"], result["eval_loss"]) == (STEPS, 0.0), "it went on from there"
    assert json.loads(state.read_text())["best_model_checkpoint"] == str(best)
    own = {name.replace(".default.", "."): x for name, x in weights.items()}
    saved = load_file(next(best.glob("*model.safetensors")))
    assert saved and all(torch.equal(own[name], x) for name, x in saved.items())


def test_a_file_with_a_wrong_byte_is_found(unbroken, tmp_path):
    file = copied(unbroken[0], 3, tmp_path) / "optimizer.pt"
    content, value = bytearray(file.read_bytes()), torch.load(file)["state"][0]["exp_avg"]
    content[content.index(value.numpy().tobytes())] ^= 255
    file.write_bytes(content)
    assert last_complete_checkpoint(tmp_path) is None


def test_the_patience_left_is_read_from_the_state():
    saved = {"stateful_callbacks": {"EarlyStoppingCallback": {"attributes": {"early_stopping_patience_counter": 3}}}}
    assert finetuning.early_stopping(5, saved).early_stopping_patience_counter == 3
    assert isinstance(finetuning.early_stopping(5, None), EarlyStoppingCallback)
