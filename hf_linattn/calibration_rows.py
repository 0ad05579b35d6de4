"""Texts as the batches that `calibrate` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .architecture import require_token_ids
from .config import require_count
from .errors import DataError, OptionError
from .evaluation.next_token import evenly, windows_of_documents
from .evaluation.perplexity import position_limit
from .inference import device_of

TOKENS, ROW, BATCH = 8192, 512, 4  # tokens in all and of a row, rows of a batch


def calibration_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, tokens: int = TOKENS
) -> list[dict[str, Tensor]]:
    """Return rows of 512 tokens, or of as many as the model has positions for, from all over the texts.

    Args:
        texts: documents of the kind that the model is for. tokens: how many are taken at most; whole rows of them.

    Raises:
        OptionError: `tokens` is below one row.
        DataError: no document has as many tokens as a row, or `texts` is one string.
        UnsupportedModelError: the model is an encoder-decoder, whose decoder needs rows of its own, or reads no text.
    """
    require_token_ids(model, "call calibrate(model, batches) with what it takes")
    size = min(ROW, position_limit(model) or ROW)
    require_count("calibration_tokens", tokens, least=size)
    try:
        rows, _ = windows_of_documents(tokenizer, texts, size)
    except OptionError as error:
        raise DataError(f"calibrate: no document has the {size} tokens of one row; give longer text") from error
    chosen = evenly(rows, tokens // size).to(device_of(model))
    return [{"input_ids": batch} for batch in chosen.split(BATCH)]


def count_tokens(batches: Sequence[Mapping[str, Any]]) -> int:
    """Return how many tokens batches have."""
    return sum(int(batch["input_ids"].numel()) for batch in batches)
