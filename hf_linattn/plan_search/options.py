"""What the searches have in common: their options, what a signal is, and how examples are averaged."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import LARGEST_SEED, require, require_count, require_finite
from ..errors import OptionError, did_you_mean
from .gates import Gates


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

    def require_finite(self, number: int, found: Tensor) -> None:
        """Raise `OptionError` unless what was found of an example is finite: else any head could be the best."""
        require_finite(f"{self.name} of example {number} ({self.groups[number]})", found.tolist())


@dataclass(frozen=True)
class SearchOptions:
    """Options of `choose_plan` beside what is chosen.

    Attributes:
        tasks: kinds of prompts of the recall suite; None: all.
        lengths: of the prompts in tokens, those within the window of what replaces heads left out; None: 1,024 and
            2,048, or the longest two of 256, 512, ..., up to twice a longer window, that the model has positions for.
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
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        require("seed", self.seed, whole and 0 <= self.seed <= LARGEST_SEED, f"an integer from 0 to {LARGEST_SEED}")
        lengths = self.lengths
        require("lengths", lengths, lengths is None or len(lengths) > 0, "at least one number of tokens")
        for length in lengths or ():
            require_count("lengths", length)
        require("tasks", self.tasks, self.tasks is None or len(self.tasks) > 0, "at least one kind of prompts")
        require("prompts", self.prompts, self.prompts is None or len(self.prompts) > 0, "at least one prompt")
        require("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0")
        both = (self.state_bytes is None) == (self.length is None)
        require("length", self.length, both, "given with state_bytes, and only so")
        for name in ("state_bytes", "length"):
            if getattr(self, name) is not None:
                require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")

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


def row_lengths(scores: Tensor) -> Tensor:
    """Return the Euclidean length of each row of [E, U] as [E, 1], above zero."""
    return scores.norm(dim=1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def mean_scores(scores: Tensor, groups: Sequence[str], lengths: Tensor | None = None) -> Tensor:
    """Return [U] from [E, U]: each example's divided by its length [E, 1], the mean of each group, of these the mean.

    So no prompt counts more because its answer is longer or less likely, and no kind because it has more prompts.
    """
    scaled = scores / (row_lengths(scores) if lengths is None else lengths)
    if len(groups) != len(scaled):
        return scaled.mean(0)  # a search that has made one row of all examples
    rows = {group: [i for i, other in enumerate(groups) if other == group] for group in groups}
    return torch.stack([scaled[own].mean(0) for own in rows.values()]).mean(0)
