"""What a teacher predicts, kept on disk: its likeliest tokens with their log probabilities, so also what is left.

A row is found again by its tokens, so that rows which are seen more than once, in epochs or in trainings with several
learning rates, have their teacher run once. Each process writes a file of its own and reads those of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

NAMED = ("input_ids", "position_ids", "attention_mask")  # inputs that a row is known by
DIGEST, ENTRY = 32, 8  # bytes of a row's digest; of a token and its log probability


class KeptLogits:
    """The `count` likeliest tokens of a teacher in each position of rows, in the files of a folder.

    Args:
        folder: is made when the first row is kept. process: number of this one, which writes a file of its own.
    """

    def __init__(self, folder: Path, count: int, process: int = 0):
        self.folder, self.count, self.process = folder, count, process
        self._places: dict[bytes, tuple[Path, int]] = {}
        self._read: dict[Path, int] = {}  # bytes of each file whose rows are known

    def row_bytes(self, length: int) -> int:
        """Return what a row of that many tokens takes."""
        return DIGEST + ENTRY * length * self.count

    def find(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return tokens int64 and log probabilities float32 [B, N, count] of all rows, or None if one is not kept."""
        ids = inputs["input_ids"]
        digests = _digests(inputs)
        if any(digest not in self._places for digest in digests):
            self._look_around(ids.shape[1])
        if any(digest not in self._places for digest in digests):
            return None
        read = [self._row(*self._places[digest], ids.shape[1]) for digest in digests]
        tokens, logs = (torch.stack(parts).to(ids.device) for parts in zip(*read, strict=True))
        return tokens.long(), logs

    def keep(self, inputs: Mapping[str, Tensor], tokens: Tensor, logs: Tensor) -> None:
        """Write rows that are not kept yet, each whole; see `find`."""
        length = tokens.shape[1]
        file, size = self.folder / f"{length}-{self.process}.rows", self.row_bytes(length)
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = file.stat().st_size // size * size if file.is_file() else 0
        with open(file, "r+b" if file.is_file() else "w+b") as out:
            out.truncate(whole)  # what a process left that was killed in the middle of a row
            out.seek(whole)
            for digest, row, values in zip(_digests(inputs), tokens, logs, strict=True):
                if digest not in self._places:
                    out.write(digest + _bytes_of(row.to(torch.int32)) + _bytes_of(values.float()))
                    self._places[digest] = file, out.tell() - size

    def _look_around(self, length: int) -> None:
        """Learn of rows of a length that are in the files by now."""
        size = self.row_bytes(length)
        for file in sorted(self.folder.glob(f"{length}-*.rows")):
            first, last = self._read.get(file, 0), file.stat().st_size // size * size
            with open(file, "rb") as rows:
                for place in range(first, last, size):
                    rows.seek(place)
                    self._places.setdefault(rows.read(DIGEST), (file, place))
            self._read[file] = last

    def _row(self, file: Path, place: int, length: int) -> tuple[Tensor, Tensor]:
        with open(file, "rb") as rows:
            rows.seek(place + DIGEST)
            tokens, logs = (rows.read(ENTRY // 2 * length * self.count) for _ in range(2))
        shape = length, self.count
        found = np.frombuffer(tokens, np.int32).reshape(shape), np.frombuffer(logs, np.float32).reshape(shape)
        return torch.from_numpy(found[0].copy()), torch.from_numpy(found[1].copy())


@torch.no_grad()
def likeliest(
    project: Callable[[Tensor], Tensor], states: Tensor, count: int, temperature: float, rows: int
) -> tuple[Tensor, Tensor]:
    """Return the `count` likeliest tokens int64 and their log probabilities float32 [B, N, count].

    Args:
        project: makes logits of states [B, N, d], `rows` of them at a time. temperature: divides the logits.
    """
    tokens, logs = [], []
    for chunk in states.flatten(0, 1).split(rows):
        logits = project(chunk)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        found = exact.log_softmax(-1).topk(count, dim=-1)
        tokens.append(found.indices)
        logs.append(found.values.float())
    shape = (*states.shape[:2], count)
    return torch.cat(tokens).view(shape), torch.cat(logs).view(shape)


def _digests(inputs: Mapping[str, Tensor]) -> list[bytes]:
    """Return the SHA-256 of each row of a batch."""
    named = [inputs[name].cpu() for name in NAMED if inputs.get(name) is not None]
    return [hashlib.sha256(b"".join(map(_bytes_of, row))).digest() for row in zip(*named, strict=True)]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().numpy().tobytes()
