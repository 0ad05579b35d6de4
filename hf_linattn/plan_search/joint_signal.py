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
    The examples of the signals are mixed evenly, as a search may take them in turn.
    """

    def __init__(self, signals: Sequence[Signal]):
        own = [(signal, i) for signal in signals for i in range(len(signal.examples))]
        self.places = sorted(own, key=lambda place: (place[1] + 0.5) / len(place[0].examples))
        super().__init__([(signal, signal.examples[i]) for signal, i in self.places])
        self.signals = list(signals)
        self.name = " and ".join(signal.name for signal in signals)

    @property
    def groups(self) -> list[str]:
        """What each example is of, in its own signal."""
        return [signal.groups[i] for signal, i in self.places]

    @property
    def weights(self) -> Tensor:
        """What each example counts [E]: half of what it does in its own signal, where there are two."""
        return torch.stack([signal.weights[i] for signal, i in self.places]) / len(self.signals)

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
        found = torch.empty_like(scores[:, :1])
        for signal in self.signals:
            rows = [number for number, place in enumerate(self.places) if place[0] is signal]
            scales = signal.scales(scores[rows])
            length = row_lengths(signal.mean(scores[rows], scales)[None])
            found[rows] = (scales * length).clamp(min=torch.finfo(scores.dtype).tiny)
        return found

    def require_finite(self, number: int, found: Tensor) -> None:
        """Raise `OptionError`, with the example's number in its own signal, unless what was found is finite."""
        signal, own = self.places[number]
        signal.require_finite(own, found)
