"""Exact weights inside blocks of tokens and kernel weights across them under one denominator, in linear time.

    o_i = sum_j w_ij v_j / sum_j w_ij,   w_ij = exp(s q_i . k_j)                               j in the block of i
                                                exp(g) phi(q_i) . phi(k_j) exp(-r |i - j|)     j in another block

Blocks of C tokens are cut from the start of the sequence; g is a number per query head, r one per key/value head. The
keys of a block are summed up in one product, and the sums of all blocks before it are carried from block to block.
For a query they come to one key more beside those of its own block: its score is the log of their summed weights, its
value is their mean. Read backwards, the same gives the blocks after it.

Causal attention sees completed blocks only. What a query gets depends on nothing after it, and the state has constant
size: the sums over completed blocks, and the keys and values of the open one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LOWEST, dense, fast_exp
from ..common.padding import take
from ..common.sink_logit import softmax_beside
from ..linear.interface import FeatureMap
from ..linear.torch import chunks_at_once, with_ones
from ..linear.types import LEAST_WEIGHT, LinearState


class MixedWeights(NamedTuple):
    """What decides the weight of a pair.

    block_size: C. scaling: s above. query_map sees [B, Hkv, G, N, D] and key_map [B, Hkv, N, D]; their log scales
    count. log_mix: [H], g above. decay_rate: [Hkv], r above; None is no decay. bias: [H]; inside a block it is then
    w_ij = relu(s q_i . k_j / 2 + bias)^2, and the denominator is at least the number of keys that i sees; None: as
    above. sink: [H], the score of one more key without value (`hf_linattn.ops.common.sink_logit`), not with a bias.
    """

    block_size: int
    scaling: float
    query_map: FeatureMap
    key_map: FeatureMap
    log_mix: Tensor
    decay_rate: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None


class MixedState(NamedTuple):
    """All that is remembered; constant size, float32 (float64 for float64 inputs), per key/value head.

    key, value: [B, Hkv, C, D or Dv], the open block, zero behind its last token. kv [B, Hkv, F, Dv + 1] and log_max
    [B, Hkv]: the sums over completed blocks, as in `LinearState`. length: [B], tokens read.
    """

    key: Tensor
    value: Tensor
    kv: Tensor
    log_max: Tensor
    length: Tensor


class _Rows(NamedTuple):
    """T blocks of rows that begin with a block.

    query [B, Hkv, G, T W, D], W = C but for a single token; key, value [B, Hkv, T C, D or Dv]. kept [B or 1, T C]:
    keys that other blocks see. seen [B or 1, T W]: how many keys a query sees.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kept: Tensor
    seen: Tensor


class _Far(NamedTuple):
    """Other blocks as one key: mean [B, Hkv, T, G, W, Dv], log_weight [B, Hkv, T, G, W], LOWEST for no weight."""

    mean: Tensor
    log_weight: Tensor


def causal_mixed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: MixedWeights,
    lengths: Tensor | None = None,
    state: MixedState | None = None,
    keep_state: bool = True,
) -> tuple[Tensor, MixedState | None]:
    """Return the causal attention output and the state after the last real token.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv.
        lengths: [B], real tokens at the start of each row; None if all are. Outputs behind them mean nothing.
        state: what was read before. keep_state: whether a state is needed; None else.

    Returns:
        output [B, H, N, Dv]; the state. Time O(N (F + C) Dv).
    """
    batch, kv_heads, length, _ = key.shape
    device, block_size = key.device, weights.block_size
    if state is not None and lengths is None and length == 1:
        return _one_token(query, key, value, weights, state)
    end = torch.full((batch,), length, device=device) if lengths is None else lengths.long()
    start = torch.zeros_like(end)  # position of the first token that is here
    size = block_size
    if state is None:
        size = min(block_size, length)
        query, key, value = (_to_blocks(x, size) for x in (query, key, value))
    else:
        opened = state.length % block_size
        start, end = state.length - opened, opened + end
        query, key, value = _behind_open_block(query, key, value, state, opened)
    done = end // block_size * block_size
    place = torch.arange(key.shape[2], device=device)
    rows = _Rows(query.unflatten(1, (kv_heads, -1)), key, value, place < done[:, None], start[:, None] + place + 1)
    hidden = torch.ones(size, size, dtype=torch.bool, device=device).triu(1)
    earlier = None if state is None else LinearState(state.kv, state.log_max)
    linear, parts = earlier, []
    for part, before, linear in _parts(rows, weights, size, earlier):  # noqa: B007 - the last one is kept
        parts.append(_attend(part, [before], hidden, weights, size))
    output = torch.cat(parts, dim=3).flatten(1, 2)
    if state is None:
        output = output[:, :, :length]
    else:
        output = take(output, opened[:, None] + torch.arange(length, device=device))
    if not keep_state or linear is None:
        return output, None
    key, value = (_open_block(x, done, end, block_size) for x in (key, value))
    return output, MixedState(key, value, linear.kv, linear.log_max, start + end)


