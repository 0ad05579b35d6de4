"""restore_one: what one exact head alone brings to the model in which everything else is replaced."""

from __future__ import annotations

import torch
from torch import Tensor

from .gates import Gates
from .options import SearchOptions, Signal
from .single_gates import values_of_single_gates


def restore_one(gates: Gates, signal: Signal, options: SearchOptions, keep: int) -> Tensor:
    """Return signal(all shut but this) - signal(all shut) [U], the mean over examples, by U + 1 forwards each."""
    whole, single = values_of_single_gates(gates, signal, torch.zeros_like(gates.values), options)
    brought = single - whole[:, None]
    return signal.mean(brought, signal.scales(brought))
