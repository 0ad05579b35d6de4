"""What a signal is with all gates alike, and with each of them alone the other way."""

from __future__ import annotations

import torch
from torch import Tensor

from ..inference import progress_bar
from .gates import Gates
from .options import SearchOptions, Signal


@torch.no_grad()
def values_of_single_gates(
    gates: Gates, signal: Signal, alike: Tensor, options: SearchOptions
) -> tuple[Tensor, Tensor]:
    """Return the signal with the gates `alike` [U], all 0 or all 1, for each example [E]; and with one moved [E, U].
    """
    whole = torch.zeros(len(signal.examples), dtype=alike.dtype)
    single = torch.zeros(len(signal.examples), len(alike), dtype=alike.dtype)
    count = len(signal.examples) * len(alike)
    with progress_bar(total=count, desc=f"single heads by {signal.name}", progress=options.progress) as bar:
        for row, example in enumerate(signal.examples):
            whole[row] = signal.value(gates, alike, example)
            for unit in range(len(alike)):
                moved = alike.clone()
                moved[unit] = 1 - moved[unit]
                single[row, unit] = signal.value(gates, moved, example)
                bar.update()
            signal.require_finite(row, torch.stack([whole[row], *single[row]]))
    return whole, single
