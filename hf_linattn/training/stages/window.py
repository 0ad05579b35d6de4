"""The stages of the window of equal bytes: what a state of constant size has to be worth more than."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_linattn import patch_model
from hf_linattn.evaluation import constant_state_bytes, streaming_bytes, streaming_like
from hf_linattn.training.run_folders import WINDOW
from hf_linattn.training.stages.base import OneProcessStage
from hf_linattn.training.stages.recovery import ControlTraining
from hf_linattn.training.training_run import TrainingRun

SERVED_IN = torch.bfloat16  # the dtype for which bytes are counted, whatever the model is trained in


class WindowMeasurement(OneProcessStage):
    """Measure the original with windows of as many bytes in the layers that are converted, nothing trained.

    The result is empty where the converted model has no state of constant size.
    """

    name = "window"
    inputs: tuple[str, ...] = ("layers",)
    scores = True

    def compute(self, context: TrainingRun) -> dict[str, Any]:
        found = describe_window(context)
        return found and {**found, **context.score(window_model(context, found["plan"]))}


class WindowTraining(ControlTraining):
    """Fine-tune these windows on the text as the control is: on as many tokens, with the best of the same rates."""

    name = "window_training"
    inputs: tuple[str, ...] = ("window",)

    def make_model(self, context: TrainingRun) -> nn.Module:
        return self.with_adapters(context, window_model(context, context.results["window"]["plan"]))

    def fresh(self, context: TrainingRun) -> nn.Module:
        return self.with_adapters(context, window_model(context, describe_window(context)["plan"]))

    def folder(self, context: TrainingRun) -> Path:
        return context.directory.path / WINDOW


class TrainedWindowMeasurement(OneProcessStage):
    """Measure the trained windows; a run that shares the control takes the result over, with its plan and bytes."""

    name = "window_trained"
    inputs: tuple[str, ...] = ("window", "window_training")
    scores = True

    def compute(self, context: TrainingRun) -> dict[str, Any]:
        found = {name: context.results["window"][name] for name in ("plan", "bytes")}
        return {**found, **context.score(context.load(WindowTraining().folder(context)))}


def describe_window(context: TrainingRun) -> dict[str, Any]:
    """Return the `plan` of equal bytes, its `bytes` and the `constant_bytes` it was made for; nothing without it."""
    converted = context.convert().to(SERVED_IN)
    plan = streaming_like(converted)
    if plan is None:
        return {}
    (options,) = plan.values()
    return {
        "plan": plan, "bytes": streaming_bytes(converted, **options), "constant_bytes": constant_state_bytes(converted)
    }  # fmt: skip


def window_model(context: TrainingRun, plan: dict[str, Any]) -> PreTrainedModel:
    """Load the original and give it windows."""
    return patch_model(context.load(), plan, chunk_feed_forward=context.arguments.model.chunk_feed_forward)
