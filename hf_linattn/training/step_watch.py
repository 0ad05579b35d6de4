"""What a step of a training takes: its time, and the memory that it holds at once beside the weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback

from hf_linattn.evaluation.memory import LiveBytes


@dataclass
class StepWatch(TrainerCallback):
    """Counts what a step holds at once beside the weights, and times all but the first."""

    device: torch.device
    peak: int = 0
    times: list[float] = field(default_factory=list)
    counting: LiveBytes | None = None
    computed: int = 0  # what the first step had held when its gradients were known
    state: int = 0  # what it leaves: the optimizer's moments

    @property
    def seconds(self) -> float:
        """The median of the steps, but for the first where there are others."""
        return statistics.median(self.times[1:] or self.times)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if not self.times:
                torch.cuda.reset_peak_memory_stats(self.device)
                self.before = torch.cuda.memory_allocated(self.device)
        elif not self.times:
            self.counting = LiveBytes()
            self.counting.__enter__()
        self.start = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.counting is not None:
            self.computed = self.counting.peak

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak = torch.cuda.max_memory_allocated(self.device) - self.before
        if self.counting is not None:
            self.state = self.counting.live
            self.peak = max(self.counting.peak, self.computed + self.state)  # later steps begin with the moments
            self.stop_counting()
        self.times.append(time.perf_counter() - self.start)

    def stop_counting(self) -> None:
        """Count no more, also where the step did not come to its end."""
        if self.counting is not None:
            self.counting.__exit__(None, None, None)
            self.counting = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is computed inside beside what the steps left."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device) - self.before)
            return
        with LiveBytes() as count:
            yield
        self.peak = max(self.peak, self.state + count.peak)
