"""Softmax attention over keys found by hashing: every query sees a run of the keys in its own bucket.

There are several rounds of hashing. In each, keys and queries are sorted by bucket and position, written as one
number, the code = bucket * span + position. The keys of a query are then a run of the sorted keys and, in terms of
codes, an interval [low, high]: round r finds key j for query i if low_ri <= code_rj <= high_ri, for any pair.

Sorted queries that follow each other have runs that overlap, so `TILE` of them are computed with one run of keys of
fixed width, masked by the intervals. Where the runs of a tile's queries lie too far apart, the tile is split; there
are at most N / TILE + L / SPREAD tiles for L keys, however the buckets turn out. A pair that an earlier round found is
masked too: every key counts once, and the rounds together are one softmax over the union.

Rounds come first in all shapes here: [R, B, H, N].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import UnsupportedModeError
from ..common.derivatives import one_at_a_time
from ..common.numerics import LN_2, LOWEST
from ..common.tracing import has_values, is_mapped, is_watched
from .types import Found, Lists, LshCall

TILE = 32  # queries computed together
SPREAD = 48  # how far the runs of one tile may lie apart
ROWS = 8192  # queries hashed, and at least computed on one head after the other round by round, at a time
CHUNK = 1 << 20  # pairs computed at a time: many enough that starting an operation does not count


def unsupported(call: LshCall) -> str | None:
    """PyTorch's operations can compute every call."""
    return None


def run(call: LshCall) -> tuple[Tensor, Tensor, Lists | None]:
    """Return the output [B, H, N, Dv], the log of its weights [B, H, N], and the lists of keys, None for one token."""
    if call.found is not None:
        return *_with_self(call, *_attend_found(call, call.found)), None
    key, value, key_code, lists = call.earlier or (call.key, call.value, call.key_code, None)
    if lists is None:
        lists = sort_keys(key_code, call.num_buckets, call.span)
    runs = find_runs(lists, call.query_code, call.span, call.behind, call.ahead)
    output, log_sum = run_attention(
        call.query, key, value, call.scaling, lists, runs, key_code, call.behind + call.ahead,
        call.query_code if call.shared else None,
    )  # fmt: skip
    return *_with_self(call, output, log_sum), lists


def _attend_found(call: LshCall, found: Found) -> tuple[Tensor, Tensor]:
    """Return the output of one query, and its log denominator."""
    hidden = found.hidden
    scores = (call.query @ found.key.mT * call.scaling).masked_fill(hidden[:, :, None], LOWEST)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum[..., None]).exp().masked_fill(hidden[:, :, None], 0.0)
    return weights @ found.value, log_sum.masked_fill(hidden.all(-1)[..., None], LOWEST)


