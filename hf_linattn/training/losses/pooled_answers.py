"""What a teacher that reads documents in windows has answered, so that it reads each document once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_linattn.evaluation.document_windows import DocumentWindows


class PooledAnswers:
    """The pooled logits of documents, by their tokens: epochs and trainings at several rates see them again.

    All are of one model, in eval mode, and of one kind of windows. An answer is [K] numbers for K classes, so all of
    them stay in memory.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Tensor] = {}

    def read(self, model: nn.Module, windows: DocumentWindows, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return what `windows.pooled_logits` does, [B, K]; the model reads the rows that it has not read before.

        Args:
            inputs: `input_ids` and `attention_mask` [B, N]; how a row is padded does not matter.
        """
        ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
        rows = [row[own].cpu().numpy().tobytes() for row, own in zip(ids, real, strict=True)]
        missing = {row: place for place, row in enumerate(rows) if row not in self._known}
        if missing:
            batch = {name: inputs[name][[*missing.values()]] for name in ("input_ids", "attention_mask")}
            self._known.update(zip(missing, windows.pooled_logits(model, batch).cpu(), strict=True))
        return torch.stack([self._known[row] for row in rows]).to(ids.device)
