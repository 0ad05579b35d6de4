"""A long document read in overlapping windows, whose logits, or embeddings, are pooled into one.

    z = sum_w n_w z_w / sum_w n_w,

z_w: what the model says of window w, n_w: how many tokens of the document are in it, those at its ends that mark a
text not counted. So a model with 512 positions answers for a document of any length, seeing 512 tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..architecture import root_model
from ..config import require, require_count

TOKENS_AT_ONCE = 16_384


@dataclass(frozen=True)
class DocumentWindows:
    """Windows of `length` tokens, with those that mark a text, every `stride` tokens of a document.

    Attributes:
        length: tokens that the model reads at a time.
        stride: tokens by which windows advance; None: half of what a window holds of a document.
        head, tail: how many tokens mark the beginning and the end of a text; every window gets the document's.
        pad_token_id: what short windows are filled with, behind their end, where a mask hides it.
    """

    length: int
    stride: int | None = None
    head: int = 0
    tail: int = 0
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        require_count("document_window", self.length, self.head + self.tail + 1)
        require_count("document_stride", self.stride, optional=True)
        most = f"at most {self.room}, the tokens of a document in a window of document_window={self.length}"
        require("document_stride", self.stride, (self.stride or 1) <= self.room, most)

    @property
    def room(self) -> int:
        """How many tokens of a document a window holds."""
        return self.length - self.head - self.tail

    @property
    def step(self) -> int:
        """By how many tokens windows advance."""
        return self.stride or max(1, self.room // 2)

    def split(self, ids: Sequence[int]) -> list[tuple[list[int], int]]:
        """Return the windows of a document, each with how many tokens of the document it holds.

        A document that fits is one window, as it is.

        >>> DocumentWindows(5, 2, head=1, tail=1).split([1, 10, 11, 12, 13, 14, 2])
        [([1, 10, 11, 12, 2], 3), ([1, 12, 13, 14, 2], 3)]
        """
        ids = list(ids)
        end = len(ids) - self.tail
        head, body, tail = ids[: self.head], ids[self.head : end], ids[end:]
        starts = range(0, max(0, len(body) - self.room) + self.step, self.step)
        return [([*head, *(part := body[i : i + self.room]), *tail], len(part)) for i in starts]

    @torch.no_grad()
    def pooled_logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return a classifier's pooled logits [B, K] for `input_ids` and `attention_mask` [B, N]; see `pooled`.

        Short windows are filled with the pad token of the model's config, if it has one: a classifier that reads its
        last token looks for that in front of these.
        """
        own = getattr(root_model(model).config.get_text_config(), "pad_token_id", None)
        windows = self if own is None else replace(self, pad_token_id=own)

        def read(ids: Tensor, mask: Tensor) -> Tensor:
            return model(input_ids=ids, attention_mask=mask).logits

        return windows.pooled(read, batch["input_ids"], batch["attention_mask"])

    @torch.no_grad()
    def pooled(self, read: Callable[[Tensor, Tensor], Tensor], ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return what a model says of windows, pooled [B, K], for ids and mask [B, N], padded on the right.

        At most `TOKENS_AT_ONCE` tokens are read at a time, or one window. A document without a token of its own counts
        as one of one token.

        read: gives [W, K] for the ids and the mask of windows [W, L].
        """
        rows = [self.split(row[real].tolist()) for row, real in zip(ids, attention_mask.bool(), strict=True)]
        windows = [torch.tensor(window, dtype=ids.dtype, device=ids.device) for row in rows for window, _ in row]
        at_once = max(1, TOKENS_AT_ONCE // self.length)
        parts = [self._padded(windows[i : i + at_once]) for i in range(0, len(windows), at_once)]
        found = torch.cat([read(*part) for part in parts])
        counts = torch.tensor([float(max(1, count)) for row in rows for _, count in row], device=found.device)
        owner = torch.tensor([number for number, row in enumerate(rows) for _ in row], device=found.device)
        precise = found.to(torch.promote_types(found.dtype, torch.float32))
        total = precise.new_zeros(len(rows), precise.shape[-1]).index_add(0, owner, precise * counts[:, None])
        return total / precise.new_zeros(len(rows)).index_add(0, owner, counts.to(precise.dtype))[:, None]

    def _padded(self, windows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return ids and mask [W, L] of windows of several lengths."""
        mask = pad_sequence([torch.ones_like(window) for window in windows], True)
        ids = pad_sequence(list(windows), True, self.pad_token_id)
        missing = int(not ids.shape[1])  # no window has a token: a pad, as models read one at least
        return F.pad(ids, (0, missing), value=self.pad_token_id), F.pad(mask, (0, missing))


def windows_for(tokenizer: Any, length: int, stride: int | None = None) -> DocumentWindows:
    """Return windows whose ends are those that a tokenizer puts around a text."""
    marks = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    head = marks.index(0)
    tail = marks[::-1].index(0)
    return DocumentWindows(length, stride, head, tail)
