"""What the methods of `extend_positions` make of a learned table's rows, and of rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _copied(rows: Tensor, count: int) -> Tensor:
    return rows[torch.arange(count, device=rows.device) % len(rows)]


def _mirrored(rows: Tensor, count: int) -> Tensor:
    return _copied(torch.cat([rows, rows.flip(0)]), count)


def _interpolated(rows: Tensor, count: int) -> Tensor:
    exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return F.interpolate(exact.T[None], size=count, mode="linear", align_corners=True)[0].T.to(rows.dtype)


def _linear(length: int, factor: float) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": factor}


def _dynamic(length: int, factor: float) -> dict[str, Any]:
    return {"rope_type": "dynamic", "factor": factor}


def _yarn(length: int, factor: float) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}


# rows [n, D] and their new number -> rows [m, D]; the first method is the default
TABLE_METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "copy": _copied, "interpolate": _interpolated, "mirror": _mirrored,
}  # fmt: skip
# old length and how many times longer -> rope parameters
ROPE_METHODS: dict[str, Callable[[int, float], dict[str, Any]]] = {
    "yarn": _yarn, "linear": _linear, "dynamic": _dynamic,
}  # fmt: skip
KEEPING = ("copy", "mirror")  # the old rows are the first of the new ones
OWN_LENGTH = ("dynamic",)  # transformers' formula reads the old length from max_position_embeddings
UNSCALED = "sliding_attention"  # layers that see no further than their window, whatever the length
