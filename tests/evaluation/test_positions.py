"""Losses by position and by distance of recurrence against loops over tokens in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
)

from hf_linattn import OptionError, patch_model
from hf_linattn.evaluation import long_losses, next_token
from hf_linattn.evaluation.memory import LiveBytes
from hf_linattn.evaluation.next_token import TokenLosses, token_losses, windows_of_documents
from hf_linattn.evaluation.positions import (
    doubling_edges,
    interval,
    loss_by_distance,
    loss_by_position,
    recurrence_distances,
)
from tests.helpers import logits_of, make_tokenizer, make_tokens
from tests.models import fill, make_model, tiny_config

SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
# whose heads' outputs are scaled, capped or neither
CONFIGS = [LlamaConfig, Gemma2Config, GraniteConfig, Cohere2Config]
TEXTS = [" ".join(f"w{5 + (start + 7 * i * i) % 60}" for i in range(count)) for start, count in enumerate((62, 8, 95))]


def made_up(windows=5, length=300, documents=(0, 0, 1, 2, 2)) -> TokenLosses:
    generator = torch.Generator().manual_seed(3)
    losses = torch.rand(windows, length - 1, generator=generator, dtype=torch.float64)
    tokens = torch.randint(40, (windows, length), generator=generator)
    return TokenLosses(tokens, losses, (losses < 0.3).double(), torch.tensor(documents))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_head_that_reads_few_tokens_at_a_time_gives_the_models_own_losses(kind, monkeypatch):
    options = {"logits_scaling": 3.0} if kind is GraniteConfig else {}
    options |= {"final_logit_softcapping": 2.0} if kind is Gemma2Config else {}
    model = fill(AutoModelForCausalLM.from_config(kind(**SIZES, **options)), std=0.5)
    windows = make_tokens(3, 23) % 61
    monkeypatch.setattr(next_token, "LOGITS", 61 * 2 * 5)  # 5 tokens of two windows
    monkeypatch.setattr(next_token, "TOKENS", 2 * 23)
    read = token_losses(model, windows)
    logs = logits_of(model, windows)[:, :-1].double().log_softmax(-1)
    expected = -logs.gather(2, windows[:, 1:, None])[..., 0]
    torch.testing.assert_close(read.losses, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(read.right, (logs.argmax(-1) == windows[:, 1:]).double())
    assert torch.equal(logits_of(model, windows)[:, :-1].double().log_softmax(-1), logs), "the model is as it was"


@pytest.mark.parametrize("name", ["opt", "bart"])
def test_a_model_that_calls_its_decoder_alone_gives_its_losses_a_few_tokens_at_a_time(name, monkeypatch):
    model = make_model(name, std=0.5) if name == "opt" else fill(BartForCausalLM(tiny_config(BartConfig)), std=0.5)
    windows = make_tokens(3, 23)
    monkeypatch.setattr(next_token, "LOGITS", model.config.vocab_size * 3 * 5)
    read = token_losses(model, windows)
    logs = logits_of(model, windows)[:, :-1].double().log_softmax(-1)
    torch.testing.assert_close(read.losses, -logs.gather(2, windows[:, 1:, None])[..., 0], rtol=1e-4, atol=1e-5)


def test_losses_over_many_tokens_are_those_of_float64():
    config = LlamaConfig(**{**SIZES, "vocab_size": 50_000, "num_hidden_layers": 1})
    model = fill(AutoModelForCausalLM.from_config(config), std=0.5)
    windows = make_tokens(2, 40) * 7
    logs = logits_of(model, windows)[:, :-1].double().log_softmax(-1)
    expected = -logs.gather(2, windows[:, 1:, None])[..., 0]
    torch.testing.assert_close(token_losses(model, windows).losses, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mechanism", ["linear", "streaming"])
def test_the_logits_of_a_document_are_never_all_there(mechanism, monkeypatch):
    config = LlamaConfig(**{**SIZES, "vocab_size": 4096, "num_hidden_layers": 1})
    model = patch_model(AutoModelForCausalLM.from_config(config), mechanism)
    windows = torch.arange(1024)[None]
    monkeypatch.setattr(next_token, "LOGITS", 4096 * 64)
    with LiveBytes() as count:
        read = token_losses(model, windows)
    assert read.losses.shape == (1, 1023) and count.peak < 1024 * 4096 * 4 / 3


def test_buckets_are_those_of_a_loop_over_positions():
    read = made_up()
    rows = loss_by_position(read)
    assert [(row.first, row.last) for row in rows] == [(1, 63), (64, 127), (128, 255), (256, 299)]
    for row in rows:
        losses, right = [], []
        for window in range(5):
            for position in range(row.first, row.last + 1):
                losses.append(float(read.losses[window, position - 1]))
                right.append(float(read.right[window, position - 1]))
        assert row.loss == pytest.approx(sum(losses) / len(losses), rel=1e-12)
        assert row.accuracy == pytest.approx(sum(right) / len(right), rel=1e-12)
        assert row.low < row.loss < row.high


@pytest.mark.parametrize("length", [2, 64, 65, 1000])
def test_edges_cover_a_window(length):
    edges = doubling_edges(length)
    assert edges[0] == 0 and edges[-1] == length and edges == sorted(set(edges))
    assert all(edge == 64 * 2**i for i, edge in enumerate(edges[1:-1]))


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_distances_are_those_of_a_search_from_each_token_back(ngram):
    windows = make_tokens(4, 57) % 5
    found = recurrence_distances(windows, ngram)
    for row in range(4):
        tokens = windows[row].tolist()
        for place in range(1, 57):
            gram = tokens[place - ngram + 1 : place + 1] if place >= ngram - 1 else None
            same = [p for p in range(ngram - 1, place) if tokens[p - ngram + 1 : p + 1] == gram]
            assert found[row, place - 1] == (place - max(same) if same else 0)


@pytest.mark.parametrize(("ngram", "farthest"), [(1, 4096), (2, 128)])
def test_losses_by_distance_are_those_of_a_loop(ngram, farthest):
    read = made_up()
    distances, sums = recurrence_distances(read.windows, ngram), {}
    for window in range(5):
        for place in range(299):
            distance = int(distances[window, place])
            bucket = next(b for b in (0, 64, 128, 256, 300) if distance <= b)
            sums.setdefault(300 if farthest < distance else bucket, []).append(float(read.losses[window, place]))
    rows = loss_by_distance(read, ngram=ngram, farthest=farthest)
    assert [row.last for row in rows] == sorted(sums)
    assert sum(row.count for row in rows) == 5 * 299
    for row in rows:
        losses = sums[row.last]
        assert row.count == len(losses) and row.loss == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_an_interval_is_that_of_documents_drawn_again():
    read = made_up(40, 30, [i // 4 for i in range(40)])
    read = read._replace(losses=read.losses + read.documents[:, None])  # windows of a document are alike
    chosen = read.windows[:, 1:] < 20
    low, high = interval(read, chosen)
    draw, means = random.Random(0), []
    for _ in range(2000):
        losses = []
        for document in draw.choices(range(10), k=10):
            rows = read.documents == document
            losses += read.losses[rows][chosen[rows]].tolist()
        means.append(sum(losses) / len(losses))
    means.sort()
    assert low == pytest.approx(means[50], abs=0.15) and high == pytest.approx(means[1950], abs=0.15)
    assert high - low > 3, "far wider than windows would have it"
    assert interval(read, chosen, seed=1) != interval(read, chosen) == (low, high)
    assert interval(read._replace(documents=torch.zeros(40)), chosen) == (None, None)


def test_long_documents_are_read_in_turn():
    model, tokenizer = make_model("llama"), make_tokenizer()
    windows, documents = windows_of_documents(tokenizer, TEXTS, 30)
    assert set(documents.tolist()) == {0, 2}
    found = long_losses(model, tokenizer, TEXTS, length=30, num_windows=3, progress=False)
    assert (found.length, found.windows, found.documents) == (30, 3, 2)
    first = [int((documents == text).nonzero()[number]) for text, number in ((0, 0), (2, 0), (0, 1))]
    read = token_losses(model, windows[first], documents[first])
    assert found.positions == loss_by_position(read) and found.pairs == loss_by_distance(read, ngram=2)
    assert found.recurrences == loss_by_distance(read) and math.isfinite(found.positions[0].low)


def test_what_cannot_be_read():
    model, tokenizer = make_model("gpt2"), make_tokenizer()
    limit = model.config.n_positions
    with pytest.raises(OptionError, match=rf"length must be 2 to {limit}, the positions .* got {limit + 1}"):
        long_losses(model, tokenizer, TEXTS, length=limit + 1)
    with pytest.raises(OptionError, match="documents with at least max_length=400 tokens"):
        long_losses(make_model("llama"), tokenizer, TEXTS, length=400)
    with pytest.raises(OptionError, match="num_windows must be at least 1, got 0"):
        long_losses(model, tokenizer, TEXTS, length=20, num_windows=0)
