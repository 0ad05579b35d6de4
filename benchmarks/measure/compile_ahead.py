"""Triton's kernels, compiled by several processes before anything is timed: one process would take minutes for it.

What they compile stands in Triton's cache on disk, from where the process that measures loads it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import torch

from benchmarks.measure.fla_kernels import compile_share
from benchmarks.measure.operations import operation_competitors
from benchmarks.measure.steps import MECHANISMS_WITH_STEPS, run_step
from benchmarks.measure.stopwatch import Plan, Stopwatch
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.testing import MODES

OURS, THEIRS = 10, 12  # processes, on 16 cores: they also wait for files and for the GPU
SECONDS = 90  # that fla's candidates may take
LENGTHS = (1024, 4096)  # short and of several segments
Failure = dict[str, Any]


def run_operation(
    plan: Plan, device: torch.device, dtype: torch.dtype, name: str, backend: str, mode: str, backward: bool
) -> None:
    """Call one operation at the lengths, which compiles what it needs."""
    stopwatch = Stopwatch(device, plan, backend)
    for length in LENGTHS:
        competitors = operation_competitors(stopwatch, [name], mode, length, backward, dtype, baselines=())
        for call in competitors.values():
            call()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def processes(count: int) -> ProcessPoolExecutor:
    """Return a pool of that many processes, fewer on a machine with fewer cores."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(min(count, os.cpu_count() or 1), mp_context=context)


def compile_ahead(
    plan: Plan, device: torch.device, dtype: torch.dtype, names: Sequence[str], backend: str, with_fla: bool
) -> dict[str, Any]:
    """Compile what the plan's operations and steps need and return what it took and what failed.

    `fla` is true if all candidates of fla's kernels are compiled; its processes are others than ours, as a compiler
    that crashes takes those beside it with it.
    """
    started, given = time.time(), (plan, device, dtype)
    cases = [(name, mode, back) for name in names for mode in MODES for back in (True, False)]
    jobs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        f"{name}, {mode}, backward {back}": (run_operation, (*given, name, backend, mode, back))
        for name, mode, back in cases
        if mode in MECHANISMS.get(name).modes
    }
    jobs |= {f"step of {x}": (run_step, (*given, x, backend)) for x in names if x in MECHANISMS_WITH_STEPS}
    failures: list[Failure] = []
    with processes(OURS) as ours, processes(THEIRS) as theirs:
        mine = {what: ours.submit(function, *arguments) for what, (function, arguments) in jobs.items()}
        shape, until = (plan.batch, plan.num_heads, LENGTHS[0], plan.head_dim), started + SECONDS
        parts = range(THEIRS if with_fla else 0)
        others = {
            f"fla, part {i}": theirs.submit(compile_share, i, THEIRS, shape, device, dtype, until) for i in parts
        }
        results(mine, failures)
        left = results(others, failures)
    if late := sum(left):
        failures.append({"what": "fla", "error": f"{late} candidates were not compiled after {SECONDS} seconds"})
    return {
        "seconds": time.time() - started,
        "fla": with_fla and len(left) == THEIRS and not late,
        "failures": failures,
    }


def results(futures: dict[str, Future[Any]], failures: list[Failure]) -> list[Any]:
    """Return what came out of all that came to an end, and note what did not."""
    found = []
    for what, future in futures.items():
        if (error := future.exception()) is None:
            found.append(future.result())
        else:
            failures.append(failure(what, error))
    return found


def failure(what: str, error: BaseException) -> Failure:
    """Return a failure as it stands in the results."""
    return {"what": what, "error": f"{type(error).__name__}: {error}"[:600]}
