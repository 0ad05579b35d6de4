"""Backward passes without a derivative, or for one gradient at a time: who asks for more gets an error, no number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import DerivativeError
from .tracing import is_mapped

IN_OPERATIONS = (
    "the operations in C or Triton that attention was made by have none; call"
    ' hf_linattn.set_backend(model, "torch") before the forward, and run it inside'
    " torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
)

SEVERAL = (
    "is_grads_batched=True, which vectorize=True of torch.autograd.functional sets, hands over several gradients as"
    " one, and the backward pass of this attention takes one at a time; leave it out, or use torch.func.jacrev"
)


def one_at_a_time(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward of a `torch.autograd.Function` that writes into memory of its own, which vmap cannot map.

    Raises (the backward):
        DerivativeError: gradients are mapped over.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if any(isinstance(x, Tensor) and is_mapped(x) for x in gradients):
            raise DerivativeError(SEVERAL)
        return backward(ctx, *gradients)

    return checked


def first_order(why: str = IN_OPERATIONS) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for the backward of a `torch.autograd.Function` that is right for first derivatives alone.

    PyTorch's `once_differentiable` says so when a second pass comes to such a node. One that asks for the gradients of
    some tensors, as `torch.autograd.grad` does, passes it by, and its part is missing. So this says so in the first
    pass, in which gradients are recorded exactly where `create_graph=True`. Such a backward is `one_at_a_time`.

    Raises (the backward):
        DerivativeError: a graph of the gradient was asked for, or several gradients at once.
    """

    def wrap(backward: Callable[..., Any]) -> Callable[..., Any]:
        single = one_at_a_time(backward)

        @functools.wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise DerivativeError(f"create_graph=True asks for the derivative of a gradient, and {why}")
            return single(ctx, *gradients)

        return checked

    return wrap
