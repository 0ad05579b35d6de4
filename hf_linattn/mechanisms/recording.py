"""What a program for other inputs than its example may hold, as torch.export and torch.jit.trace make one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModeError
from ..ops.common.tracing import is_known, is_open, is_watched


def require_recordable(mechanism: Any, query: Tensor, *masks: Tensor | None) -> None:
    """Refuse a program in which lengths, paddings or packings of its example would stand for those of all inputs.

    Args:
        mechanism: one that has `any_length` is right in every such program.
        query: [B, H, N, D]. masks: its mask and sequence ids, each [B, N], if there are any.

    Raises:
        UnsupportedModeError: torch.jit.trace; torch.export of a dynamic size, or with a mask or ids; torch.func.vmap
        over a mask or ids.
    """
    if not is_watched() or mechanism.any_length:
        return
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return  # torch.compile makes another program where these differ
    if not is_open(query) and all(x is None or is_known(x) for x in masks):
        return
    raise UnsupportedModeError(
        f"mechanism {mechanism.config.mechanism!r} of layer {mechanism.layer.index} works by the length, padding and"
        " packing that it sees, and torch.jit.trace, torch.export with dynamic sizes or a mask, and torch.func.vmap"
        " over masks make one program for all: patch with a mechanism on the linear base (linear, performer,"
        " hedgehog, gla, retention, ...) or softmax, or export with static sizes and neither attention_mask nor"
        " position_ids"
    )
