"""What a model writes: whether its cache and its batches change it, whether it repeats itself, what a teacher says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from ..config import require
from ..inference import accepted, device_of, evaluation_mode, kept_generators, progress_bar
from .next_token import token_losses
from .perplexity import position_limit

AGREEMENT = 32  # first new tokens that are compared
NGRAM = 4  # tokens that count as a repetition when they come again
# what a model predicts is written, under `plain_generation`
GREEDY: dict[str, Any] = {"do_sample": False, "use_cache": True}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "use_cache": True}


# of a `generation_config`, what says where a text begins and ends
SPECIAL = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")


@contextmanager
def plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Have `generate` write what a model predicts: of its `generation_config` the special tokens alone count."""
    given: Any = model.generation_config
    model.generation_config = GenerationConfig(**{name: getattr(given, name) for name in SPECIAL})
    try:
        yield
    finally:
        model.generation_config = given


@dataclass(frozen=True)
class Continuations:
    """What a model writes after the same prompts.

    Attributes:
        perplexity: of the original on it.
        repetition: share of its 4-grams that came before in the same text.
        agreement: share of its first 32 tokens that are those of the original's greedy continuation.
    """

    perplexity: float
    repetition: float
    agreement: float


@dataclass(frozen=True)
class GenerationRow:
    """How a model continues prompts greedily.

    Attributes:
        prompts: how many were continued.
        new_tokens: by how many tokens each.
        cached_agreement: share of the tokens, written token by token with a cache, that a forward without a cache
            over prompt and continuation finds likeliest in their places; 1 unless the cache changes the model.
        cached_gap: by how many nats such a forward finds the likeliest token likelier than the written one, at most:
            what rounding does to a tie is small, what a wrong cache does is not.
        batch_size: prompts in a batch, padded on the left.
        batch_agreement: share of the tokens that are the same as when each prompt is continued alone, up to the first
            that differs.
        repetition: share of the 4-grams of a continuation that came before in it.
        perplexity: of the teacher on the continuations; None without a teacher.
    """

    prompts: int
    new_tokens: int
    cached_agreement: float
    cached_gap: float
    batch_size: int
    batch_agreement: float
    repetition: float
    perplexity: float | None = None


def check_generation(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    teacher: nn.Module | None = None,
    new_tokens: int = 64,
    batch_size: int = 16,
    progress: bool | None = None,
) -> GenerationRow:
    """Continue prompts greedily, one by one with a cache, and compare with a forward without one and with batches.

    Args:
        model: a causal language model, patched or not.
        prompts: token ids, of any lengths: rows of a batch are padded on the left to the longest.
        teacher: whose perplexity of the continuations is given, such as the original.
        new_tokens: by how many tokens each prompt is continued.
        batch_size: prompts in a batch.
        progress: show a progress bar; None: where standard error is a terminal.

    Raises:
        OptionError: no prompts or an empty one, an option out of range, or more tokens than the model has positions.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn.evaluation import check_generation
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
        >>> row = check_generation(LlamaForCausalLM(config), [[3, 4, 5], [6]], new_tokens=8, progress=False)
        >>> row.cached_agreement, row.batch_agreement, row.perplexity
        (1.0, 1.0, None)
    """
    require("prompts", len(prompts), len(prompts) > 0 and all(map(len, prompts)), "at least one, none of them empty")
    limit, longest = position_limit(model), max(map(len, prompts))
    fits = new_tokens >= 1 and (limit is None or longest + new_tokens <= limit)
    most = "at least 1" if limit is None else f"1 to {limit - longest}, for which the model has positions"
    require("new_tokens", new_tokens, fits, most)
    require("batch_size", batch_size, batch_size >= 1, "at least 1")
    rows = [torch.tensor(list(prompt), dtype=torch.long) for prompt in prompts]
    bar = progress_bar(rows, desc="generation", unit="prompt", progress=progress)
    alone = [continuations(model, row[None], new_tokens)[0] for row in bar]
    gaps = torch.stack([_gaps(model, row, text) for row, text in zip(rows, alone, strict=True)])
    batches = [_in_batch(model, rows[i : i + batch_size], new_tokens) for i in range(0, len(rows), batch_size)]
    written = torch.stack(alone)
    same = (torch.cat(batches) == written).long().cumprod(1)
    return GenerationRow(
        prompts=len(rows),
        new_tokens=new_tokens,
        cached_agreement=float((gaps == 0).double().mean()),
        cached_gap=float(gaps.max()),
        batch_size=batch_size,
        batch_agreement=float(same.double().mean()),
        repetition=repetition(written),
        perplexity=None if teacher is None else _perplexity(teacher, rows, alone),
    )


