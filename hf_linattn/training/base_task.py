"""What every kind of prediction has in common: how text becomes rows, logits predictions, and a model its score."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linattn.errors import OptionError
from hf_linattn.evaluation.samples import Sample
from hf_linattn.training.arguments import DataArguments, RecipeArguments
from hf_linattn.training.conversations import render_conversations
from hf_linattn.training.data import TrainingData, load_text_splits, text_splits


class TextEncoder(NamedTuple):
    """What turns texts into tokens: a tokenizer, and the options that say how many of them make a row."""

    tokenizer: PreTrainedTokenizerBase
    options: DataArguments


class Task:
    """How text becomes training rows, logits become predictions, and a model gets its score."""

    auto_class: ClassVar[Any]

    def check(self, model: PreTrainedModel, data: DataArguments, recipe: RecipeArguments) -> None:
        """Raise `OptionError` for an option that makes no sense for this task."""

    def load(self, data: DataArguments) -> DatasetDict:
        """Load the three splits."""
        files = data.train_file, data.validation_file, data.test_file
        column, answers = data.text_column, data.completion_only
        return load_text_splits(data.dataset_name, data.dataset_config_name, *files, column, conversations=answers)

    def select(self, splits: DatasetDict, data: DataArguments) -> DatasetDict:
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
        """Return the `perplexity` of the test split, `num_tokens`, how many were predicted, and more."""
        raise NotImplementedError

    def samples(self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, count: int) -> list[Sample]:
        """Return what the model makes of up to `count` test texts, the same for every model."""
        raise NotImplementedError


def refuse(name: str, value: Any, reason: str) -> None:
    """Refuse an option that was set."""
    if value:
        raise OptionError(f"{name}={value}: {reason}; leave it out")
