"""Softmax over the keys near a query and over the codes of all others, under one denominator, in linear time.

    o_i = (sum_j w_ij v_j + sum_c w_ic m_c) / (sum_j w_ij + sum_c w_ic),   w_ij = exp(scaling q_i . k_j)
                                                                          w_ic = n_c exp(scaling q_i . c)

j runs over the tokens of the query's own block and of the blocks beside it, c over the codes; n_c counts the tokens
further away whose keys are nearest to c, m_c is the mean of their values. A code that nothing fell to is left out.
This is softmax attention in which every far token has its code for a key.

Blocks count from the start of a sequence, so a query sees the same whether the sequence is read at once, in parts or
token by token. Sums over codes are made once for each block, some blocks at a time, and carried on. What is before a
query and what is after it is summed up apart: all less the near would cancel.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LOWEST, running_sum
from ..common.sink_logit import softmax_beside
from ..linear.torch import with_ones

QUERIES = {"cpu": 2048}  # at a time: large enough for the products, small enough for the cache
MANY_QUERIES = 65536  # on other devices
KEYS = {"cpu": 8192}  # compared with every code at a time
MANY_KEYS = 262144
NONE = -1  # the code of a token that is not there, or does not count


class CodeState(NamedTuple):
    """All that is remembered of the keys read so far; constant size, float32 (float64 for float64 inputs).

    counts [B, Hkv, S], means [B, Hkv, S, Dv]: n_c and m_c of the blocks that no later query is near. key
    [B, Hkv, 2 C, D], value [B, Hkv, 2 C, Dv]: the tokens since, of the last completed block and of the open one, zero
    behind the last. length [B]: tokens read.
    """

    counts: Tensor
    means: Tensor
    key: Tensor
    value: Tensor
    length: Tensor


class _Rows(NamedTuple):
    """Rows as M blocks of C tokens, the last one filled up.

    query [B, Hkv, M, G C, D], key [B, Hkv, M, C, D], value [B, Hkv, M, C, Dv]; code [B, Hkv, M, C], NONE behind the
    end. end [B or 1]: tokens of each row.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    code: Tensor
    end: Tensor


