"""What four models come to on the same test split; the better of original and control is what counts as best."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from ..config import require

TINY = 1e-38  # an error of 0 divides nothing


@dataclass(frozen=True)
class Scores:
    """A number of four models of which less is better.

    Attributes:
        original: the pretrained model as it came.
        control: the pretrained model, its own attention, fine-tuned on the tokens that recovered the converted one;
            None: there is none.
        converted: the patched model before any training.
        recovered: the patched model after it.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    form: ClassVar[str]  # in which it is shown
    least: ClassVar[int]

    original: float
    control: float | None
    converted: float
    recovered: float

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is None and f.name == "control":
                continue
            fits = math.isfinite(value) and value >= self.least
            require(f"{self.name}.{f.name}", value, fits, f"finite and at least {self.least}")

    @property
    def best(self) -> float:
        """The better of original and control: what the recovered model is measured against."""
        return self.original if self.control is None else min(self.original, self.control)

    def beside_best(self, value: float) -> float:
        """Return value / min(original, control)."""
        return max(value, TINY) / max(self.best, TINY)

    @property
    def ratio(self) -> float:
        """recovered / min(original, control); 1 means that nothing was lost."""
        return self.beside_best(self.recovered)


class Perplexities(Scores):
    """Test perplexities of four models on the same text."""

    name, label, form, least = "perplexity", "test perplexity", ",.2f", 1


class SquaredErrors(Scores):
    """Mean squared errors of four regressions on the same texts: a number for each has no perplexity."""

    name, label, form, least = "squared_error", "test mean squared error", ",.4g", 0


@dataclass(frozen=True)
class Accuracies:
    """Shares of the test texts that the four classifiers put into the right class; the models are those above."""

    original: float
    control: float | None
    converted: float
    recovered: float

    @property
    def best(self) -> float:
        """The better of original and control: what the recovered classifier is measured against."""
        return self.original if self.control is None else max(self.original, self.control)
