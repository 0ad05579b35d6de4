"""What a model predicts, the next token, masked tokens or the class of a text, and all that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto import modeling_auto as auto

from hf_linattn import architecture
from hf_linattn.config import require
from hf_linattn.errors import CheckpointError, DataError, OptionError, did_you_mean
from hf_linattn.evaluation import is_masked_language_model, perplexity
from hf_linattn.inference import evaluation_mode
from hf_linattn.position_tables import position_tables
from hf_linattn.reading import reading
from hf_linattn.training.arguments import DataArguments, RecipeArguments
from hf_linattn.training.conversations import render_conversations
from hf_linattn.training.data import (
    PackedMaskingCollator,
    TrainingData,
    load_text_splits,
    text_splits,
    tokenize_and_pack,
)
from hf_linattn.training.heads import check_classes, trained_head

CLASSIFIERS = frozenset(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())


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
        return load_text_splits(
            data.dataset_name, data.dataset_config_name, *files, column, conversations=answers
        )

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

    def score(self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, batch_size: int) -> dict[str, Any]:
        """Return the `perplexity` of the test split, `num_tokens`, how many were predicted, and more."""
        raise NotImplementedError


class LanguageModeling(Task):
    """Tokens are predicted, from packed rows that documents share without seeing each other."""

    def rows(self, splits: DatasetDict, encoder: TextEncoder, model: PreTrainedModel, max_tokens: int) -> TrainingData:
        tokenizer, data = encoder
        limits = {"train": max_tokens, "validation": data.max_validation_tokens}
        least = data.max_validation_tokens is None or data.max_validation_tokens >= data.block_size
        require("max_validation_tokens", data.max_validation_tokens, least, f"at least block_size={data.block_size}")
        first = first_position(model)
        rows = {
            name: tokenize_and_pack(splits[name], tokenizer, data.block_size, limit) for name, limit in limits.items()
        }
        if first:
            rows = {
                name: dataset.map(lambda row: {"position_ids": row["position_ids"] + first})
                for name, dataset in rows.items()
            }
        return TrainingData(**rows, **self.collate(encoder))

    def collate(self, encoder: TextEncoder) -> dict[str, Any]:
        """Return the collators, where rows are not stacked as they are."""
        return {}

    def score(self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, batch_size: int) -> dict[str, Any]:
        tokenizer, data = encoder
        found = perplexity(
            model, tokenizer, test["text"], max_length=data.block_size, batch_size=batch_size,
            stride=self.stride(data), mask_probability=data.eval_mlm_probability,
        )  # fmt: skip
        return dict(found)


class CausalLanguageModeling(LanguageModeling):
    """Position i predicts token i + 1."""

    auto_class = AutoModelForCausalLM

    def stride(self, data: DataArguments) -> int | None:
        return data.stride or max(1, data.block_size // 2)

    def predicting(self, logits: Tensor) -> Tensor:
        return logits[:, :-1]

    def predicted(self, labels: Tensor) -> Tensor:
        return labels[:, 1:]


class MaskedLanguageModeling(LanguageModeling):
    """Position i predicts token i, where that is masked."""

    auto_class = AutoModelForMaskedLM

    def check(self, model: PreTrainedModel, data: DataArguments, recipe: RecipeArguments) -> None:
        _refuse("completion_only", data.completion_only, "a masked model answers nothing")
        _refuse("stride", data.stride, "windows of a masked model do not overlap")
        _refuse("fidelity_windows", recipe.fidelity_windows, "a masked model generates no text")
        _refuse("position_windows", recipe.position_windows, "a masked model predicts no next token")
        _refuse("long_windows", recipe.long_windows, "a masked model predicts no next token")

    def collate(self, encoder: TextEncoder) -> dict[str, Any]:
        tokenizer, data = encoder
        return {
            "collator": PackedMaskingCollator(tokenizer, data.mlm_probability),
            "evaluation_collator": PackedMaskingCollator(tokenizer, data.eval_mlm_probability, seed=0),
        }


class SequenceClassification(Task):
    """A text, cut to `block_size` tokens, predicts its class; rows are padded to the longest of their batch.

    Labels are class numbers, or names that the model's `config.label2id` knows. Its perplexity is that of the classes,
    exp of the mean negative log-likelihood of the right one; the score also has the `accuracy`.
    """

    auto_class = AutoModelForSequenceClassification

    def check(self, model: PreTrainedModel, data: DataArguments, recipe: RecipeArguments) -> None:
        _refuse("completion_only", data.completion_only, "a classifier answers nothing")
        _refuse("stride", data.stride, "a text is one window")
        _refuse("fidelity_windows", recipe.fidelity_windows, "a classifier generates no text")
        _refuse("position_windows", recipe.position_windows, "a classifier predicts no next token")
        _refuse("long_windows", recipe.long_windows, "a classifier predicts no next token")
        check_classes(model.name_or_path, model.config)

    def load(self, data: DataArguments) -> DatasetDict:
        files = data.train_file, data.validation_file, data.test_file
        columns = data.text_column, data.label_column
        return load_text_splits(data.dataset_name, data.dataset_config_name, *files, *columns)

    def select(self, splits: DatasetDict, data: DataArguments) -> DatasetDict:
        return text_splits(splits, data.text_column, data.label_column)

    def rows(self, splits: DatasetDict, encoder: TextEncoder, model: PreTrainedModel, max_tokens: int) -> TrainingData:
        config: Any = model.config
        tokenizer, data = encoder
        if tokenizer.pad_token_id is None or (config.pad_token_id is None and "pad_token_id" in config):
            raise DataError(
                f"pad_token: the tokenizer has {tokenizer.pad_token!r}, the model's config {config.pad_token_id!r}; a"
                " batch of texts of several lengths needs one, set both and save them"
            )
        limits = {"train": max_tokens, "validation": data.max_validation_tokens}
        rows = {}
        for name, limit in limits.items():
            # a row counts as block_size tokens; data sets may be sorted by class
            chosen = splits[name].shuffle(seed=0) if name == "train" else splits[name]
            count = len(chosen) if limit is None else min(len(chosen), max(1, limit // data.block_size))
            rows[name] = self.encode(chosen.select(range(count)), encoder, config)
        collator = PaddingCollator(tokenizer.pad_token_id)
        return TrainingData(**rows, collator=collator, evaluation_collator=collator)

    def encode(self, texts: Dataset, encoder: TextEncoder, config: Any) -> Dataset:
        """Return `input_ids`, `attention_mask` and the class numbers as `labels`."""
        labels = class_numbers(texts["label"], config.label2id, config.num_labels)
        encoded = encoder.tokenizer(
            list(texts["text"]), truncation=True, max_length=encoder.options.block_size, return_token_type_ids=False,
            verbose=False,
        )  # fmt: skip
        columns = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        return Dataset.from_dict({**columns, "labels": labels}).with_format("torch")

    def score(self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, batch_size: int) -> dict[str, Any]:
        rows, total, right = self.encode(test, encoder, model.config), 0.0, 0
        batches: Any = DataLoader(rows, batch_size, collate_fn=PaddingCollator(encoder.tokenizer.pad_token_id))  # type: ignore
        with evaluation_mode(model), torch.no_grad():
            for batch in tqdm(batches, desc="classification", unit="batch"):
                batch = {name: x.to(model.device) for name, x in batch.items()}
                labels = batch.pop("labels")
                logits = model(**batch).logits
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                total += float(cross_entropy(logits, labels, reduction="none").double().sum())
                right += int((logits.argmax(-1) == labels).sum())
        loss = total / len(rows)
        mean = float(torch.tensor(loss, dtype=torch.float64).exp())
        return {"perplexity": mean, "loss": loss, "num_tokens": len(rows), "accuracy": right / len(rows)}


@dataclass(frozen=True)
class PaddingCollator:
    """Stack texts of several lengths, padded on the right: on the left, absolute positions would be others."""

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        columns = {name: [torch.as_tensor(row[name]) for row in rows] for name in ("input_ids", "attention_mask")}
        padding = {"input_ids": self.pad_token_id, "attention_mask": 0}
        padded = {name: pad_sequence(x, True, padding[name]) for name, x in columns.items()}
        return {**padded, "labels": torch.stack([torch.as_tensor(row["labels"]) for row in rows])}


CAUSAL, MASKED, CLASSIFICATION = CausalLanguageModeling(), MaskedLanguageModeling(), SequenceClassification()
TASKS: dict[str, Task] = {"causal": CAUSAL, "masked": MASKED, "classification": CLASSIFICATION}  # by head


def task_of(model: nn.Module) -> Task:
    """Return what a model, wrapped or not, predicts, by its class; `UnsupportedModelError` if none of the three."""
    root = architecture.root_model(model)
    if any(kind.__name__ in CLASSIFIERS for kind in type(root).__mro__):
        return CLASSIFICATION
    return MASKED if is_masked_language_model(root) else CAUSAL


def load_model(name_or_path: str, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """Load a checkpoint as what it was saved as: a causal or masked language model, or a classifier of texts.

    Raises:
        UnsupportedModelError, OptionError: it has another head, see `trained_head`; no weight is loaded.
        CheckpointError: it cannot be read, or has no weights for a part of the model, which would start at random.
    """
    remedy = "give a folder with a saved model, or the name of a model on the Hub and a connection to it"
    with reading("model_name_or_path", name_or_path, remedy):
        config = AutoConfig.from_pretrained(name_or_path)
    task = TASKS[trained_head(name_or_path, config)]
    with reading("model_name_or_path", name_or_path, remedy):
        model, info = task.auto_class.from_pretrained(name_or_path, dtype=dtype, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"model_name_or_path={name_or_path!r} has no weights for {missing[0]!r} and lacks {len(missing)} tensors"
            f" of {type(model).__name__} in all, which would be random numbers; give a checkpoint that was saved with"
            " them"
        )
    return model


def first_position(model: nn.Module) -> int:
    """Return the position id of a text's first token: 0, but padding_idx + 1 in RoBERTa and its kind."""
    tables = position_tables(architecture.root_model(model), of_parts=True)
    return max((first for first, _ in tables.values()), default=0)


def class_numbers(labels: Sequence[int | str], known: Mapping[str, int], count: int) -> list[int]:
    """Return labels as class numbers; `DataError` for one that the model does not have.

    >>> class_numbers(["good", "bad", 1], {"bad": 0, "good": 1}, 2)
    [1, 0, 1]
    """
    numbers = [known.get(label) if isinstance(label, str) else label for label in labels]
    for label, number in zip(labels, numbers, strict=True):
        if number is None or not 0 <= number < count:
            hint = did_you_mean(str(label), known)
            raise DataError(
                f"label {label!r} is none of the model's {count} classes{hint}; relabel the data, or leave rows"
                " without a class out"
            )
    return numbers  # type: ignore[return-value]


def _refuse(name: str, value: Any, reason: str) -> None:
    """Refuse an option that was set."""
    if value:
        raise OptionError(f"{name}={value}: {reason}; leave it out")
