"""A few texts and what a model makes of them: for people to read beside the numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..inference import accepted, device_of, evaluation_mode
from .generation import continuations

LENGTH = 64  # tokens of a text that are read: half are the prompt, half what follows
SHOWN = 300  # characters of a text that is not generated


class Sample(NamedTuple):
    """A text, what is true of it, and what a model says."""

    prompt: str
    truth: str
    answer: str


def continued(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], count: int, *,
    length: int = LENGTH, add_special_tokens: bool = True,
) -> list[Sample]:  # fmt: skip
    """Return how a causal model goes on, greedily, after the beginnings of the first `count` texts.

    Args:
        length: tokens of a beginning and what follows, half each. Shorter texts are left out, so there may be none.
        add_special_tokens: as for `whole_windows`.
    """
    rows = _beginnings(tokenizer, texts, count, length, length, add_special_tokens)
    if not rows:
        return []
    prompts, truths = torch.tensor(rows).split([length - length // 2, length // 2], dim=1)
    written = continuations(model, prompts, length // 2)
    return [Sample(*(_text(tokenizer, ids) for ids in parts)) for parts in zip(prompts, truths, written, strict=True)]


def filled(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], count: int, *, length: int = LENGTH
) -> list[Sample]:
    """Return what a masked model puts in place of the token in the middle of each of the first `count` texts."""
    mask: Any = tokenizer.mask_token_id
    samples = []
    for row in _beginnings(tokenizer, texts, count, length, least=3):
        ids, place = torch.tensor(row), len(row) // 2
        before, hidden, after = ids[:place], ids[place : place + 1], ids[place + 1 :]
        asked = torch.cat([before, torch.tensor([mask]), after])[None].to(device_of(model))
        with evaluation_mode(model), torch.no_grad():
            logits = model(input_ids=asked, **accepted(model, use_cache=False)).logits[0, place]
        prompt = " ".join([_text(tokenizer, before), str(tokenizer.mask_token), _text(tokenizer, after)])
        answer = _text(tokenizer, logits.argmax()[None].cpu())
        samples.append(Sample(prompt, _text(tokenizer, hidden), answer))
    return samples


def shortened(text: str, longest: int = SHOWN) -> str:
    """Return a text, or its first characters.

    >>> shortened("attention", 4)
    'atte ...'
    """
    return text if len(text) <= longest else f"{text[:longest].rstrip()} ..."


def _beginnings(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], count: int, length: int, least: int,
    add_special_tokens: bool = True,
) -> list[list[int]]:  # fmt: skip
    """Return the first `length` tokens of the first `count` texts that have at least `least` of them."""
    rows: list[list[int]] = []
    options: Any = {"truncation": True, "max_length": length, "add_special_tokens": add_special_tokens}
    for text in texts if count else ():
        ids = tokenizer(text, **options, verbose=False)["input_ids"]
        if len(ids) >= least:
            rows.append(ids)
        if len(rows) == count:
            break
    return rows


def _text(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip("\n")