def mixed_attention(
    query: Tensor, key: Tensor, value: Tensor, weights: MixedWeights, lengths: Tensor | None = None
) -> Tensor:
    """Return the bidirectional attention output [B, H, N, Dv]; arguments as in `causal_mixed_attention`.

    Blocks before and after a query are summed apart: all blocks less its own would cancel.
    """
    kv_heads, length = key.shape[1:3]
    size = min(weights.block_size, length)
    query, key, value = (_to_blocks(x, size) for x in (query, key, value))
    end = torch.full((1,), length, device=key.device) if lengths is None else lengths.long()
    kept = torch.arange(key.shape[2], device=key.device) < end[:, None]
    seen = end.clamp(min=1)[:, None].expand(kept.shape)
    rows = _Rows(query.unflatten(1, (kv_heads, -1)), key, value, kept, seen)
    turned = _Rows(*(x.flip(dim) for x, dim in zip(rows, PLACES, strict=True)))
    behind = [far for _, far, _ in _parts(turned, weights, size, None)]
    after = [torch.cat(x, dim=2).flip(2, 4).split(behind[0].mean.shape[2], 2) for x in zip(*behind, strict=True)]
    hidden = (~kept).unflatten(1, (-1, size))[:, None, :, None, None].split(behind[0].mean.shape[2], 2)
    parts = []
    for (part, before, _), unseen, *far in zip(_parts(rows, weights, size, None), hidden, *after, strict=True):
        parts.append(_attend(part, [before, _Far(*far)], unseen, weights, size))
    return torch.cat(parts, dim=3).flatten(1, 2)[:, :, :length]


PLACES = (3, 2, 2, 1, 1)  # the dimension of `_Rows` that counts tokens


