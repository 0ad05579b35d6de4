"""Transformer-VQ: softmax over near keys and the codes of all others."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from hf_linattn import OptionError
from hf_linattn.attention_call import AttentionCall
from hf_linattn.config import make_config
from hf_linattn.ops.slots import vq
from hf_linattn.testing import Case
from tests.helpers import nearest

SMALL = {"num_codes": 5, "block_size": 8}
LENGTH = 61
MODES = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def fitted(case: Case, **options):
    """Return a mechanism whose codes lie where random keys are."""
    mechanism = case.make(**options)
    mechanism.codebook.copy_(torch.randn(mechanism.codebook.shape, generator=torch.Generator().manual_seed(7)))
    return mechanism


def by_query(mechanism, query, key, value) -> torch.Tensor:
    """Dense attention over quantised keys, one query of one head at a time."""
    output, size, groups = torch.zeros_like(query), mechanism.config.block_size, query.shape[1] // key.shape[1]
    for b, h in itertools.product(*map(range, query.shape[:2])):
        codes, keys, values = mechanism.codebook[h // groups], key[b, h // groups], value[b, h // groups]
        coded = [codes[nearest(codes, k)] for k in keys]
        for i in range(query.shape[2]):
            seen = range(i + 1 if mechanism.layer.causal else len(keys))
            used = torch.stack([keys[j] if abs(i // size - j // size) <= 1 else coded[j] for j in seen])
            output[b, h, i] = (mechanism.layer.scaling * used @ query[b, h, i]).softmax(0) @ values[: len(seen)]
    return output


def in_parts(mechanism, heads, sizes):
    state, parts, start = None, [], 0
    for size in sizes:
        part, state = mechanism(*(x[:, :, start : start + size] for x in heads), None, None, state)
        parts.append(part)
        start += size
    return torch.cat(parts, 2), state


@pytest.mark.covering(2)
@MODES
@pytest.mark.parametrize("queries", [64, 200, 4096], ids=["1 block at a time", "3", "all"])
@pytest.mark.parametrize("options", [SMALL, {"num_codes": 3, "block_size": 1}, {"num_codes": 90, "block_size": 5}])
def test_equals_dense_attention_over_quantised_keys(monkeypatch, causal, queries, options):
    monkeypatch.setitem(vq.QUERIES, "cpu", queries)
    monkeypatch.setitem(vq.KEYS, "cpu", 2 * queries)
    case = Case("vq", "llama", causal, options)
    heads, mechanism = case.heads(LENGTH), fitted(case)
    got, _ = mechanism(*heads)
    want = by_query(mechanism, *heads)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    exact = F.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True)
    assert (want - exact).abs().max() > 0.1  # and it is not softmax over the keys themselves


@pytest.mark.parametrize("size", [1, 2, 8])
def test_read_at_once_in_parts_and_by_token_is_the_same(size):
    case = Case("vq", "llama", True, {"num_codes": 5, "block_size": size})
    heads, mechanism = case.heads(LENGTH), fitted(case)
    want, after = mechanism(*heads)
    for sizes in ([1] * LENGTH, [16, 1, 8, 36], [7, 54], [17, 15, 1, 1, 27], [60, 1]):
        got, state = in_parts(mechanism, heads, sizes)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        for name, x, y in zip(after._fields, after, state, strict=True):
            torch.testing.assert_close(x, y, msg=lambda text, name=name: f"{name}: {text}")


@MODES
def test_with_every_key_among_the_codes_it_is_softmax_attention(causal):
    """Beyond the window, too, in whatever order the codes are."""
    case = Case("vq", "llama", causal, {"num_codes": 93, "block_size": 4})
    query, key, value = case.heads(93, batch=1)
    mechanism = case.make()
    mechanism.codebook.copy_(key[0, :, torch.randperm(93, generator=torch.Generator().manual_seed(1))])
    want = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(mechanism(query, key, value)[0], want, rtol=1e-9, atol=1e-9)


@MODES
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_what_they_are_alone(causal, side):
    """One row without pads, others that end in different blocks, one that is short enough to be exact, one empty."""
    mechanism, lengths = fitted(Case("vq", "llama", causal, SMALL)), (LENGTH, 48, 31, 9, 0)
    heads = Case("vq", "llama", causal).heads(LENGTH, batch=5)
    steps, counts = torch.arange(LENGTH), torch.tensor(lengths)[:, None]
    mask = steps < counts if side == "right" else steps >= LENGTH - counts
    got, _ = mechanism(*heads, mask)
    for row, length in enumerate(lengths):
        real = mask[row]
        assert not got[row][:, ~real].any() and int(real.sum()) == length
        if length:
            want = by_query(mechanism, *(x[row : row + 1, :, real] for x in heads))
            torch.testing.assert_close(got[row : row + 1, :, real], want, rtol=1e-9, atol=1e-9)


def test_rows_of_different_lengths_continue_each_at_its_own_place():
    case = Case("vq", "llama", True, SMALL)
    mechanism, lengths = fitted(case), (0, 3, 8, 16, 23, 60)
    heads = case.heads(90, batch=6)
    mask = torch.arange(60) < torch.tensor(lengths)[:, None]
    early, start = mechanism(*(x[:, :, :60] for x in heads), mask)
    for sizes in ([30], [1] * 30, [9, 1, 20]):
        state, late, at = start, [], 60
        for size in sizes:
            part, state = mechanism(*(x[:, :, at : at + size] for x in heads), None, None, state)
            late.append(part)
            at += size
        for row, length in enumerate(lengths):
            kept = torch.cat([torch.arange(length), torch.arange(60, 90)])
            want, alone = mechanism(*(x[row : row + 1, :, kept] for x in heads))
            got = torch.cat([early[row : row + 1, :, :length], *(x[row : row + 1] for x in late)], 2)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
            for name, x, y in zip(state._fields, state, alone, strict=True):
                torch.testing.assert_close(x[row], y[0], msg=lambda text, name=name: f"{name}: {text}")


def test_the_state_counts_and_averages_what_has_left_the_window():
    case = Case("vq", "llama", True, SMALL)
    query, key, value = case.heads(53)
    mechanism = fitted(case)
    _, state = mechanism(query, key, value)
    for b, h, s in itertools.product(range(2), range(2), range(5)):
        of_code = [j for j in range(40) if nearest(mechanism.codebook[h], key[b, h, j]) == s]
        assert state.counts[b, h, s] == len(of_code)
        want = value[b, h, of_code].mean(0) if of_code else torch.zeros(8, dtype=torch.float64)
        torch.testing.assert_close(state.means[b, h, s], want)
    assert torch.equal(state.key[:, :, :13], key[:, :, 40:]) and torch.equal(state.value[:, :, :13], value[:, :, 40:])
    assert not state.key[:, :, 13:].any() and state.length.tolist() == [53, 53]


@MODES
def test_equal_values_come_out_as_they_are_after_any_length(causal):
    """In float32: means of thousands of values, and weights that add up to one."""
    mechanism = fitted(Case("vq", "llama", causal, {"num_codes": 2}), dtype=torch.float32)
    query, key, value = Case("vq", "llama", causal).heads(5003, batch=1, dtype=torch.float32)
    output, _ = mechanism(query, key, torch.full_like(value, 3.0))
    assert (output - 3.0).abs().max() < 1e-5


@MODES
def test_codes_that_nothing_was_fitted_to_are_better_than_the_window_alone(causal):
    case = Case("vq", "llama", causal, {"block_size": 16})
    query, key, value = case.heads(400)
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    window = Case("local", "llama", causal, {"window_size": 32}).make()
    errors = [(m(query, key, value)[0] - exact).square().mean() for m in (case.make(), window)]
    assert errors[0] < 0.3 * errors[1]


@MODES
def test_the_softmax_of_scores_is_the_matrix(causal):
    case = Case("vq", "llama", causal, SMALL)
    mechanism, (query, key, value) = fitted(case), case.heads(LENGTH)
    mask = torch.arange(LENGTH) >= torch.tensor([[5], [0]])
    ids = (torch.arange(LENGTH) >= 41).long().expand(2, -1)
    matrix = mechanism.attention_matrix(query, key, mask, ids)
    for pairs in AttentionCall(query, key, value, mask, ids, {}).pairs(causal, 16):
        got = mechanism.scores(pairs).masked_fill(~pairs.allowed, -1e30).softmax(-1) * pairs.real
        want = matrix[:, :, pairs.first : pairs.first + got.shape[2], : got.shape[3]] * pairs.real
        torch.testing.assert_close(got, want)


def test_gradients_leave_a_codebook_that_changed_since_alone():
    """Two training forwards, then both backward passes."""
    heads = [x.requires_grad_() for x in Case("vq", "llama", True).heads(LENGTH, batch=1)]
    mechanism = fitted(Case("vq", "llama", True, SMALL)).train()
    output, _ = mechanism(*heads)
    want = torch.autograd.grad(output.sin().sum(), heads, retain_graph=True)
    before = mechanism.codebook.clone()
    mechanism.before_forward()
    assert not torch.equal(mechanism.codebook, before)
    for got, expected in zip(torch.autograd.grad(output.sin().sum(), heads), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_codes": 0}, "num_codes must be an integer >= 1, got 0"),
        ({"block_size": 2.5}, r"block_size must be an integer >= 1, got 2\.5"),
        ({"ema_decay": 1.5}, r"ema_decay must be a number from 0 to 1, got 1\.5"),
        ({"ema_decay": True}, "ema_decay must be a number from 0 to 1, got True"),
        ({"ema_decay": None}, "ema_decay must be a number from 0 to 1, got None"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(OptionError, match=message):
        make_config("vq", options)
