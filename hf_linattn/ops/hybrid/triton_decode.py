"""Decoding with hybrid attention by Triton: what is kept of a prompt, and one token; a launch for each."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..linear.triton_features import OneRow
from ..linear.types import LEAST_WEIGHT, FeatureMapSpec
from ..runtime.cpu import dense_rows, flop_formula, operation
from ..runtime.triton import is_large, launch, padded, require_kernels
from .triton_kernels import keep_prompt, step_hybrid

NUMBERS, MOST_VALUES = 4096, 32  # of far sums in a program, and columns of values
NEAR_NUMBERS = 8192  # in a tile of near keys
COPIED = 4096  # numbers in a tile that is copied
OPTIONS = {False: {"num_warps": 8}, True: {"num_warps": 8, "maxnreg": 128}}  # by `is_large`: two programs side by side
AFTER = ("ring_key", "ring_value", "sink_key", "sink_value", "kv", "log_max", "length")  # as in `HybridState`


@operation("sums", *(f"{name}_after" for name in AFTER), devices=("CPU", "CUDA"))
def hybrid_step_triton(
    query: Tensor, key: Tensor, value: Tensor, activation: str, query_weight: Tensor | None, query_bias: Tensor | None,
    key_weight: Tensor | None, key_bias: Tensor | None, scale: float | None, quadratic: float, offset: float,
    ring_key: Tensor, ring_value: Tensor, sink_key: Tensor, sink_value: Tensor, kv: Tensor, log_max: Tensor,
    length: Tensor, log_mix: Tensor, decay_rate: Tensor | None, window_log: Tensor | None,
    sink: Tensor | None, far_gate: Tensor | None, ends: Tensor | None, scaling: float, sums: Tensor,
    ring_key_after: Tensor, ring_value_after: Tensor, sink_key_after: Tensor, sink_value_after: Tensor,
    kv_after: Tensor, log_max_after: Tensor, length_after: Tensor,
) -> None:  # fmt: skip
    """Write the attention of one more token [B, H, 1, Dv] into `sums`, and the state after it.

    Args:
        query: [B, H, 1, D]. key: [B, Hkv, 1, D]. value: [B, Hkv, 1, Dv]. Rows are contiguous, as is all else.
        activation ... offset: of the maps of queries and keys, as in a `FeatureMapSpec`; weights as they lie.
        ring_key ... length: of a `HybridState`. log_mix ... far_gate: of `HybridWeights`, in any precision.
        ends: [B], zero for a pad, after which the state is as it was, and one for a token; None if all are.

    Raises:
        OptionError: the heads are on a CPU, and Triton was not imported to interpret kernels there.
    """
    require_kernels(query)
    (batch, heads, _, key_size), value_size, groups = key.shape, value.shape[-1], query.shape[1] // key.shape[1]
    weights = (query_weight, query_bias), (key_weight, key_bias)
    specs = [FeatureMapSpec(activation, *x, scale, quadratic, offset) for x in weights]
    row = OneRow.of(specs, heads, groups, key_size)
    ring, sinks, keys = ring_key.shape[2], sink_key.shape[2], padded(key_size)
    values, most = min(MOST_VALUES, max(1, NUMBERS // row.tile)), max(1, NEAR_NUMBERS // keys)
    rows = min(most, triton.next_power_of_2(max(1, ring)))
    given = {"DECAYED": decay_rate, "SHARED": window_log, "BESIDE": sink, "GATED": far_gate, "ENDS": ends}
    unused, found = log_max, (*row.weights, *given.values())  # the first is a placeholder for what is not read
    *maps, decay_rate, window_log, sink, far_gate, ends = (unused if x is None else x for x in found)
    launch(
        step_hybrid, (batch * heads, -(-value_size // values)), query,
        query, key, value, *maps, ring_key, ring_value, sink_key, sink_value, kv,
        log_max, length, log_mix, decay_rate, window_log, sink, far_gate, ends, sums,
        ring_key_after, ring_value_after, sink_key_after, sink_value_after, kv_after, log_max_after, length_after,
        *(number for x in (query, key, value) for number in x.stride()[:2]), *row.steps(),
        heads, groups, scaling, *row.numbers, LEAST_WEIGHT[torch.float32],
        **row.sizes, NUM_FEATURES=row.width, KEYS=keys, VALUE_SIZE=value_size, VALUES=values, RING=ring,
        ROWS=rows, SINKS=sinks, SINK_ROWS=triton.next_power_of_2(sinks + 1),
        **{name: x is not None for name, x in given.items()}, **OPTIONS[is_large(query.device)],
    )  # fmt: skip


@flop_formula(hybrid_step_triton)
def _flops(query: Any, value: Any, key_weight: Any, ring_key: Any, sink_key: Any, kv: Any, **_: Any) -> int:
    """Making features; scores of near keys and their average; adding a far key to the sums, reading them."""
    (batch, heads, _, key_size), value_size, (_, kv_heads, num_features, _) = query, value[-1], kv
    near = heads * (ring_key[2] + 1 + sink_key[2]) * (key_size + value_size)
    made = 0 if key_weight is None else key_size * key_weight[-1]
    return 2 * batch * (near + (heads + kv_heads) * (made + num_features * (value_size + 1)))


def step_attention(
    query: Tensor, key: Tensor, value: Tensor, weights: Any, maps: Any, state: Any, ends: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output [B, H, 1, Dv] and what is in the next `HybridState`; `state` stays as it is. No gradients.

    Arguments as in `HybridCall`, of one token. maps: of queries and keys, alike but for weights.
    ends: as in `hybrid_step_triton`.
    """
    given = (weights.log_mix, weights.decay_rate, weights.window_log, weights.sink, weights.far_gate, ends)
    numbers = (x if x is None else x.contiguous() for x in given)
    output, before = value.new_empty(*query.shape[:3], value.shape[-1]), [x.contiguous() for x in state]
    after = tuple(map(torch.empty_like, before))
    (of_query, of_key), heads = maps, map(dense_rows, (query, key, value))
    how = of_key.activation, *of_query[1:3], *of_key[1:3], *of_key[3:]
    hybrid_step_triton(*heads, *how, *before, *numbers, weights.scaling, output, *after)
    return output, after


