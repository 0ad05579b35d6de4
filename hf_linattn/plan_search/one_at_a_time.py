"""one_at_a_time: what the original loses when one head alone is replaced."""

from __future__ import annotations

import torch
from torch import Tensor

from .gates import Gates
from .options import SearchOptions, Signal
from .single_gates import values_of_single_gates


def one_at_a_time(gates: Gates, signal: Signal, options: SearchOptions, keep: int) -> Tensor:
    """Return signal(all open) - signal(all open but this) [U], the mean over examples, by U + 1 forwards each."""
    whole, single = values_of_single_gates(gates, signal, torch.ones_like(gates.values), options)
    lost = whole[:, None] - single
    return signal.mean(lost, signal.scales(lost))
