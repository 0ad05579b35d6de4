"""Exponentials of masked and rescaled log weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

LOWEST = -1e38  # below every score and log weight; twice that, and half as much again, is still a float32
LARGEST = 1e17  # of operands whose products, added up over a head, are to stay far inside LOWEST
LN_2 = math.log(2)
LOG2_E = 1 / LN_2


def fast_exp(x: Tensor) -> Tensor:
    """e^x, as fast where it vanishes as elsewhere; torch.exp then takes ten times as long."""
    return (x * LOG2_E).exp2_()


def bounded(x: Tensor, least: float = -LARGEST, most: float = LARGEST) -> Tensor:
    """x between two bounds, beyond which it has no gradient; what is not finite becomes NaN.

    Of heads, for products to which `LOWEST` is added; of a trained number, for whatever finite value it has.

    >>> bounded(torch.tensor([2.0, -3e38, torch.inf]))
    tensor([ 2.0000e+00, -1.0000e+17,         nan])
    """
    largest = torch.finfo(x.dtype).max
    return torch.add(x.clamp(max(least, -largest), min(most, largest)), x, alpha=0.0)


def positive(log: Tensor) -> Tensor:
    """exp(log) of a trained rate or penalty, from 1e-13, which is none, to 8,103, by which e^-x is zero."""
    return log.clamp(-30.0, 9.0).exp()


def refuses_cumsum(x: Tensor) -> bool:
    """Whether PyTorch has no running sum of these numbers that is deterministic, where only such are asked for."""
    return x.is_cuda and torch.are_deterministic_algorithms_enabled()


def running_sum(x: Tensor, dim: int = -1) -> Tensor:
    """x summed up along a dimension, by doubling steps where `cumsum` would raise.

    >>> running_sum(torch.tensor([1.0, 2.0, 3.0]))
    tensor([1., 3., 6.])
    """
    if not refuses_cumsum(x):
        return x.cumsum(dim)
    x, step = x.movedim(dim, -1), 1
    while step < x.shape[-1]:
        x, step = x + F.pad(x, (step, -step)), 2 * step
    return x.movedim(-1, dim)


def dense(x: Tensor) -> Tensor:
    """x, contiguous in compiled graphs: their backward passes disagree on the layout of a transposed input."""
    return x.contiguous() if torch.compiler.is_compiling() else x
