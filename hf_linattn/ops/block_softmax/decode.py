"""Block-sparse attention that goes on after what was read before, and what is kept of that: keys still to be seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.fused_attention import fused_attention
from ..common.padding import first_of_block, take
from ..common.precision import accum_dtype
from ..common.sink_logit import with_sink_key
from ..common.tracing import is_watched
from .autograd import BlockSoftmax, attend_blocks
from .patterns import Part, beside_sink, find_keys, grouped, make_parts
from .types import BlockSoftmaxCall, KeptKeys, Pattern


def first_in_place(call: BlockSoftmaxCall, state: KeptKeys) -> int:
    """Return from which token on kernels can read what goes on after a state: after the open block, see `padding`."""
    return first_of_block(state.length, call.query.shape[2], call.pattern.block_size)


def attend_after(blocks: BlockSoftmax, call: BlockSoftmaxCall, state: KeptKeys, start: int) -> tuple[Tensor, KeptKeys]:
    """Put the blocks that are still seen before the new ones, in order, and read these where they then are.

    start: tokens that all rows have read, `state.length`.
    """
    query, key, value, pattern = call[:4]
    size = pattern.block_size
    begun, end = start // size, start + query.shape[2]
    parts = [_after(part, begun) for part in make_parts(query, key, pattern, size, end, True) if _end(part) > begun]
    named = [part.table.flatten() for part in parts] + [torch.arange(-(-pattern.num_global // size)).to(query.device)]
    old = torch.cat(named).unique()
    old = old[(old >= 0) & (old < begun)]
    place = torch.full((-(-end // size) + 1,), -1, device=query.device)  # of every block in the row, the last is none
    place[old] = torch.arange(len(old), device=query.device)
    place[begun:-1] = torch.arange(len(old), len(place) - 1 - begun + len(old), device=query.device)
    seen = [
        x._replace(first=x.first - begun + len(old), table=place[x.table])
        for x in (find_keys(pattern, part, True, None, query) for part in parts)
    ]
    position = (old[:, None] * size + torch.arange(size, device=query.device)).flatten()
    kept = _find(state, position, start)
    keys, values = (
        torch.cat([take(x, kept).to(new.dtype), new], dim=2) for x, new in ((state.key, key), (state.value, value))
    )
    rows = grouped(F.pad(query, (0, 0, len(position), 0)), key)
    how: Any = {"block_size": size, "scaling": call.scaling, "causal": True}
    output, log = (x[:, :, :, len(position) :] for x in attend_blocks(blocks, rows, keys, values, seen, **how))
    after, _ = extend(state, key, value, count_real(None, 0, key))
    return beside_sink(output, log, call.sink), forget(after, pattern)


def _end(part: Part) -> int:
    """The block behind the last of a part."""
    return part.first + len(part.table)


def _after(part: Part, begun: int) -> Part:
    """What is left of a part from block `begun` on."""
    passed = max(begun - part.first, 0)
    return part._replace(first=part.first + passed, table=part.table[passed:])


def _find(state: KeptKeys, position: Tensor, length: int) -> Tensor:
    """Return where the state has the keys at these positions [B, M]; anywhere, if none will be seen any more."""
    places = torch.arange(state.position.shape[2], device=position.device).expand(len(state.length), -1)
    known = torch.zeros(len(places), length + 1, dtype=torch.long, device=position.device)
    return known.scatter(1, state.position[:, 0], places)[:, position + 1]


def has_full_window(call: BlockSoftmaxCall, state: KeptKeys) -> bool:
    """Whether a call has one token, which sees all that the state keeps: first tokens, and a window of the last."""
    pattern, room = call.pattern, state.position.shape[2]
    if call.query.shape[2] > 1 or call.lengths is not None or pattern.window is None or is_watched():
        return False
    # on a GPU a number that is looked at is waited for, and no graph can be captured
    return state.length.device.type == "cpu" and bool((state.length >= room).all())


def attend_window_step(call: BlockSoftmaxCall, state: KeptKeys) -> tuple[Tensor, KeptKeys]:
    """Attend to all that is kept and to the new token, which takes the place of the oldest in the window."""
    query, first, length = call.query, call.pattern.num_global, state.length + 1

    def behind(kept: Tensor, new: Tensor) -> Tensor:  # the oldest last: what is kept then is the beginning of all
        return torch.cat([kept[:, :, :first], kept[:, :, first + 1 :], new, kept[:, :, first : first + 1]], dim=2)

    key, value = behind(state.key, call.key), behind(state.value, call.value)
    heads: Any = (query, key, value)
    if any(x.dtype != query.dtype for x in heads):  # PyTorch's kernels sum up half precision in float32
        heads = tuple(x.to(accum_dtype(query)) for x in heads)
    if call.sink is not None:
        heads = with_sink_key(heads[0], heads[1], heads[2], call.sink, call.scaling)
    output = fused_attention(*heads, scale=call.scaling, enable_gqa=True)[..., : value.shape[3]]
    places, room = behind(state.position, length[:, None, None]), state.position.shape[2]
    return output, KeptKeys(key[:, :, :room], value[:, :, :room], places[:, :, :room], length)


def keep_keys(key: Tensor, value: Tensor, pattern: Pattern, lengths: Tensor | None = None) -> KeptKeys:
    """Return the state after rows that start at position 0, in their dtype."""
    if lengths is None and has_passed_window(key.shape[2], pattern):
        return _keep_window(key, value, pattern)
    count = count_real(lengths, 0, key)
    steps = torch.arange(key.shape[2], device=key.device)
    position = torch.where(steps < count[:, None], steps + 1, 0)[:, None]
    if pattern.capacity is None:  # a state is never a view of what it was made from
        key, value = key.clone(), value.clone()
    return forget(KeptKeys(key, value, position, count), pattern)


def has_passed_window(length: int, pattern: Pattern) -> bool:
    """Whether rows of that many tokens keep the first of them and a whole window of the last, and nothing else."""
    window = pattern.window
    return window is not None and pattern.capacity == window - 1 and length >= pattern.num_global + window - 1


def _keep_window(key: Tensor, value: Tensor, pattern: Pattern) -> KeptKeys:
    """`keep_keys` of rows that have passed their window: copies of two parts, for which nothing is looked for."""
    (batch, _, length, _), first = key.shape, pattern.num_global
    last = length - (pattern.window or 1) + 1
    steps = torch.arange(1, length + 1, device=key.device)
    key, value, position = (
        torch.cat([x[:, :, :first], x[:, :, last:]], dim=2) for x in (key, value, steps.expand(batch, 1, -1))
    )
    return KeptKeys(key, value, position, torch.full((batch,), length, device=key.device))


def count_real(lengths: Tensor | None, start: int, key: Tensor) -> Tensor:
    """Real tokens [B] among those of `key`, which stand behind the first `start`."""
    if lengths is None:
        return torch.full(key.shape[:1], key.shape[2], dtype=torch.long, device=key.device)
    return (lengths - start).clamp(0, key.shape[2])


def extend(state: KeptKeys, key: Tensor, value: Tensor, count: Tensor) -> tuple[KeptKeys, Tensor]:
    """Put `count` [B] new keys behind the kept ones; return also the numbers of the steps [N]."""
    steps = torch.arange(key.shape[2], device=key.device)
    new = torch.where(steps < count[:, None], state.length[:, None] + steps + 1, 0)
    joined = KeptKeys(
        torch.cat([state.key, key], dim=2),
        torch.cat([state.value, value], dim=2),
        torch.cat([state.position, new[:, None]], dim=2),
        state.length + count,
    )
    return joined, steps


def forget(state: KeptKeys, pattern: Pattern) -> KeptKeys:
    """Keep what later queries may see, in a state that always has room for the most there can be."""
    if pattern.capacity is None:
        return state
    position, next_position = state.position - 1, state.length[:, None, None]
    wanted = pattern.needed(position, next_position) | (position < pattern.num_global)
    wanted = wanted & (position >= 0)
    room = pattern.capacity + pattern.num_global
    order = torch.argsort((~wanted).to(torch.uint8), dim=-1, stable=True)[..., :room]
    missing = room - order.shape[2]
    kept = wanted.gather(2, order)

    def choose(x: Tensor) -> Tensor:
        return F.pad(take(x, order[:, 0]) * kept[..., None], (0, 0, 0, missing))

    kept_position = F.pad(state.position.gather(2, order) * kept, (0, missing))
    return KeptKeys(choose(state.key), choose(state.value), kept_position, state.length)
