"""The stage that goes on with the recovered model on longer rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_linattn.training.arguments import long_step
from hf_linattn.training.losses.distillation import Teacher
from hf_linattn.training.stages.recovery import RecoveredTraining, adapted, make_teacher
from hf_linattn.training.stages.training import TrainingPlan
from hf_linattn.training.training_run import TrainingRun


class LongTraining(RecoveredTraining):
    """As many tokens to a step, in longer rows, with the learning rate that the stage before was best with."""

    name = "long_training"
    rate_option = "long_learning_rate"
    inputs: tuple[str, ...] = ("recovered_training",)

    def plan(self, context: TrainingRun) -> TrainingPlan:
        options, distillation = context.arguments.recipe, context.arguments.distillation
        training, data = context.arguments.training, context.long_data
        batch, step = long_step(context.arguments)
        rows: dict[str, Any] = {"per_device_train_batch_size": batch}
        rates = options.learning_rates or []
        recovered = context.results.get(RecoveredTraining.name)
        before = rates[0] if recovered is None else recovered["learning_rate"]  # a rehearsal comes before the results
        rate = distillation.long_learning_rate or before
        steps = distillation.long_tokens // step
        return TrainingPlan(data, replace(training, **rows), [rate], steps)  # type: ignore[arg-type]  # there is data

    def make_model(self, context: TrainingRun) -> nn.Module:
        return adapted(context, context.load(RecoveredTraining().folder(context)))

    def fresh(self, context: TrainingRun) -> nn.Module:
        return adapted(context, context.convert())

    def trained_part(self, context: TrainingRun, model: PreTrainedModel) -> nn.Module:
        return model  # which has its adapters from the rehearsal of the stage before

    def folder(self, context: TrainingRun) -> Path:
        return context.directory.path

    def merged_before(self, context: TrainingRun) -> Path:
        return RecoveredTraining().adapter_folder(context)

    def is_last(self, context: TrainingRun) -> bool:
        return True

    def teacher(self, context: TrainingRun) -> Teacher | None:
        return make_teacher(context, own_model=True)
