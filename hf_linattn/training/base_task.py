"""What every kind of prediction has in common: how text becomes rows, logits predictions, and a model its score."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from datasets import Dataset, DatasetDict
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linattn.config import require
from hf_linattn.errors import OptionError
from hf_linattn.evaluation.document_windows import DocumentWindows
from hf_linattn.evaluation.samples import Sample
from hf_linattn.training.arguments import AUTO, Arguments, DataArguments, ModelArguments, RecipeArguments
from hf_linattn.training.arguments.distillation import OF_TEACHERS
from hf_linattn.training.conversations import render_conversations
from hf_linattn.training.data import TrainingData, read_splits, text_splits


class TextEncoder(NamedTuple):
    """What turns texts into tokens: a tokenizer, and the options that say how many of them make a row."""

    tokenizer: PreTrainedTokenizerBase
    options: DataArguments


class Task:
    """How text becomes training rows, logits become predictions, and a model gets its score."""

    auto_class: ClassVar[Any]
    has_own_loss: ClassVar[bool] = False  # what is trained is `trainee`, in which the original teaches
    reads_windows: ClassVar[bool] = False  # the original may read long texts in windows
    joins_pairs: ClassVar[bool] = False  # two texts of a row are read as one
    of_control: ClassVar[frozenset[str]] = frozenset()  # options of conversions that the control has, too
    tokenizer: PreTrainedTokenizerBase | None = None  # None: that of the checkpoint

    def check(self, model: PreTrainedModel, data: DataArguments, recipe: RecipeArguments) -> None:
        """Raise `OptionError` for an option that makes no sense for this task."""

    def check_options(self, arguments: Arguments) -> None:
        """Raise `OptionError` for options of several groups that make no sense for this task."""
        for name in ("cosine_weight", "similarity_weight"):
            if (value := getattr(arguments.recipe, name)) is not None:
                raise OptionError(
                    f"{name}={value}: it is of embedding models, which have a modules.json; leave it out"
                )
        taught = bool(arguments.recipe.kl_weight or arguments.recipe.hidden_weight)
        for f in (f for f in fields(arguments.distillation) if f.name in OF_TEACHERS):
            given = getattr(arguments.distillation, f.name)
            expected = f"{f.default} without kl_weight or hidden_weight, as the loss is that of the data alone"
            require(f.name, given, taught or given == f.default, expected)

    def compares_rows(self, arguments: Arguments) -> bool:
        """Return whether the loss compares the rows of a batch, so that others of them are another loss."""
        return False

    @classmethod
    def load(cls, data: DataArguments) -> DatasetDict:
        """Load the three splits."""
        files = data.train_file, data.validation_file, data.test_file
        return cls.select(read_splits(data.dataset_name, data.dataset_config_name, *files), data)

    @classmethod
    def select(cls, splits: DatasetDict, data: DataArguments) -> DatasetDict:
        """Return the three splits of a data set in memory."""
        return text_splits(splits, data.text_column, conversations=data.completion_only)

    def written(self, splits: DatasetDict, encoder: TextEncoder) -> DatasetDict:
        """Return the splits as text, where they are conversations; `DataError` if these cannot be written so."""
        return render_conversations(splits, encoder.tokenizer) if encoder.options.completion_only else splits

    def rows(self, splits: DatasetDict, encoder: TextEncoder, model: PreTrainedModel, max_tokens: int) -> TrainingData:
        """Turn the training (up to `max_tokens`) and validation splits into rows; `DataError` if one fills none."""
        raise NotImplementedError

    def stride(self, data: DataArguments) -> int | None:
        """Return by how many tokens test windows advance; None if they do not overlap."""
        return None

    def predicting(self, logits: Tensor) -> Tensor:
        """Return the logits that predict something, aligned with `predicted(labels)`."""
        return logits

    def predicted(self, labels: Tensor) -> Tensor:
        """Return the labels that are predicted, -100 where nothing is."""
        return labels

    def divergence(self, teacher: Any, got: Tensor, want: Tensor) -> Tensor:
        """Return how far logits [T, K] are from those of a `Teacher`, summed over predictions."""
        return teacher.divergence(got, want)

    def score(self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, batch_size: int) -> dict[str, Any]:
        """Return the `perplexity` of a test split, or `loss`, `num_tokens`, how many were predicted, and more."""
        raise NotImplementedError

    def read_tokens(self, encoder: TextEncoder, test: Dataset) -> int:
        """Return how many tokens a model reads to get its score; 0: that is not counted."""
        return 0

    def tests_some(self, encoder: TextEncoder, test: Dataset) -> bool:
        """Return whether some documents of the test split are left out, and the others are from all over it."""
        return len(encoder.options.tested(test)) < len(test)

    def samples(self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, count: int) -> list[Sample]:
        """Return what the model makes of up to `count` test texts, the same for every model; may be none."""
        return []

    def measure(
        self, run: Any, model: PreTrainedModel, options: DataArguments, windows: DocumentWindows | None = None
    ) -> dict[str, Any]:
        """Score a model on the test split of a `TrainingRun`, cut to the `block_size` of `options`.

        windows: in which the model reads each text; None: whole.
        """
        encoder, test = TextEncoder(run.tokenizer, options), options.tested(run.splits["test"])
        reading: dict[str, Any] = {} if windows is None else {"windows": windows}
        return self.score(model, encoder, test, run.arguments.training.per_device_eval_batch_size, **reading)

    def trainee(self, run: Any, model: nn.Module) -> nn.Module:
        """Return what a `TrainingRun` trains of a model: itself, or a loss that holds it."""
        return model

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        """Write a model into a folder, with what else it needs to be loaded."""
        model.save_pretrained(folder)

    def answers(self, model: PreTrainedModel, input_ids: Tensor) -> Tensor:
        """Return what a model, in eval mode, makes of tokens [B, N]: what has to be the same when it is reloaded."""
        return model(input_ids=input_ids).logits


def refuse_chosen_layers(options: ModelArguments) -> None:
    """Refuse to choose layers by predictions of tokens where there are none."""
    if options.layers == AUTO:
        raise OptionError(f"layers={AUTO!r}: layers are chosen by what is predicted of tokens; name them")


def refuse(name: str, value: Any, reason: str) -> None:
    """Refuse an option that was set."""
    if value:
        raise OptionError(f"{name}={value}: {reason}; leave it out")
