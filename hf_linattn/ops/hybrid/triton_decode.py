"""One token of hybrid attention by Triton, as in decoding: two launches for features, one for everything else."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..linear.types import LEAST_WEIGHT
from ..runtime.cpu import dense_rows, operation
from ..runtime.triton import is_large, launch, padded, require_kernels
from .triton_kernels import step_hybrid

NUMBERS, MOST_VALUES = 4096, 32  # of far sums in a program, and columns of values
NEAR_NUMBERS = 8192  # in a tile of near keys
OPTIONS = {False: {"num_warps": 8}, True: {"num_warps": 8, "maxnreg": 128}}  # by `is_large`: two programs side by side
AFTER = ("ring_key", "ring_value", "sink_key", "sink_value", "kv", "log_max", "length")  # as in `HybridState`


@operation("sums", *(f"{name}_after" for name in AFTER), devices=("CPU", "CUDA"))
def hybrid_step_triton(
    query: Tensor, key: Tensor, value: Tensor, query_features: Tensor, query_log: Tensor | None, key_features: Tensor,
    key_log: Tensor | None, ring_key: Tensor, ring_value: Tensor, sink_key: Tensor, sink_value: Tensor, kv: Tensor,
    log_max: Tensor, length: Tensor, log_mix: Tensor, decay_rate: Tensor | None, window_log: Tensor | None,
    sink: Tensor | None, far_gate: Tensor | None, scaling: float, sums: Tensor, ring_key_after: Tensor,
    ring_value_after: Tensor, sink_key_after: Tensor, sink_value_after: Tensor, kv_after: Tensor,
    log_max_after: Tensor, length_after: Tensor,
) -> None:  # fmt: skip
    """Write the attention of one more token [B, H, 1, Dv] into `sums`, and the state after it.

    Args:
        query: [B, H, 1, D]. key: [B, Hkv, 1, D]. value: [B, Hkv, 1, Dv]. Rows are contiguous, as is all else.
        query_features: [B, Hkv, G, 1, F]. key_features: [B, Hkv, 1, F], of the key that leaves the window.
        query_log: [B, Hkv, G, 1], log scales. key_log: [B, Hkv, 1].
        ring_key ... length: of a `HybridState`. log_mix ... far_gate: of `HybridWeights`, in any precision.

    Raises:
        OptionError: the heads are on a CPU, and Triton was not imported to interpret kernels there.
    """
    require_kernels(query)
    (batch, heads, _, key_size), value_size, num_features = key.shape, value.shape[-1], key_features.shape[-1]
    ring, sinks, keys, features = ring_key.shape[2], sink_key.shape[2], padded(key_size), padded(num_features)
    values, most = min(MOST_VALUES, max(1, NUMBERS // features)), max(1, NEAR_NUMBERS // keys)
    rows = min(most, triton.next_power_of_2(max(1, ring)))
    given = {"SCALED": key_log, "DECAYED": decay_rate, "SHARED": window_log, "BESIDE": sink, "GATED": far_gate}
    unused, found = log_max, (query_log, *given.values())  # the first in the place of numbers that are not read
    query_log, key_log, decay_rate, window_log, sink, far_gate = (unused if x is None else x for x in found)
    launch(
        step_hybrid, (batch * heads, -(-value_size // values)), query,
        query, key, value, query_features, query_log, key_features, key_log,
        ring_key, ring_value, sink_key, sink_value, kv, log_max, length,
        log_mix, decay_rate, window_log, sink, far_gate, sums,
        ring_key_after, ring_value_after, sink_key_after, sink_value_after, kv_after, log_max_after, length_after,
        *(number for x in (query, key, value) for number in x.stride()[:2]),
        heads, query.shape[1] // heads, scaling, LEAST_WEIGHT[torch.float32],
        KEY_SIZE=key_size, KEYS=keys, VALUE_SIZE=value_size, VALUES=values, NUM_FEATURES=num_features,
        FEATURES=features, RING=ring, ROWS=rows, SINKS=sinks, SINK_ROWS=triton.next_power_of_2(sinks + 1),
        **{name: x is not None for name, x in given.items()}, **OPTIONS[is_large(query.device)],
    )  # fmt: skip


@register_flop_formula(torch.ops.hf_linattn.hybrid_step_triton)
def _flops(query: Any, key: Any, value: Any, *rest: Any, **__: Any) -> int:
    """Scores of near keys and their average, for every query; adding a far key to the sums, reading them."""
    (batch, heads, _, key_size), value_size = query, value[-1]
    (_, kv_heads, _, num_features), ring, sinks = rest[2], rest[4][2], rest[6][2]
    near = heads * (ring + 1 + sinks) * (key_size + value_size)
    return 2 * batch * (near + (heads + kv_heads) * num_features * (value_size + 1))


def step_attention(
    query: Tensor, key: Tensor, value: Tensor, weights: Any, maps: Any, state: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output [B, H, 1, Dv] and what is in the next `HybridState`; `state` stays as it is. No gradients.

    Arguments as in `hybrid.causal_hybrid_attention`, of one token. maps: make the features of queries and of keys.
    """
    features, query_log = maps[0](query.unflatten(1, (key.shape[1], -1)))
    keys, key_log = maps[1](state.ring_key[:, :, :1] if weights.reach else key)
    given = (weights.log_mix, weights.decay_rate, weights.window_log, weights.sink, weights.far_gate)
    numbers = (x if x is None else x.contiguous() for x in given)
    output, before = value.new_empty(*query.shape[:3], value.shape[-1]), [x.contiguous() for x in state]
    after = tuple(map(torch.empty_like, before))
    heads = map(dense_rows, (query, key, value))
    hybrid_step_triton(*heads, features, query_log, keys, key_log, *before, *numbers, weights.scaling, output, *after)
    return output, after
