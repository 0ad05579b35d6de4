"""Backward passes that have no derivative: whoever asks for one gets an error, not the number without its part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...errors import DerivativeError

IN_OPERATIONS = (
    "the operations in C or Triton that attention was made by have none; call"
    ' hf_linattn.set_backend(model, "torch") before the forward, and run it inside'
    " torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
)


def first_order(why: str = IN_OPERATIONS) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for the backward of a `torch.autograd.Function` that is right for first derivatives alone.

    PyTorch's `once_differentiable` says so when a second pass comes to such a node. One that asks for the gradients of
    some tensors, as `torch.autograd.grad` does, passes it by, and its part is missing. So this says so in the first
    pass, in which gradients are recorded exactly where `create_graph=True`.

    Raises (the backward):
        DerivativeError: a graph of the gradient was asked for.
    """

    def wrap(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise DerivativeError(f"create_graph=True asks for the derivative of a gradient, and {why}")
            return backward(ctx, *gradients)

        return checked

    return wrap
