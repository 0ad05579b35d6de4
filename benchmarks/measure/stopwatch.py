"""What is timed for how long, and the clock that competitors share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

SOFTMAX = "softmax"  # `scaled_dot_product_attention` as PyTorch chooses its kernel
FLASH = "softmax, FlashAttention"  # the same, held to that kernel; on GPUs only


@dataclass(frozen=True)
class Plan:
    """What one run measures; sizes in tokens, budgets in seconds; what has no lengths or contexts is left out."""

    lengths: tuple[int, ...]
    backward_lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    budget: float = 3.0  # repeats of one row stop after this long, but not before `min_repeats`
    min_repeats: int = 5
    max_repeats: int = 30
    batch: int = 1  # of the operations and steps
    num_heads: int = 8
    head_dim: int = 64
    num_layers: int = 4  # of the model that decodes; its width is num_heads * head_dim
    ceiling_size: int = 2048  # side of the square matrices of the ceilings
    step_context: int = 0  # tokens before a step of one layer


PLANS = {
    "cpu": Plan(
        lengths=(512, 1024, 2048, 4096, 8192, 16384),
        backward_lengths=(512, 1024, 2048, 4096, 8192),
        contexts=(1024, 32768),
    ),
    "cuda": Plan(
        lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
        backward_lengths=(1024, 2048, 4096, 8192, 16384, 32768),
        contexts=(),
        budget=0.5,
        min_repeats=3,
        max_repeats=20,
        batch=4,
        num_heads=16,
        head_dim=128,
        ceiling_size=8192,
        step_context=16384,
    ),
    "quick": Plan(
        lengths=(64, 128),
        backward_lengths=(64,),
        contexts=(32, 96),
        budget=0.0,
        num_heads=2,
        head_dim=16,
        num_layers=2,
        ceiling_size=64,
        step_context=96,
    ),
}


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the repeats."""

    median: float
    fastest: float
    slowest: float
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise times given in seconds."""
        return cls(1e3 * median(seconds), 1e3 * min(seconds), 1e3 * max(seconds), len(seconds))


class Stopwatch:
    """Times competitors in turns; `backend` is what the mechanisms among them use."""

    def __init__(self, device: torch.device, plan: Plan, backend: str = "auto"):
        self.device, self.plan, self.backend = device, plan, backend

    def once(self, run: Callable[[], Any]) -> float:
        """Return the seconds of one call; on a GPU those between an event before it and one after it.

        The events wait in the device's queue as the work does: behind a call that is still running there, what the
        host needs to launch this one does not count unless the device has to wait for it.
        """
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end)

    def compare(self, competitors: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Return the seconds of every timed call: one turn each per repeat, of a call that warms up and a timed one.

        What ran before leaves its own data in the caches, and if it took seconds the system may have taken back pages
        that this one's last output was in: the call that warms up pays for both, as the first of many in a row does.
        """
        seconds: dict[str, list[float]] = {name: [] for name in competitors}
        started = time.perf_counter()
        for repeat in range(self.plan.max_repeats):
            if repeat >= self.plan.min_repeats and time.perf_counter() - started > self.plan.budget:
                break
            for name, run in competitors.items():
                run()
                seconds[name].append(self.once(run))
        return seconds