def _with_self(call: LshCall, output: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Let each query see its own key: always, or if `shared` where it saw nothing else."""
    groups = call.query.shape[1] // call.key.shape[1]
    query, output, log_sum = (x.unflatten(1, (-1, groups)) for x in (call.query, output, log_sum))
    key, value = (x[:, :, None] for x in (call.key, call.value))
    if call.shared:
        output = torch.where((log_sum == LOWEST)[..., None], value, output)
        return output.flatten(1, 2), log_sum.flatten(1, 2)
    seen = (call.query_bucket.unflatten(2, (-1, groups)) == call.key_bucket[:, :, :, None]).any(0)
    score = ((query * key).sum(-1) * call.scaling).masked_fill(seen, LOWEST)
    share = torch.sigmoid(score - log_sum)[..., None]  # of the query's own key in the joint denominator
    output = torch.lerp(output, value.expand_as(output), share)
    return output.flatten(1, 2), torch.logaddexp(score, log_sum).flatten(1, 2)


class Runs(NamedTuple):
    """The run of keys of each query, all [R, B, H, N].

    order: the queries sorted by code. start: where in the list of keys their runs begin, in this order.
    low, high: the smallest and the largest code in the run of each query as it stands; low > high in an empty one.
    """

    order: Tensor
    start: Tensor
    low: Tensor
    high: Tensor


def hash_buckets(x: Tensor, rotations: Tensor, num_buckets: int | Tensor) -> Tensor:
    """Return the buckets argmax [x R_r, -x R_r]: int64 [R, B, H, N], without gradient.

    Args:
        x: [B, H, N, D]. rotations: [R, D, half the largest number of buckets].
        num_buckets: 1 or even; `rotations` is read up to its half. A tensor [B, 1, N] sets it for every position.
    """
    half = num_buckets // 2
    if isinstance(half, Tensor):
        half = half.expand(x.shape[:3]).reshape(-1, 1, 1)
    buckets = []
    with torch.no_grad():
        joined = rotations.transpose(0, 1).flatten(1)
        for begin in range(0, x.shape[:3].numel(), ROWS):
            rows = slice(begin, begin + ROWS)
            rotated = (x.reshape(-1, x.shape[-1])[rows] @ joined).unflatten(-1, rotations.shape[::2])
            if isinstance(half, Tensor):
                unused = torch.arange(rotated.shape[-1], device=x.device) >= half[rows]
                rotated.masked_fill_(unused, 0.0)
                buckets.append(_signed_argmax(rotated, half[rows, 0]))
            else:
                buckets.append(_signed_argmax(rotated[..., :half].contiguous(), half))
    return torch.cat(buckets).T.contiguous().view(-1, *x.shape[:3])


def _signed_argmax(x: Tensor, half: int | Tensor) -> Tensor:
    """Return argmax [x, -x] [N, R] of x [N, R, columns], where -x counts from `half` on; overwrites x.

    The number of the column takes the place of the last bits of x, which decide nothing but ties, so that plain
    maxima find it: several times faster on a CPU than argmax.
    """
    columns = x.shape[-1]
    if not columns:
        return torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)
    tag = (1 << (columns - 1).bit_length()) - 1
    bits.bitwise_and_(~tag).bitwise_or_(torch.arange(columns, dtype=bits.dtype, device=x.device))
    top, bottom = x.amax(-1), x.amin(-1)
    negative = -bottom > top
    best = torch.where(negative, bottom, top).view(bits.dtype).bitwise_and_(tag)
    return best.long() + half * negative


def sort_keys(code: Tensor, num_buckets: int, span: int) -> Lists:
    """Sort keys by their codes [R, B, Hkv, L]; those of buckets beyond `num_buckets` stand behind the last bound."""
    ordered, member = code.sort(dim=-1)
    edges = torch.arange(num_buckets + 1, device=code.device) * span
    bounds = torch.searchsorted(ordered, edges.expand(*code.shape[:3], -1).contiguous())
    return Lists(ordered, member, bounds)


def find_runs(lists: Lists, code: Tensor, span: int, behind: int, ahead: int) -> Runs:
    """Return the runs of queries with these codes [R, B, H, N].

    A run has the last `behind` keys of the query's bucket up to its own position and the first `ahead` after it.
    """
    groups = code.shape[2] // lists.code.shape[2]
    keys, bounds = (x.repeat_interleave(groups, 2) for x in (lists.code, lists.bounds))
    ordered, order = code.sort(dim=-1)
    bucket = ordered // span
    here = torch.searchsorted(keys, ordered, right=True)
    start = torch.maximum(here - behind, bounds.gather(-1, bucket))
    stop = torch.minimum(here + ahead, bounds.gather(-1, bucket + 1))
    empty = start >= stop
    low = keys.gather(-1, start.clamp(max=keys.shape[-1] - 1)).masked_fill_(empty, 1)
    high = keys.gather(-1, (stop - 1).clamp_(min=0)).masked_fill_(empty, 0)
    return Runs(order, start, *(torch.empty_like(x).scatter_(-1, order, x) for x in (low, high)))


def run_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, lists: Lists, runs: Runs, key_code: Tensor,
    longest: int, own_code: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return softmax attention over the union of the rounds' runs, and the logarithm of its denominator.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, M, D]. value: [B, Hkv, M, Dv]; H is a multiple of Hkv.
        lists, runs: the keys by round and which of them a query sees, at most `longest` in a round.
        key_code: [R, B, Hkv, M], codes of all keys in all rounds, also where a round does not list them.
        own_code: [R, B, H, N], codes of the queries, if none may see the key at its own position.

    Returns:
        output [B, H, N, Dv], zero for a query without keys; log denominator [B, H, N], `LOWEST` for such a query.
    """
    tiles = _make_tiles(lists, runs, key_code, own_code, longest)
    flat = (x.reshape(-1, x.shape[-1]) for x in (query, key, value))
    attend: Callable[..., Any] = _attend_runs if is_watched() else _RunAttention.apply
    output, log_sum = attend(*flat, scaling, tiles)
    return output.view(*query.shape[:3], value.shape[3]), log_sum.view(query.shape[:3])


class _Tiles(NamedTuple):
    """Where the tiles lie. A query is a number below Q = B H N, and Q stands for none; a key is below B Hkv M."""

    ends: list[list[int]]  # [R, B H + 1], the tile with which each head of each round begins, and the last one ends
    first: Tensor  # [tiles + 1], where in `queries` each tile begins
    queries: Tensor  # [R Q], by round, head and code
    start: Tensor  # [tiles], where in the keys of its round its run begins
    keys: Tensor  # [R, B Hkv, L], by round, head and code
    groups: int  # query heads of a key/value head
    low: Tensor  # [R, Q + 1]
    high: Tensor  # [R, Q + 1]
    code: Tensor  # [R, B Hkv M]
    own: Tensor | None  # [R, Q + 1]
    width: int  # keys of a tile

    def chunks(self, *of_keys: Tensor) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Yield (queries [t, TILE], visible [t, TILE, width], windows) for a few tiles at a time.

        windows: [t, width, ...] of each of the tensors `of_keys` [B Hkv M, ...]. They are brought into the order of
        the list first: then what tiles read lies in a row. All rounds of some heads come before the next heads, so
        that keys and outputs stay in the cache.
        """
        size = max(1, CHUNK // (TILE * self.width))
        steps = torch.arange(max(TILE, self.width), device=self.first.device)
        heads = len(self.ends[0]) - 1
        group = max(1, ROWS * heads // self.low.shape[1])
        for head in range(0, heads, group):
            last = min(head + group, heads)
            shared = slice(head // self.groups, (last - 1) // self.groups + 1)
            for number, ends in enumerate(self.ends):
                listed = self.keys[number, shared].flatten()
                codes, others = ([pick(x, listed) for x in several] for several in (self.code[: number + 1], of_keys))
                begin, end = ends[head], ends[last]
                for left in range(begin, end, size):
                    right = min(left + size, end)
                    place = self.first[left:right, None] + steps[:TILE]
                    beyond = place >= self.first[left + 1 : right + 1, None]
                    queries = pick(self.queries, place.clamp_(max=len(self.queries) - 1))
                    queries.masked_fill_(beyond, self.low.shape[1] - 1)
                    run = self.start[left:right, None] - shared.start * self.keys.shape[2] + steps[: self.width]
                    visible = self._visible(queries, [pick(x, run) for x in codes])
                    yield queries, visible, [pick(x, run) for x in others]

    def _visible(self, queries: Tensor, codes: list[Tensor]) -> Tensor:
        """Return 0 where this round is the first to find the key, -1 elsewhere; it is the last of those in `codes`.

        Intervals are intersected by the minimum and united by the maximum of how deep a code lies inside them: on a
        CPU that is several times faster than combining comparisons.
        """
        number = len(codes) - 1
        depth = self._depth(number, queries, codes[number])
        if self.own is not None:
            distance = pick(self.own[number], queries)[:, :, None] - codes[number][:, None]
            depth = torch.minimum(depth, distance.abs_().sub_(1), out=depth)
        found: Any = None
        for earlier in range(number):
            other = self._depth(earlier, queries, codes[earlier])
            found = other if found is None else torch.maximum(found, other, out=found)
        if found is not None:
            depth = torch.minimum(depth, found.add_(1).neg_(), out=depth)
        return depth.clamp_(-1, 0)

    def _depth(self, number: int, queries: Tensor, code: Tensor) -> Tensor:
        above = code[:, None] - pick(self.low[number], queries)[:, :, None]
        return torch.minimum(above, pick(self.high[number], queries)[:, :, None] - code[:, None], out=above)


def _make_tiles(lists: Lists, runs: Runs, key_code: Tensor, own_code: Tensor | None, longest: int) -> _Tiles:
    if torch.compiler.is_exporting() or is_mapped(key_code):
        raise UnsupportedModeError(
            "lsh lists keys by the buckets that their values fall into, which torch.func.vmap cannot map over and"
            " torch.export cannot record; give it one batch, run it eagerly, or use another mechanism"
        )
    if not has_values(key_code):
        raise UnsupportedModeError(
            "lsh lists keys by the buckets that their values fall into, and they have none on the device 'meta' or"
            " under FakeTensorMode; give it heads in memory, or use another mechanism"
        )
    rounds, batch, heads, length = runs.start.shape
    kv_heads, listed, num_keys = *lists.code.shape[2:], key_code.shape[3]
    device = key_code.device
    rank = torch.arange(length, device=device)
    part = (runs.start - runs.start[..., rank // TILE * TILE]) // SPREAD
    begins = F.pad(part[..., 1:] != part[..., :-1], (1, 0), value=True) | (rank % TILE == 0)
    first = begins.flatten().nonzero().flatten()
    row = torch.div(first, length, rounding_mode="floor")
    kv_row = row % (batch * heads) // (heads // kv_heads)
    width = min(longest + SPREAD, listed)
    # a run of keys that would reach behind the end begins earlier: the intervals hide what it does not need
    start = runs.start.flatten()[first].clamp(max=listed - width) + kv_row * listed
    queries = runs.order + (torch.arange(batch * heads, device=device) * length).view(batch, heads, 1)
    keys = lists.member + (torch.arange(batch * kv_heads, device=device) * num_keys).view(batch, kv_heads, 1)
    largest = int(max(lists.code[..., -1].max(), key_code.max()))
    # half the memory where codes and their differences fit
    kind = torch.int32 if largest < 2**30 else torch.int64
    ends = begins.flatten(0, 2).sum(-1).cumsum(0).tolist()
    padded = lambda x, fill: F.pad(x.flatten(1), (0, 1), value=fill).to(kind)  # noqa: E731
    return _Tiles(
        [[0, *ends][row * batch * heads : (row + 1) * batch * heads + 1] for row in range(rounds)],
        F.pad(first, (0, 1), value=begins.numel()),
        queries.flatten(),
        start,
        keys.flatten(1, 2),
        heads // kv_heads,
        padded(runs.low, 1),
        padded(runs.high, 0),
        key_code.flatten(1).to(kind),
        None if own_code is None else padded(own_code, 0),
        width,
    )


class _RunAttention(torch.autograd.Function):
    """The attention itself, query [Q, D], key and value [B Hkv M, D]: keeps no pair for the backward pass.

    Its gradients are made of what is known to the graph, so they have derivatives; a graph of these keeps the pairs.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, tiles: _Tiles
    ) -> tuple[Tensor, Tensor]:
        output, log_sum = _attend_runs(query, key, value, scaling, tiles)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.scaling, ctx.tiles = scaling, tiles
        return output, log_sum

    @staticmethod
    @one_at_a_time
    def backward(ctx: Any, output_grad: Tensor, log_sum_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum = ctx.saved_tensors
        query_grad, key_grad, value_grad = (torch.zeros_like(x) for x in (F.pad(query, (0, 0, 0, 1)), key, value))
        offset = F.pad((output_grad * output).sum(-1) - log_sum_grad, (0, 1))
        output_grad = F.pad(output_grad, (0, 0, 0, 1))
        log_sum = F.pad(log_sum.clamp(min=LOWEST / 2) / LN_2, (0, 1))  # as in forward: no weight where there is no key
        number = torch.arange(len(key), device=key.device)
        for queries, visible, (keys, values, places) in ctx.tiles.chunks(key, value, number):
            scores = _scores(query, ctx.scaling, queries, keys, visible)
            weights = scores.sub_(pick(log_sum, queries)[..., None]).exp2_()
            upper = pick(output_grad, queries)
            value_grad.index_add_(0, places.flatten(), (weights.mT @ upper).flatten(0, 1))
            slope = weights * (upper @ values.mT - pick(offset, queries)[..., None]) * ctx.scaling
            query_grad.index_add_(0, queries.flatten(), (slope @ keys).flatten(0, 1))
            upper = pick(query, queries.clamp(max=len(query) - 1))
            key_grad.index_add_(0, places.flatten(), (slope.mT @ upper).flatten(0, 1))
        return query_grad[:-1], key_grad, value_grad, None, None


def _attend_runs(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, tiles: _Tiles
) -> tuple[Tensor, Tensor]:
    """Return the output [Q, Dv] and the log of its weights [Q]."""
    count = len(query)
    top = query.new_full((count + 1,), LOWEST / 2)
    total = query.new_zeros(count + 1)
    output = query.new_zeros(count + 1, value.shape[1])
    for queries, visible, (keys, values) in tiles.chunks(key, value):
        scores = _scores(query, scaling, queries, keys, visible)
        before = pick(top, queries)
        # half of LOWEST at least, so that a row without any key gets weights exp(LOWEST / 2) = 0 and not exp(0)
        after = torch.maximum(before, scores.detach().amax(-1))
        weights = scores.sub_(after[..., None]).exp2_()
        fade = (before - after).exp2_()
        summed = torch.baddbmm(pick(output, queries) * fade[..., None], weights, values)
        places = queries.flatten()
        output.index_copy_(0, places, summed.flatten(0, 1))
        total.index_copy_(0, places, (pick(total, queries) * fade + weights.sum(-1)).flatten())
        top.index_copy_(0, places, after.flatten())
    top, total, output = top[:count], total[:count], output[:count]
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    output = output / total[:, None]
    log_sum = (top * LN_2 + total.log()).masked_fill(empty, LOWEST)
    return output, log_sum


def _scores(query: Tensor, scaling: float, queries: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """Return the scaled scores [t, TILE, width] in powers of two, see `fast_exp`; LOWEST where hidden."""
    scores = (pick(query, queries.clamp(max=len(query) - 1)) * (scaling / LN_2)) @ keys.mT
    return scores.masked_fill_(visible.bool(), LOWEST)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for an index of any shape, several times faster."""
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])
