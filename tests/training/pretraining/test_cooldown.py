"""What a training's last steps learn with."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_linattn.training.pretraining.cooldown import CooledTrainer

STEPS, COOLED, PEAK = 40, 8, 0.3


def rates(trainer: Trainer, steps: int) -> list[float]:
    """Return the rate of each step, and the one behind the last."""
    trainer.create_optimizer_and_scheduler(steps)
    found = []
    for _ in range(steps + 1):
        found.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return found


def test_the_schedule_ends_earlier_and_a_line_leads_to_zero(tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path), learning_rate=PEAK, lr_scheduler_type="cosine_with_min_lr", warmup_steps=4,
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, use_cpu=True, report_to="none",
    )  # fmt: skip
    model = torch.nn.Linear(2, 2)
    got = rates(CooledTrainer(model=model, args=arguments, cooldown=COOLED / STEPS), STEPS)
    before = STEPS - COOLED
    assert got[: before + 1] == rates(Trainer(model=model, args=arguments), before)
    line = [0.1 * PEAK * (COOLED - step) / COOLED for step in range(COOLED + 1)]
    assert got[before:] == pytest.approx(line, abs=1e-12)
    assert rates(CooledTrainer(model=model, args=arguments, cooldown=0.0), STEPS) == rates(
        Trainer(model=model, args=arguments), STEPS
    )
