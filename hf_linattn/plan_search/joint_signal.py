"""both: several signals as one, in the same rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .gates import Gates
from .options import Signal, row_lengths


class JointSignal(Signal):
    """Signals that count alike: the mean of theirs, each divided by the length that its mean scores had at first.

    So the heads that are opened for one are open for the others, too, and a signal counts as far as it still fails.
    """

    def __init__(self, signals: Sequence[Signal]):
        super().__init__([(signal, example) for signal in signals for example in signal.examples])
        self.signals = list(signals)
        self.name = " and ".join(signal.name for signal in signals)

    @property
    def groups(self) -> list[str]:
        """What each example is of, in its own signal."""
        return [group for signal in self.signals for group in signal.groups]

    @property
    def weights(self) -> Tensor:
        """What each example counts [E]: half of what it does in its own signal, where there are two."""
        return torch.cat([signal.weights for signal in self.signals]) / len(self.signals)

    def value(self, gates: Gates, values: Tensor, example: Any) -> Tensor:
        """Return the example's own signal [] with these gates [U]: the higher, the better."""
        signal, own = example
        return signal.value(gates, values, own)

    def slopes(self, gates: Gates, values: Tensor, example: Any) -> Tensor:
        """Return d signal / d g [U] of the example's own signal at these gates."""
        signal, own = example
        return signal.slopes(gates, values, own)

    def scales(self, scores: Tensor) -> Tensor:
        """Return what to divide scores [E, U] by, as [E, 1]: so that each signal's mean has length 1."""
        parts = scores.split([len(signal.examples) for signal in self.signals])
        found = []
        for signal, own in zip(self.signals, parts, strict=True):
            scales = signal.scales(own)
            found.append(scales * row_lengths(signal.mean(own, scales)[None]))
        return torch.cat(found)
