"""A prompt as text, before any tokenizer has seen it, and what draws one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .draws import Draws

WRONG_ANSWERS = 7  # beside the right one: a rank at random is the first in one of eight cases


@dataclass(frozen=True)
class Draft:
    """A prompt as text.

    Attributes:
        body: instructions, context and question: the turn of the user in a chat.
        prefix: how the answer begins, given: behind the body, or the start of the assistant's turn.
        answers: texts that a right answer contains.
        right: the right continuation. wrong: others of the same form.
        needles: passages of the body that answer the question, each of them or together.
        choices: options of a multiple choice in the order of their letters.
    """

    body: str
    prefix: str
    answers: tuple[str, ...]
    right: str
    wrong: tuple[str, ...]
    needles: tuple[str, ...]
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What a question is drawn from.

    Attributes:
        draws: random numbers of this prompt alone.
        depth: where its needle lies, 0 (start) to 1 (end of the context).
        number: of the prompt among those of its task.
        words: of the haystack's text.
    """

    draws: Draws
    depth: float
    number: int
    words: Sequence[str]


Question = Callable[[int], Draft]  # a context's size, in units of the task -> the prompt with a context of that size


def listed(items: Sequence[str]) -> str:
    """Return `a`, `a and b` or `a, b, and c`.

    >>> listed(["a", "b", "c"])
    'a, b, and c'
    """
    if len(items) < 3:
        return " and ".join(items)
    return f"{', '.join(items[:-1])}, and {items[-1]}"


def distinct(draw: Callable[[], str], count: int, taken: Sequence[str] = ()) -> list[str]:
    """Return `count` drawn texts, all different from each other and from those taken."""
    found = dict.fromkeys(taken)
    first = len(found)
    while len(found) < first + count:
        found[draw()] = None
    return list(found)[first:]
