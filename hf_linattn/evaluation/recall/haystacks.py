"""What needles are hidden in: a few sentences again and again, or a text; and the hiding.

The text that comes with the library is chapters I to V of "Alice's Adventures in Wonderland" by Lewis Carroll (1865),
in the public domain: 10,700 words, about 14,000 tokens. RULER has essays that it downloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from ...config import require_texts
from ...errors import DataError

NOISE = "The grass is green.|The sky is blue.|The sun is yellow.|Here we go.|There and back again.".split("|")
TEXT = "alice.txt"
CLOSING = "'\"\u2019\u201d)"  # behind the full stop of a sentence
FEWEST_WORDS = 50


class Haystack(NamedTuple):
    """Pieces of text, the places between them where a needle may lie, and what joins all of these."""

    pieces: list[str]
    places: Sequence[int]
    joint: str

    def hide(self, needles: Sequence[str], depths: Sequence[float]) -> str:
        """Return the text with each needle at the place that is nearest to its depth, 0 (start) to 1 (end)."""
        last = len(self.pieces)
        at = [min(self.places, key=lambda place: abs(place - depth * last)) for depth in depths]
        pieces = list(self.pieces)
        for place, number in sorted(zip(at, range(len(needles)), strict=True), reverse=True):
            pieces.insert(place, needles[number])
        return self.joint.join(pieces)


def noise(size: int) -> Haystack:
    """Return `size` sentences of noise, five a line: RULER's."""
    sentences = [NOISE[i % len(NOISE)] for i in range(size)]
    lines = [" ".join(sentences[i : i + len(NOISE)]) for i in range(0, size, len(NOISE))]
    return Haystack(lines, range(len(lines) + 1), "\n")


def prose(words: Sequence[str], start: int, size: int) -> Haystack:
    """Return `size` words of a text, from the word `start` on and round its end; needles lie between sentences."""
    pieces = [words[(start + i) % len(words)] for i in range(size)]
    ends = [i + 1 for i, word in enumerate(pieces) if word.rstrip(CLOSING).endswith((".", "!", "?"))]
    return Haystack(pieces, sorted({0, *ends, size}), " ")


@cache
def bundled_words() -> tuple[str, ...]:
    """Return the words of the text that comes with the library."""
    return tuple(files(__package__).joinpath(TEXT).read_text(encoding="utf-8").split())


def words_of(haystack: Sequence[str] | None) -> tuple[str, ...]:
    """Return the words of the given texts one behind the other, or of the bundled one.

    Raises:
        DataError: the haystack is one string or no texts, or has less than 50 words.
    """
    if haystack is None:
        return bundled_words()
    words = tuple(word for text in require_texts("haystack", haystack) for word in text.split())
    if len(words) < FEWEST_WORDS:
        raise DataError(f"haystack has {len(words)} words of at least {FEWEST_WORDS}; give longer texts or none")
    return words
