"""Hybrid attention from two operations: what lies beyond the window, then the window on top of it.

The far part is kernel attention of query i with keys up to i - window_size, and if bidirectional from i + window_size
on: these are read as if they stood side by side, and what the distance between them costs is added to the log of the
far weights afterwards. Window and sinks are softmax attention over blocks that begins with the far output as if it
were one more key of that weight.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..block_softmax.autograd import Before, BlockSoftmax, Keys, attend_blocks
from ..common.grad_accumulator import Source
from ..common.numerics import LOWEST, fast_exp
from ..common.precision import wide, wide_dtype, wide_number, widened
from ..common.sink_logit import attenuate
from ..common.tracing import is_watched
from ..dispatch import Operations
from ..linear.autograd import weighed_attention
from ..linear.cpu import native_maps
from ..linear.cpu_fused import join
from ..linear.interface import FeatureMap, masked, own_maps
from ..linear.torch import LinearState
from ..window.autograd import Window, attend_window
from .gate import gate_logit

BLOCK_SIZE = 64
KEPT_WINDOW = 512  # of what is kept, 3 MB at most each


class HybridWeights(NamedTuple):
    """What decides the weight of a pair, see `ops.hybrid`.

    log_mix: [H], g there, as it is stored. decay_rate: [Hkv], r there; None is no decay. query_map sees
    [B, Hkv, G, N, D] and key_map [B, Hkv, N, D]; their log scales count. window_log [H]: the exact weights of a query
    are divided by their largest and multiplied by exp(window_log); None leaves them as they are. sink: [H], the score
    of one more exact weight, of no value (`ops.common.sink_logit`). far_gate: a [H], as it is stored, where c =
    sigmoid(`gate_logit`), the `gate`, says how much of the output is that of all weights, as against that of the exact
    ones alone; None is all of it.
    """

    window_size: int
    num_sinks: int
    scaling: float
    query_map: FeatureMap
    key_map: FeatureMap
    log_mix: Tensor
    decay_rate: Tensor | None = None
    window_log: Tensor | None = None
    sink: Tensor | None = None
    far_gate: Tensor | None = None

    @property
    def gate(self) -> Tensor:
        """c [H], in [0, 1], in at least float32, where there is a `far_gate`."""
        return torch.sigmoid(gate_logit(wide(cast(Tensor, self.far_gate))))

    def gate_of(self, key: Tensor) -> Tensor | None:
        """The same [Hkv, G], for keys [B, Hkv, N, D]; None where there is no `far_gate`."""
        return None if self.far_gate is None else self.gate.view(key.shape[1], -1)

    @property
    def reach(self) -> int:
        """How far the window goes beyond the query itself, to one side."""
        return self.window_size - 1

    def beside(self, key: Tensor) -> HybridWeights:
        """These, with g in the dtype of sums over such keys."""
        return self._replace(log_mix=self.log_mix.to(wide_dtype(key)))


class HybridState(NamedTuple):
    """All that is remembered; constant size, float32 (float64 for float64 inputs), per key/value head.

    ring_key, ring_value: [B, Hkv, window_size - 1, D or Dv], the last tokens, the newest last; zero before the first.
    sink_key, sink_value: [B, Hkv, num_sinks, D or Dv]. kv [B, Hkv, F, Dv + 1] and log_max [B, Hkv]: the sums over keys
    that have left the window, as in `LinearState`. length: [B], tokens read.
    """

    ring_key: Tensor
    ring_value: Tensor
    sink_key: Tensor
    sink_value: Tensor
    kv: Tensor
    log_max: Tensor
    length: Tensor


def is_beyond(key: Tensor, weights: HybridWeights) -> bool:
    """Whether something lies beyond the window, and these are weights that operations know."""
    window, sinks = weights.window_size, weights.num_sinks
    return key.shape[2] > window + sinks and window >= sinks and weights.window_log is None


def can_let_in(blocks: BlockSoftmax, weights: HybridWeights) -> bool:
    """Whether the operation of the window joins it with what is far, as far as the gate lets that in.

    The score of a sink belongs to the window, and is taken in after it: then the gate comes last.
    """
    return weights.far_gate is None or (blocks.gates and weights.sink is None)


def step_maps(operations: Operations, key: Tensor, weights: HybridWeights, state: HybridState | None) -> list[Any]:
    """Return what makes the features of queries and of keys for `operations.hybrid_step`; nothing where it is none."""
    if operations.hybrid_step is None or state is None or key.shape[2] > 1:
        return []
    return own_maps(operations.causal_sums, weights.query_map, weights.key_map, key)


def causal_attention(
    operations: Operations, query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights
) -> tuple[Tensor, LinearState]:
    """Return the output [B, H, N, Dv] of rows that start at position 0, and the sums over all that left the window.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv].
    """
    length, window, sinks = query.shape[2], weights.window_size, weights.num_sinks
    start, sources = window + sinks, [Source(x) for x in (query.unflatten(1, (key.shape[1], -1)), key, value)]
    rows = sources[0].narrow(3, start, length - start)
    far, far_log, state = _far(operations, (rows, *(x.narrow(2, sinks, length - start) for x in sources[1:])), weights)
    leaving = (x.narrow(2, length - window, 1) for x in sources[1:])  # from the window of the token that will come
    state = _with_key(operations, weights, state, *leaving)
    if not can_let_in(operations.block_softmax, weights):
        near = beside_sink(*_near(operations, sources, weights, None, causal=True), weights)
        return gated(*near, far, far_log, weights.gate, start).flatten(1, 2), state
    before = Before(far, far_log, start, weights.gate_of(key))
    near = _near(operations, sources, weights, before, causal=True)
    return beside_sink(*near, weights)[0].flatten(1, 2), state


def bidirectional_attention(
    operations: Operations, query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights,
    lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the bidirectional output [B, H, N, Dv]; lengths: [B], real tokens at the start of each row."""
    length, window, sinks = query.shape[2], weights.window_size, weights.num_sinks
    heads = query.unflatten(1, (key.shape[1], -1)), key, value
    sources = [Source(x) for x in heads]
    first, last = (window + sinks, sinks, sinks), (0, window, window)  # of the queries, and of their far keys
    before = [x.narrow(-2, at, length - window - sinks) for x, at in zip(sources, first, strict=True)]
    after = [x.narrow(-2, at, length - window) for x, at in zip(sources, last, strict=True)]
    far, far_log, _ = _far(operations, before, weights)
    mask = None if lengths is None else torch.arange(window, length, device=key.device) < lengths[:, None]
    far_after, log_after, _ = _far(operations, after, weights, reverse=True, mask=mask)
    if weights.far_gate is not None:
        far, far_log = join(*_from_start(far, far_log, window + sinks), far_after, log_after)
        if can_let_in(operations.block_softmax, weights):
            gated_far = Before(far, far_log, 0, weights.gate_of(key))
            return _near(operations, sources, weights, gated_far, False, lengths)[0].flatten(1, 2)
        near = beside_sink(*_near(operations, sources, weights, None, False, lengths), weights)
        return gated(*near, far, far_log, weights.gate).flatten(1, 2)
    output, log = _near(operations, sources, weights, Before(far, far_log, window + sinks), False, lengths)
    return beside_sink(*join(output, log, far_after, log_after), weights)[0].flatten(1, 2)


