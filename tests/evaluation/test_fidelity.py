"""Fidelity against loops over tokens, n-grams and attention matrices."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_linattn import OptionError, get_mechanisms, patch_model
from hf_linattn.attention_call import intercept_attention
from hf_linattn.evaluation.fidelity import fidelity, linear_share, without_far_keys
from hf_linattn.evaluation.next_token import token_losses
from hf_linattn.evaluation.positions import accuracy_by_position, loss_by_recurrence
from tests.helpers import WithoutFloat64, logits_of, make_tokenizer, make_tokens
from tests.models import make_model

TEXTS = [" ".join(f"w{5 + (start + 7 * i * i) % 60}" for i in range(52)) for start in range(6)]
OPTIONS = {"max_length": 24, "prompt_length": 6, "new_tokens": 14}


def make_pair(name: str = "llama", mechanism: str = "hybrid", **options):
    original = make_model(name, std=0.4).eval()
    return patch_model(copy.deepcopy(original), mechanism, **options).eval(), original


def test_accuracy_and_loss_are_those_of_a_loop_over_positions():
    model, _ = make_pair(window_size=4, num_sink_tokens=1)
    windows = make_tokens(5, 11)
    rows = accuracy_by_position(token_losses(model, windows), 3)
    assert [(row.first, row.last) for row in rows] == [(1, 3), (4, 6), (7, 10)]
    logits = logits_of(model, windows).double()
    for row in rows:
        places = [(b, i) for b in range(5) for i in range(row.first, row.last + 1)]
        losses = [-float(logits[b, i - 1].log_softmax(-1)[windows[b, i]]) for b, i in places]
        right = [int(logits[b, i - 1].argmax()) == int(windows[b, i]) for b, i in places]
        assert row.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert row.accuracy == pytest.approx(sum(right) / len(right))


def test_losses_by_recurrence_are_those_of_a_loop_over_pairs():
    model, _ = make_pair(window_size=4, num_sink_tokens=1)
    windows = 5 + make_tokens(4, 23) % 4  # four kinds of tokens, so that pairs come again
    logits, found = logits_of(model, windows).double(), {"new": [], "near": [], "far": []}
    for b in range(4):
        for i in range(1, 23):
            same = [j for j in range(1, i) if windows[b, j - 1 : j + 1].tolist() == windows[b, i - 1 : i + 1].tolist()]
            kind = "new" if not same else "near" if i - max(same) <= 5 else "far"
            found[kind].append(-float(logits[b, i - 1].log_softmax(-1)[windows[b, i]]))
    rows = loss_by_recurrence(token_losses(model, windows), near=5)
    assert [(row.first, row.last) for row in rows] == [(0, 0), (1, 5), (6, 23)]
    for row, losses in zip(rows, found.values(), strict=True):
        assert row.count == len(losses) > 3 and row.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert [row.last for row in loss_by_recurrence(token_losses(model, torch.arange(5, 17).view(4, 3)))] == [0]


def far_weights(model, windows) -> list[torch.Tensor]:
    """Return what each query of each layer gives to keys beyond a window of 3 and one sink, by the matrices."""
    steps, found = torch.arange(windows.shape[1]), []
    near = ((steps[:, None] - steps).abs() < 3) | (steps == 0)

    def watch(mechanism):
        def answer(call):
            matrix = mechanism.attention_matrix(call.query.double(), call.key.double(), sink=call.exact["sink"])
            found.append((matrix * ~near).sum(-1))
            return call.run(mechanism)

        return answer

    mechanisms = get_mechanisms(model)
    with torch.no_grad(), intercept_attention(mechanisms, {path: watch(m) for path, m in mechanisms.items()}):
        model(windows, use_cache=False)
    return found


@pytest.mark.parametrize(("scale", "sink"), [("exact", None), ("maximum", None), ("exact", "one")])
def test_the_linear_share_is_that_of_the_attention_matrices(scale, sink):
    options = {"window_scale": scale, "initial_share": 0.6, "sink_logit": sink}
    model, _ = make_pair("gpt2", window_size=3, num_sink_tokens=1, **options)
    windows = make_tokens(2, 13)
    expected = float(torch.stack(far_weights(model, windows)).mean())
    with WithoutFloat64():
        share = linear_share(model, windows)
    assert 0.01 < expected < 0.99 and share == pytest.approx(expected, rel=1e-4)
    assert linear_share(make_pair(mechanism="linear")[0], windows) is None
    unsaid = [{"mechanism": "hybrid", "layers": n, "options": {"num_hard_keys": 8 * n}} for n in (0, 1)]
    assert linear_share(make_pair(mechanism=unsaid)[0], windows) is None
    assert linear_share(make_model("gpt2"), windows) is None


def test_hybrids_of_some_heads_and_in_a_fusion_count_beside_those_of_whole_layers():
    options = {"window_size": 3, "num_sink_tokens": 1, "initial_share": 0.6}
    entry = {"mechanism": "hybrid", "options": options}
    model, _ = make_pair("gpt2", [{**entry, "layers": 0, "heads": 1}, {**entry, "layers": 1}])
    windows = make_tokens(2, 13)
    first, second = far_weights(model, windows)
    expected = float(torch.cat([first[:, 1:2], second], 1).mean())
    assert linear_share(model, windows) == pytest.approx(expected, rel=1e-4)
    with without_far_keys(model):
        assert linear_share(model, windows) == 0
    fused, _ = make_pair("gpt2", "fusion", members={"hybrid": options, "linear": {}})
    assert 0.01 < linear_share(fused, windows) < 0.99


def test_without_far_keys_a_hybrid_is_its_window_and_sinks():
    model, original = make_pair(window_size=4, num_sink_tokens=1)
    other = patch_model(copy.deepcopy(original), "streaming", window_size=4, num_sink_tokens=1).eval()
    ids = make_tokens(2, 17)
    before = logits_of(model, ids)
    with without_far_keys(model):
        torch.testing.assert_close(logits_of(model, ids), logits_of(other, ids), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits_of(model, ids), before)


def test_an_exact_conversion_is_as_faithful_as_the_original():
    model, original = make_pair(window_size=64)
    state = torch.get_rng_state()
    result = fidelity(model, original, make_tokenizer(), TEXTS, **OPTIONS)
    assert torch.equal(torch.get_rng_state(), state)
    assert result.greedy.agreement == result.original_greedy.agreement == 1.0
    assert result.greedy.perplexity == pytest.approx(result.original_greedy.perplexity, rel=1e-4)
    assert result.sampled.perplexity == pytest.approx(result.original_sampled.perplexity, rel=1e-2)
    assert result.original_sampled.perplexity > result.original_greedy.perplexity
    assert result.original_sampled.agreement < 1
    assert result.linear_share == 0.0
    for got, want in zip(result.positions, result.original_positions, strict=True):
        assert got.loss == pytest.approx(want.loss, rel=1e-4)


def test_a_bad_conversion_shows():
    model, original = make_pair(mechanism="linear")
    result = fidelity(model, original, make_tokenizer(), TEXTS, **OPTIONS)
    assert result.greedy.agreement < 0.9 and result.greedy.perplexity > 1.02 * result.original_greedy.perplexity
    assert result.linear_share is None and 0 <= result.greedy.repetition <= 1


def test_what_cannot_be_measured_is_refused():
    model, original = make_pair()
    with pytest.raises(OptionError, match="new_tokens must be at most max_length - prompt_length = 18, got 20"):
        fidelity(model, original, make_tokenizer(), TEXTS, **{**OPTIONS, "new_tokens": 20})
    with pytest.raises(OptionError, match="documents with at least max_length=99 tokens"):
        fidelity(model, original, make_tokenizer(), TEXTS, **{**OPTIONS, "max_length": 99})
