"""A prompt as text, before any tokenizer has seen it, and what draws one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from .draws import Draws

WRONG_ANSWERS = 7  # beside the right one: a rank at random is the first in one of eight cases
EVERYWHERE = 0.5  # the depth of tasks whose needle is the whole context


@dataclass(frozen=True)
class Draft:
    """A prompt as text.

    Attributes:
        body: instructions, context and question: the turn of the user in a chat.
        prefix: how the answer begins, given: the start of the assistant's turn, or behind the body.
        answers: texts that a right answer contains.
        right: the right continuation. wrong: others of the same form.
        needles: passages of the prompt that answer the question, each of them or together.
        depth: where a needle asked for lies in the context, 0 (start) to 1 (end).
        joint: what stands between body and prefix outside a chat.
        choices: options of a multiple choice in the order of their letters.
    """

    body: str
    prefix: str
    answers: tuple[str, ...]
    right: str
    wrong: tuple[str, ...]
    needles: tuple[str, ...]
    depth: float
    joint: str = " "
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What a question is drawn from.

    Attributes:
        draws: random numbers of this question alone.
        depth: where its needle is to lie, 0 (start) to 1 (end of the context).
        words: of the haystack's text, each with the space behind it; pieces of a text without spaces have none.
        rotation: by how many places the options of a multiple choice are turned.
    """

    draws: Draws
    depth: float
    words: Sequence[str]
    rotation: int = 0


Question = Callable[[int], Draft]  # a context's size, in units of the task -> the prompt with a context of that size


class RecallTask(ABC):
    """Draws questions. `rotations` says how often each is asked, with its options in another order."""

    rotations: ClassVar[int] = 1

    @abstractmethod
    def __call__(self, source: Source) -> Question:
        """Return a question, whose context may have any size from 1 on."""


def listed(items: Sequence[str]) -> str:
    """Return `a`, `a and b` or `a, b, and c`.

    >>> listed(["a", "b", "c"])
    'a, b, and c'
    """
    if len(items) < 3:
        return " and ".join(items)
    return f"{', '.join(items[:-1])}, and {items[-1]}"


def unlike(draw: Callable[[], str], taken: Sequence[str] = ()) -> Iterator[str]:
    """Yield drawn texts, all different from each other and from those taken."""
    known = set(taken)
    while True:
        item = draw()
        if item not in known:
            known.add(item)
            yield item


def distinct(draw: Callable[[], str], count: int, taken: Sequence[str] = ()) -> list[str]:
    """Return `count` drawn texts, all different from each other and from those taken."""
    return list(islice(unlike(draw, taken), count))


class Growing:
    """The first items of a stream, each drawn once."""

    def __init__(self, items: Iterator[str]):
        self._items, self._drawn = items, list[str]()

    def first(self, count: int) -> list[str]:
        """Return the first `count` items."""
        self._drawn.extend(islice(self._items, max(0, count - len(self._drawn))))
        return self._drawn[:count]


def spread(depth: float, count: int) -> list[float]:
    """Return the depths of needles at equal distances, from `depth` on and round the end."""
    return [(depth + i / count) % 1 for i in range(count)]
