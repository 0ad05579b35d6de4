"""What a training shows of how far it is: a line in the log, and a bar of its steps."""

from __future__ import annotations

import logging
import time
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

logger = logging.getLogger(__name__)


class Progress(TrainerCallback):
    """Say in the log how far a training is: tokens per second, losses and the time that is left.

    Args:
        row_tokens: tokens of a row.
    """

    def __init__(self, row_tokens: float):
        self.row_tokens = row_tokens
        self.start, self.first = 0.0, 0
        self.held_out = ""  # in words; none before the first evaluation

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.start, self.first = time.perf_counter(), state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        given, done = logs or {}, state.global_step - self.first
        if "eval_loss" in given:
            self.held_out = f", held-out loss {given['eval_loss']:.4f}"
        if "loss" not in given or not done or not state.is_world_process_zero:
            return
        each = (time.perf_counter() - self.start) / done  # evaluations and checkpoints are part of it
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        logger.info(
            "step %d of %d: %s tokens/s, loss %.4f%s, %.1f minutes left", state.global_step,
            state.max_steps, f"{rows * self.row_tokens / each:,.0f}", given["loss"], self.held_out,
            each * (state.max_steps - state.global_step) / 60,
        )  # fmt: skip


class StepBar(ProgressCallback):
    """The bar of a training's steps alone: evaluations have none inside it, and what is logged `Progress` says."""

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        pass

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass
