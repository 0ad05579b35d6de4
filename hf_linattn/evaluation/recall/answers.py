"""What a causal model answers: the text it writes, and how likely the right answer is among wrong ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ... import architecture
from ...config import require_count, require_finite
from ...errors import DataError, OptionError, UnsupportedModelError
from ...inference import accepted, device_of, evaluation_mode, padding_token, progress_bar
from ...positions.tables import first_position
from ..generation import GREEDY, plain_generation
from ..perplexity import is_masked_language_model, position_limit
from .prompts import RecallPrompt

MORE_TOKENS = 16  # than one and a half times the answer's, which a model may write around it
Answer = TypeVar("Answer")


class RecallAnswer(TypedDict):
    """What a model answers to one prompt.

    Attributes:
        task: of the prompt.
        length: of the prompt.
        depth: of the prompt.
        answers: texts that a right answer contains.
        written: the model's greedy continuation.
        found: share of the answers in it; of a multiple choice 1 or 0, whether its first word is the right letter.
        log_likelihood: of the right continuation, in nats.
        rank: of the right continuation's log-likelihood among those of the wrong ones, 1 is the greatest; a wrong one
            as likely as the right one is before it.
        candidates: how many there are, the right one among them.
        letter: of a multiple choice: the likeliest letter, else None.
    """

    task: str
    length: int
    depth: float
    answers: list[str]
    written: str
    found: float
    log_likelihood: float
    rank: int
    candidates: int
    letter: str | None


class OwnAnswer(NamedTuple):
    """A right answer as a model writes it: its token ids, and their log-likelihood in nats."""

    ids: list[int]
    log_likelihood: float


def answer_prompts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[RecallPrompt],
    *,
    batch_size: int = 4,
    progress: bool | None = None,
) -> list[RecallAnswer]:
    """Return what a causal language model answers to each prompt, in their order.

    A prompt is read once, into a cache, padded on the left where others of its batch are longer, and without logits
    but those of its last token. Continuations are scored and written from there.

    Args:
        model: with a causal language-modelling head, patched or not.
        tokenizer: the model's own.
        prompts: of one task, as `make_prompts` writes them.
        batch_size: prompts per forward; it changes nothing but rounding.
        progress: show a progress bar; None: where standard error is a terminal.

    Raises:
        OptionError: `batch_size` is below 1, a prompt with its answer is longer than the model's positions, or a
            log-likelihood is not finite.
        DataError: there are no prompts, or they have not all as many wrong answers: give those of one task at a time.
        UnsupportedModelError: the model has no causal language-modelling head.

    Examples:
        >>> from hf_linattn.evaluation import answer_prompts, make_prompts
        >>> prompts = make_prompts("single_noise", tokenizer, 1024, count=4)  # doctest: +SKIP
        >>> [answer["found"] for answer in answer_prompts(model, tokenizer, prompts)]  # doctest: +SKIP
    """
    if len({len(prompt.wrong_ids) for prompt in prompts}) > 1:
        raise DataError("prompts have unlike numbers of wrong answers; give those of one task at a time")
    return _in_batches(model, tokenizer, prompts, batch_size, progress, _longest, _Batch.answers)


def own_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[RecallPrompt],
    *,
    batch_size: int = 4,
    progress: bool | None = None,
) -> list[OwnAnswer | None]:
    """Return how a causal language model itself writes the answer of each prompt; None if it does not.

    It is its greedy continuation up to where that contains all answers. Arguments and errors are those of
    `answer_prompts`, but prompts of several tasks may be given at once, and their wrong answers count for nothing.
    """
    return _in_batches(model, tokenizer, prompts, batch_size, progress, _right, _Batch.own_answers)


def _in_batches(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[RecallPrompt],
    size: int,
    progress: bool | None,
    tokens: Callable[[RecallPrompt], int],
    answers: Callable[[_Batch], list[Answer]],
) -> list[Answer]:
    """Return the answers of all prompts, in their order; errors as `answer_prompts` says.

    tokens: of a prompt with what is read behind it. answers: those of a batch.
    """
    require_count("batch_size", size)
    root, limit = architecture.root_model(model), position_limit(model)
    if is_masked_language_model(model):
        raise UnsupportedModelError(f"{type(root).__name__} has no causal language-modelling head, which recall needs")
    if not prompts:
        raise DataError("prompts is empty; give at least one")
    longest = max(prompts, key=tokens)
    if limit and tokens(longest) > limit:
        raise OptionError(
            f"length={longest.length}: a prompt of {longest.task!r} has {tokens(longest)} tokens with its answer, and"
            f" the model {limit} positions; make it with length and positions of at most {limit}"
        )
    found: dict[int, Answer] = {}
    shown = progress_bar(total=len(prompts), desc="recall", progress=progress)
    with evaluation_mode(model), torch.no_grad(), shown as bar:
        for numbers in _groups(prompts, size, limit):
            batch = _Batch(root, tokenizer, [prompts[i] for i in numbers], limit)
            found.update(zip(numbers, answers(batch), strict=True))
            bar.update(len(numbers))
    return [found[i] for i in range(len(prompts))]


def _groups(prompts: Sequence[RecallPrompt], size: int, limit: int | None) -> Iterator[list[int]]:
    """Yield the numbers of prompts that are read together, the longest first.

    All rows of a batch write as much as the one with the most room: only those are together that have it.
    """
    group: list[int] = []
    for number in sorted(range(len(prompts)), key=lambda i: -len(prompts[i].prompt_ids)):
        longest = len(prompts[group[0] if group else number].prompt_ids)
        if group and (len(group) == size or (limit and longest + _room(prompts[number], limit) > limit)):
            yield group
            group = []
        group.append(number)
    yield group


def share_found(prompt: RecallPrompt, written: str) -> float:
    """Return the share of a prompt's answers that a text contains, in upper or lower case, as RULER counts.

    Of a multiple choice whether the first word is the right letter.
    """
    if prompt.choices:
        first = "".join(c if c.isalnum() else " " for c in written).split()[:1]
        return float(first == list(prompt.answers))
    return sum(answer.lower() in written.lower() for answer in prompt.answers) / len(prompt.answers)


def _right(prompt: RecallPrompt) -> int:
    """Return the tokens of a prompt with its right answer."""
    return len(prompt.prompt_ids) + len(prompt.answer_ids)


def _longest(prompt: RecallPrompt) -> int:
    """Return the tokens of a prompt with its longest continuation."""
    return len(prompt.prompt_ids) + max(map(len, (prompt.answer_ids, *prompt.wrong_ids)))


def _room(prompt: RecallPrompt, limit: int | None) -> int:
    """Return how many tokens a model may write behind a prompt."""
    wanted = len(prompt.answer_ids) * 3 // 2 + MORE_TOKENS
    return min(wanted, limit - len(prompt.prompt_ids)) if limit else wanted


class _Batch:
    """Some prompts, read into one cache up to their last token."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[RecallPrompt],
        limit: int | None,
    ):
        self.model, self.tokenizer, self.prompts, self.limit = model, tokenizer, prompts, limit
        longest = max(len(prompt.prompt_ids) for prompt in prompts)
        pads = [longest - len(prompt.prompt_ids) for prompt in prompts]
        self.pad, self.first = padding_token(model, tokenizer), first_position(model)
        rows = [[self.pad] * count + prompt.prompt_ids for count, prompt in zip(pads, prompts, strict=True)]
        self.ids = torch.tensor(rows, device=device_of(model))
        self.mask = (torch.arange(longest)[None] >= torch.tensor(pads)[:, None]).long().to(device_of(model))
        self.cache: Cache = DynamicCache(config=model.config)
        self._forward(self.ids[:, :-1], self.mask[:, :-1], self.cache, kept=1)

    def answers(self) -> list[RecallAnswer]:
        """Return what the model answers; afterwards the cache is used up."""
        candidates = [(prompt.answer_ids, *prompt.wrong_ids) for prompt in self.prompts]
        of_candidate = [self._score(continuations) for continuations in zip(*candidates, strict=True)]
        require_finite("log_likelihood", chain.from_iterable(of_candidate))
        scores = list(zip(*of_candidate, strict=True))
        written = [self._text(ids) for ids, _ in self._write()]
        return [
            self._answer(prompt, text, own[0], own[1:])
            for prompt, text, own in zip(self.prompts, written, scores, strict=True)
        ]

    def own_answers(self) -> list[OwnAnswer | None]:
        """Return what the model writes up to where all answers stand; afterwards the cache is used up."""
        written = zip(self.prompts, self._write(), strict=True)
        return [self._up_to_answer(prompt, ids, scores) for prompt, (ids, scores) in written]

    def _up_to_answer(self, prompt: RecallPrompt, ids: list[int], scores: list[float]) -> OwnAnswer | None:
        if share_found(prompt, self._text(ids)) < 1:
            return None
        end = next(end for end in range(1, len(ids) + 1) if share_found(prompt, self._text(ids[:end])) == 1)
        return OwnAnswer(ids[:end], sum(scores[:end]))

    def _answer(self, prompt: RecallPrompt, written: str, right: float, wrong: Sequence[float]) -> RecallAnswer:
        letter = None
        if prompt.choices:
            spelled = [prompt.answer_ids, *prompt.wrong_ids]
            likeliest = max(range(len(spelled)), key=[right, *wrong].__getitem__)
            letter = self.tokenizer.decode(spelled[likeliest]).strip()
        return {
            "task": prompt.task,
            "length": prompt.length,
            "depth": prompt.depth,
            "answers": list(prompt.answers),
            "written": written,
            "found": share_found(prompt, written),
            "log_likelihood": right,
            "rank": 1 + sum(score >= right for score in wrong),
            "candidates": 1 + len(wrong),
            "letter": letter,
        }

    def _score(self, continuations: Sequence[list[int]]) -> list[float]:
        """Return the log-likelihood of a continuation of each prompt, in nats."""
        longest = max(map(len, continuations))
        rows = torch.tensor([ids + [0] * (longest - len(ids)) for ids in continuations], device=self.ids.device)
        here = torch.tensor([[i < len(ids) for i in range(longest)] for ids in continuations], device=rows.device)
        read = torch.cat([self.ids[:, -1:], rows[:, :-1]], dim=1)
        mask = torch.cat([self.mask, here[:, :-1].long()], dim=1)
        logits = self._forward(read, mask, copy.deepcopy(self.cache))
        losses = _losses(logits.flatten(0, 1), rows.flatten())
        scores = -losses.view(rows.shape).masked_fill(~here.cpu(), 0.0).sum(1)
        return scores.tolist()

    def _write(self) -> list[tuple[list[int], list[float]]]:
        """Return the greedy continuations, each with as many tokens as its own answer allows, and their log p."""
        room = [_room(prompt, self.limit) for prompt in self.prompts]
        with plain_generation(self.model):
            written = self.model.generate(  # type: ignore[operator]
                self.ids, attention_mask=self.mask, past_key_values=self.cache, max_new_tokens=max(room),
                pad_token_id=self.pad, output_logits=True, return_dict_in_generate=True, **GREEDY,
            )  # fmt: skip
        new = written.sequences[:, self.ids.shape[1] :]
        scores = [-_losses(logits, ids) for logits, ids in zip(written.logits, new.T, strict=True)]
        rows = zip(new.tolist(), torch.stack(scores, dim=1).tolist(), room, strict=True)
        return [(ids[:count], row[:count]) for ids, row, count in rows]

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _forward(self, ids: Tensor, mask: Tensor, cache: Cache, kept: int = 0) -> Tensor:
        """Read tokens [B, n] behind what the cache has; return their logits [B, n, V], or the last `kept` ones."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :] + self.first
        options = accepted(self.model, position_ids=positions, logits_to_keep=kept)
        return self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options).logits


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the cross entropies [n] of tokens [n] by logits [n, V], in nats, float64 on the CPU."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide, ids.to(wide.device), reduction="none").cpu().double()
