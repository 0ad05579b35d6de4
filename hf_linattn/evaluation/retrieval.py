"""What an embedding model is for: finding the other half of a paragraph, and a neighbour from the same article."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from ..config import require, require_finite, require_texts
from ..errors import DataError
from ..inference import device_of, evaluation_mode, padding_token, progress_bar

SCALE = 20.0  # of cosines in a softmax, as the losses of sentence-transformers have it


class Retrieval(TypedDict):
    """Result of `retrieval`.

    Attributes:
        recall: share of the paragraphs whose second half is among the `k` that are most similar to their first half;
            another half as similar as the right one is before it, unless it is the same text.
        article_accuracy: share of the paragraphs whose most similar other paragraph is of the same article.
        num_paragraphs: how many there are.
    """

    recall: float
    article_accuracy: float
    num_paragraphs: int


def embed(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    max_length: int = 256,
    batch_size: int = 32,
    progress: bool | None = None,
) -> Tensor:
    """Return the means of the last hidden states over each text's tokens, of length 1: [texts, width], float32.

    Args:
        model: an encoder whose output has `last_hidden_state`.
        tokenizer: the model's own.
        texts: of any lengths.
        max_length: tokens that texts are cut to.
        batch_size: texts per forward.
        progress: show a progress bar; None: where standard error is a terminal.

    Raises:
        OptionError: `max_length` is below 1.
        DataError: `texts` is one string, holds something else, or nothing.

    Examples:
        >>> from transformers import AutoModel, AutoTokenizer
        >>> from hf_linattn import patch_model
        >>> from hf_linattn.evaluation import embed
        >>> name = "sentence-transformers/all-MiniLM-L6-v2"
        >>> model = patch_model(AutoModel.from_pretrained(name), "linear")  # doctest: +SKIP
        >>> embed(model, AutoTokenizer.from_pretrained(name), ["a text", "another"]).shape  # doctest: +SKIP
        torch.Size([2, 384])
    """
    require("max_length", max_length, max_length >= 1, "at least 1")
    texts, device = require_texts("texts", texts), device_of(model)
    if not texts:
        raise DataError("texts is empty; give at least one text")

    def read(chosen: Sequence[int]) -> Tensor:
        batch = tokenizer(  # on the right: an encoder counts its positions from the left end
            [texts[i] for i in chosen], padding=True, padding_side="right", truncation=True, max_length=max_length,
            return_tensors="pt",
        ).to(device)  # fmt: skip
        batch["input_ids"].masked_fill_(batch["attention_mask"] == 0, padding_token(model, tokenizer))
        hidden, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"][..., None]
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    with evaluation_mode(model), torch.no_grad():
        return in_batches(read, [len(text) for text in texts], batch_size, progress)


def in_batches(
    read: Callable[[Sequence[int]], Tensor], lengths: Sequence[int], batch_size: int, progress: bool | None = False
) -> Tensor:
    """Return what `read` makes of texts, given their numbers, in float32 on the CPU: [texts, D].

    Texts of like length share a batch.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    rows: list[Tensor] = [torch.empty(0)] * len(order)
    for start in progress_bar(range(0, len(order), batch_size), desc="embed", progress=progress):
        chosen = order[start : start + batch_size]
        for i, row in zip(chosen, read(chosen).float().cpu(), strict=True):
            rows[i] = row
    return torch.stack(rows)


