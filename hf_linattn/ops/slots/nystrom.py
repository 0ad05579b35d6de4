"""Nystrom attention: every query reads m landmarks, and every landmark reads every key.

Landmarks are the mean queries and mean keys of segments. With A = softmax(s Lq Lk^T) [m, m] and B = softmax(s Lq K^T)
[m, N], landmark r hands on row r of pinv(A) B V, so that a query that equals a landmark gets exact attention.

Causal: blocks of C tokens see themselves exactly and the T tokens of the completed blocks through landmarks. The
segments floor(j / u) have u(T) tokens, the smallest power of two for which m of them hold T tokens. Completed segments
are landmarks, A and B are those of the T' = floor(T / u) u tokens in them. The one segment that is open (if u > C) is
a slot with its mean key and its mean value. A slot of c tokens weighs exp(s q . key) c; slots and block share one
softmax. Landmarks, A and B change only where T' does, old landmarks then read what is new and new ones read everything
once: that is O(N m) in all, as half of m are new when u doubles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.grad_accumulator import GradAccumulator
from ..common.numerics import LOWEST, bounded
from ..common.padding import take
from .segment_pool import Summary, find_runs, open_segments, segment_size

SCORES = {"cpu": 2**18}  # at a time: large enough for the products, small enough for the cache
MANY_SCORES = 2**26  # on other devices


class Rule(NamedTuple):
    """num_landmarks: m. num_iterations: steps of `pseudo_inverse`. scaling: what q . k is multiplied by.
    block_size: C, a power of two."""

    num_landmarks: int
    num_iterations: int
    scaling: float
    block_size: int


def pseudo_inverse(matrix: Tensor, num_iterations: int) -> Tensor:
    """Return the iterate Z of Razavi et al. (2014) for the pseudo-inverse of A: [..., m, m].

    Z <- Z (13 - AZ (15 - AZ (7 - AZ))) / 4 from Z = A^T / |A|_1, one norm for each matrix. Rows of A are not negative
    and add up to one (|A|_inf = 1), or are zero, which gives zero columns in Z.
    """
    norm = matrix.sum(-2).amax(-1)[..., None, None]
    inverse = matrix.mT / torch.where(norm > 0, norm, 1.0)
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(num_iterations):
        x = matrix @ inverse
        inverse = inverse @ (13 * one - x @ (15 * one - x @ (7 * one - x))) / 4
    return inverse


def at_once(scores: int, device: torch.device) -> int:
    """Return how many items of `scores` scores each are worked on at a time."""
    return max(SCORES.get(device.type, MANY_SCORES) // scores, 1)


class Slots(NamedTuple):
    """What is known of the completed blocks, in m slots. Of each segment of u tokens, zero where there is none:

    mean_query [B, H, m, D], mean_key [B, Hkv, m, D], mean_value [B, Hkv, m, Dv]; tokens [B, m], how many it holds.
    Of each landmark: read [B, H, m, Dv], its row of B V, and log_sum [B, H, m], the log denominator of that row.
    value [B, H, m, Dv]: what queries read: of landmarks pinv(A) B V, of open segments and single tokens the mean.
    """

    mean_query: Tensor
    mean_key: Tensor
    mean_value: Tensor
    tokens: Tensor
    log_sum: Tensor
    read: Tensor
    value: Tensor


class NystromState(NamedTuple):
    """The slots; past_key, past_value [B, Hkv, P, .], the tokens of all completed blocks, as landmarks to come read
    them; query [B, H, C, D], key, value [B, Hkv, C, .]: the block not completed yet; recent [B, Hkv, K - 1, Dv], the
    last values, for a convolution of K taps; length [B]: tokens read. float32 (float64 for float64 inputs)."""

    mean_query: Tensor
    mean_key: Tensor
    mean_value: Tensor
    tokens: Tensor
    log_sum: Tensor
    read: Tensor
    slot_value: Tensor
    past_key: Tensor
    past_value: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    recent: Tensor
    length: Tensor


def causal_nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    lengths: Tensor | None = None,
    state: NystromState | None = None,
    keep_state: bool = True,
) -> tuple[Tensor, NystromState | None]:
    """Return the causal attention output [B, H, N, Dv], and the state after the last token, `recent` left as it was.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv.
        lengths: [B], real tokens of each row; None if all are. state: what was read before.
        keep_state: whether rows that begin need a state; None else.
    """
    query, key = (bounded(x) if x.shape[2] > 1 else x for x in (query, key))  # a single token has none to come
    if state is not None:
        return _continue(query, key, value, rule, lengths, state)
    output = _whole_rows(query, key, value, rule)
    return output, _state_after(query, key, value, rule, lengths) if keep_state else None


class _Run(NamedTuple):
    """What the M blocks of a run, before which u is the same, see of the past.

    key [B, Hkv, S, D], value [B, Hkv, E, G, S, Dv]: S landmarks as they are at E times. time [M]: which of them is
    that of a block. bias [M, S]: log u, LOWEST for landmarks to come. opened: key and value [B, Hkv, M, .] of the open
    segment before each block, and the log of its tokens [M]; None where blocks are as long as segments or longer.
    """

    key: Tensor
    value: Tensor
    time: Tensor
    bias: Tensor
    opened: tuple[Tensor, Tensor, Tensor] | None


def _whole_rows(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Attention of rows that begin: all blocks with one u at a time, in pieces that fit the cache."""
    batch, heads, length, _ = query.shape
    size = min(rule.block_size, length)
    count = -(-length // size)
    if missing := count * size - length:
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    sources = [GradAccumulator(x) for x in (query, key, value)]
    query, key, value = (x.whole for x in sources)
    # [B, Hkv, M, G C, D]: the queries of a group stand together in each block, beside their one block of keys
    rows = query.unflatten(1, (key.shape[1], -1)).unflatten(3, (count, size)).transpose(2, 3).flatten(3, 4)
    blocks = (rows, *(x.unflatten(2, (count, size)) for x in (key, value)))
    runs = list(find_runs(count, size, rule.num_landmarks))
    step = at_once(batch * heads * size * (rule.num_landmarks + size), key.device)
    outputs = []
    # split and not sliced, so that the gradients of all parts are put together once
    for place, *parts in zip(runs, *(x.split([b - a for a, b, _ in runs], 2) for x in blocks), strict=True):
        run = _run([x.narrow(2, 0, place[1] * size) for x in sources], place, size, rule)
        for number, part in enumerate(zip(*(x.split(step, 2) for x in parts), strict=True)):
            outputs.append(_read_blocks(run, number * step, rule.scaling, *part))
    joined = torch.cat(outputs, 2).transpose(2, 3)
    return joined.reshape(batch, heads, count * size, -1)[:, :, :length]


def _run(heads: list[Tensor], place: tuple[int, int, int], size: int, rule: Rule) -> _Run:
    """Sum up what the blocks of a run see of the past: query, key and value from the start of the rows to its end."""
    query, key, value = heads
    first, last, unit = place
    device, done = key.device, torch.arange(first, last, device=key.device) * size
    full = (last - 1) * size // unit * unit  # tokens in the landmarks that the last block sees
    opened = None
    if unit > size:
        zero = key.new_zeros(len(key) * key.shape[1], key.shape[2])
        tokens = Summary(key.flatten(0, 1), value.flatten(0, 1), zero, zero)
        open_key, open_value = open_segments(tokens, first, last, unit // size, size)
        opened = (*(x.unflatten(0, key.shape[:2]) for x in (open_key, open_value)), _logs(done % unit, key))
    count = full // unit
    starts = torch.arange(count, device=device) * unit
    bias = key.new_full((len(done), count), math.log(unit)).masked_fill(starts >= done[:, None] // unit * unit, LOWEST)
    slot_key = _means(key[:, :, :full], unit)
    if unit == 1 or not count:
        return _Run(slot_key, value[:, :, None, None, :count], torch.zeros_like(done), bias, opened)
    step, begin = max(unit, size), first * size // unit * unit
    ends = torch.arange(begin, full + 1, step, device=device)[:, None]
    slot_query = _means(query[:, :, :full], unit).unflatten(1, (key.shape[1], -1))
    log_sums, outputs = _read(slot_query.flatten(2, 3), key[:, :, :full], value[:, :, :full], step, rule.scaling)
    # of the pieces of `step` tokens that landmarks read [B, Hkv, G S, P, .], only those before each end are added up
    later = torch.arange(log_sums.shape[3], device=device) * step >= ends
    read = log_sums[..., None, :].masked_fill(later, LOWEST).softmax(-1) @ outputs
    read = read.unflatten(2, slot_query.shape[2:4]).movedim(4, 2)  # [B, Hkv, E, G, S, Dv]
    absent, values, some = (starts >= ends)[:, None], [], -(-len(ends) // 4)
    for at in (slice(x, x + some) for x in range(0, len(ends), some)):  # in parts, as early times have fewer landmarks
        seen = max(min(begin + (at.stop - 1) * step, full) // unit, 1)
        q, k = slot_query[:, :, None, :, :seen], slot_key[:, :, None, :seen]
        solved = _solve(rule, q, k, read[:, :, at, :, :seen], absent[at, :, :seen])
        values.append(F.pad(solved, (0, 0, 0, count - seen)))
    return _Run(slot_key, torch.cat(values, 2), (done // unit * unit - begin) // step, bias, opened)


def _logs(tokens: Tensor, like: Tensor) -> Tensor:
    """Return log tokens, LOWEST where there are none."""
    return tokens.clamp(min=1).to(like.dtype).log().masked_fill(tokens == 0, LOWEST)


def _means(x: Tensor, unit: int) -> Tensor:
    """Return the means [B, H, S, D] of every `unit` tokens."""
    return x if unit == 1 else x.unflatten(2, (x.shape[2] // unit, unit)).mean(3)


def _read(query: Tensor, key: Tensor, value: Tensor, size: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Return log denominators [B, Hkv, R, P] and outputs [B, Hkv, R, P, Dv] of attention of query [B, Hkv, R, D] to
    every `size` tokens alone."""
    log_sums, outputs = [], []
    step = at_once(math.prod(query.shape[:3]) * size, key.device)
    query = query[:, :, None] * scaling
    for k, v in zip(*(x.unflatten(2, (-1, size)).split(step, 2) for x in (key, value)), strict=True):
        scores = query @ k.mT
        top = scores.detach().amax(-1, keepdim=True)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        outputs.append(weights @ v / total)
        log_sums.append((top + total.log())[..., 0])
    return torch.cat(log_sums, 2).transpose(2, 3), torch.cat(outputs, 2).transpose(2, 3)


def _solve(rule: Rule, query: Tensor, key: Tensor, read: Tensor, absent: Tensor | None = None) -> Tensor:
    """Return pinv(A) B V from the landmarks [..., Hkv, G, S, D] and [..., Hkv, S, D] and from B V [..., G, S, Dv].

    absent: [..., 1, S], landmarks that do not count; None if all do.
    """
    scores = (query.flatten(-3, -2) @ key.mT * rule.scaling).unflatten(-2, query.shape[-3:-1])
    if absent is None:
        return pseudo_inverse(scores.softmax(-1), rule.num_iterations) @ read
    among = scores.masked_fill(absent[..., None, :], LOWEST).softmax(-1).masked_fill(absent[..., None], 0.0)
    return pseudo_inverse(among, rule.num_iterations) @ read


def _read_blocks(run: _Run, start: int, scaling: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention [B, Hkv, M, G, C, Dv] of the blocks of a run from `start` on: query [B, Hkv, M, G C, D], key and value
    [B, Hkv, M, C, .]."""
    count, size = key.shape[2:4]
    groups, here = query.shape[3] // size, slice(start, start + count)
    seen = run.key.shape[2]
    past = (query.flatten(2, 3) @ run.key.mT * scaling).unflatten(2, (count, -1)) + run.bias[here, None]
    future = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1).repeat(groups, 1)
    scores = [past, (query @ key.mT * scaling).masked_fill(future, LOWEST)]
    if run.opened is not None:
        scores.append(query @ run.opened[0][:, :, here, :, None] * scaling + run.opened[2][here, None, None])
    weights = torch.cat(scores, -1).softmax(-1)
    output = weights[..., seen : seen + size] @ value
    if run.opened is not None:
        output = output + weights[..., -1:] * run.opened[1][:, :, here, None]
    shape = groups, size
    of_heads = weights[..., :seen].unflatten(3, shape) @ run.value.index_select(2, run.time[here])
    return output.unflatten(3, shape) + of_heads


def _state_after(query: Tensor, key: Tensor, value: Tensor, rule: Rule, lengths: Tensor | None) -> NystromState:
    """Return the state of rows that began and have been read to their ends."""
    batch, heads, length, _ = query.shape
    size = rule.block_size
    ends = [end // size * size for end in ([length] * batch if lengths is None else lengths.tolist())]
    lengths = torch.full((batch,), length, device=key.device) if lengths is None else lengths.to(torch.int64)
    means = [x.new_zeros(*x.shape[:2], rule.num_landmarks, x.shape[3]) for x in (query, key, value)]
    read = value.new_zeros(batch, heads, rule.num_landmarks, value.shape[3])
    slots = Slots(means[0], means[1], means[2], lengths.new_zeros(batch, rule.num_landmarks), read[..., 0], read, read)
    for done in sorted(set(ends)):
        rows = [row for row, end in enumerate(ends) if end == done]
        slots = _updated(slots, rows, 0, done, rule, query, key, value)
    start = lengths // size * size
    index = start[:, None] + torch.arange(size, device=key.device)
    opened = [_until(take(x, index.clamp(max=length - 1)), lengths - start) for x in (query, key, value)]
    past = [_until(x[:, :, : max(ends)], start) for x in (key, value)]
    recent = value.new_zeros(batch, key.shape[1], 0, value.shape[3])
    return NystromState(*slots, *[*past, *opened, recent, lengths])


def _updated(
    slots: Slots, rows: list[int], start: int, done: int, rule: Rule, query: Tensor, key: Tensor, value: Tensor
) -> Slots:
    """Take the tokens `start` to `done` of some rows into their slots.

    query: [B, H, done - start, D], those tokens alone, and what follows. key, value: [B, Hkv, done or more, .].
    """
    if len(rows) == len(key):
        return _grown(slots, start, done, rule, query, key, value)
    index = torch.tensor(rows, device=key.device)
    parts = (x.index_select(0, index) for x in (query, key, value))
    grown = _grown(Slots(*(x.index_select(0, index) for x in slots)), start, done, rule, *parts)
    return Slots(*(x.index_copy(0, index, y) for x, y in zip(slots, grown, strict=True)))


def _grown(slots: Slots, start: int, done: int, rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Slots:
    """`_updated` for all rows."""
    count, device = rule.num_landmarks, key.device
    before, unit = segment_size(start, count), segment_size(done, count)
    slot = torch.arange(count, device=device)
    begins = torch.cat([slot * before, torch.arange(start, done, device=device)])
    joins = (begins // unit == slot[:, None]).to(key.dtype)
    tokens = (done - slot * unit).clamp(0, unit)
    weight, new_weight = (x[..., None].to(key.dtype) for x in (slots.tokens[:, None], tokens.clamp(min=1)))
    news = (query[:, :, : done - start], key[:, :, start:done], value[:, :, start:done])
    means = [joins @ torch.cat([x * weight, y], 2) / new_weight for x, y in zip(slots[:3], news, strict=True)]
    old_full, full = start // before * before, done // unit * unit
    old, new = old_full // unit if unit == before > 1 else 0, full // unit if unit > 1 else 0  # landmarks
    log_sum, read, values = slots.log_sum, slots.read, slots.value[:, :, :old]
    if new > old:
        landmarks = means[0][:, :, :new]
        parts = [_summed(unit, rule, landmarks[:, :, old:], key[:, :, :full], value[:, :, :full])]
        if old:
            known, known_read = log_sum[:, :, :old], read[:, :, :old]
            unread = (x[:, :, old_full:full] for x in (key, value))
            more, more_read = _summed(unit, rule, landmarks[:, :, :old], *unread)
            share = torch.sigmoid(known - more)[..., None]
            parts.insert(0, (torch.logaddexp(known, more), torch.lerp(more_read, known_read, share)))
        log_sum, read = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        shape = key.shape[1], -1
        values = _solve(rule, landmarks.unflatten(1, shape), means[1][:, :, :new], read.unflatten(1, shape))
        values = values.flatten(1, 2)
        log_sum, read = F.pad(log_sum, (0, count - new)), F.pad(read, (0, 0, 0, count - new))
    plain = means[2].repeat_interleave(query.shape[1] // key.shape[1], 1)
    values = torch.cat([values, plain[:, :, values.shape[2] :]], 2)
    return Slots(*[*means, tokens.expand_as(slots.tokens), log_sum, read, values])


def _summed(unit: int, rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return log denominators [B, H, S] and outputs [B, H, S, Dv] of attention of query [B, H, S, D] to all keys."""
    rows = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    log_sums, means = _read(rows, key, value, max(unit, rule.block_size), rule.scaling)
    read = (log_sums.softmax(-1)[..., None, :] @ means)[..., 0, :]
    return log_sums.logsumexp(-1).reshape(query.shape[:3]), read.reshape(*query.shape[:3], -1)


def _continue(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, lengths: Tensor | None, state: NystromState
) -> tuple[Tensor, NystromState]:
    """Read on from a state, block by block: every row stands at a place of its own in its block."""
    batch, _, length, _ = query.shape
    device, size = query.device, rule.block_size
    lengths = torch.full((batch,), length, device=device) if lengths is None else lengths
    opened, place = state.length % size, torch.arange(size, device=device)
    first, done = opened, state.length - opened
    past, blocks = [state.past_key, state.past_value], [state.query, state.key, state.value]
    if grows := bool((opened + lengths >= size).any()):
        news = zip(past, blocks[1:], (key, value), strict=True)
        past = [_extended(old, block, new, done, state.length) for old, block, new in news]
    slots, outputs = Slots(*state[:7]), []
    taken = torch.zeros_like(lengths)
    width = torch.arange(min(size, length), device=device)
    for _ in range(-(-(size - 1 + length) // size)):
        fits = torch.minimum(size - opened, lengths - taken)
        token = place - opened[:, None]
        new = ((token >= 0) & (token < fits[:, None]))[:, None, :, None]
        token = (token + taken[:, None]).clamp(0, length - 1)
        blocks = [torch.where(new, _at(x, token), old) for x, old in zip((query, key, value), blocks, strict=True)]
        rows = _at(query, (taken[:, None] + width).clamp(max=length - 1))
        outputs.append(_read_slots(slots, rule.scaling, opened[:, None] + width, rows, *blocks[1:]))
        taken, opened = taken + fits, opened + fits
        full = opened == size
        ends = torch.where(full, done, -1).tolist()
        for start in sorted(set(ends) - {-1}):
            chosen = [row for row, end in enumerate(ends) if end == start]
            slots = _updated(slots, chosen, start, start + size, rule, blocks[0], *past)
        opened, done = opened.masked_fill(full, 0), done + full * size
    if grows:
        longest = int(done.max())
        past, blocks = [_until(x[:, :, :longest], done) for x in past], [_until(x, opened) for x in blocks]
    index = first[:, None] + torch.arange(length, device=device)
    number = index // size  # of the block that a token came to
    index = number * len(width) + index - torch.maximum(number * size, first[:, None])
    output = _at(torch.cat(outputs, 2), index)
    return output, NystromState(*slots, *[*past, *blocks, state.recent, state.length + lengths])


def _read_slots(slots: Slots, scaling: float, within: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of query [B, H, W, D], at the positions `within` [B, W] its block, to slots and block."""
    count, size = slots.tokens.shape[1], key.shape[2]
    rows = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3) * scaling
    future = torch.arange(size, device=query.device) > within.repeat(1, query.shape[1] // key.shape[1])[..., None]
    past = rows @ slots.mean_key.mT + _logs(slots.tokens, key)[:, None, None]
    weights = torch.cat([past, (rows @ key.mT).masked_fill(future[:, None], LOWEST)], -1).softmax(-1)
    own = (weights[..., count:] @ value).reshape(*query.shape[:3], -1)
    return own + weights[..., :count].reshape(*query.shape[:3], count) @ slots.value


def _at(x: Tensor, index: Tensor) -> Tensor:
    """`take`, of a single token itself."""
    return x if x.shape[2] == 1 else take(x, index)


def _extended(past: Tensor, block: Tensor, new: Tensor, done: Tensor, length: Tensor) -> Tensor:
    """Return past tokens [B, Hkv, P, D] with the open block from `done` [B] on and new tokens from `length` [B] on."""
    room = max(past.shape[2], int(length.max()) + max(block.shape[2], new.shape[2]))
    past = F.pad(past, (0, 0, 0, room - past.shape[2]))
    for x, start in ((block, done), (new, length)):
        index = start[:, None] + torch.arange(x.shape[2], device=x.device)
        past = past.scatter(2, index[:, None, :, None].expand_as(x), x)
    return past


def _until(x: Tensor, end: Tensor) -> Tensor:
    """x [B, Hkv, N, D], zero from `end` [B] on."""
    return x.masked_fill((torch.arange(x.shape[2], device=x.device) >= end[:, None])[:, None, :, None], 0.0)
