"""Options: the text to train and measure on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_linattn.config import require
from hf_linattn.evaluation.next_token import even_places

if TYPE_CHECKING:
    from datasets import Dataset

BALANCED = "balanced"  # value of `class_weights`


@dataclass
class DataArguments:
    """Text to train and measure on; with no source given, the documentation of Python's standard library."""

    dataset_name: str | None = field(default=None, metadata={"help": "Name of a dataset on the Hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(
        default=None, metadata={"help": "Training text: .txt, .md (one document), .json, .jsonl, .csv or .parquet."}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "Text that chooses learning rate and checkpoint; default: cut from training."}
    )
    test_file: str | None = field(
        default=None, metadata={"help": "Text of the reported perplexities; default: cut from training."}
    )
    text_column: str = field(default="text", metadata={"help": "Column of the dataset or file that holds the text."})
    label_column: str = field(
        default="label", metadata={"help": "Column of the classes, by number or name, if the model is a classifier."}
    )
    text_pair_column: str | None = field(
        default=None,
        metadata={"help": "Column of a second text: of a pair to classify, or what an embedding model is to find."},
    )
    metrics: list[str] | None = field(
        default=None,
        metadata={
            "help": "Of a classifier: accuracy, macro_f1, micro_f1, matthews, pearson, spearman, mean_squared_error;"
            " default: those of its problem."
        },
    )
    class_weights: list[str] | None = field(
        default=None,
        metadata={
            "help": "What the loss of each class is multiplied by, in their order; `balanced`: so that all classes"
            " count alike."
        },
    )
    document_window: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of the overlapping windows in which the original reads long texts, to teach and"
            " to be compared; default: its position table, where texts are longer; 0: whole, with max_positions."
        },
    )
    document_stride: int | None = field(
        default=None, metadata={"help": "By how many tokens these windows advance; default: half of one."}
    )
    block_size: int = field(
        default=256, metadata={"help": "Tokens per training row and test window, or to which whole texts are cut."}
    )
    mlm_probability: float = field(
        default=0.15, metadata={"help": "Share of the tokens that a masked model predicts in training."}
    )
    eval_mlm_probability: float = field(
        default=0.15, metadata={"help": "The same in validation and test: perplexities compare at equal shares only."}
    )
    max_validation_tokens: int | None = field(default=None, metadata={"help": "Use at most that many for validation."})
    max_test_documents: int | None = field(
        default=None, metadata={"help": "Use at most that many test documents, from all over the split."}
    )
    max_test_tokens: int = field(
        default=131_072,
        metadata={
            "help": "Score language models on at most that many: the first of each test document, of fewer documents"
            " where block_size tokens of each would be more, of conversations whole ones; 0: all."
        },
    )
    stride: int | None = field(
        default=None, metadata={"help": "Test windows of a causal model start this many tokens apart; default: half."}
    )

    completion_only: bool = field(
        default=False,
        metadata={
            "help": "Learn and score the assistant's answers alone: text_column holds lists of turns with `role` and"
            " `content`, written with the tokenizer's chat template. Causal only."
        },
    )

    def __post_init__(self) -> None:
        require("block_size", self.block_size, self.block_size >= 2, "at least 2")
        for name in ("mlm_probability", "eval_mlm_probability"):
            require(name, getattr(self, name), 0 < getattr(self, name) < 1, "between 0 and 1")
        for name in ("max_validation_tokens", "max_test_documents", "stride"):
            value = getattr(self, name)
            require(name, value, value is None or value > 0, "a positive number, or absent")
        require("max_test_tokens", self.max_test_tokens, self.max_test_tokens >= 0, "a positive number, or 0")
        self.class_weights = _weights(self.class_weights)
        whole = self.document_window is None or self.document_window >= 0
        require("document_window", self.document_window, whole, "a positive number, 0 or absent")
        stride = self.document_stride
        require("document_stride", stride, stride is None or stride > 0, "a positive number, or absent")
        require("stride", self.stride, (self.stride or 1) < self.block_size, f"below block_size={self.block_size}")

    def tested(self, test: Dataset) -> Dataset:
        """Return the documents of the test split that are measured on, from all over it: it may be sorted."""
        count = min(len(test), self.max_test_documents or len(test))
        return test if count == len(test) else test.select(even_places(len(test), count))


def _weights(given: Any) -> Any:
    """Return weights of classes as numbers, or the word `balanced`."""
    if given is None or given == BALANCED or list(given) == [BALANCED]:
        return given and BALANCED
    try:
        weights = [float(weight) for weight in given]
    except (TypeError, ValueError):
        weights = []
    valid = bool(weights) and all(0 < weight < math.inf for weight in weights)
    require("class_weights", given, valid, f"{BALANCED!r}, or numbers above 0, one for each class")
    return weights
