"""The recipes from Python: a model, a plan, data sets and options in place of a YAML file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from datasets import Dataset, DatasetDict

from hf_linattn.config import require, require_count
from hf_linattn.errors import DataError, OptionError
from hf_linattn.plan import Plan, plan_as_data
from hf_linattn.report import Report
from hf_linattn.sentence_models import is_sentence_model
from hf_linattn.training.arguments import DISTILLATION, FINETUNING, Arguments, known_options, parse_arguments
from hf_linattn.training.arguments.flags import flags_of
from hf_linattn.training.data import IN_MEMORY
from hf_linattn.training.pipeline import carry_out
from hf_linattn.training.preparation import prepare
from hf_linattn.training.price import RunPrice, price_of
from hf_linattn.training.training_run import TrainingRun


@dataclass(frozen=True)
class StageOptions:
    """A stage: its tokens, and options of the recipe by shorter names; None: the recipe's default.

    Attributes:
        tokens: of training.
    """

    tokens: int
    names: ClassVar[Mapping[str, str]] = {}  # of the recipe, by those here

    def __post_init__(self) -> None:
        require_count("tokens", self.tokens)

    def options(self) -> dict[str, Any]:
        """Return the options of the recipe that are set."""
        given = {self.names.get(f.name, f.name): getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Calibrate(StageOptions):
    """Fit the mechanisms to the original's attention, in closed form where there is one.

    Attributes:
        tokens: of the text that they are fitted to.
    """

    names = {"tokens": "calibration_tokens"}


@dataclass(frozen=True)
class Align(StageOptions):
    """Train the mechanisms on the original's inputs of each layer, all layers in one forward (attention transfer).

    Attributes:
        tokens: of training.
        learning_rate: its peak.
        block_layers: compare what comes out of blocks of that many layers; None: of each layer.
        weights_weight: of the divergence from softmax's attention weights, of single layers; None: 1.
    """

    learning_rate: float = 1e-3
    block_layers: int | None = None
    weights_weight: float | None = None
    names = {
        "tokens": "transfer_tokens", "learning_rate": "transfer_learning_rate",
        "block_layers": "transfer_block_layers", "weights_weight": "transfer_weights_weight",
    }  # fmt: skip


@dataclass(frozen=True)
class Distill(StageOptions):
    """Train the model on what the original predicts, an embedding model on its embeddings.

    Attributes:
        tokens: of training.
        learning_rate: its peak.
        block_size: tokens of a row.
        lora_rank: of adapters; None: all weights are trained.
        kl_weight: of the divergence from the original; None: 1. Embedding models have other weights, of the recipe.
        ce_weight: of the text's cross-entropy; None: 0.
    """

    learning_rate: float = 1e-3
    block_size: int = 512
    lora_rank: int | None = None
    kl_weight: float | None = None
    ce_weight: float | None = None
    names = {"tokens": "max_train_tokens"}

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options().items() if name != "max_train_tokens"}


@dataclass(frozen=True)
class Lengthen(StageOptions):
    """Go on with longer rows.

    Attributes:
        tokens: of training.
        block_size: tokens of a row.
        learning_rate: its peak; None: as before.
        recall_share: share of the tokens that are generated recall.
    """

    block_size: int = 4096
    learning_rate: float | None = None
    recall_share: float = 0.0
    names = {"tokens": "long_tokens", "block_size": "long_block_size", "learning_rate": "long_learning_rate"}


WEIGHTS = {"kl_weight": 1.0, "ce_weight": 0.0}  # of a model that predicts
FOLDER = "a folder for the results"
ORDER = (Calibrate, Align, Distill, Lengthen)


class Recipe:
    """A recipe with its options as arguments and its data sets in memory.

    A run that was interrupted goes on when it is started again with the same ones.
    """

    kinds: ClassVar[Sequence[type]]  # of options that it has

    def __init__(
        self,
        model: str | os.PathLike[str],
        plan: Plan,
        train_dataset: Dataset,
        output_dir: str | os.PathLike[str],
        eval_dataset: Dataset | None = None,
        test_dataset: Dataset | None = None,
        **options: Any,
    ):
        for name, argument in IN_MEMORY.items():
            if (file := options.get(name)) is not None:
                raise OptionError(f"{name}={file!r}: data sets are given in memory here; load it and give {argument}=")
        converted = {"mechanism": plan} if isinstance(plan, str) else {"plan": plan_as_data(plan)}
        named = {"model_name_or_path": name_of(model), "output_dir": path_of("output_dir", output_dir, FOLDER)}
        named |= converted | options
        self._flags = flags_of(named, *known_options(self.kinds))
        self._plan = plan
        self.arguments = self._parsed()
        given = {"train": train_dataset, "validation": eval_dataset, "test": test_dataset}
        for (split, dataset), argument in zip(given.items(), IN_MEMORY.values(), strict=True):
            check_in_memory(argument, split, dataset)
        self._datasets = DatasetDict({name: split for name, split in given.items() if split is not None})

    def price(self) -> RunPrice:
        """Return what the run will take, from a few real steps of each stage; nothing is written."""
        return price_of(self._prepared())

    def run(self) -> Report:
        """Run the stages that are not done yet, and return the report.

        Raises:
            HfLinattnError: whatever does not fit together, before anything is written.
        """
        return carry_out(self._prepared())

    def _parsed(self) -> Arguments:
        arguments = parse_arguments(self._flags, self.kinds)
        arguments.model.keep_record(self._plan)
        return arguments

    def _prepared(self) -> TrainingRun:
        arguments = self._parsed()  # a run settles those that were left open
        return prepare(arguments, f"{__package__}.{type(self).__name__}", self._flags, self._datasets)


class Finetuning(Recipe):
    """Convert a pretrained model and fine-tune it on text, beside a control: `recipes/finetune.py` from Python.

    Args:
        model: folder or name of the original.
        plan: name of a mechanism, or a plan as `patch_model` takes it.
        train_dataset: documents in the column `text_column`; the next two are cut from it where they are not given.
        output_dir: takes the model, the report and the checkpoints.
        eval_dataset: chooses the weights that are kept.
        test_dataset: gives the reported perplexities.
        **options: any option of the recipe, such as `max_train_tokens`, `learning_rates` and `calibration_tokens`.

    Raises:
        OptionError: an option that is unknown or does not fit; as `run` does.
        DataError: a data set that is not in memory.

    Examples:
        >>> from hf_linattn.training.api import Finetuning
        >>> options = {"calibration_tokens": 32_768, "max_train_tokens": 1_000_000, "learning_rates": [1e-3]}
        >>> report = Finetuning("gpt2", "hybrid", documents, "out", **options).run()  # doctest: +SKIP
    """

    kinds = FINETUNING


class Distillation(Recipe):
    """Convert a pretrained model and have the original teach it, stage by stage: `recipes/distill.py` from Python.

    Args:
        model: folder or name of the original.
        plan: name of a mechanism, or a plan as `patch_model` takes it.
        train_dataset: documents in the column `text_column`; the last two are cut from it where they are not given.
        stages: some of `Calibrate`, `Align`, `Distill` and `Lengthen`, in this order, with `Distill`.
        output_dir: takes the model, the report and the checkpoints.
        eval_dataset: chooses the weights that are kept.
        test_dataset: gives the reported perplexities.
        **options: any other option of the recipe, such as `per_device_train_batch_size`.

    Raises:
        OptionError: stages that are out of order, or an option that is unknown or does not fit; as `run` does.
        DataError: a data set that is not in memory.

    Examples:
        >>> from hf_linattn.training.api import Align, Distill, Distillation, Lengthen
        >>> stages = [Align(100_000), Distill(800_000, lora_rank=8), Lengthen(100_000, block_size=4096)]
        >>> model = "HuggingFaceTB/SmolLM2-135M-Instruct"
        >>> report = Distillation(model, "hybrid", documents, stages, "out").run()  # doctest: +SKIP
    """

    kinds = DISTILLATION

    def __init__(
        self,
        model: str | os.PathLike[str],
        plan: Plan,
        train_dataset: Dataset,
        stages: Sequence[StageOptions],
        output_dir: str | os.PathLike[str],
        eval_dataset: Dataset | None = None,
        test_dataset: Dataset | None = None,
        **options: Any,
    ):
        check_order(stages)
        named: dict[str, Any] = {"max_train_tokens": sum(stage.tokens for stage in stages)}
        if not is_sentence_model("model", name_of(model)):
            named |= WEIGHTS
        for stage in stages:
            named |= stage.options()
        named["learning_rates"] = [named.pop("learning_rate")]  # of `Distill`: a grid of one
        refuse_those_of_stages(options)
        named |= options
        super().__init__(model, plan, train_dataset, output_dir, eval_dataset, test_dataset, **named)


def check_order(stages: Sequence[StageOptions]) -> None:
    """Raise `OptionError` unless stages are of the known kinds, in their order, each once, with `Distill`."""
    require("stages", stages, isinstance(stages, Sequence), "a list, such as [Distill(1_000_000)]")
    kinds = [type(stage) for stage in stages]
    known = all(kind in ORDER for kind in kinds)
    places = [ORDER.index(kind) for kind in kinds] if known else []
    if not known or places != sorted(set(places)) or Distill not in kinds:
        raise OptionError(
            f"stages={[kind.__name__ for kind in kinds]}: give {', '.join(kind.__name__ for kind in ORDER)} in this"
            " order, each at most once, and Distill"
        )


def refuse_those_of_stages(options: Mapping[str, Any]) -> None:
    """Raise `OptionError` for an option of the recipe that is given to a stage, whether or not it is among those."""
    owned = {kind.names.get(f.name, f.name): (kind, f.name) for kind in ORDER for f in fields(kind)}
    owned["learning_rates"] = Distill, "learning_rate"
    for name, value in options.items():
        if name in owned and value is not None:
            kind, own = owned[name]
            raise OptionError(f"{name}={value!r}: stages have their own; give {own} to {kind.__name__}(...)")


def name_of(model: str | os.PathLike[str]) -> str:
    """Return the folder or the name of the original; `OptionError` for a model in memory, or something else."""
    return path_of("model", model, "the folder or the name of the original, which is loaded several times")


def path_of(name: str, value: str | os.PathLike[str], expected: str) -> str:
    """Return an argument as a string; `OptionError` unless it is one or a path."""
    fits = isinstance(value, str | os.PathLike)
    require(name, value if fits else type(value), fits, expected)
    return os.fspath(value)


def check_in_memory(argument: str, split: str, dataset: Dataset | None) -> None:
    """Raise `DataError` for a data set whose rows are read as they come, or for something else than one."""
    if not isinstance(dataset, Dataset | None):
        raise DataError(
            f"{argument} of type {type(dataset).__name__} is no datasets.Dataset; of a stream give its first rows,"
            f" Dataset.from_list(list({argument}.take(100_000))), of a DatasetDict a split, as {argument}[{split!r}]"
        )
