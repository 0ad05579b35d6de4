"""Rows held out from a fit, and what it is worth on them: a layer that it does not serve keeps what it had."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .attention_call import AttentionCall
from .mechanisms import Mechanism

logger = logging.getLogger(__name__)

HELD_OUT = 4  # the second of every 4 rows is held out
NAMED = 3  # layers that a warning names


class HeldOut(NamedTuple):
    """An error on rows that nothing was fitted to, before and after the fit, and whether the fit was taken."""

    before: float
    after: float
    taken: bool


class Calibration(dict[str, list[float]]):
    """Path of an attention module -> its errors batch by batch, each before the fit to it.

    Attributes:
        held_out: path -> its error on the rows held out.
        whole: the error of the model's last hidden states on them with the fits of all these layers, and, where it is
            causal, on four of them end to end; empty where no layer was better by itself, or without such states.
    """

    def __init__(
        self, errors: Mapping[str, list[float]], held_out: Mapping[str, HeldOut], whole: tuple[HeldOut, ...]
    ):
        super().__init__(errors)
        self.held_out, self.whole = dict(held_out), whole


class Split:
    """Which rows of the batch at hand are held out: of every four the second, counted over all batches."""

    def __init__(self) -> None:
        self.first = self.size = 0
        self.alone = False  # whether there is one row in all, which stands for both
        self.sizes, self.held_out = list[int](), list[list[int]]()  # rows of every batch that was read, those held out

    def restart(self) -> None:
        """Begin again with the first batch."""
        self.alone = self.first == 1
        self.first = self.size = 0
        self.sizes, self.held_out = [], []

    def next_batch(self) -> None:
        """Go on to the batch after the one that was read."""
        self.sizes.append(self.size)
        self.held_out.append(self._chosen(held_out=True))
        self.first, self.size = self.first + self.size, 0

    def rows(self, call: AttentionCall, held_out: bool) -> AttentionCall | None:
        """Return the call of the rows that are held out, or of the others; None if there are none."""
        self.size = len(call.query)
        chosen = self._chosen(held_out)
        return call.rows(chosen) if chosen else None

    def _chosen(self, held_out: bool) -> list[int]:
        """Return the rows of the batch at hand that are held out, or the others."""
        own = [(self.first + row) % HELD_OUT == 1 for row in range(self.size)]
        return [row for row, is_held_out in enumerate(own) if self.alone or is_held_out == held_out]


class Judge:
    """Measures a layer with what it had before its fit and with what it has now, on rows held out from it."""

    def __init__(self, mechanism: Mechanism, parameters: list[nn.Parameter], split: Split):
        self.mechanism, self.split = mechanism, split
        self.tensors: list[Tensor] = [*parameters, *mechanism.buffers()]
        self.before = [tensor.detach().clone() for tensor in self.tensors]
        self.errors, self.size = (list[Tensor](), list[Tensor]()), 0.0

    def __call__(self, call: AttentionCall) -> Tensor:
        target, judged = call.run_softmax(self.mechanism), self.split.rows(call, held_out=True)
        if judged is not None:
            wanted = judged.run_softmax(self.mechanism)
            after = [tensor.detach().clone() for tensor in self.tensors]
            for found, values in zip(self.errors, (self.before, after), strict=True):
                write(self.tensors, values)
                errors, sizes = squared_errors(judged.run(self.mechanism), wanted, judged.real)
                found.append(errors.cpu().double())
            self.size += float(sizes.sum())
        return target

    def go_back(self) -> None:
        """Give the layer what it had before."""
        write(self.tensors, self.before)

    def decide(self) -> HeldOut:
        """Go back to what was before unless the error is lower now, by more than chance; return both."""
        before, after = (torch.cat(errors) for errors in self.errors)
        gains = before - after
        doubt = gains.std() * math.sqrt(len(gains)) if len(gains) > 1 else gains.new_zeros(())
        taken = bool(gains.sum() > doubt)  # not where it is not a number
        if not taken:
            self.go_back()
        return HeldOut(float(before.sum()) / self.size, float(after.sum()) / self.size, taken)


def take_the_better(judges: Mapping[str, Judge], measure: Callable[[], None]) -> dict[str, HeldOut]:
    """Measure every layer on the rows held out, and undo the fit of those that it did not serve."""
    if not judges:
        return {}
    measure()
    found = {path: judge.decide() for path, judge in judges.items() if judge.size}  # some may not be asked
    if kept := [path for path, result in found.items() if not result.taken]:
        errors = [f"{path}: error {found[path].before:.4g} before, {found[path].after:.4g} after" for path in kept]
        logger.warning(
            "calibrate: %d of %d layers keep what they had, as the fit was no better on rows held out, beyond chance"
            " (%s%s)",
            len(kept), len(found), "; ".join(errors[:NAMED]), f"; {len(kept) - NAMED} more" * (len(kept) > NAMED),
        )  # fmt: skip
    return found


def squared_errors(output: Tensor, target: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return sum |output - target|^2 and sum |target|^2 over each row's real tokens [B], in float32 or wider.

    Both are [B, H, N, Dv]. real: [B, N], which tokens these are; None for all.
    """
    compute = torch.promote_types(target.dtype, torch.float32)
    output, target = output.to(compute), target.to(compute)
    if real is not None:
        output, target = (x * real[:, None, :, None] for x in (output, target))
    tiny = torch.finfo(compute).tiny
    return (output - target).square().sum((1, 2, 3)), target.square().sum((1, 2, 3)).clamp(min=tiny)


@torch.no_grad()
def write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give tensors other values, in place."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
