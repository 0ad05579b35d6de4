"""Kernel attention in linear time: o_i = sum_j w_ij v_j / sum_j w_ij with w_ij = phi(q_i) . phi(k_j).

The keys are read a few chunks at a time. Inside a chunk the pairs are formed directly; everything before it is summed
up in a state of constant size. Features may carry a log scale, phi = values * exp(log_scale): exponential feature maps
then neither overflow nor need an epsilon. The state keeps the running maximum of the scales and is rescaled when it
grows; each query's own factor depends only on the keys it may see and cancels in the ratio, so the future cannot leak.

Weights may decay with the distance, w_ij = phi(q_i) . phi(k_j) exp(-|c_i - c_j|) with c the running sum of a decay per
token. That is one more log scale of the keys, counted from the start of each chunk so that it never grows with N. The
normaliser is one more column of the values (of ones), so that numerator and denominator see the same masks and decays.
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch import PYTORCH, Operation, Policy
from . import compile as compiled
from . import cpu
from . import torch as pytorch
from .torch import read_state, sum_keys
from .types import CHUNK_SIZE, FeatureMap, Features, LinearCall, LinearState

__all__ = ["FeatureMap", "Features", "causal_linear_attention", "linear_attention", "read_state", "sum_keys"]

LINEAR = Operation("linear", compile=compiled, triton=f"{__package__}.triton", cpu=cpu, torch=pytorch)


def causal_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_map: FeatureMap,
    key_map: FeatureMap,
    key_padding_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    state: LinearState | None = None,
    log_decay: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    policy: Policy = PYTORCH,
) -> tuple[Tensor, LinearState]:
    """Return the causal attention output and the state after the last key.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv. All of one dtype, in
            which the output is, unless that is widened.
        query_map, key_map: feature maps; the query's log scale cancels and is ignored.
        key_padding_mask: [B, N], true for real keys. sequence_ids: [B, N], equal inside a packed sequence.
        state: what was read before; it belongs to the first packed sequence.
        log_decay: [B, Hkv, N], at most 0: log of what all earlier keys lose when this token comes; 0 where masked.
        chunk_size: tokens of a chunk where PyTorch's operations do it; other backends have sizes of their own.
        policy: which backends may do it.

    Returns:
        output [B, H, N, Dv]; the state, which belongs to the last packed sequence. Time O(N (F + chunk_size) Dv).
    """
    where = key_padding_mask, sequence_ids, state, log_decay
    return LINEAR.run(LinearCall(query, key, value, query_map, key_map, *where, True, chunk_size, policy))


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_map: FeatureMap,
    key_map: FeatureMap,
    key_padding_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    log_decay: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    policy: Policy = PYTORCH,
) -> Tensor:
    """Return the bidirectional attention output [B, H, Nq, Dv]; arguments as in `causal_linear_attention`."""
    where = key_padding_mask, sequence_ids, None, log_decay
    return LINEAR.run(LinearCall(query, key, value, query_map, key_map, *where, False, chunk_size, policy))[0]
