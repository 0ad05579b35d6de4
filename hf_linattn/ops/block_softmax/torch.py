"""Block-sparse attention by PyTorch's operations, which can compute every call.

Query blocks become rows of a larger batch for `scaled_dot_product_attention`, some at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.grad_accumulator import GradAccumulator
from ..common.numerics import LOWEST, bounded
from ..common.precision import wide, widened
from .decode import attend_window_step, count_real, extend, forget, has_full_window
from .patterns import Part, add_log_weight, biased_attention, make_bias, parts_of, with_global_queries
from .ring import attend_ring_step, is_ring_step
from .types import BlockSoftmaxCall, KeptKeys


def unsupported(call: BlockSoftmaxCall) -> str | None:
    """PyTorch's operations can compute every call."""
    return None


def run(call: BlockSoftmaxCall) -> tuple[Tensor, KeptKeys | None]:
    """Return the output [B, H, N, Dv], and the state after a call that goes on after one."""
    if call.state is not None:
        return attend_block_by_block(call, call.state)
    return with_global_queries(_attend_copies(call), call), None


def _attend_copies(call: BlockSoftmaxCall) -> Tensor:
    """Return the output [B, H, N, Dv] of rows that begin, whose keys are brought together for each query block."""
    parts, limits = parts_of(call)
    length, size = call.query.shape[2], parts[0].size
    missing = -length % size
    query, key, value = widened(call.query, call.key, call.value)
    heads = bounded(query), bounded(key), value
    padded = [F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous() for x in heads]
    blocks = [x.unflatten(2, (-1, size)) for x in padded]
    sources = [GradAccumulator(x) for x in blocks[1:]]
    outputs = []
    queries = blocks[0].split([len(part.table) for part in parts], dim=2)
    for part, rows, lengths in zip(parts, queries, limits, strict=True):
        outputs.append(_attend_blocks(rows, sources, part, lengths, call))
    return torch.cat(outputs, dim=2).flatten(2, 3)[:, :, :length]


def _attend_blocks(
    query: Tensor, sources: list[GradAccumulator], part: Part, lengths: Tensor | None, call: BlockSoftmaxCall
) -> Tensor:
    """Return the output [B, H, T, C, Dv] of one part, each of its T blocks [B, H, T, C, D] a row of a larger batch."""
    batch, heads, chunks = query.shape[:3]
    bias = make_bias(call.pattern, part, call.causal, lengths, query)
    if lengths is None and len(bias) > 1:
        bias = bias.expand(batch, *bias.shape)
    bias = bias.flatten(0, 1) if bias.dim() == 5 else bias
    keys, values = (_bring(source, part, heads) for source in sources)
    queries = query.transpose(1, 2).flatten(0, 1)
    output = biased_attention(queries, keys, values, bias, call.scaling, lengths is not None, call.sink)
    return output.unflatten(0, (batch, chunks)).transpose(1, 2)


def _bring(source: GradAccumulator, part: Part, num_heads: int) -> Tensor:
    """Return the global tokens of blocks [B, Hkv, M, C, D] and those of each row's blocks: [B T, Hkv or H, K, D]."""
    batch, heads, total, size, width = source.whole.shape
    (chunks, each, number), shared = part.table.shape, part.shared
    owner = torch.arange(heads, device=source.whole.device)
    owner = owner if each == 1 else owner.repeat_interleave(num_heads // heads)
    first = source.narrow(2, 0, -(-shared // size)).flatten(2, 3)[:, :, :shared] if shared else None
    if part.window is not None:
        # windows overlap in memory; the global tokens stand before each of their blocks, seen before the first
        blocks = source.narrow(2, part.window, chunks + number - 1)
        if first is not None:
            before = first[:, :, None].expand(-1, -1, blocks.shape[2], -1, -1)
            blocks, size = torch.cat([before, blocks], dim=3), size + shared
        return blocks.flatten(2, 3).unfold(2, number * size, size).permute(0, 2, 1, 4, 3).flatten(0, 1)
    index = part.table.clamp(min=0) + owner[:, None] * total  # [T, Hkv or H, c]
    taken = source.index_select(1, 2, index.flatten()).view(batch, chunks, len(owner), -1, width)
    if first is not None:
        first = first[:, owner] if each > 1 else first
        taken = torch.cat([first[:, None].expand(-1, chunks, -1, -1, -1), taken], dim=3)
    return taken.flatten(0, 1)


def attend_block_by_block(call: BlockSoftmaxCall, state: KeptKeys) -> tuple[Tensor, KeptKeys]:
    """Read on after a state, a block at a time: every row stands at a place of its own."""
    pattern, outputs = call.pattern, []
    if is_ring_step(call, state):
        return attend_ring_step(call, state)
    if has_full_window(call, state):
        return attend_window_step(call, state)
    query, key, value = wide(call.query), call.key, call.value
    if query.shape[2] > 1:  # a single token has none to come
        query, key = bounded(query), bounded(key)
    for start in range(0, query.shape[2], pattern.block_size):
        span = slice(start, start + pattern.block_size)
        new_key, new_value = key[:, :, span], value[:, :, span]
        count = count_real(call.lengths, start, new_key)
        seen, steps = extend(state, new_key, new_value, count)
        rows = (state.length[:, None] + steps)[:, None, :, None]
        columns = (seen.position - 1)[:, :, None]
        allowed = pattern.sees(rows, columns) | (columns < pattern.num_global)
        allowed = allowed & (columns >= 0) & (columns <= rows)
        bias = torch.where(allowed, query.new_zeros(()), query.new_full((), LOWEST))
        bias = add_log_weight(bias, pattern.log_weight(rows, columns))
        keys, values = widened(seen.key, seen.value)
        outputs.append(biased_attention(query[:, :, span], keys, values, bias, call.scaling, True, call.sink))
        state = forget(seen, pattern)
    return torch.cat(outputs, dim=2), state
