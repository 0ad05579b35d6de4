"""Loss by position in the context, and by how long ago a token came last: where a short context hides a weakness.

A model that uses its context gets better with the position. One that cannot look something up far back loses on
tokens that came long ago, though its mean loss may be as good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..config import require
from .next_token import TokenLosses, token_losses, windows_of_documents
from .perplexity import position_limit

NEAR = 32  # tokens back that a window of softmax usually reaches
FIRST = 64  # the first bucket of positions and of distances; each later one ends twice as far
FARTHEST = 4096  # the last bucket of distances ends here
RESAMPLES = 1000
LEVEL = 0.95  # of the intervals


@dataclass(frozen=True)
class PositionRow:
    """What a model makes of the positions `first` to `last` of windows.

    Attributes:
        first: position of the first token.
        last: position of the last token.
        accuracy: share of the tokens that the model finds likeliest.
        loss: mean nats per token.
        low: lower end of the 95 % interval of the loss; None where it was not asked for, or there is one document.
        high: its upper end.
    """

    first: int
    last: int
    accuracy: float
    loss: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class RecurrenceRow:
    """What a model makes of tokens that stood last, or last followed the one before, `first` to `last` places ago.

    Both places are 0 for those that never did in the window. Copying from afar is hard for attention of constant
    state.

    Attributes:
        first: the least distance.
        last: the greatest distance.
        count: how many tokens there are.
        loss: mean nats per token.
        low: as in `PositionRow`.
        high: as in `PositionRow`.
    """

    first: int
    last: int
    count: int
    loss: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class LongLosses:
    """What a model makes of long documents.

    Attributes:
        length: tokens of a window.
        windows: how many were read.
        documents: of how many documents they are.
        positions: by position in the window, in buckets that end at 63, 127, 255, ...
        recurrences: by how far back the same token stood last.
        pairs: by how far back the same token stood last after the same one.
    """

    length: int
    windows: int
    documents: int
    positions: tuple[PositionRow, ...]
    recurrences: tuple[RecurrenceRow, ...]
    pairs: tuple[RecurrenceRow, ...]


def long_losses(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    length: int,
    num_windows: int = 16,
    seed: int = 0,
    progress: bool | None = None,
    add_special_tokens: bool = True,
) -> LongLosses:
    """Return loss by position and by distance of recurrence on long documents.

    Every model reads the same windows, the first ones of as many documents as there are, then their next ones.
    Intervals are those of a bootstrap over the documents, as windows of one are alike; with two documents at least.

    Args:
        model: a causal language model, patched or not.
        tokenizer: the model's own.
        texts: documents; those with less than `length` tokens are left out.
        length: tokens of a window; 8 times the length that the model was trained on shows what lies beyond.
        num_windows: how many are read at most.
        seed: of the resamples.
        progress: show a progress bar; None: where standard error is a terminal.
        add_special_tokens: as for `whole_windows`.

    Raises:
        OptionError: no document is that long, `length` is beyond the positions of the model, or an option is out of
            range.
        DataError: `texts` is one string, or holds something else.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn.evaluation import long_losses
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=300)
        >>> tokenizer = lambda texts, **_: {"input_ids": [list(text.encode()) for text in texts]}
        >>> read = long_losses(LlamaForCausalLM(config), tokenizer, ["abcd" * 64], length=256, progress=False)
        >>> [(row.first, row.last) for row in read.positions]
        [(1, 63), (64, 127), (128, 255)]
    """
    limit = position_limit(model)
    require("length", length, length >= 2, "at least 2")
    fits = limit is None or length <= limit
    require("length", length, fits, f"2 to {limit}, the positions that the model has")
    require("num_windows", num_windows, num_windows >= 1, "at least 1")
    windows, documents = windows_of_documents(tokenizer, texts, length, add_special_tokens)
    chosen = in_turn(documents)[:num_windows]
    read = token_losses(model, windows[chosen], documents[chosen], progress=progress)
    return LongLosses(
        length,
        len(chosen),
        len(documents[chosen].unique()),
        loss_by_position(read, seed=seed),
        loss_by_distance(read, seed=seed),
        loss_by_distance(read, ngram=2, seed=seed),
    )


def doubling_edges(length: int, first: int = FIRST) -> list[int]:
    """Return 0, first, 2 first, 4 first, ... below `length`, and `length`.

    >>> doubling_edges(500)
    [0, 64, 128, 256, 500]
    """
    edges = [0]
    while first < length:
        edges.append(first)
        first *= 2
    return [*edges, length]


def accuracy_by_position(read: TokenLosses, parts: int = 4) -> tuple[PositionRow, ...]:
    """Return accuracy and loss in each of `parts` equal parts of the windows; the first token has none."""
    length = read.windows.shape[1]
    return tuple(_position_rows(read, [round(part * length / parts) for part in range(parts + 1)]))


def loss_by_position(read: TokenLosses, *, seed: int = 0) -> tuple[PositionRow, ...]:
    """Return accuracy and loss, with its interval, in the buckets of `doubling_edges`; the first token has none.

    seed: of the resamples.

    >>> losses = torch.arange(1.0, 256.0, dtype=torch.float64).expand(2, -1)
    >>> read = TokenLosses(torch.zeros(2, 256), losses, losses * 0, torch.tensor([0, 1]))
    >>> loss_by_position(read)[-1]
    PositionRow(first=128, last=255, accuracy=0.0, loss=191.5, low=191.5, high=191.5)
    """
    return tuple(_position_rows(read, doubling_edges(read.windows.shape[1]), seed))


def _position_rows(read: TokenLosses, edges: Sequence[int], seed: int | None = None) -> Iterable[PositionRow]:
    for first, end in ((max(a, 1), b) for a, b in pairwise(edges)):
        span = slice(first - 1, end - 1)
        inside = torch.zeros_like(read.losses, dtype=torch.bool)
        inside[:, span] = True
        ends = (None, None) if seed is None else interval(read, inside, seed)
        yield PositionRow(first, end - 1, float(read.right[:, span].mean()), float(read.losses[:, span].mean()), *ends)


def loss_by_recurrence(read: TokenLosses, near: int = NEAR) -> tuple[RecurrenceRow, ...]:
    """Return the loss of tokens whose pair with the one before is new, stood within `near` places, or further back.

    A kind that does not occur in the windows is left out.
    """
    spans = [(0, 0), (1, near), (near + 1, read.windows.shape[1])]
    return tuple(_recurrence_rows(read, recurrence_distances(read.windows, 2), spans))


def loss_by_distance(
    read: TokenLosses, *, ngram: int = 1, farthest: int = FARTHEST, seed: int = 0
) -> tuple[RecurrenceRow, ...]:
    """Return the loss, with its interval, by how far back the same `ngram` tokens ended last.

    The rows are: never in the window, then distances up to 64, 128, ... and `farthest`, then all larger ones. One
    without tokens is left out.

    Args:
        ngram: 1 is the token itself, 2 the token after the same one.
        farthest: where the last bucket but that of all larger distances ends.
        seed: of the resamples.

    >>> windows = torch.arange(100).repeat(2, 2)
    >>> losses = torch.zeros(2, 199, dtype=torch.float64)
    >>> read = TokenLosses(windows, losses, losses, torch.tensor([0, 1]))
    >>> [(row.first, row.last, row.count) for row in loss_by_distance(read)]
    [(0, 0, 198), (65, 128, 200)]
    """
    length = read.windows.shape[1]
    edges = doubling_edges(min(farthest, length))
    spans = [(0, 0), *((a + 1, b) for a, b in pairwise(edges)), (farthest + 1, length)]
    return tuple(_recurrence_rows(read, recurrence_distances(read.windows, ngram), spans, seed))


def _recurrence_rows(
    read: TokenLosses, distances: Tensor, spans: Iterable[tuple[int, int]], seed: int | None = None
) -> Iterable[RecurrenceRow]:
    for first, last in spans:
        chosen = (distances >= first) & (distances <= last)
        if bool(chosen.any()):
            ends = (None, None) if seed is None else interval(read, chosen, seed)
            yield RecurrenceRow(first, last, int(chosen.sum()), float(read.losses[chosen].mean()), *ends)


def recurrence_distances(windows: Tensor, ngram: int = 1) -> Tensor:
    """Return how many places ago the `ngram` tokens that end at each later token ended last: int64 [B, N - 1].

    0 where they never did. For `ngram=2` that is how long ago the token last followed the one before it.

    >>> recurrence_distances(torch.tensor([[5, 6, 5, 5, 7, 6]])), recurrence_distances(torch.tensor([[5, 6, 5, 6]]), 2)
    (tensor([[0, 2, 1, 0, 4]]), tensor([[0, 0, 2]]))
    """
    distances = torch.zeros(windows.shape[0], windows.shape[1] - 1, dtype=torch.long)
    for row, tokens in enumerate(windows.tolist()):
        places: dict[tuple[int, ...], int] = {}
        for place in range(ngram - 1, len(tokens)):
            gram = tuple(tokens[place - ngram + 1 : place + 1])
            if place:
                distances[row, place - 1] = place - places.get(gram, place)
            places[gram] = place
    return distances


def interval(read: TokenLosses, chosen: Tensor, seed: int = 0) -> tuple[float | None, float | None]:
    """Return the ends of the 95 % interval of the mean loss of the tokens `chosen` [B, N - 1].

    It is the percentile bootstrap: documents are drawn with replacement, each with all of its windows. None and None
    with fewer than two documents.
    """
    documents, number = read.documents.unique(return_inverse=True)
    if len(documents) < 2:
        return None, None
    zeros = torch.zeros(len(documents), dtype=torch.float64)
    losses = zeros.index_add(0, number, (read.losses * chosen).sum(1))
    counts = zeros.index_add(0, number, chosen.double().sum(1))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(documents), (RESAMPLES, len(documents)), generator=generator)
    total = counts[drawn].sum(1)
    means = (losses[drawn].sum(1) / total)[total > 0]  # one without such a token says nothing
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = means.quantile(ends).tolist()
    return low, high


def in_turn(documents: Tensor) -> Tensor:
    """Return the order that takes the first window of each document, then the second of each, and so on."""
    seen: dict[int, int] = {}
    rank = []
    for document in documents.tolist():
        seen[document] = seen.get(document, -1) + 1
        rank.append(seen[document])
    return torch.tensor(rank).argsort(stable=True)