def repetition(text: Tensor, ngram: int = NGRAM) -> float:
    """Return the share of the n-grams of each row that came before in the same row, over all rows [B, N].

    >>> repetition(torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4]]))
    0.2
    """
    grams = [[tuple(row[i : i + ngram]) for i in range(len(row) - ngram + 1)] for row in text.tolist()]
    repeated = [gram in row[:i] for row in grams for i, gram in enumerate(row)]
    return sum(repeated) / max(1, len(repeated))


def continuations(
    model: PreTrainedModel, prompts: Tensor, count: int, *, mask: Tensor | None = None, sampled: bool = False,
    seed: int = 0,
) -> Tensor:  # fmt: skip
    """Return `count` new tokens after each prompt [B, count]; the global random state is left alone.

    Beams, penalties, filters and kinds of cache of the model's `generation_config` do not count.

    Args:
        prompts: int64 [B, N], padded on the left where `mask` [B, N] is 0.
        sampled: draw from the predictions as they are, by `seed`; else the likeliest tokens.
    """
    device = device_of(model)
    mask = torch.ones_like(prompts) if mask is None else mask
    with evaluation_mode(model), kept_generators(device), plain_generation(model):
        torch.manual_seed(seed)
        text = model.generate(  # type: ignore[operator]
            prompts.to(device), attention_mask=mask.to(device), min_new_tokens=count, max_new_tokens=count,
            pad_token_id=0, **(SAMPLED if sampled else GREEDY),
        )  # fmt: skip
    return text[:, prompts.shape[1] :].cpu()


def compared(original: nn.Module, prompts: Tensor, written: Tensor, reference: Tensor) -> Continuations:
    """Judge what was written after prompts [B, N] by the original and by its own greedy continuations.

    written, reference: [B, new tokens].
    """
    losses = token_losses(original, torch.cat([prompts, written], 1)).losses
    first = slice(AGREEMENT)
    return Continuations(
        perplexity=float(losses[:, prompts.shape[1] - 1 :].mean().exp()),
        repetition=repetition(written),
        agreement=float((written[:, first] == reference[:, first]).double().mean()),
    )


def _gaps(model: nn.Module, prompt: Tensor, written: Tensor) -> Tensor:
    """Return how much likelier than each written token, without a cache, the likeliest one is, in nats [count].

    Tokens that would end the text are left out, as they are when it is written.
    """
    text = torch.cat([prompt, written])[None].to(device_of(model))
    with evaluation_mode(model), torch.no_grad():
        logits = model(input_ids=text[:, :-1], **accepted(model, use_cache=False)).logits[0, len(prompt) - 1 :].float()
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    logits[:, ends] = torch.finfo(logits.dtype).min
    chosen = text[0, len(prompt) :, None]
    return (logits.amax(-1) - logits.gather(1, chosen.to(logits.device))[:, 0]).cpu()


def _in_batch(model: PreTrainedModel, prompts: Sequence[Tensor], count: int) -> Tensor:
    """Return the continuations of prompts that are padded on the left to one length [B, count]."""
    length = max(map(len, prompts))
    ids, mask = (torch.zeros(len(prompts), length, dtype=torch.long) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = 1
    return continuations(model, ids, count, mask=mask)


def _perplexity(teacher: nn.Module, prompts: Sequence[Tensor], written: Sequence[Tensor]) -> float:
    """Return the teacher's perplexity of what was written after the prompts."""
    losses = [
        token_losses(teacher, torch.cat([prompt, text])[None]).losses[0, len(prompt) - 1 :]
        for prompt, text in zip(prompts, written, strict=True)
    ]
    return float(torch.cat(losses).mean().exp())
