"""Generation checks: nothing to see in a model that is right, and what a wrong cache or mask would do."""

from __future__ import annotations

import math

import pytest
import torch

from hf_linattn import OptionError, patch_model
from hf_linattn.evaluation import check_generation, generation
from hf_linattn.evaluation.generation import continuations, repetition
from tests.helpers import logits_of
from tests.models import make_model

PROMPTS = [[7, 11, 13, 5, 9], [20, 21], [30, 8, 9, 10, 44, 12, 6]]
QUICK = {"new_tokens": 12, "progress": False}


@pytest.mark.parametrize("mechanism", ["hybrid", "streaming", "gla"])
def test_a_model_that_is_right_writes_the_same_in_every_way(mechanism):
    options = {"window_size": 4} if mechanism != "gla" else {}
    model = patch_model(make_model("llama", std=0.4), mechanism, **options)
    row = check_generation(model, PROMPTS, teacher=model, batch_size=2, **QUICK)
    assert (row.prompts, row.new_tokens, row.batch_size) == (3, 12, 2)
    assert row.cached_agreement == row.batch_agreement == 1.0 and row.cached_gap == 0.0
    losses = []
    for prompt in PROMPTS:
        written = continuations(model, torch.tensor([prompt]), 12)[0].tolist()
        logs = logits_of(model, torch.tensor([prompt + written])).double().log_softmax(-1)[0]
        losses += [-float(logs[len(prompt) - 1 + i, token]) for i, token in enumerate(written)]
    assert row.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert check_generation(model, PROMPTS, **QUICK).perplexity is None


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_wrong_cache_shows(use_cache):
    """In a checkpoint that says it wants none, too."""
    model = patch_model(make_model("llama", std=0.4), "streaming", window_size=4)
    model.generation_config.use_cache = use_cache
    real = type(model.model.layers[0].self_attn.hf_linattn).causal_sequences

    def forgetful(self, query, key, value, lengths, state, *rest, **options):
        state = state and state._replace(key=torch.zeros_like(state.key))
        return real(self, query, key, value, lengths, state, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.model.layers[0].self_attn.hf_linattn), "causal_sequences", forgetful)
        row = check_generation(model, PROMPTS, **QUICK)
    assert row.cached_agreement < 0.9 and row.cached_gap > 0.01 and row.batch_agreement == 1.0


def test_pads_that_are_read_show(monkeypatch):
    model = make_model("llama", std=0.4)
    real = model.generate

    def blind(ids, attention_mask, **options):
        return real(ids, attention_mask=torch.ones_like(attention_mask), **options)

    monkeypatch.setattr(model, "generate", blind)
    row = check_generation(model, PROMPTS, **QUICK)
    assert row.batch_agreement < 0.9 and row.cached_agreement == 1.0


def test_a_token_that_would_end_the_text_is_never_written_nor_expected():
    model = make_model("llama", std=0.4)
    likeliest = int(continuations(model, torch.tensor([PROMPTS[0]]), 1))
    model.generation_config.eos_token_id = likeliest
    assert likeliest not in continuations(model, torch.tensor([PROMPTS[0]]), 5)
    assert check_generation(model, PROMPTS, **QUICK).cached_agreement == 1.0


@pytest.mark.parametrize(
    ("sampled", "name", "value"),
    [
        (False, "num_beams", 4),
        (False, "no_repeat_ngram_size", 1),
        (False, "cache_implementation", "quantized"),
        (True, "no_repeat_ngram_size", 1),
        (True, "min_p", 0.9),
        (True, "typical_p", 0.1),
        (True, "epsilon_cutoff", 0.2),
        (False, "suppress_tokens", [*range(40)]),
        (False, "sequence_bias", [[[7], 50.0]]),
        (False, "guidance_scale", 3.0),
    ],
)
def test_what_a_checkpoint_says_of_generation_changes_nothing(sampled, name, value):
    model, prompt = make_model("llama", std=0.4), torch.tensor([PROMPTS[0]])
    predicted = continuations(model, prompt, 24, sampled=sampled)
    setattr(model.generation_config, name, value)
    assert continuations(model, prompt, 24, sampled=sampled).equal(predicted)
    assert getattr(model.generation_config, name) == value, "afterwards it has its own again"


def test_repetition_is_that_of_a_loop():
    text = torch.tensor([[1, 2, 3, 1, 2, 3, 1], [4, 5, 6, 7, 8, 9, 4]])
    assert repetition(text, 3) == 2 / 10 and repetition(text, 2) == 3 / 12 and repetition(text[:, :2], 3) == 0


def test_what_cannot_be_continued():
    model = make_model("gpt2")
    room = model.config.n_positions - 7
    with pytest.raises(OptionError, match=rf"new_tokens must be 1 to {room}, .* got {room + 1}"):
        check_generation(model, PROMPTS, new_tokens=room + 1)
    for prompts in ([], [[]]):
        with pytest.raises(OptionError, match="prompts must be at least one, none of them empty"):
            check_generation(model, prompts)
    with pytest.raises(OptionError, match="batch_size must be at least 1, got 0"):
        check_generation(model, PROMPTS, new_tokens=2, batch_size=0)


def test_tokens_behind_the_first_that_differs_do_not_count(monkeypatch):
    def written(_, prompts, count, **options):
        return torch.tensor([[8, 9, 5, 6] if "mask" in options else [8, 7, 5, 6]] * len(prompts))

    monkeypatch.setattr(generation, "continuations", written)
    assert check_generation(make_model("llama"), PROMPTS, new_tokens=4, progress=False).batch_agreement == 0.25
