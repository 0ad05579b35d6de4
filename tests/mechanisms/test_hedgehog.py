"""hedgehog against a dense reference written from the formula, query by query."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_linattn.testing import Case


def features(x: Tensor, weight: Tensor) -> list[float]:
    """phi of one vector [D] with W [D, m]: every softmax summed up by hand."""
    scores = (weight.T @ x).tolist()
    up, down = sum(math.exp(s) for s in scores), sum(math.exp(-s) for s in scores)
    return [math.exp(s) / up for s in scores] + [math.exp(-s) / down for s in scores]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@torch.no_grad()
def test_equals_the_dense_reference(architecture, causal):
    """With trained weights, other for every query head and for the keys; one row is padded on the left."""
    case = Case("hedgehog", architecture, causal, {"feature_dim": 10})
    mechanism, length = case.make(), 75
    for seed, parameter in enumerate(mechanism.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        parameter += 0.7 * noise
    query, key, value = case.heads(length)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, :9] = False
    got, _ = mechanism(query, key, value, mask)
    groups = query.shape[1] // key.shape[1]
    for row in range(2):
        for head in range(query.shape[1]):
            shared = head // groups
            query_weight = mechanism.query_map.weight[shared, head % groups]
            phi_k = [features(x, mechanism.key_map.weight[shared]) for x in key[row, shared]]
            for i in (j for j in range(length) if mask[row, j]):
                phi_q = features(query[row, head, i], query_weight)
                seen = [j for j in range(i + 1 if causal else length) if mask[row, j]]
                weights = [sum(a * b for a, b in zip(phi_q, phi_k[j], strict=True)) for j in seen]
                want = torch.tensor(weights, dtype=torch.float64) @ value[row, shared, seen] / sum(weights)
                torch.testing.assert_close(got[row, head, i], want, rtol=1e-9, atol=1e-9)


def test_state_is_per_key_value_head():
    case = Case("hedgehog", "llama", True)
    _, state = case.make()(*case.heads(5))
    assert state.kv.shape == (2, 2, 32, 9)  # batch, key/value heads, 4 x head dimension, values and normaliser
