"""What a backend brings: the operations that attention over long inputs is made of."""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import require


class Operations(NamedTuple):
    """Each is None where there is nothing of the kind, which leaves it to the C, or to PyTorch.

    causal_sums: a `linear.autograd.CausalSums`. block_softmax: a `block_softmax.autograd.BlockSoftmax`.
    mapped_attention: called as `linear.cpu_fused.mapped_attention` is, from heads whose features it makes itself.
    hybrid_step: called with (query, key, value, weights, maps, state), see `hybrid.fused.step_maps`, returns the
    attention of one token without gradients, and the tensors of the next state; it reads the features that
    `causal_sums` makes.
    """

    causal_sums: Any = None
    block_softmax: Any = None
    mapped_attention: Any = None
    hybrid_step: Any = None


NOTHING = Operations()


def default_backend() -> str:
    """Return the backend that mechanisms are made with: what HF_LINATTN_BACKEND says, "auto" or "torch".

    Raises:
        OptionError: it says anything else. The other backends are chosen for one model, by `set_backend`.
    """
    name = os.environ.get("HF_LINATTN_BACKEND", "auto")
    require("the environment variable HF_LINATTN_BACKEND", name, name in ("auto", "torch"), "'auto' or 'torch'")
    return name


DEFAULT_BACKEND = default_backend()  # read once, so that all layers of a process agree


def operations_for(mechanism: Any, heads: Tensor) -> Operations:
    """Return what a mechanism reads long inputs by where these heads are: on a GPU "auto" has Triton's."""
    automatic = mechanism.backend == "auto" and "triton" in mechanism.backends
    return gpu_operations(heads.device) if automatic else mechanism.operations


@functools.cache
def gpu_operations(device: torch.device) -> Operations:
    """Return Triton's operations on a GPU that has run them, see `is_large`, if it is installed; else nothing."""
    if device.type != "cuda":
        return NOTHING
    try:  # here: nothing else needs Triton
        from .runtime.triton import is_large
        from .runtime.triton_operations import TRITON
    except ImportError:
        return NOTHING
    return TRITON if is_large(device) else NOTHING
