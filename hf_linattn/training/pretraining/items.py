"""What rows of generated recall state and ask for: pairs, copies, passages, needles, variables.

- `pairs`: keys and values of one or two tokens, no word both in a row (multi-query associative recall; Arora et al.
  2024, Zoology, arXiv 2312.04927).
- `copies`: spans of random tokens that come again (induction; Olsson et al. 2022, arXiv 2209.11895).
- `passages`: the same with spans of the given text.
- `needles`: sentences that name a number or a UUID (RULER; Hsieh et al. 2024, arXiv 2404.06654), several to a row.
- `variables`: assignments, some of another variable, whose value is asked for. RULER's variable tracking asks for
  all names of one value instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_linattn.errors import DataError
from hf_linattn.evaluation.recall.draws import Draws
from hf_linattn.evaluation.recall.haystacks import NOISE
from hf_linattn.evaluation.recall.needles import ASK_ONE, ONE, VALUES, needle

FEWEST_WORDS = 64
CHAINED = 0.3  # of the variables, the share that is set to another variable
BARE = 0.3  # of the rows of pairs, the share without marks and ends, as in Zoology
MARKS = ("", ":", " =", " ->", " is")  # between a key and its value
ENDS = ("", "\n", ",", ";", ".")
# how a needle is written and asked for; RULER's way is chosen as often as all others together
KINDS_OF_VALUE = ("number", "number", "number", "uuid")
WORDINGS = (
    (" The {kind} of {key} is {value}.", " What is the {kind} of {key}? It is"),
    ("\n{key} has the {kind} {value}\n", "\nThe {kind} for {key} is"),
    (" Remember that {key} was given the {kind} {value};", " {key}:"),
)


class Item(NamedTuple):
    """What is stated, and how it is asked for.

    Attributes:
        statement: tokens of the statement. question: tokens that ask for the answer.
        answer: where it lies in the statement of the item number `owner`; None: in this one's own.
        end: tokens behind an answer. name: tokens that stand for the answer in other statements.
    """

    statement: list[int]
    question: list[int]
    answer: slice
    end: list[int]
    owner: int | None = None
    name: tuple[int, ...] = ()


@dataclass
class Material:
    """What rows are made of: a tokenizer, and a text as one array of its tokens.

    Raises:
        DataError: the tokenizer has hardly any words, or a span is asked for that is as long as the text.
    """

    tokenizer: PreTrainedTokenizerBase
    text: np.ndarray = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.words) < FEWEST_WORDS:
            raise DataError(
                f"tokenizer: {len(self.words)} of its tokens are words, generated recall needs {FEWEST_WORDS}; train"
                " it on more text"
            )

    @cached_property
    def words(self) -> np.ndarray:
        """Tokens that begin with a space and go on with letters."""
        texts = {index: self.tokenizer.decode([index]) for index in self.tokenizer.get_vocab().values()}
        return np.array(sorted(index for index, text in texts.items() if text[:1] == " " and text[1:].isalpha()))

    @cached_property
    def tokens(self) -> np.ndarray:
        """All tokens but the special ones."""
        return np.setdiff1d(np.arange(len(self.tokenizer)), self.tokenizer.all_special_ids)

    @cached_property
    def noise(self) -> list[int]:
        """RULER's noise, once."""
        return self.encode(" ".join(["", *NOISE]))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, no special ones added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def span(self, rng: np.random.Generator, length: int) -> list[int]:
        """Return a span of the text, from anywhere."""
        if length >= len(self.text):
            raise DataError(f"the text has {len(self.text)} tokens, a row takes {length} of them; give more text")
        start = int(rng.integers(len(self.text) - length))
        return self.text[start : start + length].tolist()

    def noise_span(self, rng: np.random.Generator, length: int) -> list[int]:
        """Return a span of the noise, from anywhere."""
        start = int(rng.integers(len(self.noise)))
        repeats = (start + length) // len(self.noise) + 1
        return (self.noise * repeats)[start : start + length]

    def drawn(self, rng: np.random.Generator, among: np.ndarray, count: int) -> list[int]:
        """Return tokens, each drawn for itself."""
        return among[rng.integers(len(among), size=count)].tolist()


