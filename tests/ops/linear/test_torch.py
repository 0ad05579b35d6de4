"""The chunked operations against a loop over single tokens, written from the formula."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from hf_linattn.ops.linear.interface import Features, causal_linear_attention, linear_attention
from hf_linattn.ops.linear.torch_open_length import Passage
from hf_linattn.ops.linear.types import LinearState
from hf_linattn.testing.counters import elements_written
from tests.ops.feature_maps import elu_map, exp_map

BATCH, HEADS, KV_HEADS, LENGTH, DIM, VALUE_DIM = 2, 4, 2, 41, 3, 5


PLAIN = {"elu": (elu_map, lambda x: F.elu(x) + 1), "exp": (exp_map, lambda x: (3 * x).exp())}


def by_token(query, key, value, phi, causal, mask, ids, rates=None) -> torch.Tensor:
    """o_i = sum_j w_ij v_j / sum_j w_ij, one query of one head at a time; rates [Hkv] of decay per real token."""
    output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=query.dtype)
    for b, h, i in itertools.product(*map(range, query.shape[:3])):
        shared = h * key.shape[1] // query.shape[1]
        seen = [j for j in range(i + 1 if causal else LENGTH) if mask[b, j] and ids[b, i] == ids[b, j]]
        if seen:
            weights = phi(key[b, shared, seen]) @ phi(query[b, h, i])
            if rates is not None:
                steps = torch.stack([mask[b, min(i, j) + 1 : max(i, j) + 1].sum() for j in seen])
                weights = weights * (-rates[shared] * steps).exp()
            output[b, h, i] = weights @ value[b, shared, seen] / weights.sum()
    return output


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)
    draw = lambda heads, dim: torch.randn(BATCH, heads, LENGTH, dim, dtype=torch.float64, generator=generator)  # noqa: E731
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[0, :3], mask[1, 35:], mask[1, 15:22] = False, False, False
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    ids[0, 16:], ids[0, 17:], ids[1, 20:] = 1, 2, 1
    return draw(HEADS, DIM), draw(KV_HEADS, DIM), draw(KV_HEADS, VALUE_DIM), mask, ids


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_equals_the_loop_over_tokens(inputs, name, causal, packed):
    query, key, value, mask, ids = inputs
    chunked, phi = PLAIN[name]
    ids = ids if packed else torch.zeros_like(ids)
    want = by_token(query, key, value, phi, causal, mask, ids)
    for chunk_size in (1, 8, 13, 1000):
        operands = (query, key, value, chunked, chunked, mask, ids if packed else None)
        if causal:
            got, _ = causal_linear_attention(*operands, chunk_size=chunk_size)
        else:
            got = linear_attention(*operands, chunk_size=chunk_size)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_decay_equals_the_loop_over_tokens(inputs, name, causal, packed):
    """A slow and a very fast rate: values, and gradients of all inputs and of the rates."""
    query, key, value, mask, ids = inputs
    chunked, phi = PLAIN[name]
    rates = torch.tensor([0.01, 9.0], dtype=torch.float64)
    rates, *heads = (x.clone().requires_grad_() for x in (rates, query, key, value))
    want = by_token(*heads, phi, causal, mask, ids if packed else torch.zeros_like(ids), rates)
    weight = torch.randn(want.shape, dtype=torch.float64) * mask[:, None, :, None]
    want_grads = torch.autograd.grad((want * weight).sum(), [*heads, rates])
    for chunk_size in (1, 13, 1000):
        decay = -rates[None, :, None] * mask[:, None]
        operands = (*heads, chunked, chunked, mask, ids if packed else None)
        if causal:
            got, _ = causal_linear_attention(*operands, log_decay=decay, chunk_size=chunk_size)
        else:
            got = linear_attention(*operands, log_decay=decay, chunk_size=chunk_size)
        real = mask[:, None, :, None]
        torch.testing.assert_close(got * real, want * real, rtol=1e-10, atol=1e-10)
        got_grads = torch.autograd.grad((got * weight).sum(), [*heads, rates])
        for a, b in zip(got_grads, want_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_decayed_state_continues_across_calls_and_stays_finite(inputs):
    """Calls of any size equal one; after 100,000 tokens of the fastest rate the state still holds the last ones."""
    query, key, value, mask, _ = inputs
    decay = -torch.tensor([0.1, 3.0], dtype=torch.float64)[None, :, None] * mask[:, None]
    want, _ = causal_linear_attention(query, key, value, exp_map, exp_map, mask, log_decay=decay)
    state, parts = None, []
    for span in (slice(0, 19), slice(19, 20), slice(20, LENGTH)):
        heads = (x[:, :, span] for x in (query, key, value))
        part, state = causal_linear_attention(
            *heads, exp_map, exp_map, mask[:, span], None, state, decay[:, :, span]
        )
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 2), want)
    ones = torch.ones(1, 1, 100_000, 1)
    output, state = causal_linear_attention(ones, ones, ones, elu_map, elu_map, log_decay=-10 * ones[..., 0])
    torch.testing.assert_close(output, ones)
    total = state.kv[0, 0, :, -1] * state.log_max.exp()[0, 0]
    torch.testing.assert_close(total, torch.tensor([2 / (1 - torch.tensor(-10.0).exp())]))


@pytest.mark.parametrize("name", PLAIN)
def test_state_is_the_sum_over_keys(inputs, name):
    _, key, value, mask, _ = inputs
    query = torch.zeros(BATCH, HEADS, LENGTH, DIM, dtype=torch.float64)
    chunked, phi = PLAIN[name]
    _, state = causal_linear_attention(query, key, value, chunked, chunked, mask)
    ones = torch.cat([value, torch.ones(BATCH, KV_HEADS, LENGTH, 1, dtype=torch.float64)], -1)
    want = torch.einsum("bhnf,bhnd,bn->bhfd", phi(key), ones, mask.double())
    torch.testing.assert_close(state.kv * state.log_max.exp()[..., None, None], want)
    assert state.kv.shape == (BATCH, KV_HEADS, DIM, VALUE_DIM + 1)


def test_a_growing_maximum_rescales_the_state_without_overflow():
    """Keys whose log scale climbs from -300 to 300: no power of e holds both ends, the running maximum does."""
    length = 200
    ramp = torch.linspace(-100, 100, length)[None, None, :, None].expand(1, 1, length, 2)
    value = torch.arange(length, dtype=torch.float32)[None, None, :, None]
    output, state = causal_linear_attention(torch.zeros(1, 1, length, 2), ramp, value, exp_map, exp_map)
    step = (ramp[0, 0, 1, 0] - ramp[0, 0, 0, 0]).item() * 3
    want = value[0, 0, :, 0] - 1 / (torch.tensor(step).exp() - 1)  # geometric weights e^(-step) per token back
    torch.testing.assert_close(output[0, 0, 20:, 0], want[20:], rtol=1e-4, atol=1e-3)
    assert torch.isfinite(state.kv).all() and state.log_max.item() == pytest.approx(300)


def test_state_continues_across_calls(inputs):
    query, key, value, mask, _ = inputs
    want, _ = causal_linear_attention(query, key, value, exp_map, exp_map, mask)
    state, parts = None, []
    for span in (slice(0, 19), slice(19, 20), slice(20, LENGTH)):
        part, state = causal_linear_attention(
            query[:, :, span], key[:, :, span], value[:, :, span], exp_map, exp_map, mask[:, span], None, state
        )
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 2), want)
    assert isinstance(state, LinearState)


def test_packed_state_belongs_to_the_last_sequence(inputs):
    query, key, value, mask, ids = inputs
    _, packed = causal_linear_attention(query, key, value, exp_map, exp_map, mask, ids)
    for row, start in ((0, 17), (1, 20)):
        rows, span = slice(row, row + 1), slice(start, None)
        _, alone = causal_linear_attention(
            *(x[rows, :, span] for x in (query, key, value)), exp_map, exp_map, mask[rows, span]
        )
        got, want = (s.kv[r] * s.log_max[r].exp()[:, None, None] for s, r in ((packed, row), (alone, 0)))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("causal", [False, True])
def test_a_negative_sum_of_weights_gives_zero_and_no_gradient(causal):
    """Weights of features with signs that cancel can come out negative; their quotient would be noise."""
    query, key, value = (torch.ones(1, 1, 3, 2, dtype=torch.float64) for _ in range(3))
    query = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)[:, None] * query
    heads = [x.requires_grad_() for x in (query, key, value)]
    operands = (*heads, Features, Features)
    output = causal_linear_attention(*operands)[0] if causal else linear_attention(*operands)
    assert torch.equal(output[0, 0], torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64))
    output.sum().backward()
    torch.testing.assert_close(heads[2].grad[0, 0], torch.full((3, 2), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_what_the_backward_pass_writes_grows_with_the_length(name, causal):
    """A gradient of full size for every part that was cut out of an input would make it quadratic."""

    def written(length: int) -> int:
        heads = [torch.randn(1, 16, length, 2, requires_grad=True) for _ in range(3)]
        operands = (*heads, PLAIN[name][0], PLAIN[name][0])
        output = causal_linear_attention(*operands)[0] if causal else linear_attention(*operands)
        return elements_written(output.sum().backward)

    assert written(8192) < 2.1 * written(4096)


def test_a_passage_over_chunks_is_the_loop_over_them():
    """What is lost over all chunks is far beyond a float, and one chunk begins another sequence."""
    count, generator = 12, torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(1, 2, *shape, generator=generator)  # noqa: E731
    largest, passed, log_max, kv = 5 * draw(count), -30 * draw(count).abs(), draw(), draw(3, 5)
    query, key, value = draw(count, 4, 3), draw(count, 8, 3), draw(count, 8, 5)
    goes_on = torch.arange(count)[None, None] != 7
    passage = Passage(key, largest, passed, log_max, goes_on)
    read, last = passage.read_and_fold(query, key, value, kv)
    state, log = kv.double(), log_max.double()
    for t in range(count):
        if goes_on[0, 0, t]:
            torch.testing.assert_close(passage.before[..., t], log.float())
            torch.testing.assert_close(read[:, :, t], (query[:, :, t].double() @ state).float())
        carried = log + passed[..., t] if goes_on[0, 0, t] else torch.full_like(log, -torch.inf)
        log = torch.maximum(carried, largest[..., t].double())
        torch.testing.assert_close(passage.after[..., t], log.float())
        state = state * (carried - log).exp()[..., None, None] + (key[:, :, t].mT @ value[:, :, t]).double()
    torch.testing.assert_close(last, state.float())