def _to_blocks(x: Tensor, size: int) -> Tensor:
    """Return x [B, H, N, D] with zeros up to whole blocks."""
    missing = -x.shape[2] % size
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _behind_open_block(
    query: Tensor, key: Tensor, value: Tensor, state: MixedState, opened: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows that begin with their open block, whose queries are of no use: new tokens stand behind `opened`."""
    size, length = state.key.shape[2], key.shape[2]
    place = torch.arange(-(-(size - 1 + length) // size) * size, device=key.device)
    fresh = (place - opened[:, None]).clamp(max=length - 1)
    index = torch.where(fresh < 0, place, size + fresh)
    key, value = (take(torch.cat(pair, 2), index) for pair in ((state.key, key), (state.value, value)))
    return take(query, fresh.clamp(min=0)), key, value


def _open_block(x: Tensor, done: Tensor, end: Tensor, size: int) -> Tensor:
    """Return the tokens of x [B, Hkv, N, D] from `done` [B] to `end` [B], zeros behind them: [B, Hkv, C, D]."""
    index = done[:, None] + torch.arange(size, device=x.device)
    block = take(x, index.clamp(max=x.shape[2] - 1))
    return block.masked_fill((index >= end[:, None])[:, None, :, None], 0.0)


def _parts(
    rows: _Rows, weights: MixedWeights, size: int, state: LinearState | None
) -> Iterator[tuple[_Rows, _Far, LinearState]]:
    """Yield a few blocks at a time, what all blocks before each come to for its queries, and the state after them."""
    step = chunks_at_once(rows.query.shape[:3].numel(), rows.key.device) * size
    place = torch.arange(size, device=rows.key.device)
    # split and not sliced, so that the gradients of all parts are put together once
    for parts in zip(*(x.split(step, dim) for x, dim in zip(rows, PLACES, strict=True)), strict=True):
        part = _Rows(*parts)
        sums, logs, state = _fold(part.key, part.value, part.kept, weights, size, state)
        yield part, _read(part.query, sums, logs, place[None], weights), state


def _fold(
    key: Tensor, value: Tensor, kept: Tensor, weights: MixedWeights, size: int, state: LinearState | None
) -> tuple[Tensor, Tensor, LinearState]:
    """Sum up T blocks: what stood in the state before each [B, Hkv, T, F, Dv + 1], its log factor, the next state."""
    features, log_scale = weights.key_map(dense(key))
    features = features.masked_fill(~kept[:, None, :, None], 0.0).unflatten(2, (-1, size))
    value = with_ones(value).unflatten(2, (-1, size))
    rate = weights.decay_rate
    if log_scale is None and rate is not None:
        log_scale = key.new_zeros(key.shape[:3])
    state = LinearState.empty(features, value, log_scale is not None) if state is None else state
    blocks, logs, left = features.shape[2], [state.log_max], None
    if log_scale is None:
        logs *= blocks + 1
    else:
        log_scale = log_scale.masked_fill(~kept[:, None], LOWEST).unflatten(2, (-1, size))
        passed = log_scale.new_zeros(1, 1, blocks)
        if rate is not None:  # as seen from the first token behind the block
            log_scale = log_scale - rate[:, None, None] * torch.arange(size, 0, -1, device=key.device)
            passed = -(rate * size)[:, None] * kept[:, None, ::size]
        largest = log_scale.detach().amax(-1).clamp(min=LOWEST / 2)
        for own, lost in zip(largest.unbind(2), passed.detach().unbind(2), strict=True):
            logs.append(torch.maximum(own, logs[-1] + lost))
        before, after = torch.stack(logs[:-1], dim=2), torch.stack(logs[1:], dim=2)
        left = fast_exp(before + passed - after)[..., None, None].unbind(2)
        value = value * fast_exp(log_scale - after[..., None])[..., None]
    sums = [state.kv]
    if blocks == 1 and features.requires_grad:  # which no query reads: a gradient of zero is one for all that
        sums = [state.kv + features[..., :0].sum()]
    for block, added in enumerate((features.mT @ value).unbind(2)):
        sums.append(added + (sums[-1] if left is None else sums[-1] * left[block]))
    return torch.stack(sums[:-1], dim=2), torch.stack(logs[:-1], dim=2), LinearState(sums[-1], logs[-1])


def _read(query: Tensor, sums: Tensor, logs: Tensor, place: Tensor, weights: MixedWeights) -> _Far:
    """Return what sums [B, Hkv, T, F, Dv + 1] come to for query [B, Hkv, G, T W, D] at `place` [B or 1, W] in a block.

    Weights that all but vanished, or came out negative by rounding, are none: their mean would be noise.
    """
    features, query_log = weights.query_map(dense(query))
    features = _in_blocks(features, sums.shape[2])
    shape = features.shape[3:5]
    total, weight = (features.flatten(3, 4) @ sums).unflatten(3, shape).split([sums.shape[-1] - 1, 1], -1)
    some = weight >= LEAST_WEIGHT[weight.dtype]
    weight = torch.where(some, weight, 1.0)
    log_weight = weight[..., 0].log() + logs[..., None, None] + weights.log_mix.view(-1, 1, shape[0], 1)
    if query_log is not None:
        log_weight = log_weight + _in_blocks(query_log[..., None], sums.shape[2])[..., 0]
    if weights.decay_rate is not None:
        log_weight = log_weight - weights.decay_rate.view(-1, 1, 1, 1) * place[:, None, None, None]
    return _Far(total / weight, log_weight.masked_fill(~some[..., 0], LOWEST))


def _attend(part: _Rows, far: list[_Far], hidden: Tensor, weights: MixedWeights, size: int) -> Tensor:
    """Return the output [B, H, G, T W, Dv] of T blocks; `hidden`: keys of its own block that a query does not see."""
    key, value = (x.unflatten(2, (-1, size)) for x in (part.key, part.value))
    query = _in_blocks(part.query, key.shape[2])
    scores = (query.flatten(3, 4) @ key.mT).unflatten(3, query.shape[3:5]) * weights.scaling
    scores = scores.masked_fill(hidden, LOWEST)
    if weights.bias is None:
        sink = None if weights.sink is None else weights.sink.view(key.shape[1], 1, -1, 1, 1)
        output = _softmax(scores, value, far, sink)
    else:
        bias = weights.bias.view(key.shape[1], 1, -1, 1, 1)
        output = _squares(scores / 2 + bias, value, far, part.seen.unflatten(1, (key.shape[2], -1)))
    return output.transpose(2, 3).flatten(3, 4)


def _softmax(scores: Tensor, value: Tensor, far: list[_Far], sink: Tensor | None) -> Tensor:
    """Return one softmax [B, Hkv, T, G, W, Dv] over the scores [..., W, C], those of the other blocks and the sink."""
    own = scores.shape[-1]
    shares = softmax_beside(torch.cat([scores, *(x.log_weight[..., None] for x in far)], dim=-1), sink)
    output = (shares[..., :own].flatten(3, 4) @ value).unflatten(3, scores.shape[3:5])
    for number, (mean, _) in enumerate(far):
        output = torch.addcmul(output, shares[..., own + number, None], mean)
    return output


def _squares(roots: Tensor, value: Tensor, far: list[_Far], seen: Tensor) -> Tensor:
    """Return the sum over keys of weight times value, over the number of keys or the weight, whichever is larger.

    roots [B, Hkv, T, G, W, C]: relu(roots)^2 are the weights of a block's own keys. seen: [B or 1, T, W].
    """
    own = F.relu(roots).square()
    count = seen.to(own.dtype)[:, None, :, None]
    top = count.log().expand(own.shape[:-1])
    for _, log_weight in far:  # kernel weights may be beyond what a float can hold
        top = torch.maximum(top, log_weight.detach())
    least = fast_exp(-top)
    output = (own.flatten(3, 4) @ value).unflatten(3, own.shape[3:5]) * least[..., None]
    weight = own.sum(-1) * least
    for mean, log_weight in far:
        share = fast_exp(log_weight - top)
        output, weight = torch.addcmul(output, share[..., None], mean), weight + share
    return output / torch.maximum(count * least, weight)[..., None]


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, weights: MixedWeights, state: MixedState
) -> tuple[Tensor, MixedState]:
    """One token of each row, as in decoding: it is put into its open block, which may be complete with it."""
    size, opened = weights.block_size, state.length % weights.block_size
    place = torch.arange(size, device=key.device)
    here = (place == opened[:, None])[:, None, :, None]
    key, value = torch.where(here, key, state.key), torch.where(here, value, state.value)
    query = query.unflatten(1, (key.shape[1], -1))
    far = _read(query, state.kv[:, :, None], state.log_max[:, :, None], opened[:, None], weights)
    hidden = (place > opened[:, None])[:, None, None, None, None]
    rows = _Rows(query, key, value, ~here[:, 0, :, 0], state.length[:, None] + 1)
    output = _attend(rows, [far], hidden, weights, size).flatten(1, 2)
    complete, linear = opened == size - 1, LinearState(state.kv, state.log_max)
    if bool(complete.any()):
        _, _, linear = _fold(key, value, complete[:, None].expand(-1, size), weights, size, linear)
        key, value = (x.masked_fill(complete[:, None, None, None], 0.0) for x in (key, value))
    return output, MixedState(key, value, *linear, state.length + 1)


def _in_blocks(x: Tensor, blocks: int) -> Tensor:
    """[B, Hkv, G, T W, D] -> [B, Hkv, T, G, W, D]."""
    return x.unflatten(3, (blocks, -1)).transpose(2, 3)
