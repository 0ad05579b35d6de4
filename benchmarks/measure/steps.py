"""A decoding step of one layer: a mechanism reads one token, softmax all keys that came before.

Timed are `LAYERS` layers behind each other, as in a model, each with a state or keys of its own, so that none finds
them in a cache; given is the time of one. On a GPU the host needs longer to launch a step than the device to do it:
the same steps are timed from a CUDA graph, too, in which they are launched together, as a serving loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure.stopwatch import SOFTMAX, Plan, Stopwatch
from benchmarks.measure.timed import timed_config
from hf_linattn import AttentionLayer
from hf_linattn.backends import use_backend
from hf_linattn.mechanisms import MECHANISMS

MECHANISMS_WITH_STEPS = ("linear", "hedgehog", "performer", "hybrid")
LAYERS = 16
READ = 1024  # tokens that a state is made of: its size is that of any other number
Step = Callable[[], Any]


@dataclass(frozen=True)
class StepRow:
    """Microseconds per layer, launched one by one and from a graph; null with the `error` that kept it from there."""

    mechanism: str
    context: int
    microseconds: float
    graph_microseconds: float | None = None
    error: str | None = None


def make_mechanism(plan: Plan, name: str, causal: bool, stopwatch: Stopwatch, dtype: torch.dtype) -> Any:
    """Return a mechanism of the plan's heads on the stopwatch's device, with its backend."""
    layer = AttentionLayer(
        index=0, num_heads=plan.num_heads, num_key_value_heads=plan.num_heads, head_dim=plan.head_dim, causal=causal,
        scaling=plan.head_dim**-0.5, device=stopwatch.device, dtype=dtype,
    )  # fmt: skip
    mechanism = MECHANISMS.get(name)(timed_config(name), layer).to(stopwatch.device, dtype)
    use_backend(mechanism, stopwatch.backend)
    return mechanism


def random_heads(stopwatch: Stopwatch, length: int, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Return that many random tensors [B, H, N, D], the same ones in every call."""
    plan, device = stopwatch.plan, stopwatch.device
    generator = torch.Generator(device).manual_seed(0)
    shape = (plan.batch, plan.num_heads, length, plan.head_dim)
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(count)]


def softmax_step(stopwatch: Stopwatch, dtype: torch.dtype) -> Step:
    """Return what reads one query and all keys in every layer."""
    query = random_heads(stopwatch, 1, dtype, 1)[0]
    layers = [random_heads(stopwatch, stopwatch.plan.step_context, dtype, 2) for _ in range(LAYERS)]

    def step() -> None:
        for key, value in layers:
            F.scaled_dot_product_attention(query, key, value)

    return step


def mechanism_step(stopwatch: Stopwatch, name: str, dtype: torch.dtype) -> Step:
    """Return what reads one token with the mechanism in every layer."""
    plan = stopwatch.plan
    mechanism = make_mechanism(plan, name, True, stopwatch, dtype).eval()
    heads, token = (random_heads(stopwatch, n, dtype, 3) for n in (min(READ, plan.step_context), 1))
    states = [mechanism(*heads)[1] for _ in range(LAYERS)]

    def step() -> None:
        for state in states:  # they stay as they are: what would come next takes as long
            mechanism(*token, state=state)

    return step


@torch.no_grad()
def run_step(plan: Plan, device: torch.device, dtype: torch.dtype, name: str, backend: str) -> None:
    """Take the steps of one mechanism once, which compiles what they need."""
    mechanism_step(Stopwatch(device, plan, backend), name, dtype)()


@torch.no_grad()
def measure_steps(
    plan: Plan, device: torch.device, dtype: torch.dtype, names: Sequence[str], backend: str
) -> list[StepRow]:
    """Time the steps of softmax and of the mechanisms named; graphs last, as a failed one may leave its mark."""
    stopwatch = Stopwatch(device, plan, backend)
    steps = {SOFTMAX: softmax_step(stopwatch, dtype)}
    steps |= {name: mechanism_step(stopwatch, name, dtype) for name in names}
    eager = {name: microseconds(values) for name, values in stopwatch.compare(steps).items()}
    graphs: dict[str, Step] = {}
    errors: dict[str, str] = {}
    for name, step in steps.items() if device.type == "cuda" else ():
        try:
            graphs[name] = capture(step)
        except RuntimeError as error:  # the eager times stand
            errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    replayed = {name: microseconds(values) for name, values in stopwatch.compare(graphs).items()}
    return [StepRow(name, plan.step_context, eager[name], replayed.get(name), errors.get(name)) for name in steps]


def microseconds(seconds: Sequence[float]) -> float:
    """Return the median time of one layer."""
    return 1e6 * median(seconds) / LAYERS


def capture(step: Step) -> Step:
    """Return the replay of a CUDA graph of one call; RuntimeError if the host would wait for the device in it.

    What waits would spoil the graph and, with it, the random numbers of the process; so it is looked for before.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