@operation("ring_key", "ring_value", "sink_key", "sink_value", "length_after", devices=("CPU", "CUDA"))
def keep_prompt_triton(
    key: Tensor, value: Tensor, starts: Tensor | None, ends: Tensor | None, ring_key: Tensor, ring_value: Tensor,
    sink_key: Tensor, sink_value: Tensor, length_after: Tensor,
) -> None:  # fmt: skip
    """Write what a `HybridState` has of the tokens of rows of keys [B, Hkv, N, D].

    Args:
        starts: [B], the place of each row's first token; None if that is 0. ends: [B], its tokens; None if all are.

    Raises:
        OptionError: the heads are on a CPU, and Triton was not imported to interpret kernels there.
    """
    require_kernels(key)
    (batch, heads, length, key_size), value_size = key.shape, value.shape[-1]
    (ring, sinks), keys, values = (x.shape[2] for x in (ring_key, sink_key)), padded(key_size), padded(value_size)
    most = max(1, ring, sinks)
    rows = min(max(1, COPIED // max(keys, values)), triton.next_power_of_2(most))
    launch(
        keep_prompt, (batch * heads * -(-most // rows),), key,
        key, value, *(length_after if x is None else x.contiguous() for x in (starts, ends)), ring_key, ring_value,
        sink_key, sink_value, length_after, *(number for x in (key, value) for number in x.stride()[:3]), heads,
        length, KEY_SIZE=key_size, KEYS=keys, VALUE_SIZE=value_size, VALUES=values, RING=ring, SINKS=sinks, ROWS=rows,
        STARTS=starts is not None, ENDS=ends is not None,
    )  # fmt: skip


@flop_formula(keep_prompt_triton)
def _no_flops(**_: Any) -> int:
    return 0


def remember(
    key: Tensor, value: Tensor, ring: int, sinks: int, starts: Tensor | None, ends: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the tokens in a `HybridState`, and how many were read: see `keep_prompt_triton`."""
    kept = [x.new_empty(*x.shape[:2], count, x.shape[-1]) for count in (ring, sinks) for x in (key, value)]
    length = key.new_empty(len(key), dtype=torch.long)
    keep_prompt_triton(*map(dense_rows, (key, value)), starts, ends, *kept, length)
    return *kept, length
