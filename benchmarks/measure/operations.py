"""The operation alone: a mechanism on random heads beside `scaled_dot_product_attention` on the same ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure.fla_kernels import FLA, fla_competitors
from benchmarks.measure.steps import make_mechanism, random_heads
from benchmarks.measure.stopwatch import FLASH, SOFTMAX, Stopwatch, Timing
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.testing.counters import flops_of

BASELINES = (SOFTMAX, FLASH, *FLA)
COUNTED = 2048  # tokens, at most, for which the products of a Triton backend are counted


@dataclass(frozen=True)
class OperationRow:
    """One mechanism or baseline, alone, at one length.

    `ratio` is softmax's median time over this one's, `flash_ratio` that of FlashAttention, null on a CPU.
    `floor_share` is the part of the median time that its matrix products, or reading inputs and writing outputs once,
    would take at the ceilings of the machine, whichever is longer; null for baselines, as the pairs that their kernels
    leave out are not known. `peak_bytes` is what a call has at most beside what is there before it, of passes with
    gradients on a GPU.
    """

    mechanism: str
    mode: str
    direction: str
    length: int
    milliseconds: Timing
    ratio: float
    floor_share: float | None = None
    flash_ratio: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Call:
    """One call of an operation, with its backward pass if there is a gradient of its output."""

    attend: Callable[..., Tensor]
    heads: list[Tensor]
    gradient: Tensor | None

    def __call__(self) -> None:
        with torch.set_grad_enabled(self.gradient is not None):
            output = self.attend(*self.heads)
            if self.gradient is not None:
                torch.autograd.grad(output, self.heads, self.gradient)

    def flops(self) -> int:
        """Return the floating-point operations of its matrix products; the counter does not know `autograd.grad`."""

        def run() -> None:
            with torch.set_grad_enabled(self.gradient is not None):
                output = self.attend(*self.heads)
                if self.gradient is not None:
                    output.backward(self.gradient)

        count = flops_of(run)
        for x in self.heads:
            x.grad = None
        return count


@dataclass(frozen=True)
class Crossover:
    """The shortest measured length from which a mechanism stays faster than softmax; null if it never does."""

    mechanism: str
    mode: str
    direction: str
    length: int | None


@dataclass(frozen=True)
class Case:
    """What competitors are compared at."""

    direction: str
    mode: str
    length: int

    @property
    def backward(self) -> bool:
        """Whether gradients are made, too."""
        return self.direction != "forward"

    def __str__(self) -> str:
        return f"{self.mode}, {self.direction}, {self.length:,}"


class Operations:
    """Times the operations named and the baselines, case by case; `failures` has those that could not be."""

    def __init__(
        self, stopwatch: Stopwatch, names: Sequence[str], dtype: torch.dtype, ceilings: dict[str, float],
        baselines: Sequence[str] = (SOFTMAX,),
    ):  # fmt: skip
        self.stopwatch, self.names, self.dtype, self.ceilings = stopwatch, names, dtype, ceilings
        self.baselines = baselines
        self.failures: list[dict[str, Any]] = []
        self.counts: dict[tuple[str, Case], int] = {}

    def cases(self) -> list[Case]:
        """Return all that the plan has, the long ones last: those most likely fail, and may take a GPU with them."""
        plan = self.stopwatch.plan
        cases = [
            Case(direction, mode, length)
            for direction, lengths in (("forward", plan.lengths), ("forward+backward", plan.backward_lengths))
            for mode in ("causal", "bidirectional")
            for length in lengths
        ]
        return sorted(cases, key=lambda case: case.length)

    def rows(self, case: Case) -> list[OperationRow]:
        """Time one case; none of its rows if a GPU has not the memory for it."""
        given = (case.mode, case.length, case.backward, self.dtype, self.baselines)
        try:
            return self.compare(case, operation_competitors(self.stopwatch, self.names, *given))
        except torch.OutOfMemoryError as error:
            self.note(case, error)
            return []
        finally:
            if self.stopwatch.device.type == "cuda":
                torch.cuda.empty_cache()

    def compare(self, case: Case, competitors: dict[str, Call]) -> list[OperationRow]:
        """Time competitors in turns."""
        timings = {name: Timing.of(values) for name, values in self.stopwatch.compare(competitors).items()}
        rows = []
        for name, timing in timings.items():
            median = timing.median
            flash = timings[FLASH].median / median if FLASH in timings else None
            share = None if name in BASELINES else 1e3 * self.floor(name, case, competitors[name]) / median
            peak = peak_bytes(competitors[name], self.stopwatch.device) if case.backward else None
            ratio = timings[SOFTMAX].median / median
            rows.append(OperationRow(name, case.mode, case.direction, case.length, timing, ratio, share, flash, peak))
        return rows

    def note(self, case: Case, error: Exception) -> None:
        """Write a failure down."""
        self.failures.append({"what": str(case), "error": f"{type(error).__name__}: {error}"[:600]})

    def floor(self, name: str, case: Case, call: Call) -> float:
        """Return the seconds that the operation takes at best."""
        plan = self.stopwatch.plan
        # read query, key and value, write the output; backward those, its gradient and theirs
        operands = (4 + 8 * case.backward) * plan.batch * plan.num_heads * plan.head_dim
        return floor_seconds(self.flops(name, case, call), operands * case.length * self.dtype.itemsize, self.ceilings)

    def flops(self, name: str, case: Case, call: Call) -> float:
        """Return the operations of its matrix products.

        Those of feature maps in Triton cannot be seen: counted are PyTorch's own, of fewer tokens and one sequence.
        """
        if self.stopwatch.backend != "triton":
            return call.flops()
        plan, counted = self.stopwatch.plan, replace(case, length=min(case.length, COUNTED))
        if (name, counted) not in self.counts:
            small = Stopwatch(self.stopwatch.device, replace(plan, batch=1), "torch")
            given = (counted.mode, counted.length, counted.backward, self.dtype)
            self.counts[name, counted] = operation_competitors(small, [name], *given, ())[name].flops()
        return self.counts[name, counted] * plan.batch * case.length / counted.length


def measure_operations(
    operations: Operations, until: float = float("inf"), done: Callable[[list[OperationRow]], None] = lambda _: None
) -> list[OperationRow]:
    """Time all cases and return their rows; `done` gets those there are after each one.

    What would begin after `until`, of `time.monotonic()`, is noted as a failure.
    """
    rows: list[OperationRow] = []
    for case in operations.cases():
        if time.monotonic() > until:
            operations.note(case, TimeoutError("no time was left"))
            continue
        rows += operations.rows(case)
        done(rows)
    return rows


def floor_seconds(flops: float, moved: float, ceilings: dict[str, float]) -> float:
    """Return what a number of operations, or of bytes read or written, takes at best."""
    return max(flops / ceilings["matmul_gflops"], moved / ceilings["copy_gigabytes_per_second"]) / 1e9


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Return the bytes that one call has at most beyond those before it; null on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def operation_competitors(
    stopwatch: Stopwatch, names: Iterable[str], mode: str, length: int, backward: bool, dtype: torch.dtype,
    baselines: Sequence[str] = (SOFTMAX,),
) -> dict[str, Call]:  # fmt: skip
    """Return name -> one call of that operation on shared inputs; mechanisms without the mode are left out."""
    *heads, of_output = random_heads(stopwatch, length, dtype, 4)
    for x in heads:
        x.requires_grad_(backward)
    causal, gradient = mode == "causal", of_output if backward else None

    def softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return softmax(query, key, value)

    known = {SOFTMAX: softmax, FLASH: flash}
    competitors = {name: Call(known[name], heads, gradient) for name in baselines if name in known}
    if causal and not backward and set(FLA) & set(baselines):
        competitors |= {name: Call(*given, None) for name, given in fla_competitors(heads).items()}
    for name in names:
        if mode in MECHANISMS.get(name).modes:
            mechanism = make_mechanism(stopwatch.plan, name, causal, stopwatch, dtype).train(backward)
            competitors[name] = Call(lambda q, k, v, mechanism=mechanism: mechanism(q, k, v)[0], heads, gradient)
    return competitors


def find_crossovers(rows: Sequence[OperationRow]) -> list[Crossover]:
    """Return, for each mechanism, mode and direction, the measured length from which it stays ahead."""
    curves: dict[tuple[str, str, str], list[OperationRow]] = {}
    for row in rows:
        if row.mechanism not in BASELINES:
            curves.setdefault((row.mechanism, row.mode, row.direction), []).append(row)
    crossovers = []
    for key, curve in curves.items():
        ahead = None
        for row in sorted(curve, key=lambda row: -row.length):
            if row.ratio < 1:
                break
            ahead = row.length
        crossovers.append(Crossover(*key, ahead))
    return crossovers
