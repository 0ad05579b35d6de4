"""A window in a static cache: kept keys at fixed places, where each new one takes that of the oldest."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.numerics import LOWEST
from ..common.precision import widened
from .patterns import add_log_weight, biased_attention
from .types import BlockSoftmaxCall, KeptKeys, Pattern, RingKeys


def in_ring(state: KeptKeys, pattern: Pattern) -> RingKeys:
    """Return the state of a pattern that is a window with its keys at the places of a ring."""
    if isinstance(state, RingKeys):
        return state
    position = state.position[:, 0] - 1
    size = pattern.num_global + _window(pattern)
    place = torch.where(position < 0, size, _places(position, pattern))  # behind the ring where there is no key

    def put(x: Tensor) -> Tensor:
        index = place[:, None, :, None].expand_as(x)
        return x.new_zeros(*x.shape[:2], size + 1, x.shape[3]).scatter(2, index, x)[:, :, :size]

    position = put(state.position[..., None])[..., 0]
    return RingKeys(put(state.key), put(state.value), position, state.length)


def is_ring_step(call: BlockSoftmaxCall, state: KeptKeys) -> bool:
    """Whether a call has one token of each row, behind keys in a ring."""
    return isinstance(state, RingKeys) and call.query.shape[2] == 1


def attend_ring_step(call: BlockSoftmaxCall, state: KeptKeys) -> tuple[Tensor, KeptKeys]:
    """Write the new tokens into the ring, and attend to what they see in it; the state that is returned is the same.

    A pad is written where the next token will be, and seen by none.
    """
    pattern, position = call.pattern, state.length[:, None, None]
    place = _places(position, pattern)
    for kept, new in ((state.key, call.key), (state.value, call.value)):
        kept.scatter_(2, place[..., None].expand_as(new), new.to(kept.dtype))
    count = 1 if call.lengths is None else call.lengths[:, None, None]
    state.position.scatter_(2, place, (position + 1) * count)
    rows, columns = position[..., None], (state.position - 1)[:, :, None]
    allowed = (pattern.sees(rows, columns) | (columns < pattern.num_global)) & (columns >= 0)
    query, key, value = widened(call.query, state.key, state.value)
    bias = torch.where(allowed, query.new_zeros(()), query.new_full((), LOWEST))
    bias = add_log_weight(bias, pattern.log_weight(rows, columns))
    output = biased_attention(query, key, value, bias, call.scaling, True, call.sink)
    state.length.add_(1 if call.lengths is None else call.lengths)
    return output, state


def _window(pattern: Pattern) -> int:
    """W, of a pattern that is a window."""
    return 1 if pattern.window is None else pattern.window


def _places(position: Tensor, pattern: Pattern) -> Tensor:
    """Return where tokens at these positions stand."""
    first = pattern.num_global
    return torch.where(position < first, position, first + (position - first) % _window(pattern))