def _from_start(far: Tensor, log: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return what queries from `start` on have, for all: those before it have no weight."""
    return F.pad(far, (0, 0, start, 0)), F.pad(log, (start, 0), value=LOWEST)


def _far(
    operations: Operations, heads: Sequence[Tensor], weights: HybridWeights, reverse: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, LinearState]:  # fmt: skip
    """Return the attention of query i to key i and all before it, or if `reverse` after it, its log, and all sums."""
    query, key, value = heads
    rate = weights.decay_rate
    maps = native_maps(weights.query_map, weights.key_map) if operations.mapped_attention else []
    decay = None if rate is None else (-rate[:, None]).expand(key.shape[:3])
    if maps:
        far, log, state = operations.mapped_attention(query, key, value, maps, mask, decay, None, reverse=reverse)
    else:
        own = own_maps(operations.causal_sums, weights.query_map, weights.key_map, key)
        query, key, value = (x.flip(-2) if reverse else x for x in (heads if own else widened(*heads)))
        mask = mask.flip(1) if reverse and mask is not None else mask
        query_map, key_map = own or (weights.query_map, weights.key_map)
        features, query_log = query_map(query)
        keys, log_scale = masked(key_map(key), mask, decay is not None)
        far, log, state = weighed_attention(operations.causal_sums, features, keys, log_scale, value, decay)
        log = log if query_log is None else log + query_log
        far, log = (far.flip(3), log.flip(3)) if reverse else (far, log)
    return far, distant(log, weights), state


def _with_key(
    operations: Operations, weights: HybridWeights, state: LinearState, key: Tensor, value: Tensor
) -> LinearState:
    """The sums over one more key [B, Hkv, 1, D]."""
    own = own_maps(operations.causal_sums, weights.query_map, weights.key_map, key)
    features, log_scale = own[1](key) if own else weights.key_map(wide(key))
    kv, log_max = state
    values = torch.cat([value, kv.new_ones(*value.shape[:3], 1)], dim=-1)
    if log_scale is not None or weights.decay_rate is not None:
        left = log_max if weights.decay_rate is None else log_max - weights.decay_rate
        own_log = kv.new_zeros(()) if log_scale is None else log_scale.squeeze(-1)
        log_max = torch.maximum(own_log.detach(), left.detach())
        kv = kv * fast_exp(left - log_max)[..., None, None]
        values = values * fast_exp(own_log - log_max)[..., None, None]
    return LinearState(torch.addcmul(kv, features.mT, values), log_max)


def remember(key: Tensor, value: Tensor, weights: HybridWeights, far_sums: LinearState) -> tuple[Tensor, ...]:
    """Return what is in the `HybridState` after whole rows [B, Hkv, N, D or Dv] whose far sums are known."""
    batch, _, length, _ = key.shape
    places = slice(length - weights.reach, length), slice(weights.num_sinks)
    # copies: views would keep all of a long prefill
    tokens = [x[:, :, place].to(wide_dtype(key), copy=True) for place in places for x in (key, value)]
    return *tokens, *far_sums, torch.full((batch,), length, device=key.device)


def _near(
    operations: Operations, sources: list[Source], weights: HybridWeights, before: Before | None, causal: bool,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention to what queries begin with, the window and the sinks, and its log."""
    query, key, value = (source.whole for source in sources)
    how: Any = {"scaling": weights.scaling, "before": before, "sources": sources}
    windows = operations.block_softmax.window
    if windows is not None and windows.suits(query, key, value):
        seen = Window(weights.window_size, weights.num_sinks, causal, lengths)
        return attend_window(windows, query, key, value, seen, **how)
    like = wide_number(query)
    parts = near_parts(key.shape[2], weights.window_size, weights.num_sinks, like, causal, lengths)
    return attend_blocks(
        operations.block_softmax, query, key, value, list(parts), block_size=BLOCK_SIZE, causal=causal, **how
    )


def distant(log: Tensor, weights: HybridWeights) -> Tensor:
    """Return the log weights [B, Hkv, G, N] of far keys with their mix, and what the distance costs."""
    rate, log = weights.decay_rate, log + weights.log_mix.view(log.shape[1], -1, 1)
    return log if rate is None else log - (rate * weights.window_size).view(-1, 1, 1)


def beside_sink(output: Tensor, log: Tensor, weights: HybridWeights) -> tuple[Tensor, Tensor]:
    """Return the output [B, Hkv, G, N, Dv] and its log weights beside the sink, if there is one."""
    if weights.sink is None:
        return output, log
    sink = weights.sink.view(log.shape[1], -1, 1)
    return attenuate(output, log, sink), torch.logaddexp(log, sink.to(log.dtype))


def gated(near: Tensor, near_log: Tensor, far: Tensor, far_log: Tensor, gate: Tensor, start: int = 0) -> Tensor:
    """Return (1 - c) times the near output [B, Hkv, G, N, Dv] plus c times the joint; no far keys before `start`."""
    share = torch.sigmoid(far_log - near_log[..., start:]) * gate.view(near_log.shape[1], -1, 1)
    joint = torch.lerp(near[..., start:, :], far.to(near.dtype), share[..., None].to(near.dtype))
    return torch.cat([near[..., :start, :], joint], dim=-2) if start else joint


def near_parts(
    length: int, window: int, sinks: int, like: Tensor, causal: bool, lengths: Tensor | None = None
) -> Iterable[Keys]:
    """Return what the query blocks see, with one bias for each of the first and one for all others.

    With `lengths` [B] of rows every block has one of its own in every row. On a CPU, what is the same in every layer
    and step is made once.
    """
    plain = type(like) is Tensor and like.device.type == "cpu" and not is_watched()
    if plain and lengths is None and window <= KEPT_WINDOW:
        return _kept_parts(length, window, sinks, like.dtype, causal)
    return _make_parts(length, window, sinks, like, causal, lengths)


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)
def _kept_parts(length: int, window: int, sinks: int, dtype: torch.dtype, causal: bool) -> tuple[Keys, ...]:
    return tuple(_make_parts(length, window, sinks, torch.empty(0, dtype=dtype), causal, None))