def code_attention(
    query: Tensor, key: Tensor, value: Tensor, codebook: Tensor, *, block_size: int, scaling: float,
    lengths: Tensor | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the bidirectional attention output [B, H, N, Dv]; arguments as in `causal_code_attention`."""
    length, end = key.shape[2], _ends(key, lengths)
    size = min(block_size, length)
    rows = _make_rows(query, key, value, codebook, size, end, coded=length > 2 * size)
    return _attend(rows, codebook, scaling, None, sink, causal=False)[:, :, :length]


def causal_code_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    codebook: Tensor,
    *,
    block_size: int,
    scaling: float,
    lengths: Tensor | None = None,
    state: CodeState | None = None,
    keep_state: bool = True,
    sink: Tensor | None = None,
) -> tuple[Tensor, CodeState | None]:
    """Return the causal attention output and the state after the last real token.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv.
        codebook: [Hkv, S, D], in the dtype of the others; gets no gradient. block_size: C.
        scaling: s, what q . k is multiplied by.
        lengths: [B], real tokens at the start of each row; None if all are. Outputs behind them mean nothing.
        state: what was read before. keep_state: whether rows that begin need a state; None else.
        sink: [H], the score of one more key without value (`hf_linattn.ops.common.sink_logit`).

    Returns:
        output [B, H, N, Dv]; the state. Time O(N (S + C) (D + Dv)).
    """
    length, end = key.shape[2], _ends(key, lengths)
    if state is None:
        size = min(block_size, length)
        rows = _make_rows(query, key, value, codebook, size, end, coded=length >= 2 * block_size)
        output = _attend(rows, codebook, scaling, None, sink, causal=True)[:, :, :length]
        return output, _state_after(rows, codebook.shape[1], block_size, None) if keep_state else None
    if length == 1 and lengths is None:
        return _step(query, key, value, codebook, scaling, state, sink)
    # rows that begin with what the state holds, so that all blocks lie alike
    held = _held(state)[:, None]
    steps = torch.arange(2 * block_size - 1 + length, device=key.device)
    index = torch.where(steps < held, steps, 2 * block_size + (steps - held).clamp(max=length - 1))
    key, value = (_take(torch.cat(pair, 2), index) for pair in ((state.key, key), (state.value, value)))
    query = _take(query, (steps - held).clamp(0, length - 1))
    rows = _make_rows(query, key, value, codebook, block_size, held[:, 0] + end, coded=True)
    output = _attend(rows, codebook, scaling, _joined(state), sink, causal=True)
    output = _take(output, held + torch.arange(length, device=key.device))
    return output, _state_after(rows, codebook.shape[1], block_size, state)


@torch.no_grad()
def nearest_codes(x: Tensor, codebook: Tensor) -> Tensor:
    """Return argmin_s |x - codebook_s| [..., Hkv, N] for x [..., Hkv, N, D] and codebook [Hkv, S, D]."""
    half_squares = codebook.square().sum(-1)[:, None] / 2
    step = _keys_at_once(x[..., 0])
    parts = [(part @ codebook.mT - half_squares).argmax(-1) for part in x.split(step, dim=-2)]
    return torch.cat(parts, dim=-1)


def code_sums(code: Tensor, x: Tensor, num_codes: int) -> Tensor:
    """Return the sum of x [..., N, D] over the tokens of each code [..., N]: [..., S, D]; NONE is left out.

    By products: on every device they give the same bits each time.
    """
    codes = torch.arange(num_codes, device=code.device)[:, None]
    step = _keys_at_once(code)
    parts = zip(code.split(step, dim=-1), x.split(step, dim=-2), strict=True)
    sums = [(several[..., None, :] == codes).to(x.dtype) @ part for several, part in parts]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def _keys_at_once(rows: Tensor) -> int:
    """Return how many keys of each row [..., N] to take together."""
    return max(KEYS.get(rows.device.type, MANY_KEYS) // max(rows.shape[:-1].numel(), 1), 1)


def code_means(code: Tensor, x: Tensor, num_codes: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean of x [..., N, D] over the tokens of each code [..., S, D], zero where there are none, and their
    number [..., S]; or both with `weight` [..., N]."""
    x = with_ones(x)
    return _parted(code_sums(code, x if weight is None else x * weight[..., None], num_codes))


@torch.no_grad()
def fit_codes(
    points: Tensor, codebook: Tensor, counts: Tensor, generator: torch.Generator, iterations: int
) -> tuple[Tensor, Tensor]:
    """Return codes and counts after k-means on points [Hkv, n, D] and all points that were fitted before.

    These are known by their codes [Hkv, S, D]: `counts` [Hkv, S] of them are taken to lie where their code does. Codes
    that count none begin at points drawn one after the other, each with a probability as its squared distance to the
    nearest code (k-means++, Arthur and Vassilvitskii 2007); there are none to draw where all points have a code.
    """
    seeded = _seeded(points, codebook, counts, generator)
    everything = torch.cat([points, codebook], 1)
    weight = torch.cat([torch.ones_like(points[..., 0]), counts], 1)
    for _ in range(iterations):
        means, sizes = code_means(nearest_codes(everything, seeded), everything, codebook.shape[1], weight)
        seeded = torch.where((sizes > 0)[..., None], means, seeded)
    return seeded, sizes


def _seeded(points: Tensor, codebook: Tensor, counts: Tensor, generator: torch.Generator) -> Tensor:
    """Return the codebook with points in place of codes that count none."""
    heads, num_codes, width = codebook.shape
    fitted = counts > 0
    largest = codebook.gather(1, counts.argmax(1)[:, None, None].expand(-1, 1, width))
    live = torch.where(fitted[..., None], codebook, largest)
    nearest = live.gather(1, nearest_codes(points, live)[..., None].expand_as(points))
    distance = (points - nearest).square().sum(-1)
    # all are as likely where there is no code yet
    distance = torch.where(fitted.any(1, keepdim=True), distance, torch.inf)
    draws = torch.rand(num_codes, heads, 1, generator=generator, device="cpu").to(points)
    codes = []
    for number, draw in enumerate(draws):
        chances = running_sum(torch.where(distance.isinf(), 1.0, distance))
        index = torch.searchsorted(chances, draw * chances[:, -1:], right=True).clamp(max=points.shape[1] - 1)
        point = points.gather(1, index[..., None].expand(-1, -1, width))
        drawn = ~fitted[:, number, None] & (chances[:, -1:] > 0)
        codes.append(torch.where(drawn, point[:, 0], codebook[:, number]))
        distance = torch.where(drawn, torch.minimum(distance, (points - point).square().sum(-1)), distance)
    return torch.stack(codes, 1)


def _ends(key: Tensor, lengths: Tensor | None) -> Tensor:
    return torch.full((1,), key.shape[2], device=key.device) if lengths is None else lengths.long()


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Return the positions index [B, M] of x [B, H, N, D]."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _joined(state: CodeState) -> Tensor:
    """Return sums and counts [B, Hkv, S, Dv + 1], as they are added up."""
    return with_ones(state.means) * state.counts[..., None]


def _parted(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return means [..., S, Dv], zero where nothing was summed up, and counts [..., S]."""
    sums, counts = sums.split([sums.shape[-1] - 1, 1], -1)
    return sums / torch.where(counts == 0, 1.0, counts), counts[..., 0]


def _log(counts: Tensor) -> Tensor:
    return counts.clamp(min=1).log().masked_fill(counts == 0, LOWEST)


def _shifted(blocks: Tensor, steps: int, fill: int = 0) -> Tensor:
    """Return blocks [B, Hkv, M, ...] with number m - steps in place m, `fill` where there is none."""
    if not steps:
        return blocks
    before, after = max(steps, 0), max(-steps, 0)
    padded = F.pad(blocks, (0, 0) * (blocks.dim() - 3) + (before, after), value=fill)
    return padded[:, :, after : after + blocks.shape[2]]


def _make_rows(
    query: Tensor, key: Tensor, value: Tensor, codebook: Tensor, size: int, end: Tensor, coded: bool
) -> _Rows:
    """Cut up query [B, H, N, D], key and value [B, Hkv, N, .]; codes are looked up only if any will count."""
    missing = -key.shape[2] % size
    code = key.new_full(key.shape[:3], NONE, dtype=torch.long)
    if coded:
        behind = torch.arange(key.shape[2], device=key.device) >= end[:, None, None]
        code = nearest_codes(key, codebook).masked_fill(behind, NONE)
    if missing:
        code = F.pad(code, (0, missing), value=NONE)
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    query, key, value, code = (x.unflatten(2, (-1, size)) for x in (query, key, value, code))
    query = query.unflatten(1, (key.shape[1], -1)).transpose(2, 3).flatten(3, 4)
    return _Rows(query, key, value, code, end)


def _attend(
    rows: _Rows, codebook: Tensor, scaling: float, carried: Tensor | None, sink: Tensor | None, causal: bool
) -> Tensor:
    """Return the output [B, H, M C, Dv]; `carried`: sums and counts of what stands before the rows."""
    batch, kv_heads, count, size, _ = rows.key.shape
    codes, num_codes = codebook * scaling, codebook.shape[1]  # a copy: the codebook may change before a backward pass
    beside = (-1, 0) if causal else (-1, 0, 1)
    queries = QUERIES.get(rows.query.device.type, MANY_QUERIES)
    step = max(queries // (batch * kv_heads * rows.query.shape[3]), 1)
    far = carried is not None or count > 2
    tables = _far_tables(rows, num_codes, step, carried, causal) if far else iter(())
    sink = None if sink is None else sink.view(kv_heads, 1, -1, 1).repeat_interleave(size, dim=2)
    # split and not sliced, so that the gradients of all parts are put together once
    near = (_shifted(x, -offset).split(step, 2) for x in (rows.key, rows.value) for offset in beside)
    outputs = []
    for number, (query, *blocks) in enumerate(zip(rows.query.split(step, 2), *near, strict=True)):
        key, value = (torch.cat(x, 3) for x in (blocks[: len(beside)], blocks[len(beside) :]))
        hidden = _hidden(rows, number * step, query.shape[2], beside, causal)
        scores = (query @ key.mT * scaling).unflatten(3, (-1, size)).masked_fill(hidden, LOWEST).flatten(3, 4)
        if not far:
            outputs.append(softmax_beside(scores, sink) @ value)
            continue
        means, counts = _parted(next(tables))
        of_codes = (query.flatten(2, 3) @ codes.mT).view(*query.shape[:-1], -1) + _log(counts)[:, :, :, None]
        weights = softmax_beside(torch.cat([of_codes, scores], -1), sink).split([num_codes, scores.shape[-1]], -1)
        outputs.append(weights[0] @ means + weights[1] @ value)
    output = torch.cat(outputs, 2).unflatten(3, (-1, size))  # [B, Hkv, M, G, C, Dv]
    return output.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _hidden(rows: _Rows, first: int, blocks: int, beside: tuple[int, ...], causal: bool) -> Tensor:
    """Return the near keys that queries of T blocks from `first` on do not see: [B or 1, 1, T, 1, C or 1, K]."""
    size, device = rows.key.shape[3], rows.key.device
    inside = torch.arange(size, device=device)
    block = torch.arange(first, first + blocks, device=device)[:, None, None]
    place = ((block + torch.tensor(beside, device=device)[:, None]) * size + inside).flatten(1)[:, None]  # [T, 1, K]
    if causal:
        return ((place < 0) | (place > block * size + inside[:, None]))[None, None, :, None]
    return ((place < 0) | (place >= rows.end.view(-1, 1, 1, 1)))[:, None, :, None]


def _far_tables(rows: _Rows, num_codes: int, step: int, carried: Tensor | None, causal: bool) -> Iterator[Tensor]:
    """Yield sums and counts [B, Hkv, T, S, Dv + 1] of what is far from each block, `step` blocks at a time."""
    values = with_ones(rows.value)

    def sums_of(offset: int) -> Iterator[Tensor]:
        """Yield the sums of single blocks, each where the block `offset` behind it."""
        moved = _shifted(rows.code, offset, NONE), _shifted(values, offset)
        for code, value in zip(*(x.split(step, 2) for x in moved), strict=True):
            yield code_sums(code, value, num_codes)

    before: Any = 0.0 if carried is None else carried[:, :, None]
    if causal:
        for sums in sums_of(2):
            yield running_sum(sums, 2) + before
            before = before + sums.sum(2, keepdim=True)
        return
    totals = [sums.sum(2, keepdim=True) for sums in sums_of(-2)]
    behind = list(accumulate(totals[:0:-1], initial=torch.zeros_like(totals[0])))[::-1]  # of each part
    for sums, ahead, rest in zip(sums_of(2), sums_of(-2), behind, strict=True):
        yield running_sum(sums, 2) + running_sum(ahead.flip(2), 2).flip(2) + (before + rest)
        before = before + sums.sum(2, keepdim=True)


def _held(state: CodeState) -> Tensor:
    """Return how many tokens the state holds as they are [B]."""
    size = state.key.shape[2] // 2
    return state.length - (state.length // size - 1).clamp(min=0) * size


def _state_after(rows: _Rows, num_codes: int, size: int, state: CodeState | None) -> CodeState:
    """Return the state after rows that began, or that begin with what `state` holds."""
    key, value, code = (x.flatten(2, 3) for x in (rows.key, rows.value, rows.code))
    end = rows.end.expand(len(key))[:, None]
    begin = (end // size - 1).clamp(min=0) * size  # of what is kept as it is
    place = torch.arange(key.shape[2], device=key.device)
    sums = code_sums(code.masked_fill((place >= begin)[:, None], NONE), with_ones(value), num_codes)
    means, counts = _parted(sums if state is None else sums + _joined(state))
    index = begin + torch.arange(2 * size, device=key.device)
    missing = (index >= end)[:, None, :, None]
    index = index.clamp(max=key.shape[2] - 1)
    key, value = (_take(x, index).masked_fill(missing, 0.0) for x in (key, value))
    length = end[:, 0] if state is None else end[:, 0] - _held(state) + state.length
    return CodeState(counts, means, key, value, length.clone())


def _step(
    query: Tensor, key: Tensor, value: Tensor, codebook: Tensor, scaling: float, state: CodeState, sink: Tensor | None
) -> tuple[Tensor, CodeState]:
    """Read one token more: `causal_code_attention` where N = 1."""
    num_codes, size = codebook.shape[1], state.key.shape[2] // 2
    held = _held(state)
    place = held[:, None, None, None]
    key, value = (
        old.scatter(2, place.expand_as(new), new) for old, new in ((state.key, key), (state.value, value))
    )
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [B, Hkv, G, D]
    hidden = torch.arange(2 * size, device=key.device) > place
    of_codes = rows @ (codebook * scaling).mT + _log(state.counts)[:, :, None]
    scores = torch.cat([of_codes, (rows @ key.mT * scaling).masked_fill(hidden, LOWEST)], -1)
    weights = softmax_beside(scores, None if sink is None else sink.view(*rows.shape[1:3], 1))
    output = weights[..., :num_codes] @ state.means + weights[..., num_codes:] @ value
    state = state._replace(key=key, value=value, length=state.length + 1)
    leaves = held + 1 == 2 * size  # as the next query is in a new block
    return output.flatten(1, 2)[:, :, None], _folded(state, codebook, leaves) if bool(leaves.any()) else state


def _folded(state: CodeState, codebook: Tensor, leaves: Tensor) -> CodeState:
    """Return the state with the first block it holds under its codes, in the rows that it leaves [B]."""
    size = state.key.shape[2] // 2
    code = nearest_codes(state.key[:, :, :size], codebook)
    sums = code_sums(code, with_ones(state.value[:, :, :size]), codebook.shape[1])
    means, counts = _parted(_joined(state) + sums)
    key, value = (F.pad(x[:, :, size:], (0, 0, 0, size)) for x in (state.key, state.value))
    folded = CodeState(counts, means, key, value, state.length)
    chosen = (leaves.view(-1, *[1] * (x.dim() - 1)) for x in state)
    return CodeState(*(torch.where(*each) for each in zip(chosen, folded, state, strict=True)))
