"""Packed rows: several documents in one row, which do not see each other.

They are told by positions that restart. Many models hand `position_ids` to their layers; others only embed them, or
make rotary tables of them. What else a model is called with reaches the layers of all, as FlashAttention's lengths do,
and again where gradient checkpointing runs a layer once more: so do the positions, as `POSITIONS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .ops.common.tracing import counts_positions, is_known

POSITIONS = "hf_linattn_positions"  # the argument of layers that brings them the positions their model was given


@dataclass(frozen=True)
class PositionArgument:
    """How the forward of a model takes `position_ids`: their place among its arguments; whether it takes any others.

    place: None if it does not take them.
    """

    place: int | None
    takes_others: bool

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> PositionArgument:
        """Read it from the signature of a bound forward."""
        parameters = inspect.signature(forward).parameters
        place = list(parameters).index("position_ids") if "position_ids" in parameters else None
        return cls(place, any(p.kind is p.VAR_KEYWORD for p in parameters.values()))

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the positions that a forward is called with."""
        if self.place is not None and self.place < len(args):
            return args[self.place]
        return kwargs.get("position_ids")

    def handed_on(self, kwargs: dict[str, Any], positions: Tensor | None) -> dict[str, Any]:
        """Return `kwargs` with the model's own positions for its layers, and none of a model around it."""
        others = {name: x for name, x in kwargs.items() if name != POSITIONS}
        return others if positions is None or not self.takes_others else {**others, POSITIONS: positions}


def sequence_ids(
    position_ids: Tensor | None, cu_seq_lens: Tensor | None, key_padding_mask: Tensor | None, num_queries: int,
    num_keys: int,
) -> Tensor | None:  # fmt: skip
    """Number packed sequences [B, Nk] by the restarts of position_ids, or by FlashAttention's cumulative lengths."""
    if num_queries == 1 or num_queries != num_keys:
        return None
    if cu_seq_lens is not None:
        steps = torch.arange(num_queries, device=cu_seq_lens.device)
        return torch.searchsorted(cu_seq_lens[1:].to(steps.dtype), steps, right=True)[None]
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != num_queries or counts_positions():
        return None
    restart = position_ids[:, 1:] <= position_ids[:, :-1]
    if key_padding_mask is not None:
        # the positions of padding mean nothing, and what stands before the first real token is no sequence
        begun = key_padding_mask[:, :-1].cumsum(1) > 0
        restart = restart & key_padding_mask[:, 1:] & begun
    if is_known(restart) and not bool(restart.any()):
        return None
    ids = torch.nn.functional.pad(restart.cumsum(1), (1, 0))
    return ids if key_padding_mask is None else ids.expand(key_padding_mask.shape[0], -1)
