"""Masks for masked language modelling, on packed rows: others in every epoch, the same after an interruption."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from hf_linattn.errors import DataError


class PackedMaskingCollator:
    """Stack packed rows and mask them for masked language modelling; `position_ids` stay, no mask is added.

    Masking is that of transformers' `DataCollatorForLanguageModeling` (of the chosen tokens 80 % become the mask
    token, 10 % a random token, 10 % stay; special tokens are never chosen), whose own padding would add the
    `attention_mask` that hides the restarts of `position_ids`. A row's masks depend on the seed, the epoch and its
    tokens alone, not on its batch or on what came before.

    Args:
        mlm_probability: share of the tokens to predict.
        seed: of the masks, until `begin_epoch` gives another.
        vocab_size: tokens that the model has, where the tokenizer may have more; None: all.

    Raises:
        DataError: the tokenizer has no mask token, or the model has no embedding for it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, mlm_probability: float = 0.15, seed: int = 0,
        vocab_size: int | None = None,
    ):  # fmt: skip
        if tokenizer.mask_token is None:
            raise DataError("mask_token=None: masked language modelling needs a tokenizer that has a mask token")
        number: Any = tokenizer.mask_token_id
        if vocab_size is not None and number >= vocab_size:
            raise DataError(
                f"mask_token={tokenizer.mask_token!r} has the number {number}, beyond the {vocab_size} tokens of the"
                " model; give the tokenizer that the model was trained with"
            )
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        self.masking = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=mlm_probability)
        # in memory that the workers of a DataLoader share, which may live through many epochs
        self._drawn = torch.tensor([seed, 0]).share_memory_()

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Draw other masks from now on; epoch: counted from 0."""
        self._drawn.copy_(torch.tensor([seed, epoch]))

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        masked = [self._mask(torch.as_tensor(row["input_ids"])) for row in rows]
        return {
            "input_ids": torch.stack([input_ids for input_ids, _ in masked]),
            "position_ids": torch.stack([torch.as_tensor(row["position_ids"]) for row in rows]),
            "labels": torch.stack([labels for _, labels in masked]),
        }

    def _mask(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask one row, from a generator of its own."""
        row_seed = zlib.crc32(input_ids.numpy().tobytes(), int(self._drawn.sum()) % 2**32)
        self.masking.generator = torch.Generator().manual_seed(row_seed)
        inputs, labels = self.masking.torch_mask_tokens(input_ids[None].clone())
        # a random token that the model lacks leaves the one that stood there
        return inputs[0].where(inputs[0] < self.vocab_size, input_ids), labels[0]


class MaskedAnew(TrainerCallback):
    """Have a collator draw other masks in every epoch of a training.

    A Trainer that goes on from a checkpoint reads the batches of the begun epoch again, and sets the random states
    of then after the first batch that it trains on: masks from these would be others than without the interruption.
    """

    def __init__(self, collator: PackedMaskingCollator):
        self.collator = collator

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.collator.begin_epoch(args.seed, int(state.epoch or 0))
