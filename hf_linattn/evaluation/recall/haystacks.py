"""What needles are hidden in: a few sentences again and again, or a text; and the hiding.

The text that comes with the library is chapters I to V of "Alice's Adventures in Wonderland" by Lewis Carroll (1865),
in the public domain: 10,700 words, about 14,000 tokens. RULER has essays that it downloads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import NamedTuple

from ...config import require_texts
from ...errors import DataError

NOISE = "The grass is green.|The sky is blue.|The sun is yellow.|Here we go.|There and back again.".split("|")
TEXT = "alice.txt"
STOPS = "\u3002\uff0e\uff61\uff01\uff1f\u0964\u0965\u061f\u06d4\u0589\u1362\u104b\u17d4\u0f0d"  # of other scripts
CLOSING = "'\"\u2019\u201d)\u300d\u300f\uff09"  # behind the full stop of a sentence
FEWEST_WORDS = 50
LONGEST_SENTENCE = 200  # words; that of the bundled text has 179
LONGEST_WORD, PIECE = 40, 20  # characters; a longer word is a text without spaces, in pieces of at most PIECE


class Haystack(NamedTuple):
    """Pieces of text with what follows each, the places between them where a needle may lie, and what joins these."""

    pieces: list[str]
    places: Sequence[int]
    joint: str

    def hide(self, needles: Sequence[str], depths: Sequence[float]) -> str:
        """Return the text with each needle at the place that is nearest to its depth, 0 (start) to 1 (end)."""
        last, first, parts = len(self.pieces), 0, list[str]()
        at = [min(self.places, key=lambda place: abs(place - depth * last)) for depth in depths]
        for place, needle in sorted(zip(at, needles, strict=True), key=lambda pair: pair[0]):
            parts += self._text(first, place), needle
            first = place
        return self.joint.join(part for part in (*parts, self._text(first, last)) if part)

    def _text(self, first: int, end: int) -> str:
        return "".join(self.pieces[first:end]).removesuffix(self.joint)


def noise(size: int) -> Haystack:
    """Return `size` sentences of noise, five a line: RULER's."""
    sentences = [NOISE[i % len(NOISE)] for i in range(size)]
    lines = [" ".join(sentences[i : i + len(NOISE)]) + "\n" for i in range(0, size, len(NOISE))]
    return Haystack(lines, range(len(lines) + 1), "\n")


def prose(words: Sequence[str], start: int, size: int) -> Haystack:
    """Return `size` words of a text, from the word `start` on and round its end; needles lie between sentences.

    Where no sentence ends for more than 200 words, as in verse or source code, they may lie between any two.
    """
    beyond = LONGEST_SENTENCE + 1  # words beside the context, which may lie within a long stretch
    ends = [i + 1 for i in range(-beyond, size + beyond - 1) if _ends_sentence(words[(start + i) % len(words)])]
    places = {0, size}
    for low, high in pairwise((-beyond, *ends, size + beyond)):
        places |= {*range(low, high)} if high - low > LONGEST_SENTENCE else {low}
    pieces = [words[(start + i) % len(words)] for i in range(size)]
    return Haystack(pieces, sorted(place for place in places if 0 <= place <= size), " ")


def _ends_sentence(word: str) -> bool:
    return word.rstrip(f" {CLOSING}").endswith((*".!?", *STOPS))


@cache
def bundled_words() -> tuple[str, ...]:
    """Return the words of the text that comes with the library."""
    return tuple(files(__package__).joinpath(TEXT).read_text(encoding="utf-8").split())


def words_of(haystack: Sequence[str] | None) -> tuple[str, ...]:
    """Return the words of the given texts one behind the other, or of the bundled one, each with a space behind it.

    A text without spaces has pieces in place of words: its sentences, in parts where they are long.

    Raises:
        DataError: the haystack is one string or no texts, or has less than 50 words.
    """
    if haystack is None:
        return tuple(f"{word} " for word in bundled_words())
    texts = require_texts("haystack", haystack)
    words = tuple(piece for text in texts for word in text.split() for piece in _pieces(f"{word} "))
    if len(words) < FEWEST_WORDS:
        raise DataError(f"haystack has {len(words)} words of at least {FEWEST_WORDS}; give longer texts or none")
    return words


def _pieces(word: str) -> list[str]:
    """Return a word, or the pieces of a long one, each as far as a sentence of another script ends.

    >>> _pieces("word ")
    ['word ']
    """
    if len(word) <= LONGEST_WORD:
        return [word]
    return re.findall(rf"[^{STOPS}]{{1,{PIECE}}}(?:[{STOPS}]+[{CLOSING}]*)? ?|[{STOPS}]+ ?", word)
