"""Options: the text to train and measure on."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_linattn.config import require


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
    block_size: int = field(
        default=256, metadata={"help": "Tokens per training row and test window; a classifier's texts are cut to it."}
    )
    mlm_probability: float = field(
        default=0.15, metadata={"help": "Share of the tokens that a masked model predicts in training."}
    )
    eval_mlm_probability: float = field(
        default=0.15, metadata={"help": "The same in validation and test: perplexities compare at equal shares only."}
    )
    max_validation_tokens: int | None = field(default=None, metadata={"help": "Use at most that many for validation."})
    max_test_documents: int | None = field(default=None, metadata={"help": "Use at most that many test documents."})
    stride: int | None = field(
        default=None, metadata={"help": "Test windows of a causal model start this many tokens apart; default: half."}
    )

    completion_only: bool = field(
        default=False,
        metadata={
            "help": "Learn the assistant's answers alone: text_column holds lists of turns with `role` and `content`,"
            " written with the tokenizer's chat template. Causal only."
        },
    )

    def __post_init__(self) -> None:
        require("block_size", self.block_size, self.block_size >= 2, "at least 2")
        for name in ("mlm_probability", "eval_mlm_probability"):
            require(name, getattr(self, name), 0 < getattr(self, name) < 1, "between 0 and 1")
        for name in ("max_validation_tokens", "max_test_documents", "stride"):
            value = getattr(self, name)
            require(name, value, value is None or value > 0, "a positive number, or absent")
        require("stride", self.stride, (self.stride or 1) < self.block_size, f"below block_size={self.block_size}")