def retrieval(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    articles: Sequence[Sequence[str]],
    *,
    k: int = 10,
    max_length: int = 256,
    batch_size: int = 32,
    progress: bool | None = None,
) -> Retrieval:
    """Measure an embedding model on paragraphs that nobody had to label.

    Args:
        model: as for `embed`.
        tokenizer: as for `embed`.
        articles: the paragraphs of each article; halves are cut at the middle word, without spaces at the middle
            character.
        k: how many answers count for the recall.
        max_length: as for `embed`.
        batch_size: as for `embed`.
        progress: show progress bars; None: where standard error is a terminal.

    Raises:
        OptionError: fewer than two articles, k below 1, or an embedding that is not finite.
        DataError: an article is one string, or holds something else, or all are empty.

    Examples:
        >>> from hf_linattn.evaluation import retrieval
        >>> articles = [["one two three four", "five six"], ["seven eight", "nine ten"]]
        >>> retrieval(model, tokenizer, articles)["recall"]  # doctest: +SKIP
    """
    require("articles", len(articles), len(articles) >= 2, "at least two articles, as lists of paragraphs")
    require("k", k, k >= 1, "at least 1")
    paragraphs = [paragraph for article in articles for paragraph in require_texts("articles", article)]
    if not paragraphs:
        raise DataError("articles have no paragraph; give at least one")
    article = torch.tensor([number for number, article in enumerate(articles) for _ in article])
    options = {"max_length": max_length, "batch_size": batch_size, "progress": progress}
    queries, answers = halves(paragraphs)
    first, second, whole = (
        embed(model, tokenizer, texts, **options)  # type: ignore[arg-type]  # mypy takes the values for one type
        for texts in (queries, answers, paragraphs)
    )
    nearest = _cosines(whole, whole).fill_diagonal_(-1.0).argmax(1)
    return {
        "recall": float((_ranks(_cosines(first, second), answers) < k).double().mean()),
        "article_accuracy": float((article[nearest] == article).double().mean()),
        "num_paragraphs": len(paragraphs),
    }


def halves(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the first and the second half of each text, cut at the middle word; one without spaces, in its middle.

    >>> halves(["one two three", "\u5929\u5730\u7384\u9ec4"])
    (['one', '\u5929\u5730'], ['two three', '\u7384\u9ec4'])
    """
    pairs = [_halved(text) for text in texts]
    return [first for first, _ in pairs], [second for _, second in pairs]


def _halved(text: str) -> tuple[str, str]:
    words = text.split()
    parts, joint = (words, " ") if len(words) > 1 else ("".join(words), "")
    middle = len(parts) // 2
    return joint.join(parts[:middle]), joint.join(parts[middle:])


def retrieval_of_pairs(queries: Tensor, answers: Tensor, texts: Sequence[str] | None = None) -> dict[str, float]:
    """Return what queries [N, D] find among answers [N, D], all of length 1, row i of one the right one for the other.

    `recall_at_1`, `recall_at_10`: the share of queries whose answer is the nearest, or among the nearest ten; another
    answer as near as the right one is before it. Of `texts`, what the answers are embeddings of, N as well, equal ones
    are one answer; None: all differ.
    `perplexity`: exp of the mean of -log p, p the right answer's share of a softmax over 20 times all cosines: among
    how many answers, equally near, a query is as uncertain. An embedding that is not finite is an `OptionError`.

    >>> retrieval_of_pairs(torch.eye(3), torch.eye(3))["recall_at_1"]
    1.0
    """
    cosines = _cosines(queries.double(), answers.double())
    rank = _ranks(cosines, range(len(cosines)) if texts is None else texts)
    loss = F.cross_entropy(SCALE * cosines, torch.arange(len(cosines)))
    return {
        "perplexity": float(loss.exp()),
        "recall_at_1": float((rank < 1).double().mean()),
        "recall_at_10": float((rank < 10).double().mean()),
    }


def _cosines(first: Tensor, second: Tensor) -> Tensor:
    """Return the cosines [N, M] of rows of length 1; `OptionError` if one is not finite."""
    cosines = first @ second.T
    require_finite("cosines", cosines[~cosines.isfinite()].tolist())
    return cosines


def _ranks(cosines: Tensor, texts: Sequence[Hashable]) -> Tensor:
    """Return how many answers are as near to each query as its own, on the diagonal, or nearer: [N].

    Those of the same text as its own are not counted.
    """
    number = {text: i for i, text in enumerate(texts)}
    group = torch.tensor([number[text] for text in texts], device=cosines.device)
    return ((cosines >= cosines.diagonal()[:, None]) & (group != group[:, None])).sum(1)
