"""Chains that have to be followed from one sentence to the next, in noise."""

from __future__ import annotations

import string
from dataclasses import dataclass

from .draft import WRONG_ANSWERS, Draft, Question, RecallTask, Source, distinct, spread
from .draws import Draws
from .haystacks import noise
from .needles import ONE, needle

TRACK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find"
    " all variables that are assigned the value {value} in the text above."
)
TRACKED = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the"
    " value {value}, they are:"
)
EXAMPLE_SIZE, EXAMPLE_LETTERS, LETTERS = 10, 3, 5
FOLLOW = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about"
    " the numbers afterwards.\n{context}\nWhat is the special magic number for {query} mentioned in the provided text?"
)
CHAINS = 3


@dataclass(frozen=True)
class VariableTracking(RecallTask):
    """One chain of assignments, `VAR X = 12345`, `VAR Y = VAR X`; all its variables are asked for, after an example.

    RULER's task, with its four hops. The depth is that of the first assignment; the others follow evenly to the end.
    """

    hops: int = 4

    def __call__(self, source: Source) -> Question:
        draws = source.draws
        example = self._chain(draws.fork("example"), EXAMPLE_LETTERS)
        shown = self._question(example, EXAMPLE_SIZE, 0.0)
        names, value = self._chain(draws, LETTERS)
        fresh = distinct(lambda: _name(draws, LETTERS), WRONG_ANSWERS * len(names), names)
        wrong = [" ".join(fresh[i :: WRONG_ANSWERS]) for i in range(WRONG_ANSWERS)]

        def draft(size: int) -> Draft:
            body, prefix = self._question((names, value), size, source.depth)
            return Draft(
                body=f"{' '.join((*shown, *example[0]))}\n\n{body}",
                prefix=prefix,
                answers=tuple(names),
                right=" ".join(names),
                wrong=tuple(wrong),
                needles=tuple(_assignments(names, value)),
                depth=source.depth,
            )

        return draft

    def _chain(self, draws: Draws, letters: int) -> tuple[list[str], str]:
        """Return the variables of a chain, and its value."""
        return distinct(lambda: _name(draws, letters), self.hops + 1), draws.number(5)

    def _question(self, chain: tuple[list[str], str], size: int, depth: float) -> tuple[str, str]:
        """Return body and prefix."""
        names, value = chain
        depths = [depth + (1 - depth) * i / len(names) for i in range(len(names))]
        context = noise(size).hide(_assignments(names, value), depths)
        return TRACK.format(context=context, value=value), TRACKED.format(count=len(names), value=value)


@dataclass(frozen=True)
class MultiHop(RecallTask):
    """Three keys whose number is said to be another key's, which stands elsewhere; one is asked for.

    The depth is that of its number; the sentence that leads there is half the context away.
    """

    def __call__(self, source: Source) -> Question:
        draws = source.draws
        keys, values = distinct(draws.key, 2 * CHAINS), distinct(draws.number, CHAINS)
        ends = [needle("number", key, value) for key, value in zip(keys[CHAINS:], values, strict=True)]
        links = [
            f"The special magic number for {key} is the same as the one for {other}."
            for key, other in zip(keys[:CHAINS], keys[CHAINS:], strict=True)
        ]
        fresh = distinct(draws.number, WRONG_ANSWERS - CHAINS + 1, values)

        def draft(size: int) -> Draft:
            context = noise(size).hide([*ends, *links], spread(source.depth, 2 * CHAINS))
            return Draft(
                body=FOLLOW.format(context=context, query=keys[0]),
                prefix=ONE.format(kind="number", query=keys[0]),
                answers=(values[0],),
                right=values[0],
                wrong=(*values[1:], *fresh),
                needles=(ends[0], links[0]),
                depth=source.depth,
            )

        return draft


def _name(draws: Draws, letters: int) -> str:
    """Return the name of a variable."""
    return draws.text(string.ascii_uppercase, letters)


def _assignments(names: list[str], value: str) -> list[str]:
    """Return the assignments of a chain."""
    return [f"VAR {name} = {what}" for name, what in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)]
