"""restore_one: what one exact head alone brings to the model in which everything else is replaced."""

from __future__ import annotations

import torch
from torch import Tensor

from .gates import Gates
from .options import SearchOptions, Signal
from .single_gates import values_of_single_gates


def restore_one(gates: Gates, signal: Signal, options: SearchOptions, keep: int) -> Tensor:
    """Return signal(all shut but this) - signal(all shut) for each example: [E, U], by U + 1 forwards."""
    whole, single = values_of_single_gates(gates, signal, torch.zeros_like(gates.values), options)
    return single - whole[:, None]
