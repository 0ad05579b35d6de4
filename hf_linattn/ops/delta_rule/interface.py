"""The gated delta rule: S_i = g_i (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T, read as o_i = S_i^T q_i.

Every token is one step of gradient descent on |S^T k_i - v_i|^2, after which the state has lost what its gate takes.
Keys and queries are divided by their length, so that a key with beta_i = 1 stands for v_i and nothing else afterwards.
Backends read the tokens in chunks, each of which is one triangular system (`torch.py`).
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch import PYTORCH, Operation, Policy
from . import cpu
from . import torch as pytorch
from .types import DeltaCall, FeatureMap

__all__ = ["gated_delta_rule"]

DELTA_RULE = Operation("delta_rule", cpu=cpu, torch=pytorch)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_gate: Tensor | None = None,
    state: Tensor | None = None,
    query_map: FeatureMap | None = None,
    key_map: FeatureMap | None = None,
    policy: Policy = PYTORCH,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, N, Dv] and S after the last key [B, Hkv, F, Dv].

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv. All of one dtype.
        beta: [B, Hkv, N], from 0 to 2; 0 for pads. log_gate: log g [B, Hkv, N], at most 0; 0 for pads; None: g is 1.
        state: S before the first key [B, Hkv, F, Dv]; None: it is zero.
        query_map, key_map: make F features of queries [B, Hkv, G, N, D] and of keys [B, Hkv, N, D], which are divided
            by their length then; None: they are features themselves. One that all but vanishes is zero.
        policy: which backends may do it.

    Time O(N (F + C) Dv) in chunks of C tokens; memory beside the output that of a few chunks.

    >>> import torch
    >>> key, value = torch.eye(4)[None, None], torch.randn(1, 1, 4, 3)
    >>> found, _ = gated_delta_rule(key, key, value, beta=torch.ones(1, 1, 4))
    >>> torch.equal(found, value)  # what was just written is read
    True
    """
    call = DeltaCall(query, key, value, beta, log_gate, state, query_map, key_map, policy)
    return DELTA_RULE.run(call)
