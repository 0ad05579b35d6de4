"""Softmax over the keys that a pattern lets a query see, block by block.

A pattern answers two questions: which key blocks a query block may need (`key_table`), and whether query i sees key j
(`sees`). The first is about speed, the second is the truth: a block named in vain costs time, never a wrong result.

Query blocks become rows of a larger batch for `scaled_dot_product_attention`, some at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.fused_attention import fused_attention
from ..common.grad_accumulator import Source
from ..common.numerics import LOWEST, bounded
from ..common.precision import wide_number, widened
from ..common.sink_logit import attenuate, with_sink_key
from ..window.autograd import Window, attend_window
from .autograd import BlockSoftmax, Keys, attend_blocks
from .cpu import NATIVE_BLOCKS

AT_ONCE = {"cpu": 1 << 21}  # elements of keys and masks for a few query blocks: 8 MiB in float32
AT_ONCE_ELSEWHERE = 1 << 27


class Pattern(Protocol):
    """Which keys a query sees, with all positions counted from the start of the sequence."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def num_global(self) -> int:
        """The first so many keys are seen by all."""
        ...

    @property
    def capacity(self) -> int | None:
        """How many past keys decoding must keep at most, beside the global ones; None: all of them."""
        ...

    @property
    def global_queries(self) -> bool:
        """Whether the first `num_global` queries see all keys where attention is bidirectional."""
        ...

    @property
    def window(self) -> int | None:
        """W where a query sees the global keys and those less than W tokens away, and nothing else matters."""
        ...

    @property
    def shifts(self) -> bool:
        """Whether a pair of query and key, both moved by a block, is seen and weighted as before."""
        ...

    @property
    def whole_blocks(self) -> bool:
        """Whether every key in the blocks of `key_table` is seen, as far as the direction of attention allows."""
        ...

    def key_table(self, num_blocks: int, causal: bool) -> Tensor:
        """Return the blocks that queries of each block may see, int64 [num_blocks, H or 1, c].

        Doubles, and numbers outside 0 ... num_blocks - 1 (causal: behind the own block), are passed over.
        """
        ...

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Return whether a query [B or 1, H or 1, Nq, 1] sees a key [B or 1, H or 1, 1, Nk]; its own it must see."""
        ...

    def log_weight(self, query_position: Tensor, key_position: Tensor) -> Tensor | None:
        """Return what is added to the scores of these pairs; None for nothing."""
        ...

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        """Return whether any query at `position` or later may see this key."""
        ...


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scaling: float,
    causal: bool,
    lengths: Tensor | None = None,
    use_native: bool = False,
    blocks: BlockSoftmax | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return softmax attention over what `pattern` shows, for rows that start at position 0: [B, H, N, Dv].

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv.
        lengths: [B], real tokens of each row; None if all are. A query without keys gets zero.
        use_native: whether the C may do it where it can, which is where the pattern itself needs no gradients.
        blocks: what does it in the place of the C; None leaves it to that.
        sink: [H], the score of one more key without value, which all queries see (`hf_linattn.ops.common.sink_logit`).
    """
    length, count = query.shape[2], min(pattern.num_global, query.shape[2])
    blocks = NATIVE_BLOCKS if blocks is None and use_native else blocks
    trained = torch.is_grad_enabled() and is_weighted(pattern, query)
    blocks = None if trained or blocks is None or not blocks.suits(query, key, value) else blocks
    windows = None if blocks is None or pattern.window is None else blocks.window
    if windows is not None and windows.suits(query, key, value):
        window = Window(cast(int, pattern.window), count, causal, None if causal else lengths)
        output = _beside_sink(*attend_window(windows, _grouped(query, key), key, value, window, scaling=scaling), sink)
    else:
        output = _attend_in_parts(blocks, query, key, value, pattern, scaling, causal, lengths, sink)
    if causal or not count or not pattern.global_queries:
        return output
    rows, key, value = widened(query[:, :, :count], key, value)
    bias = rows.new_zeros(1, 1, 1, length)
    if lengths is not None:  # what hides a pad is added to its score
        rows, key = bounded(rows), bounded(key)
        behind = torch.arange(length, device=query.device) >= lengths[:, None, None, None]
        bias = bias.masked_fill(behind, LOWEST)
    top = biased_attention(rows, key, value, bias, scaling, lengths is not None, sink)
    return torch.cat([top.to(output.dtype), output[:, :, count:]], dim=2)


