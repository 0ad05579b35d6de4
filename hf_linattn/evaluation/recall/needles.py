"""Needles in a haystack, in the words of RULER (Hsieh et al. 2024, arXiv 2404.06654), and choices among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .draft import WRONG_ANSWERS, Draft, Question, RecallTask, Source, distinct, listed, spread
from .draws import Draws
from .haystacks import noise, prose

VALUES: dict[str, Callable[[Draws], str]] = {"number": Draws.number, "uuid": Draws.uuid}
ASK_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the"
    " {kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text?"
)
ASK_MANY = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I will quiz you about"
    " the {kind}s afterwards.\n{context}\nWhat are all the special magic {kind}s for {query} mentioned in the provided"
    " text?"
)
ONE = "The special magic {kind} for {query} mentioned in the provided text is"
MANY = "The special magic {kind}s for {query} mentioned in the provided text are"
LETTERS = "ABCD"


def needle(kind: str, key: str, value: str) -> str:
    """Return the sentence that hides a value."""
    return f"One of the special magic {kind}s for {key} is: {value}."


@dataclass(frozen=True)
class Needles(RecallTask):
    """Keys with one or more values each, of which some keys are asked for.

    The depth is that of a value asked for; the other needles follow at equal distances. Values of one key are to be
    given in the order in which they stand in the text, those of several in the order of the question.

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
        depths, start = spread(source.depth, len(values)), draws.below(len(source.words))
        order = sorted(range(len(values)), key=depths.__getitem__)
        asked = [values[j] for i in range(self.queries) for j in order if j % self.keys == i]
        needles = [needle(kind, keys[i % self.keys], value) for i, value in enumerate(values)]
        wrong = [listed(answers) for answers in self._wrong(asked, values, draws)]
        body, prefix = (ASK_ONE, ONE) if len(asked) == 1 else (ASK_MANY, MANY)
        query = listed(keys[: self.queries])

        def draft(size: int) -> Draft:
            haystack = prose(source.words, start, size) if self.text else noise(size)
            return Draft(
                body=body.format(kind=kind, context=haystack.hide(needles, depths), query=query),
                prefix=prefix.format(kind=kind, query=query),
                answers=tuple(asked),
                right=listed(asked),
                wrong=tuple(wrong),
                needles=tuple(text for text, value in zip(needles, values, strict=True) if value in asked),
                depth=source.depth,
            )

        return draft

    def _wrong(self, asked: Sequence[str], values: Sequence[str], draws: Draws) -> list[list[str]]:
        """Return wrong answers: values of other keys, right ones of wrong keys, and values that stand nowhere."""
        count = len(asked)
        others = [[value] for value in values if value not in asked and count == 1]
        mixed = [[*asked[i:], *asked[:i]] for i in range(1, self.queries)]
        missing = WRONG_ANSWERS - len(others) - len(mixed)
        fresh = distinct(lambda: VALUES[self.kind](draws), missing * count, values)
        return [*others, *mixed, *(fresh[i * count : (i + 1) * count] for i in range(missing))]


@dataclass(frozen=True)
class MultipleChoice(RecallTask):
    """Four numbers in a text; which of them belongs to a key is asked with each of them in each place.

    The answer is a letter, so that what a model prefers whatever is asked shows in how often it takes each.
    """

    rotations = len(LETTERS)

    def __call__(self, source: Source) -> Question:
        draws = source.draws
        keys, values = distinct(draws.key, len(LETTERS)), distinct(draws.number, len(LETTERS))
        needles = [needle("number", key, value) for key, value in zip(keys, values, strict=True)]
        order = draws.shuffled(values)
        choices = [*order[source.rotation :], *order[: source.rotation]]
        options = "\n".join(f"{letter}. {value}" for letter, value in zip(LETTERS, choices, strict=True))
        right = LETTERS[choices.index(values[0])]
        depths, start = spread(source.depth, len(needles)), draws.below(len(source.words))

        def draft(size: int) -> Draft:
            context = prose(source.words, start, size).hide(needles, depths)
            return Draft(
                body=f"{ASK_ONE.format(kind='number', context=context, query=keys[0])}\n{options}",
                prefix="Answer:",
                answers=(right,),
                right=right,
                wrong=tuple(letter for letter in LETTERS if letter != right),
                needles=(needles[0],),
                depth=source.depth,
                joint="\n",
                choices=tuple(choices),
            )

        return draft
