"""Prompts of generated tasks as token ids, of a given length, for any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ...chat_templates import render_chat
from ...config import require, require_count, require_known
from ...errors import DataError, OptionError
from .draft import Draft, Question, Source
from .draws import Draws
from .haystacks import words_of
from .tasks import RECALL_TASKS

PROBE = "The grass is green."
MOST_PIECES = 100  # pieces of context that one token is taken to write, at most


@dataclass(frozen=True)
class RecallPrompt:
    """A prompt and its answer.

    Attributes:
        task: as given.
        length: as given, the most tokens that prompt and answer have together.
        depth: where the needle lies in the context, 0 (start) to 1 (end), one of them where several are asked for;
            0.5 where the whole context is one.
        seed: as given.
        distance: tokens from the end of the last needle to the end of the prompt; a model that sees fewer has no
            needle before it. Exact but for a token that stands across that end.
        prompt_ids: token ids of the prompt, with the special tokens that the tokenizer puts before a text.
        answers: texts that a right answer contains.
        answer_ids: token ids of the right continuation.
        wrong_ids: those of wrong ones, of the same form.
        choices: the options of a multiple choice in the order of their letters, else empty.
    """

    task: str
    length: int
    depth: float
    seed: int
    distance: int
    prompt_ids: list[int]
    answers: tuple[str, ...]
    answer_ids: list[int]
    wrong_ids: tuple[list[int], ...]
    choices: tuple[str, ...] = ()


def make_prompts(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    count: int,
    seed: int = 0,
    haystack: Sequence[str] | None = None,
    chat: bool = False,
    positions: int | None = None,
) -> list[RecallPrompt]:
    """Return prompts of one task, whose needles lie at depths (i + 1/2) / count, i = 0 to count - 1.

    The texts depend on task, length, seed, haystack and the number of a prompt, and on the tokenizer as far as it
    decides how much context fits; they are the same on every machine and with every version of Python.

    Args:
        task: a name in `RECALL_TASKS`.
        tokenizer: that of the model that is to answer.
        length: tokens of prompt and answer together, at most; as much context is written as that leaves room for.
        count: how many questions; multiple choice has four prompts for each, its options turned by one place.
        seed: of all that is drawn.
        haystack: texts to hide needles in, for tasks that have a text; None takes the one that comes with the library,
            chapters of "Alice's Adventures in Wonderland".
        chat: write the prompt as the turn of a user, through the tokenizer's chat template.
        positions: of the model that is to answer, so that the wrong answers, which may be longer than the right one,
            fit as well; None: any number.

    Raises:
        UnknownNameError: no task has that name.
        OptionError: `count` is below 1, or `length` beyond the positions or too short for the task with this
            tokenizer.
        DataError: the haystack is one string or has less than 50 words, the tokenizer has no chat template that is
            asked for, or it cannot spell an answer.

    Examples:
        >>> from hf_linattn.evaluation import make_prompts
        >>> prompts = make_prompts("single_noise", tokenizer, 1024, count=4)  # doctest: +SKIP
        >>> [prompt.depth for prompt in prompts]  # doctest: +SKIP
        [0.125, 0.375, 0.625, 0.875]
    """
    require_known("recall task", task, RECALL_TASKS)
    require_count("length", length)
    require_count("count", count)
    require("length", length, positions is None or length <= positions, f"at most {positions}, the model's positions")
    require("tokenizer", tokenizer, callable(tokenizer), "a tokenizer, such as AutoTokenizer.from_pretrained(name)")
    if chat and not tokenizer.chat_template:
        raise DataError("chat=True: the tokenizer has no chat_template; set one or leave chat out")
    writer = _Writer(tokenizer, chat, spare=None if positions is None else positions - length)
    words, prompts, size = words_of(haystack), list[RecallPrompt](), 1
    for number in range(count):
        for rotation in range(RECALL_TASKS[task].rotations):
            source = Source(Draws(task, length, seed, number), (number + 0.5) / count, words, rotation)
            question = RECALL_TASKS[task](source)
            size = _largest_size(question, writer, length, size, task)
            prompts.append(writer.write(question(size), task=task, length=length, seed=seed))
    return prompts


def _largest_size(question: Question, writer: _Writer, length: int, guess: int, task: str) -> int:
    """Return the size of the largest context with which prompt and answer have at most `length` tokens.

    Tokens grow about evenly with the size, so each try is where a line through the last ones reaches the length.
    """
    low, least = 1, writer.count(question(1))
    if least > length:
        raise OptionError(f"length must be at least {least} for the task {task!r} with this tokenizer, got {length}")
    low_count, high, high_count, size = least, 0, 0, max(2, guess)  # high: the least that is too large, 0 for none
    while not high or high - low > 1:
        counted = writer.count(question(size))
        if counted <= length and size > MOST_PIECES * length:
            raise DataError(f"the tokenizer writes a text in {counted} tokens however long it is; take another one")
        if counted <= length:
            low, low_count = size, counted
        else:
            high, high_count = size, counted
        if high:
            share = (length - low_count) / (high_count - low_count)
            size = min(max(low + 1, low + int(share * (high - low) + 0.5)), high - 1)
        else:
            size = 1 + int((low - 1) * (length - least) / max(1, low_count - least)) + 2
    return low


class _Writer:
    """Writes drafts with one tokenizer; `spare` tokens are left to what a wrong answer is longer, None: any number."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool, spare: int | None):
        self.tokenizer, self.chat, self.spare = tokenizer, chat, spare
        plain, whole = self._encode(PROBE), list(tokenizer(PROBE)["input_ids"])
        starts = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
        self.first_ids = whole[: starts[0]] if starts and not chat else []

    def text(self, draft: Draft) -> str:
        """Return the whole prompt."""
        if not self.chat:
            return draft.body + draft.joint + draft.prefix
        turns = [{"role": "user", "content": draft.body}]
        return render_chat(self.tokenizer, turns) + draft.prefix

    def count(self, draft: Draft) -> int:
        """Return the tokens of prompt and answer, and those of the longest wrong one that find no room behind it."""
        right = len(self.first_ids) + len(self._encode(f"{self.text(draft)} {draft.right}"))
        if self.spare is None:
            return right
        own, *wrong = (len(self._continue(draft.prefix, x)) for x in (draft.right, *draft.wrong))
        return right + max(0, max(wrong) - own - self.spare)

    def write(self, draft: Draft, **fields: object) -> RecallPrompt:
        """Return the prompt as token ids."""
        text = self.text(draft)
        prompt_ids = self._encode(text)
        answer_ids = self._continue(draft.prefix, draft.right)
        spelled = self.tokenizer.decode(answer_ids)
        if not all(answer.lower() in spelled.lower() for answer in draft.answers):
            raise DataError(f"the tokenizer writes {draft.right!r} as {spelled!r}; take one that has all letters")
        return RecallPrompt(
            **fields,  # type: ignore[arg-type]
            depth=draft.depth,
            distance=len(self._encode(text[max(text.rfind(needle) + len(needle) for needle in draft.needles) :])),
            prompt_ids=[*self.first_ids, *prompt_ids],
            answers=draft.answers,
            answer_ids=answer_ids,
            wrong_ids=tuple(self._continue(draft.prefix, wrong) for wrong in draft.wrong),
            choices=draft.choices,
        )

    def _continue(self, prefix: str, continuation: str) -> list[int]:
        """Return the ids of a continuation: what follows those of the prefix in the ids of both together."""
        before, both = self._encode(prefix), self._encode(f"{prefix} {continuation}")
        if both[: len(before)] == before:
            return both[len(before) :]
        return self._encode(f" {continuation}")  # the tokenizer joins what stands at the boundary

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
