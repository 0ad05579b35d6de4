"""What the searches have in common: their options, what a signal is, and how examples are averaged."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import require, require_count, require_finite, require_seed
from ..errors import OptionError, did_you_mean
from .gates import Gates

SEVERAL = {"lengths": "number of tokens", "tasks": "kind of prompts", "prompts": "prompt"}


class Signal(ABC):
    """What a plan is to keep of a model: a number for each example and each setting of the gates."""

    name: str

    def __init__(self, examples: Sequence[Any]):
        self.examples = list(examples)

    @property
    @abstractmethod
    def groups(self) -> list[str]:
        """What each example is of; the groups count alike."""

    @abstractmethod
    def value(self, gates: Gates, values: Tensor, example: Any) -> Tensor:
        """Return the signal [] of an example with these gates [U]: the higher, the better."""

    def slopes(self, gates: Gates, values: Tensor, example: Any) -> Tensor:
        """Return d signal / d g [U] of an example at these gates.

        The exact outputs behind shut gates have no gradient but the gates' own, so with all gates shut the backward
        pass is that of the model in which everything is replaced.
        """
        given = values.clone().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.value(gates, given, example), given)[0]

    @property
    def weights(self) -> Tensor:
        """What each example counts [E], 1 in all: groups alike, and the examples of a group."""
        sizes = Counter(self.groups)
        return torch.tensor([1 / (len(sizes) * sizes[group]) for group in self.groups], dtype=torch.float64)

    def scales(self, scores: Tensor) -> Tensor:
        """Return what to divide scores [E, U] by, as [E, 1]: their lengths.

        So no prompt counts more because its answer is longer or less likely.
        """
        return row_lengths(scores)

    def mean(self, scores: Tensor, scales: Tensor) -> Tensor:
        """Return [U] from [E, U]: the mean over groups of the mean over their examples, each divided by its scale."""
        return self.weights.to(scores.dtype) @ (scores / scales)

    def require_finite(self, number: int, found: Tensor) -> None:
        """Raise `OptionError` unless what was found of an example is finite: else any head could be the best."""
        require_finite(f"{self.name} of example {number} ({self.groups[number]})", found.tolist())


@dataclass(frozen=True)
class SearchOptions:
    """Options of `choose_plan` beside what is chosen.

    Attributes:
        tasks: kinds of prompts of the recall suite; None: all.
        lengths: of the prompts in tokens, those within the window of what replaces heads left out; None: 2,048, or
            the longest of 256, 512, ..., up to twice a longer window, that the model has positions for, or of these
            the longest that it answers.
        num_prompts: of each kind and length.
        seed: of the prompts.
        prompts: prompts of your own, in place of these.
        haystack: as for `make_prompts`.
        chat: as for `make_prompts`.
        state_bytes: in place of `keep`: as many heads stay exact as a decoding state of this many bytes has room for,
            with the room for 256 more tokens that exact heads have from the first decoded token on.
        length: tokens of the sequence whose state `state_bytes` is of.
        rounds: of the search `slope`: how often slopes are measured, with the steepest of the rounds before open.
        steps: of the search `gates`.
        learning_rate: of the search `gates`.
        progress: show progress bars; None: where standard error is a terminal.
    """

    tasks: Sequence[str] | None = None
    lengths: Sequence[int] | None = None
    num_prompts: int = 1
    seed: int = 0
    prompts: Sequence[Any] | None = None
    haystack: Any = None
    chat: bool = False
    state_bytes: int | None = None
    length: int | None = None
    rounds: int = 3
    steps: int = 100
    learning_rate: float = 0.05
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "rounds", "steps"):
            require_count(name, getattr(self, name))
        rate = self.learning_rate
        require_seed(self.seed)
        require("learning_rate", rate, _is(int | float, rate) and 0 < rate < math.inf, "above 0, and finite")
        for name, expected in SEVERAL.items():
            given = getattr(self, name)
            several = isinstance(given, Collection) and not isinstance(given, str) and len(given) > 0
            require(name, given, given is None or several, f"at least one {expected}, in a list")
            object.__setattr__(self, name, given if given is None else list(given))  # of any kind, as JSON has it
        for length in self.lengths or ():
            require_count("lengths", length)
        for prompt in self.prompts or ():
            fits = all(hasattr(prompt, name) for name in ("task", "length", "prompt_ids", "answer_ids"))
            require("prompts", prompt, fits, "what make_prompts makes, or objects with the same fields")
        both = (self.state_bytes is None) == (self.length is None)
        require("length", self.length, both, "given with state_bytes, and only so")
        for name in ("state_bytes", "length"):
            given = getattr(self, name)
            require(name, given, given is None or (_is(int, given) and given >= 1), "an integer >= 1")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SearchOptions:
        """Build them from keywords; `OptionError` with the nearest names for one that is unknown."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise OptionError(f"choose_plan has no option {name!r}{did_you_mean(name, known)}")
        return cls(**options)

    def recorded(self) -> dict[str, Any]:
        """Return what a plan's record says of them, as JSON-able data."""
        left_out = ("seed", "prompts", "haystack", "progress")
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        return {name: list(x) if isinstance(x, list | tuple) else x for name, x in found.items()}


def _is(kind: Any, value: object) -> bool:
    """Return whether a value is a number of a kind; booleans are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def row_lengths(scores: Tensor) -> Tensor:
    """Return the Euclidean length of each row of [E, U] as [E, 1], above zero."""
    return scores.norm(dim=1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
