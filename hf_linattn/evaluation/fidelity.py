"""What perplexity does not show: text that is generated, accuracy late in the context, and what a hybrid leans on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import architecture
from ..attention_call import AttentionCall, intercept_attention
from ..config import require
from ..inference import accepted, evaluation_mode
from ..mechanisms.hybrid import HybridMechanism
from ..patching import get_mechanisms, is_patched

AGREEMENT = 32  # first new tokens that are compared
NGRAM = 4  # tokens that count as a repetition when they come again
NEAR = 32  # tokens back that a window of softmax usually reaches
BLOCK = 128  # queries whose weights are held at a time


@dataclass(frozen=True)
class PositionRow:
    """Positions `first` to `last` of a window: share of tokens predicted right, mean nats per token."""

    first: int
    last: int
    accuracy: float
    loss: float


@dataclass(frozen=True)
class RecurrenceRow:
    """Tokens that last followed the one before `first` to `last` places ago: how many, mean nats per token.

    Both are 0 for those that never did in the window. Copying from afar is hard for attention of constant state.
    """

    first: int
    last: int
    count: int
    loss: float


@dataclass(frozen=True)
class Continuations:
    """What a model writes after the same prompts.

    Attributes:
        perplexity: of the original on it. repetition: share of its 4-grams that came before in the same text.
        agreement: share of its first 32 tokens that are those of the original's greedy continuation.
    """

    perplexity: float
    repetition: float
    agreement: float


@dataclass(frozen=True)
class Fidelity:
    """A converted model beside the original, on text that neither was fitted on.

    Attributes:
        positions, original_positions: accuracy by position in the context.
        greedy, sampled, original_greedy, original_sampled: continuations.
        recurrences, original_recurrences: loss by how far back the same two tokens stood together.
        linear_share: share of the attention weights that hybrid mechanisms give to keys beyond window and sinks, mean
            over queries, heads and layers; None without hybrid mechanisms.
        perplexity_without_linear: on the test split, with that share taken away (`without_far_keys`); None if not
            measured.
    """

    positions: tuple[PositionRow, ...]
    original_positions: tuple[PositionRow, ...]
    greedy: Continuations
    sampled: Continuations
    original_greedy: Continuations
    original_sampled: Continuations
    recurrences: tuple[RecurrenceRow, ...] = ()
    original_recurrences: tuple[RecurrenceRow, ...] = ()
    linear_share: float | None = None
    perplexity_without_linear: float | None = None


def fidelity(
    model: PreTrainedModel,
    original: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    max_length: int = 256,
    num_windows: int = 32,
    num_positions: int = 4,
    prompt_length: int = 32,
    new_tokens: int = 64,
    seed: int = 0,
) -> Fidelity:
    """Compare a converted causal language model with its original.

    Args:
        texts: test documents; their first `num_windows` windows of `max_length` tokens are read, and the first
            `prompt_length` tokens of each are continued by `new_tokens`, greedily and sampled at temperature 1.
        num_positions: into how many parts the positions of a window are divided.

    Raises:
        OptionError: the texts hold no whole window, or a prompt and its continuation do not fit into one.
    """
    fits = prompt_length + new_tokens <= max_length
    require("new_tokens", new_tokens, fits, f"at most max_length - prompt_length = {max_length - prompt_length}")
    windows = whole_windows(tokenizer, texts, max_length)[:num_windows]
    prompts = windows[:, :prompt_length]
    reference = _continue(original, prompts, new_tokens, False, seed)

    def written(writer: PreTrainedModel, sampled: bool) -> Continuations:
        text = _continue(writer, prompts, new_tokens, sampled, seed)
        return _judge(original, text, reference, prompt_length)

    read, original_read = (token_losses(reader, windows) for reader in (model, original))
    return Fidelity(
        accuracy_by_position(read, num_positions),
        accuracy_by_position(original_read, num_positions),
        greedy=written(model, False),
        sampled=written(model, True),
        original_greedy=written(original, False),
        original_sampled=written(original, True),
        recurrences=loss_by_recurrence(read),
        original_recurrences=loss_by_recurrence(original_read),
        linear_share=linear_share(model, windows),
    )


def accuracy_by_position(read: TokenLosses, parts: int = 4) -> tuple[PositionRow, ...]:
    """Return accuracy and loss in each of `parts` equal parts of the windows; the first token has none."""
    windows, losses, right = read
    edges = [round(part * windows.shape[1] / parts) for part in range(parts + 1)]
    spans = [(max(a, 1), b) for a, b in pairwise(edges)]
    return tuple(
        PositionRow(a, b - 1, float(right[:, a - 1 : b - 1].mean()), float(losses[:, a - 1 : b - 1].mean()))
        for a, b in spans
    )


def loss_by_recurrence(read: TokenLosses, near: int = NEAR) -> tuple[RecurrenceRow, ...]:
    """Return the loss of tokens whose pair with the one before is new, stood within `near` places, or further back.

    A kind that does not occur in the windows is left out.
    """
    windows, losses, _ = read
    distances, rows = _distances(windows), []
    for first, last in ((0, 0), (1, near), (near + 1, windows.shape[1])):
        chosen = (distances >= first) & (distances <= last)
        if bool(chosen.any()):
            rows.append(RecurrenceRow(first, last, int(chosen.sum()), float(losses[chosen].mean())))
    return tuple(rows)


def _distances(windows: Tensor) -> Tensor:
    """Return how many places ago each later token last followed the token before it, 0 if it never did: [B, N - 1]."""
    distances = torch.zeros(windows.shape[0], windows.shape[1] - 1, dtype=torch.long)
    for row, tokens in enumerate(windows.tolist()):
        places: dict[tuple[int, int], int] = {}
        for place, pair in enumerate(pairwise(tokens)):
            distances[row, place] = place - places.get(pair, place)
            places[pair] = place
    return distances


def linear_share(model: nn.Module, windows: Tensor) -> float | None:
    """Return the share of attention weight that hybrid mechanisms give to far keys; None without any."""
    if not is_patched(model):
        return None
    shares: list[Tensor] = []
    hybrids = {path: m for path, m in get_mechanisms(model).items() if isinstance(m, HybridMechanism)}

    def watch(mechanism: HybridMechanism) -> Any:
        def answer(call: AttentionCall) -> Tensor:
            for pairs in call.pairs(mechanism.layer.causal, BLOCK):
                scores = mechanism.scores(pairs).masked_fill(~pairs.allowed, torch.finfo(torch.float32).min)
                far = (scores.softmax(-1) * ~mechanism.is_exact(pairs)).sum(-1)
                shares.append(far.double().flatten())
            return call.run(mechanism)

        return answer

    usable = {path: watch(mechanism) for path, mechanism in hybrids.items() if mechanism.has_scores}
    if not usable:
        return None
    mechanisms = get_mechanisms(model)
    itself = {path: partial(AttentionCall.run, mechanism=mechanism) for path, mechanism in mechanisms.items()}
    with evaluation_mode(model), torch.no_grad(), intercept_attention(mechanisms, {**itself, **usable}):
        for batch in windows.split(8):
            model(input_ids=batch.to(_device(model)), **accepted(model, use_cache=False))
    return float(torch.cat(shares).mean())


@contextmanager
def without_far_keys(model: nn.Module) -> Iterator[nn.Module]:
    """Take the linear part out of all hybrid mechanisms for a while: what is left is window and sinks."""
    hybrids = [m for m in get_mechanisms(model).values() if isinstance(m, HybridMechanism)]
    try:
        for hybrid in hybrids:
            hybrid.far_shut = True
        yield model
    finally:
        for hybrid in hybrids:
            hybrid.far_shut = False


def whole_windows(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> Tensor:
    """Return the windows of `length` tokens that the texts hold, each of one text: [B, N]; `OptionError` if none."""
    encoded = tokenizer(list(texts), verbose=False)["input_ids"]
    rows = [ids[i : i + length] for ids in encoded for i in range(0, len(ids) - length + 1, length)]
    require("texts", len(texts), bool(rows), f"documents with at least max_length={length} tokens")
    return torch.tensor(rows, dtype=torch.long)


class TokenLosses(NamedTuple):
    """Windows [B, N], the negative log-likelihood of each later token [B, N - 1], and 1 where it was the likeliest."""

    windows: Tensor
    losses: Tensor
    right: Tensor


def token_losses(model: nn.Module, windows: Tensor) -> TokenLosses:
    """Read windows of tokens with a model."""
    losses, right = [], []
    with evaluation_mode(model), torch.no_grad():
        for batch in windows.to(_device(model)).split(8):
            logits = model(input_ids=batch, **accepted(model, use_cache=False)).logits[:, :-1].float()
            losses.append(F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").cpu())
            right.append((logits.argmax(-1) == batch[:, 1:]).double().cpu())
    return TokenLosses(windows, torch.cat(losses).double(), torch.cat(right))


def _continue(model: PreTrainedModel, prompts: Tensor, count: int, sampled: bool, seed: int) -> Tensor:
    """Return prompts and continuations [B, prompt + count]; the global random state is left alone."""
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0} if sampled else {"do_sample": False}
    device = _device(model)
    with evaluation_mode(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        text = model.generate(  # type: ignore[operator]
            prompts.to(device), attention_mask=torch.ones_like(prompts).to(device), min_new_tokens=count,
            max_new_tokens=count, pad_token_id=0, **options,
        )  # fmt: skip
    return text.cpu()


def _judge(original: nn.Module, text: Tensor, reference: Tensor, prompt: int) -> Continuations:
    losses = token_losses(original, text).losses
    grams = [[tuple(row[i : i + NGRAM]) for i in range(len(row) - NGRAM + 1)] for row in text[:, prompt:].tolist()]
    repeated = [gram in row[:i] for row in grams for i, gram in enumerate(row)]
    first = slice(prompt, prompt + AGREEMENT)
    return Continuations(
        perplexity=float(losses[:, prompt - 1 :].mean().exp()),
        repetition=sum(repeated) / max(1, len(repeated)),
        agreement=float((text[:, first] == reference[:, first]).double().mean()),
    )


def _device(model: nn.Module) -> Any:
    return architecture.root_model(model).device
