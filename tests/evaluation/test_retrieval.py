"""Embeddings against single texts, and retrieval against a loop over paragraphs."""

from __future__ import annotations

import math
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from transformers import BertModel

from hf_linattn import DataError, OptionError, patch_model
from hf_linattn.evaluation import embed, retrieval
from hf_linattn.evaluation.embeddings import Texts, embedding_scores
from hf_linattn.evaluation.retrieval import halves, retrieval_of_pairs
from tests.helpers import make_tokenizer
from tests.models import make_model

retrieval_module = import_module("hf_linattn.evaluation.retrieval")  # the package has a function of that name


def make_paragraph(article: int, number: int) -> str:
    return " ".join(f"w{5 + (7 * article + 3 * number + i * i) % 60}" for i in range(9 + number))


ARTICLES = [[make_paragraph(article, number) for number in range(3)] for article in range(4)]


def make_encoder() -> BertModel:
    return make_model("bert", std=0.5).bert


def test_an_embedding_is_the_mean_over_the_tokens_of_the_text_alone():
    model, tokenizer = patch_model(make_encoder(), "linear").train(), make_tokenizer()
    texts = ["w7 w9 w11", "w8", "w5 w6 w7 w8 w9 w10 w11"]
    rows = embed(model, tokenizer, texts, batch_size=2, max_length=5)
    assert model.training
    for text, row in zip(texts, rows, strict=True):
        ids = torch.tensor([[int(word[1:]) for word in text.split()[:5]]])
        with torch.no_grad():
            mean = model.eval()(input_ids=ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(row, mean / mean.norm(), rtol=1e-4, atol=1e-5)


def test_a_pad_token_that_the_model_has_no_embedding_for_is_not_read():
    model, tokenizer, texts = make_encoder(), make_tokenizer(), ["w7 w9 w11", "w8"]
    expected = embed(model, tokenizer, texts)
    tokenizer.add_special_tokens({"pad_token": "[OTHER PAD]"})
    assert tokenizer.pad_token_id >= model.config.vocab_size
    assert torch.equal(embed(model, tokenizer, texts), expected)


@pytest.mark.parametrize("k", [1, 3])
def test_retrieval_counts_what_a_loop_counts(k):
    model, tokenizer = make_encoder(), make_tokenizer()
    result = retrieval(model, tokenizer, ARTICLES, k=k, batch_size=5)
    paragraphs = [(number, p.split()) for number, article in enumerate(ARTICLES) for p in article]

    def embedding(words: list[str]) -> torch.Tensor:
        return embed(model, tokenizer, [" ".join(words)])[0]

    found = same = 0
    for i, (article, words) in enumerate(paragraphs):
        first = embedding(words[: len(words) // 2])
        answers = [float(first @ embedding(other[len(other) // 2 :])) for _, other in paragraphs]
        found += sum(answer >= answers[i] for j, answer in enumerate(answers) if j != i) < k
        own = embedding(words)
        near = [float(own @ embedding(other)) if j != i else -2 for j, (_, other) in enumerate(paragraphs)]
        same += paragraphs[max(range(len(near)), key=near.__getitem__)][0] == article
    assert result == {"recall": found / 12, "article_accuracy": same / 12, "num_paragraphs": 12}
    assert 0 < result["recall"]


def test_an_encoder_that_embeds_all_texts_alike_finds_none_and_one_without_numbers_is_refused():
    model, tokenizer = make_encoder(), make_tokenizer()
    last = model.encoder.layer[-1].output.LayerNorm
    last.weight.data.zero_()
    last.bias.data.fill_(1.0)
    assert retrieval(model, tokenizer, ARTICLES)["recall"] == 0
    alike = retrieval_of_pairs(torch.ones(12, 1), torch.ones(12, 1))
    assert alike == {"recall_at_1": 0, "recall_at_10": 0, "perplexity": pytest.approx(12)}
    last.bias.data.fill_(math.nan)
    with pytest.raises(OptionError, match=r"^cosines must be finite, or the model is broken: .*, got \[nan\]$"):
        retrieval(model, tokenizer, ARTICLES)
    with pytest.raises(OptionError, match="cosines must be finite"):
        retrieval_of_pairs(torch.tensor([[1.0], [math.nan]]), torch.ones(2, 1))


def test_an_answer_that_stands_there_twice_is_found_and_one_as_near_with_another_text_is_not(monkeypatch):
    kinds = torch.tensor([0, 1, 0, 2, 3])
    alike, texts = torch.eye(4)[kinds], [f"answer {kind}" for kind in kinds.tolist()]
    assert retrieval_of_pairs(alike, alike)["recall_at_1"] == 3 / 5
    assert retrieval_of_pairs(alike, alike, texts)["recall_at_1"] == 1
    assert retrieval_of_pairs(torch.ones(5, 1), torch.ones(5, 1), texts)["recall_at_1"] == 0
    modules = SimpleNamespace(prompt="", embed_texts=lambda encoder, part, **options: alike)
    found = embedding_scores(modules, None, Texts([], texts, texts), max_length=8)
    assert (found["recall_at_1"], found["num_tokens"]) == (1, 5)
    monkeypatch.setattr(retrieval_module, "embed", lambda model, tokenizer, part, **options: alike)
    assert retrieval(None, None, [[f"a {text}"] for text in texts], k=1)["recall"] == 1


def test_a_text_without_spaces_has_two_halves():
    texts = ["\u79cb\u6536\u51ac\u85cf\u79cb", "w7", "w5 w6 w7", "w"]
    assert halves(texts) == (["\u79cb\u6536", "w", "w5", ""], ["\u51ac\u85cf\u79cb", "7", "w6 w7", "w"])
    Texts(texts[:3], *halves(texts[:3])).check()
    with pytest.raises(DataError, match="the text 'w' is too short to have a first half"):
        Texts(texts, *halves(texts)).check()


def test_what_cannot_be_measured_is_refused():
    model, tokenizer = make_encoder(), make_tokenizer()
    with pytest.raises(OptionError, match="articles must be at least two articles"):
        retrieval(model, tokenizer, ARTICLES[:1])
    with pytest.raises(OptionError, match="k must be at least 1, got 0"):
        retrieval(model, tokenizer, ARTICLES, k=0)
    with pytest.raises(DataError, match=r"articles must be a sequence of texts, got one string; pass \[text\]"):
        retrieval(model, tokenizer, ["w5 w6", "w7 w8"])


def test_nothing_to_embed_is_refused():
    model, tokenizer = make_model("bert", "Model"), make_tokenizer()
    with pytest.raises(DataError, match="texts is empty; give at least one text"):
        embed(model, tokenizer, [])
    with pytest.raises(DataError, match="articles have no paragraph; give at least one"):
        retrieval(model, tokenizer, [[], []])
