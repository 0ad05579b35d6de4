"""Needles in a haystack, in the words of RULER (Hsieh et al. 2024, arXiv 2404.06654)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .draft import WRONG_ANSWERS, Draft, Question, Source, distinct, listed
from .draws import Draws
from .haystacks import Haystack, noise, prose

VALUES: dict[str, Callable[[Draws], str]] = {"number": Draws.number, "uuid": Draws.uuid}
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the"
    " {kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text?",
    "The special magic {kind} for {query} mentioned in the provided text is",
)
MANY = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I will quiz you about"
    " the {kind}s afterwards.\n{context}\nWhat are all the special magic {kind}s for {query} mentioned in the provided"
    " text?",
    "The special magic {kind}s for {query} mentioned in the provided text are",
)


def needle(kind: str, key: str, value: str) -> str:
    """Return the sentence that hides a value."""
    return f"One of the special magic {kind}s for {key} is: {value}."


def spread(depth: float, count: int) -> list[float]:
    """Return the depths of needles at equal distances from `depth` on, round the end."""
    return [(depth + i / count) % 1 for i in range(count)]


@dataclass(frozen=True)
class Needles:
    """Keys with one or more values each, of which some keys are asked for.

    The depth is that of the first value asked for; the other needles follow at equal distances.

    Attributes:
        kind: `number` or `uuid`. text: whether they lie in a text, not in noise.
        keys, values, queries: how many keys there are, values of each, keys asked for.
    """

    kind: str = "number"
    text: bool = True
    keys: int = 1
    values: int = 1
    queries: int = 1

    def __call__(self, source: Source) -> Question:
        draws, kind = source.draws, self.kind
        keys = distinct(draws.key, self.keys)
        values = distinct(lambda: VALUES[kind](draws), self.keys * self.values)
        of_key = [values[i :: self.keys] for i in range(self.keys)]
        needles = [needle(kind, keys[i % self.keys], value) for i, value in enumerate(values)]
        asked = [value for own in of_key[: self.queries] for value in own]
        wrong = [listed(answers) for answers in self._wrong(asked, values, draws)]
        depths, start = spread(source.depth, len(needles)), draws.below(len(source.words))
        body, prefix = ONE if len(asked) == 1 else MANY
        query = listed(keys[: self.queries])

        def draft(size: int) -> Draft:
            haystack: Haystack = prose(source.words, start, size) if self.text else noise(size)
            context = haystack.hide(needles, depths)
            return Draft(
                body=body.format(kind=kind, context=context, query=query),
                prefix=prefix.format(kind=kind, query=query),
                answers=tuple(asked),
                right=listed(asked),
                wrong=tuple(wrong),
                needles=tuple(text for text, value in zip(needles, values, strict=True) if value in asked),
            )

        return draft

    def _wrong(self, asked: Sequence[str], values: Sequence[str], draws: Draws) -> list[list[str]]:
        """Return wrong answers: values of other keys, right ones of wrong keys, and values that stand nowhere."""
        count = len(asked)
        others = [value for value in values if value not in asked]
        mixed = [[*asked[i:], *asked[:i]] for i in range(1, self.queries)]
        given = [*([value] for value in others if count == 1), *mixed][:WRONG_ANSWERS]
        missing = WRONG_ANSWERS - len(given)
        fresh = distinct(lambda: VALUES[self.kind](draws), missing * count, values)
        return [*given, *(fresh[i * count : (i + 1) * count] for i in range(missing))]
