"""Exact attention against the dense float64 formula and against PyTorch's own kernel."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from hf_linattn.ops.common import exact_softmax as softmax
from hf_linattn.ops.common.exact_softmax import softmax_attention
from hf_linattn.testing.counters import elements_written


def dense(query, key, value, scaling, allowed, softcap=None):
    """softmax over the allowed keys by exponentials and sums; an empty row is zero."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = scores.exp() * allowed
    total = weights.sum(-1, keepdim=True)
    return weights @ value / torch.where(total > 0, total, 1.0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("block", [3, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("earlier", [0, 4])
def test_equals_the_dense_formula(monkeypatch, softcap, window, earlier, block):
    monkeypatch.setattr(softmax, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    nq, nk = 13, 13 + earlier
    query = torch.randn(2, 4, nq, 6, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, 2, nk, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(2, nk, dtype=torch.bool)
    mask[0, :3] = False
    mask[1] = False
    ids = (torch.arange(nk) > 8).long().expand(2, -1)
    i, j = torch.arange(nk - nq, nk)[:, None], torch.arange(nk)[None]
    same = (ids[:, -nq:, None] == ids[:, None])[:, None]
    allowed = (j <= i) & ((i - j) < (window or nk)) & mask[:, None, None] & same
    got = softmax_attention(
        query, key, value, scaling=0.3, causal=True, key_padding_mask=mask, sequence_ids=ids, sliding_window=window,
        softcap=softcap,
    )  # fmt: skip
    tolerance = 1e-6 if softcap else 1e-12  # capped scores go through float32
    torch.testing.assert_close(got, dense(query, key, value, 0.3, allowed, softcap), rtol=tolerance, atol=tolerance)
    assert not got[1].any()


@pytest.mark.parametrize("causal", [False, True])
def test_without_masks_it_is_pytorchs_kernel_bit_for_bit(causal):
    query, key, value = torch.randn(3, 2, 4, 33, 8, generator=torch.Generator().manual_seed(1)).unbind()
    want = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=0.2)
    assert torch.equal(softmax_attention(query, key, value, scaling=0.2, causal=causal), want)


def test_dropout_is_applied():
    query, key, value = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(1)).unbind()
    plain, dropped = (softmax_attention(query, key, value, scaling=0.2, causal=True, dropout=p) for p in (0.0, 0.9))
    assert not torch.equal(plain, dropped)


@torch.no_grad()
def test_a_decoded_token_makes_no_copy_of_the_keys():
    query, key, value = (torch.randn(2, 2, length, 8) for length in (1, 300, 300))
    mask = torch.arange(300) >= torch.tensor([[7], [0]])
    decode = partial(softmax_attention, query, key, value, scaling=0.2, causal=True, key_padding_mask=mask)
    assert elements_written(decode) < key.numel()
