"""What hard keys cost beside the same `hybrid` without them, and softmax: a long prompt and a token after it.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.hard_keys       # benchmarks/results/hard_keys_speed.json

Of attention alone, causal, batch 1 and 8 heads of size 64, random numbers; by the processor's time of one thread,
which a busy machine disturbs little. `share` is the time without hard keys over that with them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional as F

from benchmarks.measure.provenance import collect_provenance
from benchmarks.measure.stopwatch import SOFTMAX, Plan, Timing
from benchmarks.result_files import HARD_KEYS_FILE, RESULTS, Document
from benchmarks.studies.heads import ProcessorTime
from hf_linattn.atomic_io import write_json
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer

HEADS, HEAD_DIM, NUM_HARD_KEYS = 8, 64, 64
WINDOWS = {"window 64": 64, "window 256": 256}
TIMES = Plan((), (), (), budget=10.0, min_repeats=3, max_repeats=15)


def make_hybrid(dtype: torch.dtype, **options: int) -> Any:
    """Return the mechanism of one layer."""
    layer = AttentionLayer(0, HEADS, HEADS, HEAD_DIM, True, HEAD_DIM**-0.5, torch.device("cpu"), dtype)
    return MECHANISMS.get("hybrid")(make_config("hybrid", options), layer).to(dtype).eval()


def summarised(seconds: dict[str, list[float]]) -> Document:
    """Return the times of all, and for each window the share."""
    rows: Document = {name: vars(Timing.of(own)) for name, own in seconds.items()}
    for name in WINDOWS:
        rows[f"{name}, hard keys"]["share"] = median(seconds[name]) / median(seconds[f"{name}, hard keys"])
    return rows


@torch.no_grad()
def measure(length: int, dtype: torch.dtype) -> Document:
    """Time a prompt of that many tokens, and one more token after it."""
    stopwatch = ProcessorTime(torch.device("cpu"), TIMES)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, length, HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2) for _ in range(3))
    softmax = partial(F.scaled_dot_product_attention, query, key, value)
    prompts: dict[str, Callable[[], Any]] = {SOFTMAX: partial(softmax, is_causal=True)}
    one = [x[:, :, -1:] for x in (query, key, value)]
    steps: dict[str, Callable[[], Any]] = {SOFTMAX: partial(F.scaled_dot_product_attention, one[0], key, value)}
    for name, window in WINDOWS.items():
        for kind, number in ((name, 0), (f"{name}, hard keys", NUM_HARD_KEYS)):
            mechanism = make_hybrid(dtype, window_size=window, num_hard_keys=number)
            prompts[kind] = partial(mechanism, query, key, value)
            steps[kind] = partial(mechanism, *one, state=prompts[kind]()[1])
    return {"prompt": summarised(stopwatch.compare(prompts)), "token": summarised(stopwatch.compare(steps))}


def main(
    output: Annotated[Path, typer.Option(help="where the results go")] = RESULTS / HARD_KEYS_FILE,
    length: Annotated[int, typer.Option(help="tokens")] = 16384,
) -> None:
    """Measure in both precisions and write the JSON."""
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        source = collect_provenance(torch.device("cpu"), dtype, "benchmarks.studies.hard_keys")
        runs.append({"provenance": source, "length": length, "num_hard_keys": NUM_HARD_KEYS, **measure(length, dtype)})
    write_json(output, {"runs": runs})
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
