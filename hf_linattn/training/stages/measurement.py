"""The stages that measure a model, and those whose result is that of another run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_linattn.training.stages.base import OneProcessStage
from hf_linattn.training.training_run import TrainingRun


def validation(context: TrainingRun, model: PreTrainedModel) -> dict[str, Any]:
    """Return the loss of a model on the validation split."""
    return {"eval_loss": context.validation_loss(model)}


@dataclass
class Measurement(OneProcessStage):
    """A model is loaded and measured: on the test split, if nothing else is said."""

    name: str
    make_model: Callable[[TrainingRun], PreTrainedModel]
    inputs: tuple[str, ...] = ()
    measure: Callable[[TrainingRun, PreTrainedModel], dict[str, Any]] = TrainingRun.score

    def __post_init__(self) -> None:
        self.scores = self.measure is TrainingRun.score

    def compute(self, context: TrainingRun) -> dict[str, Any]:
        return self.measure(context, self.make_model(context))


@dataclass
class SharedStage(OneProcessStage):
    """What the stage of this name came to in another run, whose control serves here too; nothing if it had none."""

    name: str

    def compute(self, context: TrainingRun) -> dict[str, Any]:
        return context.shared_control.get(self.name, {})
