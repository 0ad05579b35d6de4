"""What perplexity does not show: text that is generated, accuracy late in the context, and what a hybrid leans on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention_call import AttentionCall, intercept_attention
from ..config import require
from ..inference import accepted, device_of, evaluation_mode
from ..mechanisms import Mechanism, Pairs
from ..mechanisms.composite import CompositeMechanism
from ..mechanisms.hybrid import HybridMechanism, hybrids_of
from ..patching import get_mechanisms, is_patched
from .generation import Continuations, compared, continuations
from .next_token import token_losses, whole_windows
from .positions import PositionRow, RecurrenceRow, accuracy_by_position, loss_by_recurrence

BLOCK = 128  # queries whose weights are held at a time


@dataclass(frozen=True)
class Fidelity:
    """A converted model beside the original, on text that neither was fitted on.

    Attributes:
        positions: accuracy by position in the context.
        original_positions: the original's.
        greedy: the likeliest continuations.
        sampled: continuations at temperature 1.
        original_greedy: the original's.
        original_sampled: the original's.
        recurrences: loss by how far back the same two tokens stood together.
        original_recurrences: the original's.
        linear_share: share of the attention weights that hybrid mechanisms, of single heads too, give to keys beyond
            window and sinks, mean over queries, heads and layers; None without any, and where one has no scores.
        perplexity_without_linear: on the test split, with that share taken away (`without_far_keys`); None if not
            measured.
        control_positions: the control's; empty where it was not read.
        control_recurrences: the control's; empty where it was not read.
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
    control_positions: tuple[PositionRow, ...] = ()
    control_recurrences: tuple[RecurrenceRow, ...] = ()


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
    control: PreTrainedModel | None = None,
    add_special_tokens: bool = True,
) -> Fidelity:
    """Compare a converted causal language model with its original.

    Args:
        model: the converted model.
        original: the model that it was converted from.
        tokenizer: that of both.
        texts: test documents; their first windows of `max_length` tokens are read.
        max_length: tokens of a window.
        num_windows: how many windows are read at most.
        num_positions: into how many parts the positions of a window are divided.
        prompt_length: first tokens of each window that are continued, greedily and sampled at temperature 1.
        new_tokens: by how many tokens they are continued.
        seed: of the samples.
        control: the original, fine-tuned: what recurs is read with it, too.
        add_special_tokens: as for `whole_windows`.

    Raises:
        OptionError: the texts hold no whole window, or a prompt and its continuation do not fit into one.
        DataError: `texts` is one string, or holds something else.

    Examples:
        >>> from hf_linattn.evaluation import fidelity
        >>> fidelity(model, original, tokenizer, texts).greedy.perplexity  # doctest: +SKIP
    """
    most = max_length - prompt_length
    require("new_tokens", new_tokens, new_tokens <= most, f"at most max_length - prompt_length = {most}")
    windows = whole_windows(tokenizer, texts, max_length, add_special_tokens)[:num_windows]
    reference = continuations(original, prompts := windows[:, :prompt_length], new_tokens)

    def written(writer: PreTrainedModel, sampled: bool) -> Continuations:
        text = continuations(writer, prompts, new_tokens, sampled=sampled, seed=seed)
        return compared(original, prompts, text, reference)

    read, original_read = (token_losses(reader, windows) for reader in (model, original))
    return Fidelity(
        accuracy_by_position(read, num_positions),
        accuracy_by_position(original_read, num_positions),
        greedy=written(model, False), sampled=written(model, True),
        original_greedy=written(original, False), original_sampled=written(original, True),
        recurrences=loss_by_recurrence(read),
        original_recurrences=loss_by_recurrence(original_read),
        linear_share=linear_share(model, windows),
        **({} if control is None else _read_control(control, windows, num_positions)),
    )  # fmt: skip


def _read_control(control: PreTrainedModel, windows: Tensor, num_positions: int) -> dict[str, Any]:
    """Return the fields of a `Fidelity` that are the control's."""
    read = token_losses(control, windows)
    return {
        "control_positions": accuracy_by_position(read, num_positions), "control_recurrences": loss_by_recurrence(read)
    }  # fmt: skip


def linear_share(model: nn.Module, windows: Tensor) -> float | None:
    """Return the share of attention weight that hybrid mechanisms give to far keys.

    None without any, and where one, as with hard keys, has no scores to tell.
    """
    if not is_patched(model):
        return None
    shares: list[Tensor] = []
    mechanisms = get_mechanisms(model)
    hybrids = hybrids_of(mechanisms.values())
    if not hybrids or not all(hybrid.has_scores for hybrid in hybrids):
        return None

    def watch(mechanism: Mechanism) -> Any:
        watched = bool(hybrids_of([mechanism]))

        def answer(call: AttentionCall) -> Tensor:
            for pairs in call.pairs(mechanism.layer.causal, BLOCK) if watched else ():
                shares.extend(_far_shares(mechanism, pairs))
            return call.run(mechanism)

        return answer

    watching = {path: watch(mechanism) for path, mechanism in mechanisms.items()}
    with evaluation_mode(model), torch.no_grad(), intercept_attention(mechanisms, watching):
        for batch in windows.split(8):
            model(input_ids=batch.to(device_of(model)), **accepted(model, use_cache=False))
    return float(torch.cat(shares).mean())


def _far_shares(mechanism: Mechanism, pairs: Pairs) -> Iterator[Tensor]:
    """Yield what each query gives to far keys, of all its weight, in each hybrid of a layer: [B H C]."""
    if isinstance(mechanism, CompositeMechanism):
        for member, own in zip(mechanism.parts(), mechanism.pairs_of_members(pairs), strict=True):
            yield from _far_shares(member, own)
    elif isinstance(mechanism, HybridMechanism):
        scores = mechanism.scores(pairs).masked_fill(~pairs.allowed, torch.finfo(torch.float32).min)
        total, sink = scores.logsumexp(-1, keepdim=True), mechanism.log_sink(scores, pairs.sink)
        if sink is not None:
            total = torch.logaddexp(total, sink[:, None, None])
        far = ((scores - total).exp() * ~mechanism.is_exact(pairs)).sum(-1)
        yield far.flatten().cpu().double()


@contextmanager
def without_far_keys(model: nn.Module) -> Iterator[nn.Module]:
    """Take the linear part out of all hybrid mechanisms, of single heads too, for a while.

    What is left is window and sinks, and hard keys where there are some.

    Args:
        model: a patched model.

    Yields:
        The model itself.

    Raises:
        PatchError: the model is not patched.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn import patch_model
        >>> from hf_linattn.evaluation import without_far_keys
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
        >>> model, tokens = patch_model(LlamaForCausalLM(config), "hybrid", window_size=4), torch.arange(32)[None]
        >>> with without_far_keys(model):
        ...     near = model(tokens).logits
        >>> torch.equal(near, model(tokens).logits)
        False
    """
    hybrids = hybrids_of(get_mechanisms(model).values())
    try:
        for hybrid in hybrids:
            hybrid.far_shut = True
        yield model
    finally:
        for hybrid in hybrids:
            hybrid.far_shut = False
