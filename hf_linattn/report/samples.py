"""What a report shows of texts: each with what the models make of it."""

from __future__ import annotations

from dataclasses import dataclass


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
