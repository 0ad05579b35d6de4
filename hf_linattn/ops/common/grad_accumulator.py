"""Parts of one tensor whose gradients are added up in place.

A part that is cut out by indexing gets a gradient of the size of the whole tensor, zero but for the part, and all of
them are added up: quadratic time for an operation that reads its keys part by part. Parts in a row come from `split`,
which puts their gradients together once; parts that overlap or lie scattered come from here.

With `create_graph=True` what is added up is part of the graph: sums of gradients have derivatives as any others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.cpu import zeros
from .derivatives import one_at_a_time
from .tracing import is_watched


class GradAccumulator:
    """A tensor to take parts from, and their gradients added up: each costs its own size, not that of the tensor.

    Attributes:
        whole: the tensor, which may be used as it is, too.
        gradient: where its gradient is added up; None if none is needed.
    """

    def __init__(self, tensor: Tensor):
        needed = tensor.requires_grad and torch.is_grad_enabled() and not is_watched()
        self.gradient = _Gradient(tensor.shape) if needed else None
        self.whole: Tensor = _Whole.apply(tensor, self.gradient) if needed else tensor

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return `length` entries from `start` on."""
        return self._take(_narrow, dim, start, length)

    def index_select(self, first_dim: int, last_dim: int, index: Tensor) -> Tensor:
        """Return the entries at `index` [K] of these dimensions flattened to one, any of them any number of times."""
        return self._take(_select, first_dim, last_dim, index)

    def rows(self, place: Tensor) -> Tensor:
        """Return what stands at `place` [B, H, K] of each head in a tensor [B, H, L, D], any number of times."""
        return self._take(rows_at, place)

    def _take(self, how: Any, *place: Any) -> Tensor:
        if self.gradient is None:
            return how(self.whole, *place)
        if not torch.is_grad_enabled():  # a view that asks for gradients has no node then, for which hooks look
            return how(self.whole.detach(), *place)
        return _Part.apply(self.whole, self.gradient, how, place)


class _Gradient:
    """The gradient of a tensor as far as its parts have added to it; apart from it, which the graph must not hold.

    What a backward pass that ended in an error left behind is no part of the next one's.
    """

    def __init__(self, shape: torch.Size):
        self.shape = shape
        self.total: Tensor | None = None
        self.backward_pass = -1

    def begun(self, like: Tensor) -> Tensor:
        """What others add to, zero if nobody has; like another one's numbers then."""
        self._enter_pass()
        if self.total is None:
            self.total = zeros(like, self.shape)
        return self.total

    def add(self, gradient: Tensor, how: Any, place: tuple[Any, ...]) -> None:
        total = self.begun(gradient)
        how(total, *place, add=gradient.to(total.dtype))

    def take_over(self, gradient: Tensor) -> None:
        """Add a gradient of the whole, which from now on is nobody else's: the first is what the others add to."""
        self._enter_pass()
        self.total = gradient if self.total is None else self.total.add_(gradient)

    def pop(self) -> Tensor | None:
        self._enter_pass()
        total, self.total = self.total, None
        return total

    def _enter_pass(self) -> None:
        if self.backward_pass != (now := torch._C._current_graph_task_id()):
            self.total, self.backward_pass = None, now


def _narrow(x: Tensor, dim: int, start: int, length: int, add: Tensor | None = None) -> Tensor:
    """Return a part of x, to which `add` is added."""
    part = x.narrow(dim, start, length)
    return part if add is None else part.add_(add)


def _select(x: Tensor, first_dim: int, last_dim: int, index: Tensor, add: Tensor | None = None) -> Tensor:
    """Return entries of x, or x with `add` added to them."""
    rows = x.flatten(first_dim, last_dim)
    return rows.index_select(first_dim, index) if add is None else rows.index_add_(first_dim, index, add)


def rows_at(x: Tensor, place: Tensor, add: Tensor | None = None) -> Tensor:
    """Return what stands at `place` [B, H, K] of each head in x [B, H, L, D], or x with `add` added to that."""
    batch, heads, length, _ = x.shape
    row, head = torch.arange(batch, device=x.device)[:, None, None], torch.arange(heads, device=x.device)[:, None]
    turned = x.transpose(1, 2)  # as models give heads: whole rows of memory are copied, which index_select does fast
    if x.is_contiguous():
        rows, index = x.flatten(0, 2), (row * heads + head) * length + place
    elif turned.is_contiguous():
        rows, index = turned.flatten(0, 2), (row * length + place) * heads + head
    else:
        return x[row, head, place] if add is None else x.index_put_((row, head, place), add, accumulate=True)
    if add is None:
        return rows.index_select(0, index.flatten()).view(*place.shape, x.shape[3])
    rows.index_add_(0, index.flatten(), add.flatten(0, 2))
    return x


class _Part(torch.autograd.Function):
    """A part; its gradient is added to that of the whole, and none goes on."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, gradient: _Gradient, how: Any, place: tuple[Any, ...]) -> Tensor:
        ctx.to = (gradient, how, place)
        return how(whole, *place)

    @staticmethod
    @one_at_a_time
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        accumulated, how, place = ctx.to
        accumulated.add(gradient, how, place)
        return None, None, None, None


class _Whole(torch.autograd.Function):
    """The tensor itself, in a backward pass after all of its parts: hands on what they added up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: _Gradient) -> Tensor:
        ctx.of_parts = gradient
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        total = ctx.of_parts.pop()
        if total is None or gradient is None:
            return gradient if total is None else total, None
        return total.add_(gradient), None
