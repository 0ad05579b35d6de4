"""What a backward pass makes again instead of keeping it: all that a function makes of a few tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .tracing import is_watched


def made_again(function: Callable[..., Any], *given: Tensor) -> Any:
    """Return function(*given), of which a graph keeps `given` and what the function holds; it draws no numbers."""
    if not torch.is_grad_enabled() or is_watched():
        return function(*given)
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
