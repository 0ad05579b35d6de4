"""slope: what opening a gate a little would bring, all gates by one backward pass for each example."""

from __future__ import annotations

import torch
from torch import Tensor

from ..inference import progress_bar
from .gates import Gates
from .options import SearchOptions, Signal


def slope(gates: Gates, signal: Signal, options: SearchOptions, keep: int) -> Tensor:
    """Return scores [U]: mean slopes, all gates shut, then with those open that were steepest so far.

    Each of `rounds` rounds opens as many of the `keep` gates as the others. Where nothing is exact the first few heads
    hide what all others are for; with these open the slopes say it. All are divided by the length that the example's
    had at first: one that is answered by now has small slopes and counts little. A head that was opened keeps the
    slope that it was opened for, or that of what came later where this is more.
    """
    opened, scores = torch.zeros_like(gates.values), torch.zeros_like(gates.values)
    order: list[int] = []
    scales: Tensor | None = None
    rounds = min(options.rounds, keep)
    for number in range(rounds):
        raw, shut = slopes_at(gates, signal, opened, options), opened == 0
        scales = signal.scales(raw) if scales is None else scales
        scores = torch.where(shut, signal.mean(raw, scales), scores)
        more = keep * (number + 1) // rounds - len(order)
        best = scores.masked_fill(~shut, float("-inf")).topk(more).indices
        opened[best] = 1
        order += best.tolist()
    least = scores[opened == 0].max()
    for unit in reversed(order):
        least = scores[unit] = torch.maximum(scores[unit], least)
    return scores


def slopes_at(gates: Gates, signal: Signal, values: Tensor, options: SearchOptions) -> Tensor:
    """Return d signal / d g at the gates `values` [U], for each example: [E, U]."""
    examples = progress_bar(signal.examples, desc=f"slopes of {signal.name}", progress=options.progress)
    rows = []
    for number, example in enumerate(examples):
        rows.append(signal.slopes(gates, values, example))
        signal.require_finite(number, rows[-1])
    return torch.stack(rows)
