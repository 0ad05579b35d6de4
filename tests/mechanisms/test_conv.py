"""conv and evo with trained taps, against a loop over tokens and taps; untrained they are `local`."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import DynamicCache

from hf_linattn import OptionError, UnknownNameError, patch_model
from hf_linattn.cache import state_bytes
from hf_linattn.config import make_config
from hf_linattn.ops.window import convolved as banded
from hf_linattn.testing import Case, random_tokens, tiny_model

SCALING = 8**-0.5
LENGTH = 150
CASES = [
    ("conv", {"window_size": 6}),
    ("conv", {"window_size": 1}),
    ("conv", {"window_size": 90, "kernel_radius": 2}),  # a kernel much narrower than the band
    ("conv", {"window_size": 9, "kernel_radius": 0, "form": "raw"}),
    ("conv", {"window_size": 13, "form": "raw"}),
    ("conv", {"window_size": 500, "kernel_radius": 7}),
    ("evo", {"window_size": 7, "num_rounds": 1}),
    ("evo", {"window_size": 7, "num_rounds": 2}),
    ("evo", {"window_size": 11, "num_rounds": 3, "kernel_radius": 4}),
    ("evo", {"window_size": 6, "num_rounds": 3, "form": "raw"}),
    ("evo", {"window_size": 90, "num_rounds": 2, "kernel_radius": 1, "form": "raw"}),
]


def trained(case: Case, dtype: torch.dtype = torch.float64, **options) -> torch.nn.Module:
    """Return a mechanism whose taps are no longer the identity."""
    mechanism = case.make(dtype, **options)
    noise = torch.randn(mechanism.kernel.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with torch.no_grad():
        mechanism.kernel += 0.3 * noise.to(dtype)
    return mechanism


def loop_over_taps(mechanism, query, key, value) -> torch.Tensor:
    """The output [H, n, Dv] of one sequence, of its first and its last head, one score at a time."""
    options, output = mechanism.config.to_options(), torch.zeros_like(query)
    rounds, taps = options.get("num_rounds", 1), mechanism.kernel.tolist()
    for h, i in itertools.product((0, len(query) - 1), range(query.shape[1])):
        shared = h * len(key) // len(query)
        products = (key[shared] @ query[h, i] * SCALING).tolist()
        last = i if mechanism.layer.causal else len(products) - 1
        seen = [j for j in range(last + 1) if abs(i - j) < options["window_size"]]
        scores = {j: products[j] for j in seen}
        radius = len(taps[h]) // 2
        for _ in range(rounds):
            scores = {
                j: sum(taps[h][radius + t] * scores.get(j + t, 0.0) for t in range(-radius, radius + 1)) for j in seen
            }
        weights = torch.tensor([scores[j] for j in seen], dtype=torch.float64)
        weights = weights if options["form"] == "raw" else weights.exp() / weights.exp().sum()
        output[h, i] = weights @ value[shared, seen]
    return output


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_it_is_the_loop_over_taps(name, options, causal):
    """Blocks inside the sequence and at its ends; grouped heads; pads anywhere; the reference too."""
    case = Case(name, "llama", causal, options)
    mechanism = trained(case)
    query, key, value = case.heads(LENGTH)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :61], mask[1, 137:], mask[1, 40:43] = False, False, False
    whole, padded = (mechanism(query, key, value, given)[0] for given in (None, mask))
    matrices = (mechanism.attention_matrix(query, key, given) for given in (None, mask))
    references = [torch.einsum("bhij,bhjd->bhid", matrix, value.repeat_interleave(2, 1)) for matrix in matrices]
    for row, real in enumerate(mask):
        # one row short, the other one also whole: with blocks whose band ends nowhere
        for kept, *results in ((real, padded, references[1]), (real | (row == 1), whole, references[0]))[: row + 1]:
            want = loop_over_taps(mechanism, *(x[row][:, kept] for x in (query, key, value)))
            for got in results:
                torch.testing.assert_close(got[row, ::3, kept], want[::3], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "options"), [("conv", {}), ("evo", {"num_rounds": 3}), ("conv", {"kernel_radius": 0})]
)
def test_untrained_it_is_local(name, options, causal):
    for window_size, length in ((1, 70), (19, 201), (64, 201), (300, 201)):
        case = Case(name, "llama", causal, {**options, "window_size": window_size})
        heads = case.heads(length)
        got, want = case.make()(*heads)[0], Case("local", "llama", causal).make(window_size=window_size)(*heads)[0]
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_one_round_is_conv(causal):
    case = Case("conv", "llama", causal, {"window_size": 9})
    heads = case.heads(LENGTH)
    want = trained(case)(*heads)[0]
    assert torch.equal(trained(Case("evo", "llama", causal, case.options), num_rounds=1)(*heads)[0], want)
    assert (trained(Case("evo", "llama", causal, case.options))(*heads)[0] - want).abs().max() > 1e-2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{"window_size": 23}, {"window_size": 50, "kernel_radius": 2, "form": "raw"}])
def test_parts_of_any_size_give_the_same(options, causal, monkeypatch):
    """Outputs and gradients with a part for every few queries, and columns convolved a few at a time."""
    case = Case("evo", "llama", causal, options)

    def results() -> list[torch.Tensor]:
        mechanism = trained(case)
        heads = [x.requires_grad_() for x in case.heads(LENGTH)]
        output = mechanism(*heads)[0]
        return [output, *torch.autograd.grad(output.sin().sum(), [*heads, mechanism.kernel])]

    want = results()
    for block, at_once, part in ((7, 1, 5), (16, 20_000, 64), (64, 1, 8), (200, 1 << 20, 3)):
        monkeypatch.setattr(banded, "BLOCK", block)
        monkeypatch.setattr(banded, "PART", part)
        monkeypatch.setitem(banded.AT_ONCE, "cpu", at_once)
        for got, expected in zip(results(), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_continued_states_give_the_full_forward(name, options):
    case = Case(name, "llama", True, options)
    mechanism = trained(case)
    query, key, value = case.heads(LENGTH)
    want, last = mechanism(query, key, value)
    for sizes in ([1] * 30 + [120], [3, 70, 1, 1, 70, 5], [100, 50]):
        state, parts = None, []
        for heads in zip(*(x.split(sizes, 2) for x in (query, key, value)), strict=True):
            part, state = mechanism(*heads, None, None, state)
            parts.append(part)
        torch.testing.assert_close(torch.cat(parts, 2), want, rtol=1e-10, atol=1e-10)
        assert all(torch.equal(x, y) for x, y in zip(state, last, strict=True))


@pytest.mark.parametrize("window_size", [1, 8, 40])
def test_rows_of_different_lengths_continue_each_at_its_own_place(window_size):
    """One row is empty, others shorter than the ring or longer; they read on twice, padded once more."""
    case = Case("evo", "llama", True, {"window_size": window_size})
    mechanism, first, second = trained(case), torch.tensor([0, 3, 22, 90]), torch.tensor([5, 0, 30, 17])
    query, key, value = case.heads(130, batch=4)
    masks = [torch.arange(90) < first[:, None], torch.arange(30) < second[:, None], None]
    state, parts = None, []
    for *heads, mask in zip(*(x.split([90, 30, 10], 2) for x in (query, key, value)), masks, strict=True):
        part, state = mechanism(*heads, mask, None, state)
        parts.append(part)
    got, real = torch.cat(parts, 2), torch.cat([*masks[:2], torch.ones(4, 10, dtype=torch.bool)], 1)
    for row, kept in enumerate(real):
        want, alone = mechanism(*(x[row : row + 1, :, kept] for x in (query, key, value)))
        torch.testing.assert_close(got[row : row + 1, :, kept], want, rtol=1e-10, atol=1e-10)
        assert all(torch.equal(x[row], y[0]) for x, y in zip(state, alone, strict=True))


@pytest.mark.parametrize("name", ["conv", "evo"])
@pytest.mark.parametrize("form", ["softmax", "raw"])
def test_trained_taps_see_no_future(name, form):
    case = Case(name, "gpt2", True, {"window_size": 20, "form": form})
    mechanism = trained(case)
    query, key, value = case.heads(100)
    want, _ = mechanism(query, key, value)
    for cut in (1, 50, 64, 81):
        loud = torch.where(torch.arange(100) < cut, 1.0, 1000.0)[:, None]
        got, _ = mechanism(query * loud, key * loud, value * loud)
        assert torch.equal(got[:, :, :cut], want[:, :, :cut])
    jacobian = torch.autograd.functional.jacobian(lambda x: mechanism(query, x, value)[0].sum((0, 1, 3)), key)
    assert not jacobian.abs().amax((1, 2, 4)).triu(1).any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"form": "raw", "kernel_radius": 3}])
def test_taps_get_the_gradients_of_the_reference(options, causal):
    """Of padded and packed rows; no tap that is of use goes without."""
    case = Case("evo", "llama", causal, {**options, "window_size": 12})
    mechanism = trained(case)
    query, key, value = case.heads(LENGTH)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :9], mask[1, 140:] = False, False
    ids = (torch.arange(LENGTH) >= 77).long().expand(2, -1)
    weight = torch.randn(query.shape, dtype=torch.float64) * mask[:, None, :, None]
    got, _ = mechanism(query, key, value, mask, ids)
    matrix = mechanism.attention_matrix(query, key, mask, ids)
    want = torch.einsum("bhij,bhjd->bhid", matrix, value.repeat_interleave(2, 1))
    got, want = (torch.autograd.grad((x * weight).sum(), mechanism.kernel)[0] for x in (got, want))
    torch.testing.assert_close(got, want)
    assert (got != 0).all() and got.shape[0] == 4


@pytest.mark.parametrize(("window_size", "kernel_radius", "taps"), [(64, None, 127), (1, None, 1), (9, 3, 7)])
def test_kernels_begin_as_the_identity_one_per_query_head(window_size, kernel_radius, taps):
    mechanism = Case("conv", "llama", True).make(window_size=window_size, kernel_radius=kernel_radius)
    want = torch.zeros(4, taps, dtype=torch.float64)
    want[:, taps // 2] = 1
    assert torch.equal(mechanism.kernel, want) and mechanism.averages
    assert not Case("conv", "llama", True).make(form="raw").averages


@pytest.mark.parametrize("name", ["conv", "evo"])
def test_state_is_a_ring_of_constant_size(name):
    model = patch_model(tiny_model("llama", True, torch.bfloat16), name, window_size=6)
    sizes = []
    for length in (3, 300):
        cache = DynamicCache()
        with torch.no_grad():
            model(random_tokens(2, length), past_key_values=cache, use_cache=True)
        state = cache.layers[0].state
        assert state.ring_key.shape == state.ring_value.shape == (2, 2, 5, 8)
        assert state.length.tolist() == [length, length]
        sizes.append(state_bytes(cache))
    assert sizes == [2 * 2 * (2 * 5 * 16 * 4 + 8)] * 2  # layers, rows, heads; 5 keys and values; the length


def test_scores_of_any_size_stay_finite():
    mechanism = trained(Case("evo", "llama", False), torch.float32)
    heads = [x.requires_grad_() for x in Case("evo", "llama", False).heads(LENGTH, dtype=torch.float32, size=100)]
    output = mechanism(*heads)[0]
    gradients = torch.autograd.grad(output.sum(), [*heads, mechanism.kernel])
    assert all(math.isfinite(x.sum().item()) for x in (output, *gradients))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("conv", {"window_size": 0}, OptionError, "window_size must be an integer >= 1, got 0"),
        ("conv", {"kernel_radius": -1}, OptionError, "kernel_radius must be None or an integer >= 0, got -1"),
        (
            "conv", {"kernel_radius": 64}, OptionError,
            "kernel_radius must be less than window_size, which is 64, got 64",
        ),
        ("conv", {"form": "soft"}, UnknownNameError, "did you mean softmax"),
        ("evo", {"num_rounds": 0}, OptionError, "num_rounds must be an integer >= 1, got 0"),
    ],
)  # fmt: skip
def test_bad_options_are_named(name, options, error, message):
    with pytest.raises(error, match=message):
        make_config(name, options)
