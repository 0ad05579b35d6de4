"""One token of kernel attention by Triton, as in decoding: one launch makes features, reads a state and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.cpu import dense_rows, flop_formula, operation
from ..runtime.triton import launch, require_kernels
from .triton_decode_kernels import step_token
from .triton_features import OneRow
from .types import LEAST_WEIGHT, FeatureMapSpec, LinearState

MOST_VALUES = 32  # columns of values in a program
# numbers of a state in a program, and its warps, by whether features have weights: these are then read by as few
# programs as keep a GPU busy
NUMBERS = {False: (4096, 4), True: (16384, 8)}


@operation("sums", "state_after", "log_max_after", devices=("CPU", "CUDA"))
def causal_step_triton(
    query: Tensor, key: Tensor, value: Tensor, activation: str, query_weight: Tensor | None, query_bias: Tensor | None,
    key_weight: Tensor | None, key_bias: Tensor | None, scale: float | None, quadratic: float, offset: float,
    log_decay: Tensor | None, mask: Tensor | None, sums: Tensor, state: Tensor, log_max: Tensor, state_after: Tensor,
    log_max_after: Tensor,
) -> None:  # fmt: skip
    """Write the state [B, Hkv, F, Dv + 1] after one more key, and what it says to the queries, normalised.

    query: [B, Hkv, G, 1, D]. key: [B, Hkv, 1, D]. value: [B, Hkv, 1, Dv]. All with contiguous rows. activation ...
    offset: of the maps of queries and keys, as in a `FeatureMapSpec`. log_decay: [B, Hkv, 1]. mask: bool [B, 1], false
    for a key that is none. sums: [B, Hkv, G, 1, Dv], contiguous, as are the states.

    Raises:
        OptionError: the heads are on a CPU, and Triton was not imported to interpret kernels there.
    """
    require_kernels(query)
    (batch, heads, groups, _, input_size), value_size = query.shape, value.shape[-1]
    weights = (query_weight, query_bias), (key_weight, key_bias)
    specs = [FeatureMapSpec(activation, *x, scale, quadratic, offset) for x in weights]
    row = OneRow.of(specs, heads, groups, input_size)
    unused = log_max  # a placeholder for numbers that are not read
    numbers, warps = NUMBERS[key_weight is not None]
    values = min(MOST_VALUES, max(1, numbers // row.tile))
    launch(
        step_token, (batch * heads, -(-value_size // values)), query, query, key, value,
        *(unused if x is None else x for x in (*row.weights, log_decay, mask)), sums, state, log_max, state_after,
        log_max_after, *query.stride()[:3], *key.stride()[:2], *value.stride()[:2], *row.steps(),
        *((0, 0) if log_decay is None else log_decay.stride()[:2]), 0 if mask is None else mask.stride(0),
        heads, groups, *row.numbers, LEAST_WEIGHT[torch.float32],
        **row.sizes, NUM_FEATURES=row.width, VALUE_SIZE=value_size, VALUES=values, DECAYED=log_decay is not None,
        MASKED=mask is not None, num_warps=warps,
    )  # fmt: skip


@flop_formula(causal_step_triton)
def _flops(query: Any, value: Any, key_weight: Any, state: Any, **_: Any) -> int:
    """Making features, adding the key to the state, reading it for every query."""
    (batch, heads, groups), input_size, num_features = query[:3], query[-1], state[2]
    made = 0 if key_weight is None else input_size * key_weight[-1]
    return batch * heads * 2 * (groups + 1) * (made + num_features * (value[-1] + 1))


def step_attention(
    query: Tensor, key: Tensor, value: Tensor, maps: Sequence[FeatureMapSpec], *, key_padding_mask: Tensor | None,
    log_decay: Tensor | None, state: LinearState | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Return the output [B, Hkv, G, 1, Dv] and the next state; `state` stays as it is. Without gradients.

    Args:
        query: [B, Hkv, G, 1, D]. key: [B, Hkv, 1, D]. value: [B, Hkv, 1, Dv]. log_decay: [B, Hkv, 1].
        maps: of queries and of keys, alike but for their weights.
        key_padding_mask: [B, 1], true for real keys.
    """
    state = LinearState.before_map(maps[1], key, value, log_decay) if state is None else state
    output, before = value.new_empty(*query.shape[:4], value.shape[-1]), [x.contiguous() for x in state]
    after = LinearState(*map(torch.empty_like, before))
    mask = None if key_padding_mask is None else key_padding_mask.bool().expand(len(value), 1)
    (of_query, of_key), heads = maps, map(dense_rows, (query, key, value))
    causal_step_triton(
        *heads, of_key.activation, *of_query[1:3], *of_key[1:3], *of_key[3:], log_decay, mask, output, *before, *after
    )
    return output, after
