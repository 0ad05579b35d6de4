"""slope: what opening a gate a little would bring, all gates by one backward pass for each example."""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm.auto import tqdm

from .gates import Gates
from .options import SearchOptions, Signal


def slopes(gates: Gates, signal: Signal, options: SearchOptions, keep: int) -> Tensor:
    """Return d signal / d g at g = 0, all gates shut, for each example: [E, U].

    The exact outputs behind shut gates have no gradient but the gates' own, so the backward pass is that of the
    model in which everything is replaced.
    """
    rows = []
    for example in tqdm(signal.examples, desc=f"slopes of {signal.name}", disable=not options.progress):
        shut = torch.zeros_like(gates.values, requires_grad=True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(signal.value(gates, shut, example), shut)
        rows.append(slope)
    return torch.stack(rows)
