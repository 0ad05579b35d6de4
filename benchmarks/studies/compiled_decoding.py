"""What one compiled graph for all tokens saves beside a step that Python leads, operation by operation, on a CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.compiled_decoding     # benchmarks/results/compiled_decoding.json

One token at a time of the small Llama of `benchmarks.measure.decoding`: with the default cache, and with a static one
whose step `torch.compile` made one graph. Both multiply by the same weights, which lie in memory and bound the time
from below; the model's linear layers alone are timed beside them. By the processor's time of one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import nn
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel, StaticCache

from benchmarks.measure.decoding import build_model, prefill
from benchmarks.measure.provenance import collect_provenance
from benchmarks.measure.stopwatch import PLANS, SOFTMAX, Stopwatch, Timing
from benchmarks.measure.timed import timed_config
from benchmarks.result_files import COMPILED_DECODING_FILE, RESULTS, Document
from benchmarks.studies.heads import ProcessorTime
from hf_linattn.atomic_io import write_json

MECHANISMS = (SOFTMAX, "linear", "hedgehog", "local", "hybrid")
CONTEXT, ROOM, TOKENS = 1024, 512, 4  # tokens read, more for which a static cache has room, and in each turn


def decode(step: Callable[..., Any], cache: Cache) -> None:
    """Decode the tokens of one turn."""
    token = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(TOKENS):
        step(input_ids=token, past_key_values=cache, use_cache=True)


def multiply(layers: list[nn.Linear]) -> None:
    """Multiply one token by all weights, as often as a turn has tokens."""
    rows = [layer.weight.new_zeros(1, layer.in_features) for layer in layers]
    for _ in range(TOKENS):
        for layer, row in zip(layers, rows, strict=True):
            layer(row)


def static_cache(model: PreTrainedModel, context: int, room: int) -> StaticCache:
    """Return a static cache that has read as many random tokens."""
    cache = StaticCache(config=model.config, max_cache_len=context + room)
    tokens = torch.randint(model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.no_grad()
def measure(stopwatch: Stopwatch, mechanism: str, context: int, room: int) -> Document:
    """Return milliseconds a token: eager, compiled, and of the linear layers alone."""
    model = build_model(stopwatch, torch.float32, mechanism)
    compiled = torch.compile(model.forward, fullgraph=True, dynamic=False)
    runs = {
        "eager": partial(decode, model, prefill(model, context)),
        "compiled": partial(decode, compiled, static_cache(model, context, room)),
        "products": partial(multiply, [x for x in model.modules() if isinstance(x, nn.Linear)]),
    }
    seconds = {name: [x / TOKENS for x in times] for name, times in stopwatch.compare(runs).items()}
    eager, once, products = (median(seconds[name]) for name in runs)
    ratios = {"ratio": once / eager, "ratio_beyond_products": (once - products) / (eager - products)}
    return {"mechanism": mechanism, **{name: vars(Timing.of(x)) for name, x in seconds.items()}, **ratios}


def main(
    output: Annotated[Path, typer.Option(help="where the results go")] = RESULTS / COMPILED_DECODING_FILE,
    mechanism: Annotated[list[str] | None, typer.Option(help="repeatable; by default five")] = None,
    context: Annotated[int, typer.Option(help="tokens read before")] = CONTEXT,
    plan: Annotated[str, typer.Option(help="of the stopwatch: " + ", ".join(PLANS))] = "cpu",
) -> None:
    """Measure and write the JSON."""
    stopwatch = ProcessorTime(torch.device("cpu"), PLANS[plan])
    names = mechanism or MECHANISMS
    rows = [measure(stopwatch, name, context, ROOM) for name in tqdm(names, desc="mechanisms")]
    source = collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.studies.compiled_decoding")
    options = {name: timed_config(name).to_options() for name in names}
    results = {"provenance": source, "options": options, "context": context, "rows": rows}
    write_json(output, results)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
