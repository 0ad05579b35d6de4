"""The stages that see whether a training made any position worse than it was, also beyond the rows it had."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_linattn.errors import OptionError
from hf_linattn.evaluation import PositionRow, position_limit
from hf_linattn.evaluation.next_token import TokenLosses, token_losses, windows_of_documents
from hf_linattn.evaluation.positions import in_turn, loss_by_position
from hf_linattn.training.arguments import Arguments
from hf_linattn.training.stages.base import OneProcessStage
from hf_linattn.training.stages.recovery import RecoveredTraining
from hf_linattn.training.training_run import TrainingRun

logger = logging.getLogger(__name__)

TOLERATED = 0.005  # nats per token, half a percent of perplexity
BEYOND = 4  # times as long as the rows of a training are the windows on which it is checked


@dataclass
class PositionCheck(OneProcessStage):
    """Compare a model before and after a stage on held-out windows, bucket by bucket of positions.

    A bucket is worse where its mean difference is above `TOLERATED` and the 95 % interval of that above zero: a
    bootstrap over the documents, or over the tokens of a single one.

    Attributes:
        stage: that is checked. start: the one that it begins from. before, after: load their models.
        long: whether the rows are those of the long stage.

    Raises:
        OptionError: a bucket is worse; what the stage left is kept.
    """

    stage: str
    start: str
    before: Callable[[TrainingRun], PreTrainedModel]
    after: Callable[[TrainingRun], PreTrainedModel]
    long: bool = False

    def __post_init__(self) -> None:
        self.name = f"{self.stage}_positions"

    def compute(self, context: TrainingRun) -> dict[str, Any]:
        known = context.position_losses
        first = known.pop((self.start, self.long), None)  # where the stage before was checked in this process
        if first is None:
            first = self._losses(context, self.before)
        gc.collect()  # one model at a time; modules may refer to each other in a ring
        second = known[self.stage, self.long] = self._losses(context, self.after)
        old, rows = loss_by_position(first), changes(first, second)
        for was, row in zip(old, rows, strict=True):
            said = self.stage, row.first, row.last, was.loss + row.loss, row.loss
            logger.info("%s, positions %d to %d: loss %.3f, %+.3f", *said)
        worse = [row for row in rows if is_worse(row)]
        if worse:
            raise OptionError(self._refusal(context, max(worse, key=lambda row: row.loss)))
        return {"windows": len(second.losses), "before": list(map(asdict, old)), "change": list(map(asdict, rows))}

    def _losses(self, context: TrainingRun, load: Callable[[TrainingRun], PreTrainedModel]) -> TokenLosses:
        model = load(context)
        length = checked_length(context.arguments, position_limit(model), self.long)
        return token_losses(model, *held_out(context, length))

    def _refusal(self, context: TrainingRun, row: PositionRow) -> str:
        data, distillation = context.arguments.data, context.arguments.distillation
        sizes = ("block_size", data.block_size), ("long_block_size", distillation.long_block_size)
        name, size = sizes[self.long]
        return (
            f"{name}={size}: the stage {self.stage} made positions {row.first} to {row.last} worse by"
            f" {row.loss:.3f} nats (95 % interval {row.low:.3f} to {row.high:.3f}); give longer rows or a lower"
            f" learning rate, as {name} {2 * (size or 0)} in another output_dir, or go on here with position_windows 0"
        )


def position_checks(arguments: Arguments) -> dict[str, PositionCheck]:
    """Return the checks of the stages that change the converted model, by the name of the stage."""
    options = arguments.distillation
    models: dict[str, Callable[[TrainingRun], PreTrainedModel]] = {
        "converted": lambda run: run.convert(),
        "calibration": lambda run: run.convert(("calibration",)),
        "transfer": lambda run: run.convert(("transfer",)),
        "recovered_training": lambda run: run.load(RecoveredTraining().folder(run)),
        "long_training": lambda run: run.load(run.directory.path),
    }
    absent = {"calibration": not arguments.recipe.calibration_tokens, "transfer": not options.transfer_tokens,
              "long_training": options.long_block_size is None}  # fmt: skip
    stages = [name for name in models if not absent.get(name)]
    return {
        after: PositionCheck(after, before, models[before], models[after], after == "long_training")
        for before, after in pairwise(stages)
    }


def checked_length(arguments: Arguments, limit: int | None, long: bool) -> int:
    """Return the tokens of the windows on which a stage is checked, as far as there are positions."""
    size = arguments.distillation.long_block_size if long else arguments.data.block_size
    length = BEYOND * (size or 0)
    return length if limit is None else min(length, limit)


def held_out(context: TrainingRun, length: int) -> tuple[Tensor, Tensor]:
    """Return windows [B, N] of the validation split and the document of each, documents in turn."""
    texts, special = context.splits["validation"]["text"], not context.arguments.data.completion_only
    windows, documents = windows_of_documents(context.tokenizer, texts, length, special)
    chosen = in_turn(documents)[: context.arguments.recipe.position_windows]
    return windows[chosen], documents[chosen]


def changes(before: TokenLosses, after: TokenLosses) -> tuple[PositionRow, ...]:
    """Return by how much the losses of the same windows changed, with intervals, bucket by bucket."""
    change = after._replace(losses=after.losses - before.losses)
    rows = loss_by_position(change)
    return tuple(row if row.low is not None else over_tokens(row, change.losses) for row in rows)


def over_tokens(row: PositionRow, losses: Tensor) -> PositionRow:
    """Return a row with the interval that its tokens have, each counted as one of its own; losses: [B, N - 1]."""
    inside = losses[:, row.first - 1 : row.last]
    half = 1.96 * float(inside.std()) / math.sqrt(inside.numel())
    return replace(row, low=row.loss - half, high=row.loss + half)


def is_worse(row: PositionRow) -> bool:
    """Whether a change is one to the worse that is worth a word, and not one by chance."""
    return row.loss > TOLERATED and row.low is not None and row.low > 0
