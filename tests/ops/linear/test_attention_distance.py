"""How far attention looks, on scores that say it themselves."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.ops.linear.attention_distance import FASTEST, SLOWEST, matching_decay_rate

RATES = torch.tensor([2.0, 0.3, 0.01], dtype=torch.float64)


def decaying_heads(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [B, 6, N, 1] and keys [B, 3, N, 1] with softmax_j(q_i . k_j) ~ exp(r j) ~ exp(-r (i - j)), j <= i."""
    key = RATES[:, None, None] * positions[:, None, :, None]
    return torch.ones_like(key).repeat(1, 2, 1, 1), key


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("length", [90, 700])  # all queries, and some of them
def test_the_rate_of_attention_that_decays_is_found(length, itself):
    query, key = decaying_heads(torch.arange(length)[None])
    torch.testing.assert_close(matching_decay_rate(query, key, 1.0, True, None, itself), RATES, rtol=1e-4, atol=0)


def test_half_precision_counts_as_far():
    """bfloat16 has no whole numbers above 256 in steps of one; attention to the first token alone needs them."""
    first = torch.eye(1000, dtype=torch.bfloat16)[:1].expand(1, 1, 1000, 1000) * 60
    key = torch.eye(1000, dtype=torch.bfloat16)[None, None]
    rates = [matching_decay_rate(first.to(d), key.to(d), 1.0, True) for d in (torch.bfloat16, torch.float64)]
    torch.testing.assert_close(rates[0].double(), rates[1], rtol=1e-3, atol=0)
    query, key = decaying_heads(torch.arange(90)[None])
    query, key = query.bfloat16(), key.bfloat16()  # keys are rounded, positions must not be
    want = matching_decay_rate(query.double(), key.double(), 1.0, True)
    torch.testing.assert_close(matching_decay_rate(query, key, 1.0, True).double(), want, rtol=1e-3, atol=0)


def test_pads_do_not_count_whatever_they_hold():
    mask = torch.ones(2, 120, dtype=torch.bool)
    mask[0, :30] = mask[1, 50:70] = False
    query, key = decaying_heads(mask.cumsum(1))
    query = query.masked_fill(~mask[:, None, :, None], 7.0)
    key = key.masked_fill(~mask[:, None, :, None], 50.0)
    torch.testing.assert_close(matching_decay_rate(query, key, 1.0, True, mask), RATES, rtol=1e-4, atol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_rates_are_bounded(causal):
    """Attention to all alike, and none but to the own token."""
    key = 99 * torch.eye(64)[None, None]
    uniform, sharp = (matching_decay_rate(query, key, 1.0, causal) for query in (torch.zeros_like(key), key))
    others = matching_decay_rate(key / 20, key / 20, 1.0, causal, itself=False)
    assert uniform.item() == pytest.approx(SLOWEST, rel=1e-3) and sharp.item() == pytest.approx(FASTEST, rel=1e-3)
    assert others.item() == pytest.approx(SLOWEST, rel=1e-3)