def _make_parts(
    length: int, window: int, sinks: int, like: Tensor, causal: bool, lengths: Tensor | None
) -> Iterator[Keys]:
    arange = functools.partial(torch.arange, device=like.device)
    blocks = arange(-(-length // BLOCK_SIZE))
    behind = -(-(window - 1) // BLOCK_SIZE)  # blocks that the window reaches back
    table = blocks[:, None] + arange(-behind, 1 if causal else behind + 1)
    own = blocks[:, None] * BLOCK_SIZE + arange(BLOCK_SIZE)
    edge = behind + -(-sinks // BLOCK_SIZE) + 1 if lengths is None else len(blocks)  # behind these no window has sinks
    for part in (slice(0, edge), slice(edge, None)):
        if len(blocks[part]):
            rows, shown = own[part], table[part]
            rows, columns = (rows, shown) if part.start == 0 else (rows[:1], shown[:1])
            columns = (columns[..., None] * BLOCK_SIZE + arange(BLOCK_SIZE)).flatten(1)
            distance = rows[:, :, None] - columns[:, None]
            seen = (distance.abs() < window) & (columns >= sinks)[:, None]
            present = like.new_ones(*rows.shape, sinks, dtype=torch.bool)
            if causal:
                seen, present = seen & (distance >= 0), present & (arange(sinks) <= rows[..., None])
            seen = torch.cat([present, seen], dim=-1)[:, None]
            if lengths is not None:
                columns = torch.cat([arange(sinks).expand(len(columns), -1), columns], dim=1)
                seen = seen & (columns[:, None, None] < lengths.view(-1, 1, 1, 1, 1))
            bias = torch.where(seen, like.new_zeros(()), like.new_full((), LOWEST))
            yield Keys(int(part.start), shown[:, None], bias, sinks)