Maker = Callable[[list[Item]], Item]  # the items so far -> the next one


def pairs(material: Material, length: int, rng: np.random.Generator, bare: float = BARE) -> Maker:
    """Keys, all different in their first token while there are any left, and values.

    Args:
        bare: the share of the rows that have neither marks nor ends.
    """
    key_width, value_width = (int(width) for width in rng.integers(1, 3, size=2))
    # a word that is a key here and a value there would have two successors
    keys, values = np.array_split(rng.permutation(material.words), 2)
    first_tokens = keys.tolist()
    unmarked = rng.random() < bare
    mark, end = (material.encode("" if unmarked else str(rng.choice(choices))) for choices in (MARKS, ENDS))

    def make(before: list[Item]) -> Item:
        rest = material.drawn(rng, keys, key_width - 1)
        question = [first_tokens[len(before) % len(first_tokens)], *rest, *mark]
        value = material.drawn(rng, values, value_width)
        return Item([*question, *value, *end], question, slice(len(question), len(question) + value_width), end)

    return make


def copies(material: Material, length: int, rng: np.random.Generator) -> Maker:
    """Spans of random tokens; the first two ask for the rest."""
    width = int(rng.integers(4, max(5, min(32, length // 4))))

    def make(before: list[Item]) -> Item:
        span = material.drawn(rng, material.tokens, width)
        return Item(span, span[:2], slice(2, width), [])

    return make


def passages(material: Material, length: int, rng: np.random.Generator) -> Maker:
    """Spans of the text; the first four tokens ask for the rest."""
    width = int(rng.integers(8, max(9, min(64, length // 4))))

    def make(before: list[Item]) -> Item:
        span = material.span(rng, width)
        return Item(span, span[:4], slice(4, width), [])

    return make


def needles(material: Material, length: int, rng: np.random.Generator) -> Maker:
    """Numbers or UUIDs of words, in RULER's wording or in others."""
    draws = Draws(int(rng.integers(2**62)))
    kind = draws.pick(KINDS_OF_VALUE)
    ruler = draws.below(2)
    states, asks = draws.pick(WORDINGS)
    keys = rng.permutation(material.words).tolist()

    def make(before: list[Item]) -> Item:
        word = material.tokenizer.decode([keys[len(before) % len(keys)]]).strip()
        key, value = draws.key() if draws.below(2) else word, VALUES[kind](draws)
        if ruler:
            statement, question = f" {needle(kind, key, value)}", "\n" + asked(kind, key)
        else:
            statement, question = (text.format(kind=kind, key=key, value=value) for text in (states, asks))
        lead, _, end = statement.partition(f" {value}")
        parts = [material.encode(text) for text in (lead, f" {value}", end)]
        start = len(parts[0])
        return Item([*chain(*parts)], material.encode(question), slice(start, start + len(parts[1])), parts[2])

    return make


def asked(kind: str, key: str) -> str:
    """Return RULER's question for one needle and the start of the answer.

    >>> asked("uuid", "brave-otter").partition("? ")[2]
    'The special magic uuid for brave-otter mentioned in the provided text is'
    """
    _, _, question = ASK_ONE.rpartition("\n")
    return f"{question} {ONE}".format(kind=kind, query=key)


def variables(material: Material, length: int, rng: np.random.Generator) -> Maker:
    """Assignments of numbers, or of variables that are set already."""
    names = rng.permutation(material.words).tolist()
    before_name, mark, asks, end = (material.encode(text) for text in ("VAR", " =", "print", "\n"))

    def make(before: list[Item]) -> Item:
        name = names[len(before) % len(names)]
        lead, question = [*before_name, name, *mark], [*asks, name, *mark]
        if before and rng.random() < CHAINED:
            number = int(rng.integers(len(before)))
            other = before[number]
            owner = number if other.owner is None else other.owner
            return Item([*lead, *other.name, *end], question, other.answer, end, owner, (name,))
        value = material.encode(f" {rng.integers(10_000, 100_000)}")
        return Item([*lead, *value, *end], question, slice(len(lead), len(lead) + len(value)), end, None, (name,))

    return make
