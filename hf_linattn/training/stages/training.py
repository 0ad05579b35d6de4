"""What the stages have in common that all processes train in together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_linattn.training.arguments import FinetuningArguments
from hf_linattn.training.data import TrainingData
from hf_linattn.training.finetuning import rehearse
from hf_linattn.training.losses.distillation import Teacher
from hf_linattn.training.training_run import TrainingRun


@dataclass(frozen=True)
class TrainingPlan:
    """On what a stage trains its model, and for how long.

    Attributes:
        data: rows. training: options of its Trainers.
        learning_rates: with several of them, each trains a model for `search_steps`, and the best one goes on.
        max_steps: of the training that is kept.
    """

    data: TrainingData
    training: FinetuningArguments
    learning_rates: Sequence[float]
    max_steps: int
    search_steps: int = 0

    def tokens(self, steps: int) -> int:
        """Return how many tokens these steps read, over all processes; the last of an epoch may have fewer rows."""
        training, rows = self.training, len(self.data.train)
        batch = training.train_batch_size * training.world_size
        if training.dataloader_drop_last:
            rows -= rows % batch
        step = batch * training.gradient_accumulation_steps
        epochs, more = divmod(steps, max(1, math.ceil(rows / step)))  # without a row the training is refused
        return (epochs * rows + min(rows, more * step)) * round(self.data.row_tokens)

    @property
    def candidates(self) -> Sequence[float]:
        """The learning rates that are tried."""
        return self.learning_rates if len(self.learning_rates) > 1 else ()


class TrainingStage:
    """A stage of training: a plan, the model it trains, and what is made of the result."""

    name: str
    inputs: tuple[str, ...] = ()
    scores = False
    keeps_model = True  # whether a model is left in a folder

    def plan(self, context: TrainingRun) -> TrainingPlan:
        """Return what is trained on, and for how long."""
        raise NotImplementedError

    def make_model(self, context: TrainingRun) -> nn.Module:
        """Return what is trained."""
        raise NotImplementedError

    def fresh(self, context: TrainingRun) -> nn.Module:
        """Return what is trained before any stage is done, to see what a step takes."""
        return self.make_model(context)

    def teacher(self, context: TrainingRun) -> Teacher | None:
        """Return who teaches the model; None: the text alone."""
        return None

    def trained_part(self, context: TrainingRun, model: PreTrainedModel) -> nn.Module:
        """Return what a stage trains of a converted model."""
        return model

    def train(self, context: TrainingRun, plan: TrainingPlan) -> dict[str, Any]:
        """Train, save what came of it, record the result and return it."""
        raise NotImplementedError

    def run(self, context: TrainingRun) -> dict[str, Any]:
        done = context.directory.finished(self.name)
        return self.train(context, self.plan(context)) if done is None else done

    def rehearse(self, context: TrainingRun, model: PreTrainedModel) -> None:
        """Set up the Trainers without a step; `OptionError` if one does not take the options.

        Args:
            model: the converted model, of which nothing else is asked afterwards.
        """
        plan = self.plan(context)
        rehearse(
            self.name, lambda: context.task.trainee(context, self.trained_part(context, model)), plan.data,
            plan.training, learning_rate=plan.learning_rates[0], max_steps=plan.max_steps,
            search_steps=plan.search_steps if plan.candidates else 0,
        )  # fmt: skip
