"""The chunked operations against a loop over single queries, written from the formula."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from hf_linattn.ops.hybrid import fused
from hf_linattn.ops.hybrid.interface import HybridWeights, causal_hybrid_attention, hybrid_attention
from hf_linattn.ops.linear import torch as linear_torch
from hf_linattn.ops.linear.interface import Features
from tests.ops.feature_maps import elu_map

BATCH, HEADS, KV_HEADS, LENGTH, DIM, VALUE_DIM = 2, 4, 2, 45, 3, 5
SCALING, WINDOW, SINKS = 0.7, 6, 3


def exp_map(x: torch.Tensor) -> Features:
    """exp(4 x): log scales of very different size, so that which part has the maximum changes from query to query."""
    top = 4 * x.amax(-1)
    return Features((4 * x - top[..., None]).exp(), top)


PLAIN = {"elu": (elu_map, lambda x: F.elu(x) + 1), "exp": (exp_map, lambda x: (4 * x).exp())}


def by_query(query, key, value, phi, causal, mix, rates=None, lengths=None, window=WINDOW, sinks=SINKS):
    """o_i = sum_j w_ij v_j / sum_j w_ij, one query of one head at a time."""
    rows = []
    for b, h, i in itertools.product(range(len(query)), range(query.shape[1]), range(query.shape[2])):
        shared = h * key.shape[1] // query.shape[1]
        end = query.shape[2] if lengths is None else int(lengths[b])
        if i >= end:
            rows.append(torch.zeros_like(value[0, 0, 0]))
            continue
        seen = torch.arange(i + 1 if causal else end)
        near = ((seen - i).abs() < window) | (seen < sinks)
        q, k = query[b, h, i], key[b, shared, seen]
        decay = 1.0 if rates is None else torch.exp(-rates[shared] * (seen - i).abs())
        weights = torch.where(near, torch.exp(SCALING * k @ q), torch.exp(mix[h]) * (phi(k) @ phi(q)) * decay)
        rows.append(weights @ value[b, shared, seen] / weights.sum())
    return torch.stack(rows).view(*query.shape[:3], -1)


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)
    draw = lambda heads, dim: torch.randn(BATCH, heads, LENGTH, dim, dtype=torch.float64, generator=generator)  # noqa: E731
    mix = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)
    return draw(HEADS, DIM), draw(KV_HEADS, DIM), draw(KV_HEADS, VALUE_DIM), mix


def weights_of(name, mix, rates=None, window=WINDOW, sinks=SINKS):
    return HybridWeights(window, sinks, SCALING, PLAIN[name][0], PLAIN[name][0], mix, rates)


@pytest.mark.parametrize("decaying", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_equals_the_loop_over_queries(inputs, name, causal, decaying):
    """Values, and gradients of all inputs, the mix and the rates, of which one is slow and one very fast."""
    rates = torch.tensor([0.02, 5.0], dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (*inputs, *([rates] if decaying else []))]
    heads, mix, rates = leaves[:3], leaves[3], leaves[4] if decaying else None
    want = by_query(*heads, PLAIN[name][1], causal, mix, rates)
    weight = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want_grads = torch.autograd.grad((want * weight).sum(), leaves)
    for chunk_size in (1, 7, 16, 1000):
        operands = (*heads, weights_of(name, mix, rates))
        if causal:
            got, _ = causal_hybrid_attention(*operands, chunk_size=chunk_size)
        else:
            got = hybrid_attention(*operands, chunk_size=chunk_size)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        for a, b in zip(torch.autograd.grad((got * weight).sum(), leaves), want_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 4), (9, 0), (4, 60), (100, 2), (20, 20)])
def test_windows_and_sinks_of_any_size(inputs, causal, window, sinks):
    *heads, mix = inputs
    want = by_query(*heads, PLAIN["exp"][1], causal, mix, window=window, sinks=sinks)
    weights = weights_of("exp", mix, window=window, sinks=sinks)
    attend = causal_hybrid_attention if causal else hybrid_attention
    got = attend(*heads, weights, chunk_size=8)
    torch.testing.assert_close(got[0] if causal else got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_padded_rows_get_what_they_get_alone(inputs, causal):
    *heads, mix = inputs
    lengths = torch.tensor([31, 4])
    rates = torch.tensor([0.1, 1.0], dtype=torch.float64)
    want = by_query(*heads, PLAIN["exp"][1], causal, mix, rates, lengths)
    attend = causal_hybrid_attention if causal else hybrid_attention
    got = attend(*heads, weights_of("exp", mix, rates), lengths, chunk_size=8)
    got = got[0] if causal else got
    real = (torch.arange(LENGTH) < lengths[:, None])[:, None, :, None]
    torch.testing.assert_close(got * real, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lengths", [None, [20, 3]])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_are_read_one_at_a_time(inputs, monkeypatch, causal, lengths):
    """Of rows of whole chunks, padded and not."""
    monkeypatch.setitem(linear_torch.AT_ONCE, "cpu", 1)
    *heads, mix = (x[:, :, :24] if x.dim() > 1 else x for x in inputs)
    lengths = None if lengths is None else torch.tensor(lengths)
    want = by_query(*heads, PLAIN["elu"][1], causal, mix, lengths=lengths, window=2)
    attend = causal_hybrid_attention if causal else hybrid_attention
    got = attend(*heads, weights_of("elu", mix, window=2), lengths, chunk_size=6)
    got = got[0] if causal else got
    real = torch.arange(24) < (torch.tensor([24, 24]) if lengths is None else lengths)[:, None]
    torch.testing.assert_close(got * real[:, None, :, None], want, rtol=1e-10, atol=1e-10)


def test_what_blocks_see_is_said_where_the_heads_are():
    for device in ("cpu", "meta"):
        parts = list(fused.near_parts(300, 9, 2, torch.empty(1, device=device), causal=True))
        assert {x.device.type for part in parts for x in part if isinstance(x, torch.Tensor)} == {device}


@pytest.mark.parametrize("decaying", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_rows_of_different_lengths_continue_across_calls(inputs, name, decaying):
    """Prefill with pads, then calls of any size, each row at its own position; the state keeps its size."""
    *heads, mix = inputs
    rates = torch.tensor([0.1, 1.0], dtype=torch.float64) if decaying else None
    weights = weights_of(name, mix, rates)
    want, _ = causal_hybrid_attention(*heads, weights, chunk_size=8)
    for lengths in ([19, 2], [0, 11], [1, 1]):
        first = torch.tensor(lengths)
        prefill = [x[:, :, :19] for x in heads]
        _, state = causal_hybrid_attention(*prefill, weights, first, chunk_size=8)
        at = first
        for size in (1, 1, 2, 13, 1, 7):
            index = (at[:, None] + torch.arange(size))[:, None, :, None]
            parts = [x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in heads]
            got, after = causal_hybrid_attention(*parts, weights, None, state, chunk_size=8)
            expected = want.gather(2, index.expand(-1, HEADS, -1, VALUE_DIM))
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
            assert [x.shape for x in after] == [x.shape for x in state]
            state, at = after, at + size
        assert state.length.tolist() == at.tolist()


@pytest.mark.parametrize("at_once", [1, 32])
def test_pads_do_not_get_into_the_state(inputs, monkeypatch, at_once):
    monkeypatch.setitem(linear_torch.AT_ONCE, "cpu", at_once)
    *heads, mix = inputs
    weights, lengths = weights_of("exp", mix, torch.tensor([0.1, 1.0], dtype=torch.float64)), torch.tensor([23, 2])
    states = []
    for size in (0.0, 50.0):
        loud = [x.clone() for x in heads]
        for row, end in enumerate(lengths):
            for x in loud:
                x[row, :, end:] = size
        states.append(causal_hybrid_attention(*loud, weights, lengths, chunk_size=8)[1])
    for a, b in zip(*states, strict=True):
        assert torch.equal(a, b)
    for row, end in enumerate(lengths):
        alone = [x[row : row + 1, :, :end] for x in heads]
        want = causal_hybrid_attention(*alone, weights, chunk_size=8)[1]
        for a, b in zip(states[0], want, strict=True):
            torch.testing.assert_close(a[row : row + 1], b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", [-300.0, 0.0, 300.0])
def test_neither_part_overflows_or_drowns_the_other(inputs, causal, offset):
    """Both parts together shifted by e^(offset + 300) or e^(offset - 300): the ratio stays what it was."""
    *heads, mix = (x.float() for x in inputs)
    shifted = lambda by: lambda x: Features(*exp_map(x)[:1], exp_map(x)[1] + by)  # noqa: E731
    attend = causal_hybrid_attention if causal else hybrid_attention

    def run(weights, dtype=torch.float32):
        got = attend(*(x.to(dtype) for x in heads), weights._replace(log_mix=weights.log_mix.to(dtype)))
        return got[0] if causal else got

    plain = weights_of("exp", mix)
    moved = plain._replace(query_map=shifted(offset), key_map=shifted(-offset))
    torch.testing.assert_close(run(moved), run(plain), rtol=2e-3, atol=2e-3)
    for by in (-200.0, 200.0):  # one part vanishes, the other is right
        lone = plain._replace(key_map=shifted(by))
        torch.testing.assert_close(run(lone), run(lone, torch.float64).float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_features_that_hardly_meet_count_with_the_weight_they_have(inputs, causal):
    """Products of e^-56 beside log scales of 56 are those of 1 beside 0, in float32 too."""
    *heads, mix = (x.float() for x in inputs)
    plain, attend = weights_of("elu", mix), causal_hybrid_attention if causal else hybrid_attention
    thin = lambda x: Features(elu_map(x)[0] * math.exp(-28), x.new_full(x.shape[:-1], 28.0))  # noqa: E731
    got, want = (attend(*heads, x) for x in (plain._replace(query_map=thin, key_map=thin), plain))
    torch.testing.assert_close(*((x[0] if causal else x) for x in (got, want)), rtol=2e-3, atol=2e-3)


def test_features_that_do_not_meet_leave_the_window_alone():
    """Far keys with large log scales and no overlap with the query: e^150 by their bound, which must not hide it."""
    query, key, value = (torch.zeros(1, 1, 30, 2) for _ in range(3))
    query[..., 0], value[:, :, 20:] = 1.0, 1.0
    key[:, :, :10, 1] = 1.0

    def apart(x: torch.Tensor) -> Features:
        return Features((x > 0).to(x.dtype), 150 * x.sum(-1))

    weights = HybridWeights(5, 0, 1.0, apart, apart, torch.full((1,), -150.0))
    output, _ = causal_hybrid_attention(query, key, value, weights)
    torch.testing.assert_close(output[0, 0, 24:], torch.ones(6, 2))  # all of the window is one


def test_state_holds_the_newest_tokens_the_sinks_and_the_sum_between(inputs):
    *heads, mix = inputs
    _, key, value = heads
    _, state = causal_hybrid_attention(*heads, weights_of("elu", mix), chunk_size=8)
    assert torch.equal(state.ring_key, key[:, :, -5:]) and torch.equal(state.ring_value, value[:, :, -5:])
    assert torch.equal(state.sink_key, key[:, :, :3]) and torch.equal(state.sink_value, value[:, :, :3])
    far = slice(SINKS, LENGTH - WINDOW + 1)
    ones = F.pad(value, (0, 1), value=1.0)
    torch.testing.assert_close(state.kv, PLAIN["elu"][1](key[:, :, far]).transpose(-1, -2) @ ones[:, :, far])
    assert state.length.tolist() == [LENGTH] * BATCH
