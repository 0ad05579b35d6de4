"""divergence: how near the predictions on text are to the original's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..chunked_sums import chunk_rows, sum_by_chunks
from ..sensitivity import log_probabilities, logits_of, real_tokens
from .gates import Gates
from .options import Signal


def beyond_windows(batches: Sequence[Mapping[str, Any]], gates: Gates) -> list[Mapping[str, Any]]:
    """Return the batches with a row beyond the window of what replaces heads; the others' divergence is rounding.

    Raises:
        DataError: there is none.
    """
    lengths = [gates.longest_row(batch) for batch in batches]
    return gates.beyond_window(batches, lengths, "batches: the longest row", "text")


class DivergenceSignal(Signal):
    """- KL(original || gated), the mean over a batch's real tokens, in nats; batches are `prediction_inputs`."""

    name = "divergence"

    def __init__(self, batches: Sequence[Mapping[str, Any]]):
        super().__init__(batches)
        self._original: tuple[Any, Tensor] | None = None  # of the batch that was last asked for

    @property
    def groups(self) -> list[str]:
        """What each example is of; the groups count alike."""
        return ["text"] * len(self.examples)

    def value(self, gates: Gates, values: Tensor, example: Mapping[str, Any]) -> Tensor:
        """Return the signal [] of a batch with these gates [U]: the higher, the better."""
        original = self._logits_of_original(gates, example)
        found = logits_of(gates.run(values, example))
        real = real_tokens(example, found).float()
        rows = [x.flatten(0, 1) for x in (found, original, real)]
        return -sum_by_chunks(_divergence, chunk_rows(found.shape[-1]), *rows) / real.sum()

    def _logits_of_original(self, gates: Gates, example: Mapping[str, Any]) -> Tensor:
        if self._original is None or self._original[0] is not example:
            self._original = example, logits_of(gates.run_original(example))
        return self._original[1]


def _divergence(found: Tensor, original: Tensor, real: Tensor) -> Tensor:
    """Return KL(original || found), summed over the real tokens, of logits [T, V]."""
    wanted, got = log_probabilities(original), log_probabilities(found)
    return ((wanted.exp() * (wanted - got)).sum(-1) * real).sum()
