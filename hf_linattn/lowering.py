"""Lowering an error by L-BFGS, with a way back from steps that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class _NotFiniteError(Exception):
    """A trial step came to an error or to gradients that are not finite."""


def lower(parameters: Sequence[nn.Parameter], measure: Callable[[], Tensor], steps: int) -> bool:
    """Lower the error that `measure` returns by L-BFGS; return whether all that was tried was finite.

    At the first error or gradient that is not, parameters go back to the best point so far, which may be where they
    began, and nothing more is tried.

    Args:
        parameters: what is fitted, in place.
        measure: returns a number that depends on them.
        steps: iterations at most.

    >>> x = nn.Parameter(torch.tensor(4.0))
    >>> lower([x], lambda: (x - 1).square(), 9), round(x.item(), 3)
    (True, 1.0)
    """
    # made for this error alone: what it knows of the curvature belongs to no other
    optimizer = torch.optim.LBFGS(parameters, max_iter=steps, line_search_fn="strong_wolfe")
    best, least = [p.detach().clone() for p in parameters], torch.inf

    @torch.enable_grad()
    def evaluate() -> Tensor:
        nonlocal best, least
        optimizer.zero_grad()
        error = measure()
        error.backward(inputs=list(parameters))  # of what else the error knows no gradient is left behind
        gradients = (p.grad for p in parameters if p.grad is not None)
        if not all(bool(x.isfinite().all()) for x in (error, *parameters, *gradients)):
            raise _NotFiniteError
        if float(error.detach()) < least:
            best, least = [p.detach().clone() for p in parameters], float(error.detach())
        return error

    try:
        optimizer.step(evaluate)  # type: ignore[arg-type]  # a tensor is as good as a number
    except _NotFiniteError:
        with torch.no_grad():
            for parameter, value in zip(parameters, best, strict=True):
                parameter.copy_(value)
        return False
    return True
