"""What is particular to synthesizer: its four forms, its share beside softmax, its tables' end, queries in blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import DynamicCache

from hf_linattn import OptionError, UnknownNameError, patch_model
from hf_linattn.config import make_config
from hf_linattn.errors import UnsupportedModeError
from hf_linattn.mechanisms import synthesizer
from hf_linattn.ops import reference
from hf_linattn.testing import Case, random_tokens, tiny_model
from hf_linattn.testing.counters import largest_tensor

FORMS = ("dense", "factorised_dense", "random", "factorised")
EVEN = {"max_length": 90, "rank": 3, "initial_mix": 0.4}  # 90 positions are no square


def trained(case: Case, **options) -> torch.nn.Module:
    """Return a mechanism whose parameters are no longer the initial ones, biases of zero included."""
    mechanism = case.make(**options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return mechanism


def synthetic_score(mechanism, query: torch.Tensor, head: int, i: int, j: int) -> torch.Tensor:
    """The number s_ij of one head by its form, for one query [D]."""
    of = mechanism.synthetic

    def two_layers(network) -> torch.Tensor:
        hidden = (query @ network.weight1[head] + network.bias1[head]).clamp(min=0)
        return hidden @ network.weight2[head] + network.bias2[head]

    scores = {
        "dense": lambda: two_layers(of.layers)[j],
        "factorised_dense": lambda: two_layers(of.coarse)[j // 10] * two_layers(of.fine)[j % 10],
        "random": lambda: of.table[head, i, j],
        "factorised": lambda: of.left[head, i] @ of.right[head, j],
    }
    return scores[mechanism.config.form]()


def loop_over_tokens(mechanism, query, key, value) -> torch.Tensor:
    """The formula for one pair at a time."""
    output = torch.zeros_like(query)
    for b, h, i in itertools.product(*map(range, query.shape[:3])):
        shared, q = h * key.shape[1] // query.shape[1], query[b, h, i]
        share = mechanism.mix_logit[h].sigmoid() if mechanism.config.mix else 1.0
        scores = []
        for j in range(i + 1 if mechanism.layer.causal else key.shape[2]):
            own = mechanism.layer.scaling * q @ key[b, shared, j]
            scores.append((1 - share) * own + share * synthetic_score(mechanism, q, h, i, j))
        output[b, h, i] = torch.stack(scores).softmax(0) @ value[b, shared, : len(scores)]
    return output


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_loop_over_pairs(form, causal, monkeypatch):
    """Mixed and pure, all queries at a time and a few."""
    for mix in (True, False):
        case = Case("synthesizer", "llama", causal, {**EVEN, "form": form, "mix": mix})
        query, key, value = case.heads(13)
        mechanism = trained(case)
        want = loop_over_tokens(mechanism, query, key, value)
        matrix = mechanism.attention_matrix(query, key)
        torch.testing.assert_close(reference.attend(matrix, value), want, rtol=1e-10, atol=1e-10)
        for elements in (1, 2 * 4 * 13 * 5, 1 << 22):
            monkeypatch.setattr(synthesizer, "AT_ONCE", {"cpu": elements})
            torch.testing.assert_close(mechanism(query, key, value)[0], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_different_lengths_continue_each_at_its_own_place(form):
    """One row is empty, one full; the others read on at once, in parts and by token, up to the last position."""
    case = Case("synthesizer", "llama", True, {**EVEN, "form": form})
    mechanism, lengths = trained(case), (0, 3, 50, 70)
    query, key, value = case.heads(90, batch=4)
    mask = torch.arange(70) < torch.tensor(lengths)[:, None]
    early, first = mechanism(*(x[:, :, :70] for x in (query, key, value)), mask)
    for sizes in ([20], [1] * 20, [7, 1, 12]):
        parts, state, start = [early], first, 70
        for size in sizes:
            span = slice(start, start + size)
            part, state = mechanism(*(x[:, :, span] for x in (query, key, value)), None, None, state)
            parts.append(part)
            start += size
        got = torch.cat(parts, 2)
        assert state.length.tolist() == [20, 23, 70, 90]
        for row, length in enumerate(lengths):
            kept = torch.cat([torch.arange(length), torch.arange(70, 90)])
            heads = [x[row : row + 1, :, kept] for x in (query, key, value)]
            torch.testing.assert_close(got[row : row + 1, :, kept], mechanism(*heads)[0], rtol=1e-10, atol=1e-10)
            for stored, x in zip(state[:2], heads[1:], strict=True):
                assert torch.equal(stored[row, :, : len(kept)], x[0])
                assert not stored[row, :, len(kept) :].any()


def test_padded_parts_continue_at_their_own_places():
    """The second part is padded, too, and its longest row is not the one that was the longest."""
    case = Case("synthesizer", "gpt2", True, {**EVEN, "form": "factorised"})
    mechanism, first, second = trained(case), (6, 2), (3, 9)
    query, key, value = case.heads(25)
    spans = (slice(0, 6), slice(6, 15), slice(15, 25))
    state, got = None, []
    for span, lengths in zip(spans, (first, second, (10, 10)), strict=True):
        mask = torch.arange(span.stop - span.start) < torch.tensor(lengths)[:, None]
        part, state = mechanism(*(x[:, :, span] for x in (query, key, value)), mask, None, state)
        got.append(part)
    for row in range(2):
        kept = torch.cat([torch.arange(first[row]), 6 + torch.arange(second[row]), torch.arange(15, 25)])
        want, _ = mechanism(*(x[row : row + 1, :, kept] for x in (query, key, value)))
        torch.testing.assert_close(torch.cat(got, 2)[row : row + 1, :, kept], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_positions_count_from_the_start_of_a_sequence(form, causal):
    """Padded on the left by 5, on the right by 11, and packed behind another: as alone."""
    case = Case("synthesizer", "llama", causal, {**EVEN, "form": form, "max_length": 31})
    query, key, value = case.heads(50)
    mechanism = trained(case)
    mask, ids = torch.ones(2, 50, dtype=torch.bool), (torch.arange(50) >= 19).long().expand(2, -1)
    mask[0, :5], mask[1, 39:] = False, False
    got, _ = mechanism(query, key, value, mask, ids)
    for row, number in itertools.product(range(2), range(2)):
        span = mask[row] & (ids[row] == number)
        want, _ = mechanism(*(x[row : row + 1, :, span] for x in (query, key, value)))
        torch.testing.assert_close(got[row : row + 1, :, span], want, rtol=1e-10, atol=1e-10)
    assert not got.transpose(1, 2)[~mask].any()


@pytest.mark.parametrize("form", FORMS)
def test_a_fresh_model_is_as_near_to_softmax_as_its_share_is_small(form):
    case = Case("synthesizer", "llama", True, {"form": form, "max_length": 64})
    query, key, value = case.heads(60)
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def error(**options) -> float:
        return (case.make(**options)(query, key, value)[0] - want).abs().max().item()

    assert error(initial_mix=0.0) < 1e-14
    assert error() < 0.05
    assert 8 < error(initial_mix=0.01) / error(initial_mix=0.001) < 12


def test_pure_scores_ask_for_no_key_and_those_of_positions_for_no_query():
    for form in FORMS:
        case = Case("synthesizer", "gpt2", True, {"form": form, "mix": False, "max_length": 40})
        mechanism, (query, key, value) = case.make(), case.heads(40)
        want, _ = mechanism(query, key, value)
        torch.testing.assert_close(mechanism(query, 5 * key.flip(2), value)[0], want, rtol=1e-12, atol=1e-12)
        changed = (mechanism(query.flip(2), key, value)[0] - want).abs().max()
        assert (changed < 1e-12) == (form in ("random", "factorised"))
        assert "mix_logit" not in dict(mechanism.named_parameters())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_parameters_get_the_gradients_of_the_formula(form, causal, monkeypatch):
    monkeypatch.setattr(synthesizer, "AT_ONCE", {"cpu": 2 * 4 * 45 * 10})
    case = Case("synthesizer", "llama", causal, {**EVEN, "form": form})
    mechanism = trained(case)
    query, key, value = case.heads(45)
    mask = torch.ones(2, 45, dtype=torch.bool)
    mask[0, :9], mask[1, 30:] = False, False
    parameters = list(mechanism.parameters())
    weight = torch.randn(query.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weight = weight * mask[:, None, :, None]
    got = torch.autograd.grad((mechanism(query, key, value, mask)[0] * weight).sum(), parameters)
    want = reference.attend(mechanism.attention_matrix(query, key, mask), value)
    for a, b in zip(got, torch.autograd.grad((want * weight).sum(), parameters), strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_longer_inputs_are_refused_however_they_come():
    message = "max_length=8 positions, got a sequence of 9 tokens; shorten it, or patch the model with max_length=9"
    for causal in (True, False):
        case = Case("synthesizer", "llama", causal, {"max_length": 8})
        mechanism, heads = case.make(), case.heads(9)
        with pytest.raises(UnsupportedModeError, match=message):
            mechanism(*heads)
        with pytest.raises(UnsupportedModeError, match=message):
            mechanism.attention_matrix(*heads[:2])
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[:, 0] = False
        mechanism(*heads, mask)
    model = patch_model(tiny_model("gpt2", True), "synthesizer", max_length=8)
    cache = DynamicCache()
    model(random_tokens(2, 8), past_key_values=cache, use_cache=True)
    with pytest.raises(UnsupportedModeError, match=message):
        model(random_tokens(2, 1), past_key_values=cache, use_cache=True)


def test_no_matrix_of_all_pairs_is_held_without_gradients(monkeypatch):
    monkeypatch.setattr(synthesizer, "AT_ONCE", {"cpu": 1 << 14})
    for form, causal in itertools.product(("dense", "factorised_dense", "factorised"), (True, False)):
        case = Case("synthesizer", "gpt2", causal, {"form": form, "max_length": 300})
        mechanism, heads = case.make(torch.float32).eval(), case.heads(300, batch=1, dtype=torch.float32)
        with torch.no_grad():
            assert largest_tensor(lambda: mechanism(*heads)) < 300**2 / 4  # noqa: B023 - called at once


def test_the_seed_and_the_layer_decide_what_is_drawn():
    def drawn(**options) -> torch.Tensor:
        return Case("synthesizer", "gpt2", True, {"form": "random", "max_length": 9, **options}).make().synthetic.table

    before = torch.get_rng_state()
    assert torch.equal(drawn(seed=3), drawn(seed=3))
    assert not torch.equal(drawn(), drawn(seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    model = patch_model(tiny_model("gpt2", True), "synthesizer", form="factorised", max_length=9)
    first, second = (p for name, p in model.named_parameters() if name.endswith("synthetic.left"))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"form": "factorized"}, UnknownNameError, "unknown form 'factorized'; did you mean factorised"),
        ({"max_length": 0}, OptionError, "max_length must be an integer >= 1, got 0"),
        ({"rank": 0}, OptionError, "rank must be an integer >= 1, got 0"),
        ({"mix": "no"}, OptionError, "mix must be True or False, got 'no'"),
        ({"initial_mix": 1}, OptionError, "initial_mix must be a number from 0 to less than 1, got 1"),
        ({"initial_mix": True}, OptionError, "initial_mix must be a number from 0 to less than 1, got True"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make_config("synthesizer", options)