def _attend_in_parts(
    blocks: BlockSoftmax | None, query, key, value, pattern, scaling, causal, lengths, sink
) -> Tensor:
    """Return the output [B, H, N, Dv] from the blocks of the pattern's table, by the operation if there is one."""
    length = query.shape[2]
    parts = make_parts(query, key, pattern, min(pattern.block_size, length), length, causal)
    real = torch.full(query.shape[:1], length, device=query.device) if lengths is None else lengths
    limits = [None if causal or (lengths is None and part.end <= length) else real for part in parts]
    if blocks is None:
        return _attend_copies(query, key, value, pattern, parts, scaling, causal, limits, sink)
    return _attend_in_place(blocks, query, key, value, pattern, parts, scaling, causal, limits, sink)


def _attend_in_place(
    blocks: BlockSoftmax, query, key, value, pattern, parts: list[Part], scaling, causal, limits, sink
) -> Tensor:
    """Return the output [B, H, N, Dv] of all parts, each of whose queries finds its keys where they are."""
    seen = [find_keys(pattern, part, causal, lengths, query) for part, lengths in zip(parts, limits, strict=True)]
    how: Any = {"block_size": parts[0].size, "scaling": scaling, "causal": causal}
    return _beside_sink(*attend_blocks(blocks, _grouped(query, key), key, value, seen, **how), sink)


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """Query [B, Hkv, G, N, D] for keys [B, Hkv, N, D]."""
    return query.unflatten(1, (key.shape[1], -1))


def _beside_sink(output: Tensor, log: Tensor, sink: Tensor | None) -> Tensor:
    """Return the output [B, H, N, Dv] beside the sink if there is one, given that of groups and the log of weights."""
    return attenuate(output.flatten(1, 2), log.flatten(1, 2), None if sink is None else sink[:, None])


def find_keys(pattern: Pattern, part: Part, causal: bool, lengths: Tensor | None, query: Tensor) -> Keys:
    """Return what the queries of a part see, in rows that have all keys from the first on."""
    bias = None
    if not pattern.whole_blocks or is_weighted(pattern, query) or part.shared or lengths is not None:
        # a window's global tokens stand before all of its blocks here, not before each
        bias = _make_bias(pattern, part._replace(window=None), causal, lengths, wide_number(query))
    return Keys(part.first, part.table, bias, part.shared)


def _attend_copies(query, key, value, pattern, parts: list[Part], scaling, causal, limits, sink) -> Tensor:
    """Return the output [B, H, N, Dv] of all parts, for whose queries the keys are brought together."""
    length, size = query.shape[2], parts[0].size
    missing = -length % size
    query, key, value = widened(query, key, value)
    heads = bounded(query), bounded(key), value
    padded = [F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous() for x in heads]
    blocks = [x.unflatten(2, (-1, size)) for x in padded]
    sources = [Source(x) for x in blocks[1:]]
    outputs = []
    queries = blocks[0].split([len(part.table) for part in parts], dim=2)
    for part, rows, lengths in zip(parts, queries, limits, strict=True):
        outputs.append(_attend_blocks(rows, sources, pattern, part, scaling, causal, lengths, sink))
    return torch.cat(outputs, dim=2).flatten(2, 3)[:, :, :length]


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


@torch.compiler.disable  # nothing of this is data: it follows from the length alone
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
    table = torch.cat([torch.arange(first).expand(*table.shape[:2], -1), table], dim=-1)
    limit = torch.arange(1, num_blocks + 1)[:, None, None] if causal else num_blocks
    table = table.masked_fill((table < 0) | (table >= limit), num_blocks).sort(-1).values
    table[..., 1:].masked_fill_(table[..., 1:] == table[..., :-1].clone(), num_blocks)
    table = table.sort(-1).values
    return table.masked_fill(table == num_blocks, -1)


def _attend_blocks(query, sources: list[Source], pattern, part: Part, scaling, causal, lengths, sink) -> Tensor:
    """Return the output [B, H, T, C, Dv] of one part, each of its T blocks [B, H, T, C, D] a row of a larger batch."""
    batch, heads, chunks = query.shape[:3]
    bias = _make_bias(pattern, part, causal, lengths, query)
    if lengths is None and len(bias) > 1:
        bias = bias.expand(batch, *bias.shape)
    bias = bias.flatten(0, 1) if bias.dim() == 5 else bias
    keys, values = (_bring(source, part, heads) for source in sources)
    queries = query.transpose(1, 2).flatten(0, 1)
    output = biased_attention(queries, keys, values, bias, scaling, lengths is not None, sink)
    return output.unflatten(0, (batch, chunks)).transpose(1, 2)


def _make_bias(pattern, part: Part, causal: bool, lengths: Tensor | None, like: Tensor) -> Tensor:
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
    zero, lowest = like.new_zeros(()), like.new_full((), LOWEST)
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


def _bring(source: Source, part: Part, num_heads: int) -> Tensor:
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
