"""How fast a training goes: tokens per second, and its share of the rate at which the machine multiplies matrices."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

COUNTED = 2  # the step whose operations are counted; the first one makes what later ones find
# of the matrices that are multiplied to measure a machine's rate, and how many products are taken at a time; else:
SIZES = {"cuda": (4096, 16)}
SIZE = (1024, 1)
LONG = 0.5  # seconds of a run that needs no other: of a dtype without instructions for it


class Speed(TrainerCallback):
    """Times the steps of a training, and counts the operations of PyTorch's matrix products in its second one.

    Kernels of this library in C and Triton are not counted, so the share is that of projections, feed-forwards, head
    and softmax attention. Evaluations and checkpoints are not timed.

    Args:
        row_tokens: tokens of a row. dtype: of the products.
    """

    def __init__(self, row_tokens: float, dtype: torch.dtype):
        self.row_tokens, self.dtype = row_tokens, dtype
        self.taken, self.timed, self.seconds, self.operations = 0, 0, 0.0, 0
        self.rate = 0.0
        self.counting: FlopCounterMode | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.rate = matrix_rate(args.device.type, self.dtype)  # now, as a step leaves no memory for it

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.taken += 1
        if self.taken == COUNTED and not args.torch_compile:  # which would compile anew
            self.counting = FlopCounterMode(display=False)
            self.counting.mod_tracker = _Whole()  # type: ignore[assignment]
            self.counting.__enter__()
        self.start = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.counting is not None:
            self.operations = self.counting.get_total_flops()
            self.stop_counting()
        elif self.taken > COUNTED:
            self.timed += 1
            self.seconds += time.perf_counter() - self.start

    def stop_counting(self) -> None:
        """Count no more, also where the step did not come to its end."""
        if self.counting is not None:
            self.counting.__exit__(None, None, None)
            self.counting = None

    def result(self, args: TrainingArguments) -> dict[str, float]:
        """Return `tokens_per_second` of all processes and `matrix_share`; nothing after fewer than three steps."""
        if not self.timed:
            return {}
        each = self.seconds / self.timed
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        found = {"tokens_per_second": round(rows * self.row_tokens / each, 1)}
        if self.operations:
            found["matrix_share"] = round(self.operations / each / self.rate, 4)
        return found


class Clock(TrainerCallback, ExportableState):
    """Says how long a training took, over all calls that took its steps; checkpoints hold what it said then.

    What a call did after the checkpoint from which the next one went on is not part of it: those steps are taken anew.

    Args:
        before: seconds of the calls before.
    """

    def __init__(self, before: float = 0.0):
        self.before, self.start = before, time.perf_counter()

    @classmethod
    def resumed(cls, saved: Mapping[str, Any] | None) -> Clock:
        """Return one that goes on from the state of a checkpoint; None: there is none."""
        recorded = (saved or {}).get("stateful_callbacks", {}).get(cls.__name__, {})
        return cls(**recorded.get("attributes", {}))

    @property
    def seconds(self) -> float:
        """Seconds until now."""
        return self.before + time.perf_counter() - self.start

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"args": {}, "attributes": {"before": self.seconds}}


class _Whole(nullcontext[None]):
    """Counts all as one: PyTorch's tracker of modules hooks into gradients, which attention transfer cannot have."""

    parents = frozenset(("Global",))


@functools.cache
def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Return the operations a second of a large matrix product, two for each multiplication, the best of four runs."""
    size, products = SIZES.get(device, SIZE)
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(products):
            result = left @ right
        result.flatten()[0].item()  # which waits for the device
        best = min(best, time.perf_counter() - start)
        if best > LONG:
            break
    return 2 * size**3 * products / best


def product_dtype(args: TrainingArguments, own: torch.dtype) -> torch.dtype:
    """Return the dtype of the matrix products of a training: of mixed precision, or else the weights' own."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else own
