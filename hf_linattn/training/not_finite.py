"""A training whose loss is no longer finite goes back to its last checkpoint, twice, each time with half the rate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_linattn.errors import OptionError
from hf_linattn.training.run_directory import RunDirectory

logger = logging.getLogger(__name__)

HALVINGS = 2  # of the learning rate, before a training is given up
Trained = TypeVar("Trained")


class NotFiniteError(ArithmeticError):
    """Ends a training inside its Trainer, before a loss that is not finite changes a weight.

    Attributes:
        step: that was being taken, the first is 1.
    """

    def __init__(self, step: int):
        super().__init__(f"the loss of step {step} is not finite")
        self.step = step


def with_halved_rates(
    stage: str,
    option: str,
    rate: float,
    directory: RunDirectory,
    train: Callable[[float], tuple[Trained, int | None]],
) -> tuple[Trained, float]:
    """Train, and where the loss is not finite go on from the last checkpoint with half the learning rate, twice.

    How often it was halved is recorded, so that an interrupted training goes on with the rate it had come to.

    Args:
        stage, option: names of the stage, and of the option that gave the `rate`.
        train: goes on from the last checkpoint with a rate; returns what came of it, and the step whose loss was not
            finite or None.

    Returns:
        what the last `train` returned, and its rate.

    Raises:
        OptionError: the loss was not finite with any of the rates.
    """
    record = f"{stage}-halved"
    steps = list((directory.finished(record) or {}).get("steps", []))
    while True:
        tried = rate / 2 ** len(steps)
        result, step = train(tried)
        if step is None:
            return result, tried
        if len(steps) == HALVINGS:
            raise OptionError(
                f"{option}={rate:g}: the loss of the stage {stage} is not finite at step {step}, nor was it with"
                f" {' and '.join(f'{rate / 2**i:g}' for i in range(HALVINGS))} (steps {', '.join(map(str, steps))});"
                f" give a lower {option}, a lower max_grad_norm, or dtype 'float32', in another output_dir; what was"
                " finite is kept in this one"
            )
        steps.append(step)
        logger.warning(
            "stage %s: the loss of step %d is not finite; back to the last checkpoint with half the learning rate, %g",
            stage, step, tried / 2,
        )  # fmt: skip
        directory.record(record, {"steps": steps})


@torch.no_grad()
def has_finite_weights(model: nn.Module) -> bool:
    """Return whether all trained parameters, or this process's shards of them, are finite."""
    return all(bool(torch.isfinite(own_part(p)).all()) for p in model.parameters() if p.requires_grad)


def own_part(parameter: Any) -> Tensor:
    """Return what this process holds of a parameter: all of it, or its shard."""
    if hasattr(parameter, "ds_tensor"):  # of ZeRO-3, which leaves the parameter itself empty
        shard = parameter.ds_tensor.flatten()
        first = shard.numel() * torch.distributed.get_rank(parameter.ds_process_group)
        return shard[: max(0, parameter.ds_numel - first)]  # behind its end nobody wrote
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
