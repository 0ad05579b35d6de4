"""The options of a run: read from flags, YAML files or both, and checked against each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import HfArgumentParser, TrainingArguments

from hf_linattn.config import require
from hf_linattn.errors import OptionError
from hf_linattn.training.arguments.board import CommandLine
from hf_linattn.training.arguments.data import DataArguments
from hf_linattn.training.arguments.distillation import DistillationArguments
from hf_linattn.training.arguments.flags import flags_of, plain_name, refusing, unread_word
from hf_linattn.training.arguments.model import ModelArguments
from hf_linattn.training.arguments.recipe import FULL, LORA, RecipeArguments
from hf_linattn.training.arguments.refused import check_stages
from hf_linattn.training.arguments.trainer import FinetuningArguments

DEFAULT_LEARNING_RATES = [3e-4, 1e-3, 3e-3]
UNBOUNDED = ("max_grad_norm",)  # inf: gradients are measured and not clipped


class Arguments(NamedTuple):
    """The options of a run, by group."""

    model: ModelArguments
    data: DataArguments
    recipe: RecipeArguments
    training: FinetuningArguments
    distillation: DistillationArguments = DistillationArguments()

    @property
    def distils(self) -> bool:
        """Whether the recipe is `distill`; without it its group is the one that stands above."""
        return self.distillation is not self._field_defaults["distillation"]

    @property
    def control_trains(self) -> str:
        """What a control of this run trains: `lora` adapters or all weights, `full`."""
        given = self.recipe.control
        return given if given in (LORA, FULL) else _trained_with(self.distillation)


FINETUNING = (ModelArguments, DataArguments, RecipeArguments, FinetuningArguments)
DISTILLATION = (*FINETUNING, DistillationArguments)


def parse_arguments(argv: Sequence[str], kinds: Sequence[type] = FINETUNING) -> Arguments:
    """Read options as `read_arguments` does, and check that their tokens make steps.

    Raises:
        OptionError: as `read_arguments` and `check_budget` do.
        UnknownNameError: as `read_arguments` does.
    """
    arguments = read_arguments(argv, kinds)
    check_budget(arguments)
    return arguments


def read_arguments(argv: Sequence[str], kinds: Sequence[type] = FINETUNING) -> Arguments:
    """Read `[config.yaml] [--flag value ...]`; a flag overrides the same name in the file and in a row of the board.

    Args:
        kinds: the groups that may be set, `FINETUNING` or `DISTILLATION`.

    Raises:
        OptionError: an unknown name (the message has the nearest ones), a value out of range, an unreadable file.
        UnknownNameError: a row that the board lacks.

    >>> arguments = read_arguments(
    ...     ["--model_name_or_path", "gpt2", "--mechanism", "linear", "--output_dir", "out", "--seed", "7"])
    >>> arguments.model.mechanism, arguments.data.block_size, arguments.training.seed
    ('linear', 256, 7)
    """
    known, others = known_options(kinds)
    with refusing(argv):
        line = CommandLine(argv)
    flags = flags_of(line.options(), known, others) + line.flags
    parser = HfArgumentParser(kinds, allow_abbrev=False, exit_on_error=False, add_help=False)  # type: ignore[arg-type]
    with refusing(flags):
        *parsed, unknown = parser.parse_args_into_dataclasses(
            flags, return_remaining_strings=True, look_for_args_file=False
        )
    if unknown:
        raise unread_word(unknown[0], flags, known, others)
    arguments = Arguments(*parsed)
    check_stages(arguments.training, {plain_name(flag) for flag in flags if flag.startswith("--")})
    _check_finite(arguments)
    _check_together(arguments)
    return arguments


def known_options(kinds: Sequence[type]) -> tuple[set[str], set[str]]:
    """Return the options of these groups, and those that the recipe `distill` alone has."""
    own, every = (
        {f.name for kind in groups for f in dataclasses.fields(kind) if f.init} for groups in (kinds, DISTILLATION)
    )
    return own, every - own


def _check_finite(arguments: Arguments) -> None:
    """Raise `OptionError` for a number that is infinite or none, alone or among several."""
    groups: tuple[Any, ...] = arguments
    for group in groups:
        for f in dataclasses.fields(group):
            value = getattr(group, f.name, None)
            numbers = value if isinstance(value, list) else [value]
            finite = all(math.isfinite(number) for number in numbers if isinstance(number, float))
            require(f.name, value, finite or f.name in UNBOUNDED, "finite")


def _check_together(arguments: Arguments) -> None:
    """Settle what depends on several groups: the grid of learning rates, what the control trains."""
    _, data, recipe, training, distillation = arguments
    if recipe.overwrite_output_dir and training.resume_from_checkpoint is not None:
        raise OptionError(
            "overwrite_output_dir=True deletes the run with which"
            f" resume_from_checkpoint={training.resume_from_checkpoint!r} goes on; give one of them"
        )
    if recipe.learning_rates and training.learning_rate:
        raise OptionError(
            f"learning_rate={training.learning_rate} and learning_rates={recipe.learning_rates} were both given;"
            " give one of them"
        )
    if not recipe.learning_rates:
        recipe.learning_rates = [training.learning_rate] if training.learning_rate else DEFAULT_LEARNING_RATES
    recipe.control_learning_rates = recipe.control_learning_rates or recipe.learning_rates
    usual = _trained_with(distillation)
    has_adapters = usual == LORA or recipe.control_dir is not None  # those of this run, or of the one that lends
    expected = f"{FULL!r} where lora_rank and control_dir are absent"
    require("control", recipe.control, has_adapters or recipe.control != LORA, expected)
    recipe.control = recipe.control or usual
    if training.max_steps > 0:
        raise OptionError(f"max_steps={training.max_steps}: the length of a run is given by max_train_tokens instead")
    longer = distillation.long_block_size
    above = longer is None or longer > data.block_size
    require("long_block_size", longer, above, f"above block_size={data.block_size}")


def check_budget(arguments: Arguments) -> None:
    """Raise `OptionError` where the tokens of a stage do not make one step."""
    _, data, recipe, training, distillation = arguments
    step = tokens_per_step(data, training)
    grids: Any = (recipe.learning_rates, recipe.control_learning_rates)
    searched = recipe.lr_search_tokens if max(map(len, grids)) > 1 else None
    longer = distillation.long_block_size
    calibrated = -(-recipe.calibration_tokens // data.block_size) * data.block_size  # in whole rows
    before = calibrated + distillation.transfer_tokens + distillation.long_tokens
    share = "max_train_tokens, of which the search takes 0.15,"
    wanted = {
        "max_train_tokens": recipe.max_train_tokens - before,
        share if recipe.searches_a_share else "lr_search_tokens": searched,
        "transfer_tokens": distillation.transfer_tokens or None,
        "long_tokens": distillation.long_tokens or None,
    }
    least = {"long_tokens": long_step(arguments)[1] if longer else step}
    for name, tokens in wanted.items():
        if tokens is not None and tokens < least.get(name, step) and name == "long_tokens":
            raise OptionError(
                f"long_tokens={tokens} is less than one step of {least[name]} tokens, rows of"
                f" long_block_size={longer}; raise it, or lower long_block_size or gradient_accumulation_steps"
            )
        if tokens is not None and tokens < step:
            shared = f" ({before} of the other stages are part of it)" if name == "max_train_tokens" and before else ""
            raise OptionError(
                f"{name} leaves {tokens} tokens{shared}, less than one step of {step} tokens"
                f" (block_size={data.block_size} x global batch of {step // data.block_size}); raise it or lower"
                " block_size or per_device_train_batch_size"
            )


def _trained_with(distillation: DistillationArguments) -> str:
    return FULL if distillation.lora_rank is None else LORA


def long_step(arguments: Arguments) -> tuple[int, int]:
    """Return how many longer rows a device takes at a time, as many tokens as else or one row, and a step's tokens."""
    _, data, _, training, distillation = arguments
    length = distillation.long_block_size or data.block_size
    batch = max(1, training.per_device_train_batch_size * data.block_size // length)
    devices = training.world_size * training.train_batch_size // training.per_device_train_batch_size
    return batch, batch * length * training.gradient_accumulation_steps * devices


def tokens_per_step(data: DataArguments, training: TrainingArguments) -> int:
    """Return how many tokens one optimizer step sees, over all processes."""
    return data.block_size * training.train_batch_size * training.gradient_accumulation_steps * training.world_size
