"""What a report shows of texts: each with what the models make of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 2  # in Markdown; the page of a run has all
SAID = ("original", "recovered")


@dataclass(frozen=True)
class TextSample:
    """A text of the test split, and what each model makes of it; the models are those of `Perplexities`.

    Attributes:
        prompt: the beginning of a text, a text with a mask in it, or what a classifier reads, cut where it is long.
        truth: how the text goes on, the masked token, or the label.
        original, control, converted, recovered: what the model says in its place; None: there is no such model.
    """

    prompt: str
    truth: str
    original: str
    control: str | None
    converted: str
    recovered: str


def sample_section(samples: Sequence[TextSample]) -> list[str]:
    """Return a section in Markdown: texts as they are in fences, whatever stands in them; empty without samples."""
    note = "Texts of the test split, what is expected after each, and what the original and this model answer."
    return ["## Sample output", note, *map(fenced, samples[:SHOWN])] if samples else []


def fenced(sample: TextSample) -> str:
    """Return a sample as a block of Markdown that no text in it can end.

    >>> print(fenced(TextSample("The cat", "sat", "sits", None, "the", "sat")))
    ```text
    [text] The cat
    [expected] sat
    [original] sits
    [recovered] sat
    ```
    """
    named = {"text": sample.prompt, "expected": sample.truth} | {name: getattr(sample, name) for name in SAID}
    body = "\n".join(f"[{name}] {text}" for name, text in named.items())
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    return f"{fence}text\n{body}\n{fence}"
