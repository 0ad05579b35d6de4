"""gates: Adam on all gates together, weights frozen, at the price of an open gate that leaves as many open as wanted.

After DuoAttention (Xiao et al. 2024, arXiv 2410.10819), which trains gates against a fixed penalty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..inference import progress_bar
from .gates import Gates
from .options import SearchOptions, Signal
from .slope import slopes_at

NOISE = 0.05  # gradients below that, in shares of the mean slopes' length, move no gate as those above it do

def trained_gates(gates: Gates, signal: Signal, options: SearchOptions, keep: int) -> Tensor:
    """Return gates in [0, 1] whose sum is `keep`, [U]; those that came out alike in order of slope.

    They begin from the slopes, divided by that of the last one kept. A step of Adam raises the signal of one example,
    divided by the length of its slopes and counted as in their mean, less a price for every open gate: the price is
    the number that, taken from all gates before they are cut to [0, 1], leaves a sum of `keep`. So it needs no choice.

    Deviation from DuoAttention: the price is found, not given, and the signal may be the answers' likelihood.
    """
    found = slopes_at(gates, signal, torch.zeros_like(gates.values), options)
    scales = signal.scales(found)
    steepness, counts = signal.mean(found, scales), len(found) * signal.weights.to(found.dtype)
    at_margin = steepness.topk(keep).values[-1].clamp(min=torch.finfo(steepness.dtype).tiny)
    trained = at_a_price((steepness / at_margin).clamp(0, 1), keep).requires_grad_()
    optimizer = torch.optim.Adam([trained], lr=options.learning_rate, eps=NOISE)
    steps = progress_bar(range(options.steps), desc=f"gates by {signal.name}", progress=options.progress)
    for step in steps:
        number = step % len(signal.examples)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(signal.value(gates, trained, signal.examples[number]), trained)
        signal.require_finite(number, gradient)
        trained.grad = -gradient / scales[number] * counts[number]
        optimizer.step()
        with torch.no_grad():
            trained.copy_(at_a_price(trained, keep))
    order = steepness.argsort().argsort() / len(steepness)  # in [0, 1)
    return trained.detach() + 1e-3 * order


def at_a_price(values: Tensor, keep: int) -> Tensor:
    """Return clamp(values - price, 0, 1) with the price, of either sign, at which the sum is `keep`.

    >>> at_a_price(torch.tensor([0.9, 0.8, 0.1]), 1)
    tensor([0.5500, 0.4500, 0.0000])
    """
    low, high = values.min() - 1, values.max()
    for _ in range(60):
        price = (low + high) / 2
        if (values - price).clamp(0, 1).sum() > keep:
            low = price
        else:
            high = price
    return (values - (low + high) / 2).clamp(0, 1)
