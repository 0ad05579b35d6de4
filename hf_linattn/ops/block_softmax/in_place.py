"""Block-sparse attention by the kernels of a backend, which find keys where they lie."""

from __future__ import annotations

from torch import Tensor

from ..common.padding import lengths_of, read_in_turn
from .autograd import BlockSoftmax
from .decode import attend_after, first_in_place
from .patterns import attend_in_place
from .ring import is_ring_step
from .torch import attend_block_by_block
from .types import BlockSoftmaxCall, KeptKeys


def stuck(call: BlockSoftmaxCall) -> str | None:
    """Return why no kernels can go on after the state of a call, None if they can or there is none."""
    if call.state is None:
        return None
    if is_ring_step(call, call.state):
        return "a step in a static cache"
    if call.lengths is not None:
        return "padded rows after a state"
    whole = first_in_place(call, call.state) < call.query.shape[2]
    return None if whole else "no whole block after a state"


def attend(blocks: BlockSoftmax, call: BlockSoftmaxCall) -> tuple[Tensor, KeptKeys | None]:
    """Return the output [B, H, N, Dv], and the state after a call that goes on after one.

    Rows that have all read as much are read as long ones are from their start, but for the rest of the open block.
    """
    if call.state is None:
        return attend_in_place(blocks, call), None

    def part(query: Tensor, key: Tensor, value: Tensor) -> BlockSoftmaxCall:
        return call._replace(query=query, key=key, value=value)

    first = first_in_place(call, call.state)
    start = lengths_of(call.state.length)[0] + first
    return read_in_turn(
        call[:3],
        call.state,
        first,
        lambda *heads: attend_block_by_block(part(*heads[:3]), heads[3]),
        lambda *heads: attend_after(blocks, part(*heads[:3]), heads[3], start),
    )
