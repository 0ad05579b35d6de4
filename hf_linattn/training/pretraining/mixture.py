"""Batches of text and of generated recall, the same for the same seed, whichever of them are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hf_linattn.errors import DataError, OptionError
from hf_linattn.training.data import TOKENIZED_AT_ONCE
from hf_linattn.training.pretraining.items import Material
from hf_linattn.training.pretraining.rows import recall_row

_SPLITS = {"train": 0, "validation": 1, "test": 2}  # each with random numbers of its own


class Stage(NamedTuple):
    """A part of a training.

    Attributes:
        length: tokens of a row. share: of the training's steps, beside those of the other stages; they need not add up
            to 1. recall: share of generated recall among the rows.
        kind: the one kind that these rows have, a name in `KINDS`; None: all kinds by their shares.
    """

    length: int
    share: float
    recall: float = 0.0
    kind: str | None = None


class Mixture(torch.utils.data.Dataset):
    """One batch per step: `input_ids`, `labels` and `position_ids`, int64 [batch_tokens / length, length].

    Of every batch the first rows are generated recall (`recall_row`), as
    many as the stage's `recall` says; the others are spans of the text, whose tokens are all predicted, with documents
    one behind the other as GPT-2 was trained. A row begins at a random position of those that the longest row has, so
    that short rows train the whole of a position table. A batch depends on the seed, the split and its number alone,
    so that a training that was interrupted goes on with the same ones, and needs no rows on disk.

    Args:
        material: tokenizer and text. split: its name; other splits draw other rows.
        stages: lengths of rows, in their order. steps: how many batches there are.

    Raises:
        OptionError: `batch_tokens` is not a multiple of every stage's length, or a share of recall is not from 0 to 1.
    """

    def __init__(
        self,
        material: Material,
        split: str,
        stages: Sequence[Stage],
        steps: int,
        batch_tokens: int,
        seed: int = 0,
    ):
        for stage in stages:
            if batch_tokens % stage.length:
                raise OptionError(f"batch_tokens must be a multiple of {stage.length}, got {batch_tokens}")
            if not 0 <= stage.recall <= 1:
                raise OptionError(f"a stage's share of recall must be from 0 to 1, got {stage.recall}")
        self.material, self.seed = material, (seed, _SPLITS[split])
        self.batch_tokens, self.stages = batch_tokens, tuple(stages)
        ends = np.cumsum([stage.share for stage in stages])
        ends = np.round(ends / ends[-1] * steps).astype(int)
        self.ends = ends.tolist()

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        length, _, recall, kind = self.stage_at(step)
        rows, rng = self.batch_tokens // length, np.random.default_rng((*self.seed, step))
        # a share of a row is a row in as many of the batches
        recalled = int(recall * rows * (step + 1)) - int(recall * rows * step)
        batch = [recall_row(self.material, length, rng, kind)[:2] for _ in range(recalled)]
        texts = [np.array(self.material.span(rng, length)) for _ in range(rows - recalled)]
        input_ids, labels = zip(*batch, *((text, text) for text in texts), strict=True)
        first = rng.integers(max(stage.length for stage in self.stages) - length + 1, size=(rows, 1))
        arrays = {
            "input_ids": np.stack(input_ids), "labels": np.stack(labels), "position_ids": first + np.arange(length)
        }  # fmt: skip
        return {name: torch.tensor(array) for name, array in arrays.items()}

    def stage_at(self, step: int) -> Stage:
        """Return the stage of a step."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        return next(stage for stage, end in zip(self.stages, self.ends, strict=True) if step < end)


def text_tokens(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> np.ndarray:
    """Return the tokens of all documents, int64 [T], in random order, each behind the token that begins a text.

    Raises:
        DataError: the documents have no token.
    """
    texts = [str(text) for text in dataset["text"]]
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    documents: list[list[int]] = []
    for first in range(0, len(order), TOKENIZED_AT_ONCE):
        batch = [texts[number] for number in order[first : first + TOKENIZED_AT_ONCE]]
        documents += tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
    if not any(documents):
        raise DataError("the text has no tokens; give documents that are not empty")
    return np.concatenate([np.array([tokenizer.bos_token_id, *document]) for document in documents])
