"""How well a causal language model predicts each token of whole windows, without all of the logits at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import architecture
from ..config import require, require_texts
from ..inference import accepted, device_of, evaluation_mode, progress_bar

TOKENS = 16_384  # that a batch has at most, beyond its first window
ROWS = 8  # windows that it has at most, unless asked for
LOGITS = 1 << 24  # that are made at a time at most


class TokenLosses(NamedTuple):
    """Windows [B, N], what a model made of each later token [B, N - 1], and the document of each window [B].

    losses: the negative log-likelihoods, in nats, float64. right: 1 where the token was the likeliest, else 0.
    """

    windows: Tensor
    losses: Tensor
    right: Tensor
    documents: Tensor


def token_losses(
    model: nn.Module,
    windows: Tensor,
    documents: Tensor | None = None,
    *,
    batch_size: int = ROWS,
    progress: bool | None = False,
) -> TokenLosses:
    """Read windows of tokens with a model: int64 [B, N], each from its first token.

    The layers run once on a window; their outputs then go through the head a few tokens at a time, so that of B N V
    logits no more than 2^24 are there together.

    Args:
        documents: the number of the document that each window is from [B]; None: each is one of its own.
        batch_size: windows at a time; fewer where they have more than 16,384 tokens together.
        progress: show a progress bar.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    >>> read = token_losses(LlamaForCausalLM(config), torch.arange(24).view(2, 12))
    >>> read.losses.shape, read.losses.dtype, read.documents
    (torch.Size([2, 11]), torch.float64, tensor([0, 1]))
    """
    read: list[tuple[Tensor, Tensor]] = []
    batches = windows.split(max(1, min(batch_size, TOKENS // windows.shape[1])))
    with evaluation_mode(model), torch.no_grad():
        for batch in progress_bar(batches, desc="reading", unit="batch", progress=progress):
            given = {"input_ids": batch.to(device_of(model))}
            parts = [_judge(*part) for part in logits_of_parts(model, given)]
            read.append((torch.cat([losses for losses, _ in parts], 1), torch.cat([right for _, right in parts], 1)))
    losses, right = (torch.cat(rows) for rows in zip(*read, strict=True))
    return TokenLosses(windows.cpu(), losses, right, torch.arange(len(windows)) if documents is None else documents)


def _judge(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and rightness [B, C] of logits [B, C, V]."""
    # flat, as over a dimension that is not the last PyTorch sums V float32 terms one by one: 1e-4 nats at 49,152
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return losses.cpu().double(), (logits.argmax(-1) == targets).cpu().double()


def whole_windows(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, add_special_tokens: bool = True
) -> Tensor:
    """Return the windows of `length` tokens that the texts hold, each of one text: int64 [B, N].

    Args:
        tokenizer: of any kind.
        texts: documents; those with less than `length` tokens give no window.
        length: tokens of a window.
        add_special_tokens: those that the tokenizer puts around a text; False for one that a chat template wrote.

    Raises:
        OptionError: no text has so long a window.
        DataError: `texts` is one string, or holds something else.

    Examples:
        >>> from hf_linattn.evaluation import whole_windows
        >>> tokenizer = lambda texts, **_: {"input_ids": [list(text.encode()) for text in texts]}
        >>> whole_windows(tokenizer, ["abcde", "f"], 2)
        tensor([[ 97,  98],
                [ 99, 100]])
    """
    return windows_of_documents(tokenizer, texts, length, add_special_tokens)[0]


def evenly(rows: Tensor, count: int) -> Tensor:
    """Return `count` of the rows, evenly over all of them, or all where there are fewer.

    >>> evenly(torch.arange(10), 3)
    tensor([0, 3, 6])
    """
    return rows[even_places(len(rows), min(count, len(rows)))]


def even_places(length: int, count: int) -> list[int]:
    """Return `count` places, evenly over as many as there are.

    >>> even_places(10, 3)
    [0, 3, 6]
    """
    return [place * length // count for place in range(count)]


def spaced_within(lengths: Sequence[int], most: int) -> list[int]:
    """Return the numbers of documents, spaced evenly, that have `most` tokens in all; of one, if each has more.

    >>> spaced_within([4, 5, 3, 4, 6, 2], 13)
    [1, 3, 5]
    """
    for count in range(max(1, most * len(lengths) // sum(lengths)), 0, -1):  # from as many as of the mean length
        chosen = [(2 * i + 1) * len(lengths) // (2 * count) for i in range(count)]
        if sum(lengths[i] for i in chosen) <= most:
            break
    return chosen


def windows_of_documents(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, add_special_tokens: bool = True
) -> tuple[Tensor, Tensor]:
    """Return `whole_windows` [B, N] and the number of the text that each is from [B]."""
    texts = require_texts("texts", texts)
    encoded = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"] if texts else []
    places = [(text, i) for text, ids in enumerate(encoded) for i in range(0, len(ids) - length + 1, length)]
    require("texts", len(texts), bool(places), f"documents with at least max_length={length} tokens")
    rows = [encoded[text][i : i + length] for text, i in places]
    return torch.tensor(rows, dtype=torch.long), torch.tensor([text for text, _ in places])


def logits_of_parts(model: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits [B, C, V] of some positions after the others, and the tokens [B, C] they are for.

    Logits are in float32 at least. Models scale or cap what their head gives, each in its own way: the model itself is
    asked, with a part of what its layers came to for what they make of one token.

    Args:
        model: a causal one. inputs: `input_ids` [B, N] and what else its layers are given, such as a mask.
    """
    root, input_ids = architecture.root_model(model), inputs["input_ids"]
    options: Any = accepted(model, use_cache=False)
    length = input_ids.shape[1] - 1
    size = max(1, LOGITS // (len(input_ids) * root.config.get_text_config().vocab_size))
    body: Any = None if size > length else _called_body(root, input_ids[:, :1], options)
    if body is None:  # there are few logits, or layers and head are one
        yield _exact(model(**inputs, **options).logits[:, :-1]), input_ids[:, 1:]
        return
    output = body(**inputs, **accepted(body, use_cache=False))
    hidden = output.last_hidden_state
    for first in range(0, length, size):
        part = type(output)(**{**output, "last_hidden_state": hidden[:, first : min(first + size, length)]})
        handle = body.register_forward_hook(lambda *_, part=part: part)
        try:
            logits = _exact(model(input_ids=input_ids[:, :1], **options).logits)
        finally:
            handle.remove()
        yield logits, input_ids[:, 1 + first : 1 + first + logits.shape[1]]


def _called_body(root: PreTrainedModel, token: Tensor, options: Mapping[str, Any]) -> nn.Module | None:
    """Return the part of a model that it calls for the states in front of its head, as OPT its decoder alone."""
    called: list[nn.Module] = []
    bodies = [x for x in (root.base_model, root.get_decoder()) if isinstance(x, nn.Module) and x is not root]
    handles = [x.register_forward_hook(lambda body, *_: called.append(body)) for x in bodies]
    try:
        root(input_ids=token, **options)
    finally:
        for handle in handles:
            handle.remove()
    return next((x for x in bodies if x in called), None)


def _exact(logits: Tensor) -> Tensor:
    """Return logits in float32, or in their own dtype if that holds more."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
