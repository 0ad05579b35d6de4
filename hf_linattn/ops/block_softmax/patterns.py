"""Which keys the blocks of a pattern's queries see, as tables and biases, and attention to them where they lie.

PyTorch's operations and kernels read the same `Part`s: blocks of queries that are computed together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.fused_attention import fused_attention
from ..common.numerics import LOWEST, bounded
from ..common.precision import accum_dtype, widened
from ..common.sink_logit import attenuate, with_sink_key
from ..common.tracing import ends_graph, unrecorded
from ..window.autograd import Window, attend_window
from .autograd import BlockSoftmax, Keys, attend_blocks
from .types import BlockSoftmaxCall, Pattern

AT_ONCE = {"cpu": 1 << 21}  # elements of keys and masks for a few query blocks: 8 MiB in float32
AT_ONCE_ELSEWHERE = 1 << 27


def attend_in_place(blocks: BlockSoftmax, call: BlockSoftmaxCall) -> Tensor:
    """Return the output [B, H, N, Dv] of rows that begin, by kernels that find keys where they lie."""
    query, key, value, pattern = call[:4]
    if blocks.window is not None and pattern.window is not None and blocks.window.suits(query, key, value):
        count = min(pattern.num_global, query.shape[2])
        window = Window(pattern.window, count, call.causal, None if call.causal else call.lengths)
        read = attend_window(blocks.window, grouped(query, key), key, value, window, scaling=call.scaling)
    else:
        parts, limits = parts_of(call)
        seen = [find_keys(pattern, x, call.causal, ends, query) for x, ends in zip(parts, limits, strict=True)]
        how: Any = {"block_size": parts[0].size, "scaling": call.scaling, "causal": call.causal}
        read = attend_blocks(blocks, grouped(query, key), key, value, seen, **how)
    return with_global_queries(beside_sink(*read, call.sink), call)


def with_global_queries(output: Tensor, call: BlockSoftmaxCall) -> Tensor:
    """Return the output where the first tokens see all keys, if attention is bidirectional and the pattern says so."""
    count = min(call.pattern.num_global, call.query.shape[2])
    if call.causal or not count or not call.pattern.global_queries:
        return output
    length, lengths = call.query.shape[2], call.lengths
    rows, key, value = widened(call.query[:, :, :count], call.key, call.value)
    bias = rows.new_zeros(1, 1, 1, length)
    if lengths is not None:  # what hides a pad is added to its score
        rows, key = bounded(rows), bounded(key)
        behind = torch.arange(length, device=rows.device) >= lengths[:, None, None, None]
        bias = bias.masked_fill(behind, LOWEST)
    top = biased_attention(rows, key, value, bias, call.scaling, lengths is not None, call.sink)
    return torch.cat([top.to(output.dtype), output[:, :, count:]], dim=2)


def trained_weights(call: BlockSoftmaxCall) -> str | None:
    """Return why no kernel can compute a call whose pattern adds to scores what needs gradients, None elsewhere."""
    trained = torch.is_grad_enabled() and is_weighted(call.pattern, call.query)
    return "a pattern whose weights need gradients" if trained else None


def parts_of(call: BlockSoftmaxCall) -> tuple[list[Part], list[Tensor | None]]:
    """Return the parts of rows that begin, and of each the real tokens [B], None where these hide nothing."""
    length = call.query.shape[2]
    size = min(call.pattern.block_size, length)
    parts = unrecorded(make_parts, call.query, call.key, call.pattern, size, length, call.causal)
    real = torch.full(call.query.shape[:1], length, device=call.query.device) if call.lengths is None else call.lengths
    seen = [call.causal or (call.lengths is None and part.end <= length) for part in parts]
    return parts, [None if x else real for x in seen]


def grouped(query: Tensor, key: Tensor) -> Tensor:
    """Query [B, Hkv, G, N, D] for keys [B, Hkv, N, D]."""
    return query.unflatten(1, (key.shape[1], -1))


def beside_sink(output: Tensor, log: Tensor, sink: Tensor | None) -> Tensor:
    """Return the output [B, H, N, Dv] beside the sink if there is one, given that of groups and the log of weights."""
    return attenuate(output.flatten(1, 2), log.flatten(1, 2), None if sink is None else sink[:, None])


def find_keys(pattern: Pattern, part: Part, causal: bool, lengths: Tensor | None, query: Tensor) -> Keys:
    """Return what the queries of a part see, in rows that have all keys from the first on."""
    bias = None
    if not pattern.whole_blocks or is_weighted(pattern, query) or part.shared or lengths is not None:
        # a window's global tokens stand before all of its blocks here, not before each
        bias = make_bias(pattern, part._replace(window=None), causal, lengths, query, accum_dtype(query))
    return Keys(part.first, part.table, bias, part.shared)


class Part(NamedTuple):
    """T blocks of queries that are computed together.

    first: the number of the first. size: tokens per block. table: [T, H or 1, c], the key blocks of each, -1 for none.
    shared: how many global tokens stand before these.
    alike: each sees what the one before sees, a block further. window: where the keys of the first begin, in blocks,
    if these moreover are blocks in a row; else None. end: behind the last key that is seen.
    """

    first: int
    size: int
    table: Tensor
    shared: int
    alike: bool
    window: int | None
    end: int


@ends_graph  # nothing of this is data: it follows from the length alone
def make_parts(query: Tensor, key: Tensor, pattern: Pattern, size: int, length: int, causal: bool) -> list[Part]:
    """Divide the query blocks of rows of that length into parts of a size that suits the device."""
    batch, heads, _, head_dim = query.shape
    num_blocks = -(-length // size)
    shared = min(pattern.num_global, length)
    table = _make_table(pattern, num_blocks, causal)
    regular = (table.diff(dim=-1) == 1).all(-1).all(-1) & (table[:, 0, 0] * size >= shared)
    straight = (regular & (table.shape[1] == 1)).tolist()  # blocks in a row, clear of the first
    if shared % size == 0 and not any(straight):  # global tokens that fill blocks are blocks like the others
        table, shared = _make_table(pattern, num_blocks, causal, shared // size), 0
    columns = table.shape[2] * size + shared
    kept = key.shape[1] if table.shape[1] == 1 else heads
    # keys, values and mask of one block of queries, scores too where the mask is trained
    plain = not is_weighted(pattern, query)
    weight = batch * columns * (2 * kept * head_dim + size * (table.shape[1] if plain else heads))
    step = max(1, AT_ONCE.get(query.device.type, AT_ONCE_ELSEWHERE) // weight)
    follows = (table[1:] == table[:-1] + 1).flatten(1).all(-1).tolist()  # sees what the one before sees, one further
    parts, first = [], 0
    while first < num_blocks:
        rows = table[first : first + step]
        if not straight[first]:
            rows = rows[: [*straight[first : first + len(rows)], True].index(True)]
        elif pattern.shifts and plain:  # little to copy, one mask, no scores that are kept
            rows = table[first : first + 1 + [*follows[first:], False].index(False)]
        width = max(1, int((rows >= 0).sum(-1).max()))
        alike = int(rows.min()) * size >= shared and all(follows[first : first + len(rows) - 1])
        window = int(rows[0, 0, 0]) if alike and straight[first] else None
        end = (int(rows.max()) + 1) * size
        rows = rows[..., :width].to(query.device)
        parts.append(Part(first, size, rows, shared, alike and pattern.shifts, window, end))
        first += len(rows)
    return parts


def is_weighted(pattern: Pattern, query: Tensor) -> bool:
    """Whether scores get anything added."""
    first_token = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=query.device)
    return pattern.log_weight(first_token, first_token) is not None


def _make_table(pattern: Pattern, num_blocks: int, causal: bool, first: int = 0) -> Tensor:
    """Return the key blocks of each query block, the `first` ones among them, in order and once; -1 stands last."""
    table = pattern.key_table(num_blocks, causal).cpu()
    table = torch.cat([torch.arange(first, device="cpu").expand(*table.shape[:2], -1), table], dim=-1)
    limit = torch.arange(1, num_blocks + 1, device="cpu")[:, None, None] if causal else num_blocks
    table = table.masked_fill((table < 0) | (table >= limit), num_blocks).sort(-1).values
    table[..., 1:].masked_fill_(table[..., 1:] == table[..., :-1].clone(), num_blocks)
    table = table.sort(-1).values
    return table.masked_fill(table == num_blocks, -1)


def make_bias(
    pattern: Pattern, part: Part, causal: bool, lengths: Tensor | None, like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return what the scores of a part get [T or 1, H or 1, C or 1, K], with `lengths` for each row: [B, T, ...]."""
    size, shared, device = part.size, part.shared, like.device
    table = part.table[:1] if part.alike and lengths is None else part.table
    blocks = torch.arange(part.first, part.first + len(table), device=device).view(-1, 1, 1)
    rows = (blocks * size + torch.arange(size, device=device))[..., None]
    columns = table[..., None] * size + torch.arange(size, device=device)
    columns = columns if part.window is not None else columns.flatten(-2)[..., None, :]
    valid = columns >= shared  # which a block of number -1 never is
    if shared:
        columns, valid = F.pad(columns, (shared, 0)), F.pad(valid, (shared, 0))
        columns[..., :shared] = torch.arange(shared, device=device)
        valid[..., 0, :shared] = True
    columns, valid = columns.flatten(-2)[:, :, None], valid.flatten(-2)[:, :, None]
    zero, lowest = like.new_zeros((), dtype=dtype), like.new_full((), LOWEST, dtype=dtype)
    log_weight = pattern.log_weight(rows, columns)
    if pattern.whole_blocks and causal and not shared:  # block by block: cheaper than comparing positions
        whole = torch.where((table >= 0) & (table < blocks), zero, lowest)[:, :, None, :, None]
        inside = torch.ones(size, size, dtype=torch.bool, device=device).tril()
        own = torch.where(inside, zero, lowest)[:, None]
        return add_log_weight(torch.where((table == blocks)[:, :, None, :, None], own, whole).flatten(-2), log_weight)
    allowed = valid if pattern.whole_blocks else valid & (pattern.sees(rows, columns) | (columns < pattern.num_global))
    allowed = allowed & (columns <= rows) if causal else allowed
    if lengths is not None:
        allowed = allowed & (columns < lengths.view(-1, 1, 1, 1, 1))
    return add_log_weight(torch.where(allowed, zero, lowest), log_weight)


def add_log_weight(bias: Tensor, log_weight: Tensor | None) -> Tensor:
    """Return the bias with what a pattern adds to it, if anything."""
    return bias if log_weight is None else bias + log_weight.to(bias.dtype)


def biased_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float, empty_rows: bool,
    sink: Tensor | None = None,
) -> Tensor:
    """Return softmax attention with scores + bias [B or 1, H or 1, Nq or 1, Nk], which is `LOWEST` for hidden pairs.

    Queries and keys are `bounded` where keys may be hidden that a caller cannot answer for, as those to come.
    A row without any other is zero; `empty_rows=False` promises that there is none.
    """
    width = value.shape[3]
    if sink is not None:
        query, key, value = with_sink_key(query, key, value, sink, scaling)
        bias, empty_rows = F.pad(bias, (1, 0)), False
    whole = bias.expand(-1, -1, query.shape[2], -1)
    output = fused_attention(query, key, value, attn_mask=whole, scale=scaling, enable_gqa=True)
    output = output if sink is None else output[..., :width]
    return output.masked_fill(bias.amax(-1, keepdim=True) <= LOWEST / 2, 0.0) if empty_rows else output
