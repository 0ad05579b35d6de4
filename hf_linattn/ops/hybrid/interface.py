"""Softmax weights for near keys and kernel weights for far ones under one denominator, in linear time.

    o_i = sum_j w_ij v_j / sum_j w_ij,   w_ij = exp(s q_i . k_j)                               j near i, or a sink
                                                exp(g) phi(q_i) . phi(k_j) exp(-r |i - j|)     j far from i

Near is |i - j| < window_size, sinks are the first `num_sinks` tokens; g is a number per query head, r one per
key/value head. Both parts are summed with a log factor of their own and meet under their common maximum, so neither is
rescaled against the other and neither overflows. With a gate c per query head the output is (1 - c) times that of the
near weights alone plus c times this: far keys then have at most the share c.

The far part is strictly causal linear attention over keys that lie window_size - 1 positions back: query i stands
beside key i - (window_size - 1) and reads only what is before it. So the window slides token by token, in a prefill as
in decoding. Read backwards, the same gives the far keys after a query.
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch import PYTORCH, Operation, Policy
from ..linear.types import CHUNK_SIZE
from . import compile as compiled
from . import cpu
from . import torch as pytorch
from .types import HybridCall, HybridState, HybridWeights

__all__ = ["HybridState", "HybridWeights", "causal_hybrid_attention", "hybrid_attention"]

HYBRID = Operation("hybrid", compile=compiled, triton=f"{__package__}.triton", cpu=cpu, torch=pytorch)


def causal_hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: HybridWeights,
    lengths: Tensor | None = None,
    state: HybridState | None = None,
    chunk_size: int = CHUNK_SIZE,
    policy: Policy = PYTORCH,
) -> tuple[Tensor, HybridState]:
    """Return the causal attention output and the state after the last real token.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv.
        lengths: [B], real tokens at the start of each row; None if all are. Outputs behind them mean nothing.
        state: what was read before.
        policy: which backends may do it.

    Returns:
        output [B, H, N, Dv]; the state. Time O(N (F + chunk_size + window_size) Dv).
    """
    return HYBRID.run(HybridCall(query, key, value, weights, lengths, state, True, chunk_size, policy))


def hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: HybridWeights,
    lengths: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    policy: Policy = PYTORCH,
) -> Tensor:
    """Return the bidirectional attention output [B, H, N, Dv]; arguments as in `causal_hybrid_attention`."""
    return HYBRID.run(HybridCall(query, key, value, weights, lengths, None, False, chunk_size, policy))[0]
