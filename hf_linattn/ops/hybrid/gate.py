"""How far the gate of a head lets in what lies beyond its window: c = sigmoid(`gate_logit`)."""

from __future__ import annotations

from torch import Tensor

GATE_GAIN = 10.0  # so that the usual learning rates open a gate in a few hundred steps
GATE_RANGE = (-1.5, 0.7)  # where a gate is all but shut and all but open: at 0 or 1 it would have no gradient


def gate_logit(far_gate: Tensor) -> Tensor:
    """Return GATE_GAIN a with a held in GATE_RANGE; beyond it the gradient is that at its end."""
    return GATE_GAIN * (far_gate.detach().clamp(*GATE_RANGE) + (far_gate - far_gate.detach()))
