"""One token of kernel attention by Triton, as in decoding: a state is read once and written once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..runtime.cpu import dense_rows, operation
from ..runtime.triton import launch, padded, require_kernels
from .triton_decode_kernels import step_token
from .types import LEAST_WEIGHT, LinearState

NUMBERS, MOST_VALUES = 4096, 32  # of a state in a program, and columns of values


@operation("sums", "state_after", "log_max_after", devices=("CPU", "CUDA"))
def causal_step_triton(
    query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None, log_decay: Tensor | None,
    mask: Tensor | None, sums: Tensor, state: Tensor, log_max: Tensor, state_after: Tensor, log_max_after: Tensor,
) -> None:  # fmt: skip
    """Write the state [B, Hkv, F, Dv + 1] after one more key, and what it says to the queries, normalised.

    query: [B, Hkv, G, 1, F]. key: [B, Hkv, 1, F]. value: [B, Hkv, 1, Dv]. log_scale, log_decay: [B, Hkv, 1].
    mask: bool [B, 1], false for a key that is none. sums: [B, Hkv, G, 1, Dv]. All contiguous but for the rows of
    values, decays and the mask.

    Raises:
        OptionError: the heads are on a CPU, and Triton was not imported to interpret kernels there.
    """
    require_kernels(query)
    (batch, heads, groups, _, key_size), value_size = query.shape, value.shape[-1]
    unused = log_max  # in the place of numbers that are not read
    keys = padded(key_size)
    values = min(MOST_VALUES, max(1, NUMBERS // keys))
    launch(
        step_token, (batch * heads, -(-value_size // values)), query,
        query, key, value, *(unused if x is None else x for x in (log_scale, log_decay, mask)), sums,
        state, log_max, state_after, log_max_after, *value.stride()[:2],
        *((0, 0) if log_decay is None else log_decay.stride()[:2]), 0 if mask is None else mask.stride(0),
        heads, groups, LEAST_WEIGHT[torch.float32],
        KEY_SIZE=key_size, KEYS=keys, VALUE_SIZE=value_size, VALUES=values,
        SCALED=log_scale is not None, DECAYED=log_decay is not None, MASKED=mask is not None,
    )  # fmt: skip


@register_flop_formula(torch.ops.hf_linattn.causal_step_triton)
def _flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Adding the key to the state, reading it for every query."""
    batch, heads, groups, _, key_size = query
    return batch * heads * 2 * (groups + 1) * key_size * (value[-1] + 1)


def step_attention(
    query: Tensor, key: Tensor, log_scale: Tensor | None, value: Tensor, log_decay: Tensor | None,
    key_padding_mask: Tensor | None, state: LinearState | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Return the output [B, Hkv, G, 1, Dv] and the next state of features; `state` stays as it is. Without gradients.

    Arguments as of `features.FeatureKernels.attend`, of one token; key_padding_mask: [B, 1], true for real keys.
    """
    scaled = log_scale is not None or log_decay is not None
    state = LinearState.before(key.shape[-1], value, scaled) if state is None else state
    output, before = value.new_empty(*query.shape[:4], value.shape[-1]), [x.contiguous() for x in state]
    after = LinearState(*map(torch.empty_like, before))
    mask = None if key_padding_mask is None else key_padding_mask.bool().expand(len(value), 1)
    causal_step_triton(query, key, dense_rows(value), log_scale, log_decay, mask, output, *before, *after)
    return output, after
