"""Lists that have no haystack around them: words to count, a phone book, words to copy."""

from __future__ import annotations

import itertools
import math
import string
from dataclasses import dataclass
from functools import partial

from .draft import EVERYWHERE, WRONG_ANSWERS, Draft, Growing, Question, RecallTask, Source, distinct, listed, unlike
from .draws import ADJECTIVES, NOUNS, Draws

WORDS = [*ADJECTIVES, *NOUNS]
COUNT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that"
    " appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
COUNTED = "Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
EXAMPLE_REPEATS, EXAMPLE_OTHERS = 3, 10
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared"
    " coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the"
    " three most frequently appeared words in the above coded text?"
)
THREE = "Answer: According to the coded text above, the three most frequently appeared words are:"
ZETA = math.pi**2 / 6  # the sum of 1 / k^2, so that k^-2 / ZETA are shares
FEWEST_CODED = 80  # from which on the words of rank 2 to 6 appear, and those of rank 2 to 4 more often than others
CODED_LETTERS = 6
BOOK = (
    "Below is a phone book. Make sure to memorize it. I will quiz you about the phone numbers afterwards.\n{context}\n"
    "What is the phone number of {name} in the provided phone book?"
)
NUMBER = "The phone number of {name} in the provided phone book is"
COPY = (
    "Below is a list of words. Make sure to memorize it. I will ask you to copy a part of it afterwards.\n{context}\n"
    "Copy the part of the provided list that starts with: {start}."
)
COPY_START, COPY_REST = 4, 8


def numbered(words: list[str]) -> str:
    """Return `1. a 2. b`."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


@dataclass(frozen=True)
class CommonWords(RecallTask):
    """Ten words appear more often than others, and are asked for, after an example: RULER's common words extraction.

    The context's size is how many uncommon words it has, each of them once as long as the words last; common ones
    appear six times, or as often as makes them a third of the list. RULER has them 6 times against 1, and 30 against 3
    from 4,096 tokens on, about a third as well. The words are the library's own; they are to be given in the order in
    which they first appear.
    """

    def __call__(self, source: Source) -> Question:
        draws = source.draws
        words = draws.shuffled(WORDS)
        common, others = words[:COMMON], words[COMMON:]
        example = draws.fork("example").sample(WORDS, COMMON + EXAMPLE_OTHERS)
        shown = draws.fork("order of the example").shuffled(example[:COMMON] * EXAMPLE_REPEATS + example[COMMON:])
        solved = numbered(sorted(example[:COMMON], key=shown.index))
        example_text = " ".join((COUNT.format(context=numbered(shown)), COUNTED, solved))
        wrong = [numbered(others[i * COMMON : (i + 1) * COMMON]) for i in range(WRONG_ANSWERS)]

        def draft(size: int) -> Draft:
            listing = draws.fork("order").shuffled(_repeated(common, others, size))
            context, answers = numbered(listing), sorted(common, key=listing.index)
            return Draft(
                body=f"{example_text}\n\n{COUNT.format(context=context)}",
                prefix=COUNTED,
                answers=tuple(answers),
                right=numbered(answers),
                wrong=tuple(wrong),
                needles=(context,),
                depth=EVERYWHERE,
            )

        return draft


def _repeated(common: list[str], others: list[str], size: int) -> list[str]:
    """Return common words and `size` uncommon ones, each as often as it is to appear."""
    seldom, often = 1 + (size - 1) // len(others), max(6, size // (2 * COMMON))
    return [*common * often, *(others[i // seldom] for i in range(size))]


@dataclass(frozen=True)
class FrequentWords(RecallTask):
    """Coded words of which the one of rank k makes up 6 / (pi k)^2 of all; the three first behind `...` are asked for.

    RULER's frequent words extraction, with its exponent of 2.
    """

    def __call__(self, source: Source) -> Question:
        draws = source.draws

        def draft(size: int) -> Draft:
            count = FEWEST_CODED + size
            ranks = math.isqrt(int(count / ZETA))  # of which each appears at least once
            coded = draws.fork("words")
            words = ["...", *distinct(lambda: coded.text(string.ascii_lowercase, CODED_LETTERS), ranks - 1)]
            text = [word for k, word in enumerate(words, 1) for _ in range(int(count / ZETA / k**2))]
            context = " ".join(draws.fork("order").shuffled(text))
            right, rare = words[1:4], words[4:7]
            other = draws.fork("other words")
            fresh = distinct(
                lambda: other.text(string.ascii_lowercase, CODED_LETTERS), 3 * (WRONG_ANSWERS - 1), words
            )
            wrong = [rare, *(fresh[i : i + 3] for i in range(0, len(fresh), 3))]
            return Draft(
                body=FREQUENT.format(context=context),
                prefix=THREE,
                answers=tuple(right),
                right=listed(right),
                wrong=tuple(map(listed, wrong)),
                needles=(context,),
                depth=EVERYWHERE,
            )

        return draft


@dataclass(frozen=True)
class PhoneBook(RecallTask):
    """Names with phone numbers, one of which is asked for (Jelassi et al. 2024, Repeat After Me, arXiv 2402.01032)."""

    def __call__(self, source: Source) -> Question:
        draws = source.draws
        name, number = _person(draws), _phone(draws)
        fresh = distinct(lambda: _phone(draws), WRONG_ANSWERS, [number])

        names = Growing(unlike(partial(_person, draws.fork("names")), [name]))
        numbers = Growing(unlike(partial(_phone, draws.fork("numbers")), [number]))

        def draft(size: int) -> Draft:
            entries = [f"{one}: {digits}" for one, digits in zip(names.first(size), numbers.first(size), strict=True)]
            place, own = int(source.depth * size + 0.5), f"{name}: {number}"
            near = sorted(range(size), key=lambda i: abs(i - place))[:WRONG_ANSWERS]
            return Draft(
                body=BOOK.format(context="\n".join((*entries[:place], own, *entries[place:])), name=name),
                prefix=NUMBER.format(name=name),
                answers=(number,),
                right=number,
                wrong=tuple([*(numbers.first(size)[i] for i in near), *fresh][:WRONG_ANSWERS]),
                needles=(own,),
                depth=source.depth,
            )

        return draft


def _person(draws: Draws) -> str:
    return draws.key().title().replace("-", " ")


def _phone(draws: Draws) -> str:
    return f"{draws.number(3)}-{draws.number(3)}-{draws.number(4)}"


@dataclass(frozen=True)
class Copying(RecallTask):
    """Words at random; four that stand in a row are given again, and the eight behind them are to follow.

    The look-up by a prefix of Jelassi et al. 2024 (arXiv 2402.01032), with words for their letters.
    """

    def __call__(self, source: Source) -> Question:
        draws = source.draws
        passage = draws.sample(WORDS, COPY_START + COPY_REST)
        start, rest = " ".join(passage[:COPY_START]), " ".join(passage[COPY_START:])
        pick = partial(draws.fork("others").pick, WORDS)
        others = Growing(pick() for _ in itertools.count())
        runs = [" ".join(others.first(i + COPY_REST)[i:]) for i in range(0, WRONG_ANSWERS * COPY_REST, COPY_REST)]

        def draft(size: int) -> Draft:
            words, place = others.first(size), int(source.depth * size + 0.5)
            context = " ".join((*words[:place], start, rest, *words[place:]))
            return Draft(
                body=COPY.format(context=context, start=start),
                prefix=start,
                answers=(rest,),
                right=rest,
                wrong=tuple(runs),
                needles=(f"{start} {rest}",),
                depth=source.depth,
            )

        return draft
