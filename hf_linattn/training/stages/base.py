"""What a stage is: one step of a recipe, whose recorded result a rerun does not compute again."""

from __future__ import annotations

from typing import Any, Protocol

from hf_linattn.training.training_run import TrainingRun


class Stage(Protocol):
    """One step of a recipe.

    Attributes:
        name: of its record in the run directory. inputs: names of earlier stages whose results or files it reads,
            those that the recipe has. scores: whether a model reads the test split.
    """

    name: str
    inputs: tuple[str, ...]
    scores: bool

    def run(self, context: TrainingRun) -> dict[str, Any]:
        """Return the result as it is recorded; it is computed first if it is not recorded yet."""


class OneProcessStage:
    """A stage that one process computes while the others wait."""

    name: str
    inputs: tuple[str, ...] = ()
    scores: bool = False

    def run(self, context: TrainingRun) -> dict[str, Any]:
        return context.directory.once(self.name, lambda: self.compute(context))

    def compute(self, context: TrainingRun) -> dict[str, Any]:
        """Return the result, as JSON-able data."""
        raise NotImplementedError
