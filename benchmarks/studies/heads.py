"""What a plan pays that leaves a few heads exact and gives all others a window: time and bytes beside softmax.

    python -m benchmarks.studies.heads SmolLM2-135M-Instruct/        # benchmarks/results/heads_speed.json

Of attention alone: a long prompt, each kind of layer once and counted as often as the plan has it, and a token after a
long context, all layers with their own keys; softmax is PyTorch's `scaled_dot_product_attention` of grouped queries,
and for a token also with the cache of transformers, which copies all keys. Of the whole model: prompts and tokens of
several lengths. Heads are random numbers, tokens of the whole model too; its weights are its own.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from benchmarks.measure.decoding import Turn, prefill
from benchmarks.measure.provenance import collect_provenance
from benchmarks.measure.stopwatch import SOFTMAX, Plan, Stopwatch
from benchmarks.result_files import HEADS_FILE, RESULTS, Document
from hf_linattn import get_mechanisms, patch_model
from hf_linattn.atomic_io import write_json
from hf_linattn.cache import state_bytes
from hf_linattn.config import require_known
from hf_linattn.mechanisms import AttentionLayer, Mechanism
from hf_linattn.ops.common.growing import held_bytes
from hf_linattn.training.task import load_model

# key/value heads of SmolLM2-135M that carry what it recalls: layer, head
EXACT = ((5, 0), (6, 0), (7, 2), (17, 1), (18, 2), (20, 1), (20, 2), (21, 0), (23, 0))
WINDOW = {"window_size": 256, "num_sink_tokens": 4}
PROMPT, CONTEXT, LENGTHS = 16384, 32768, (2048, 8192, 32768)
PLAN, COPIED = "plan", "softmax, keys copied"
TIMES = Plan((), (), (), budget=10.0, min_repeats=3, max_repeats=15)


class ProcessorTime(Stopwatch):
    """A clock that counts what this process alone computes: with one thread, a busy machine disturbs it little."""

    def once(self, run: Callable[[], Any]) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start


CLOCKS = {"wall": Stopwatch, "processor": ProcessorTime}


def plan_of(exact: Sequence[tuple[int, int]], layers: int, heads: int) -> list[Document]:
    """Return a plan in which all but these key/value heads are windows."""
    kept = {layer: [head for at, head in exact if at == layer] for layer, _ in exact}
    shared = [
        {"layers": [layer], "heads": [head for head in range(heads) if head not in own]} for layer, own in kept.items()
    ]
    places = [{"layers": [layer for layer in range(layers) if layer not in kept]}, *shared]
    return [{"mechanism": "streaming", "options": WINDOW, **place} for place in places]


def random_heads(layer: AttentionLayer, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Return query, key and value [1, heads, length, D] as projections leave them."""
    heads = (layer.num_heads, layer.num_key_value_heads, layer.num_key_value_heads)
    return [torch.randn(1, length, count, layer.head_dim).to(dtype).transpose(1, 2) for count in heads]


def softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return what transformers calls for softmax."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1, enable_gqa=True)


def measure_prompt(stopwatch: Stopwatch, mechanisms: Sequence[Mechanism], length: int, dtype: torch.dtype) -> Document:
    """Time the attention of all layers to a prompt, from one layer of each kind."""
    kinds = {json.dumps(mechanism.config.to_options()): mechanism for mechanism in mechanisms}
    counts = Counter(json.dumps(mechanism.config.to_options()) for mechanism in mechanisms)
    heads = random_heads(mechanisms[0].layer, length, dtype)
    runs: dict[str, Any] = {SOFTMAX: lambda: softmax(*heads)}
    runs |= {kind: lambda mechanism=mechanism: mechanism(*heads) for kind, mechanism in kinds.items()}
    seconds = {name: median(times) for name, times in stopwatch.compare(runs).items()}
    whole = {SOFTMAX: len(mechanisms) * seconds.pop(SOFTMAX), PLAN: sum(counts[x] * seconds[x] for x in kinds)}
    layers = [{"options": json.loads(x), "layers": counts[x], "seconds": seconds[x]} for x in kinds]
    return {"tokens": length, "seconds": whole, "ratio": whole[PLAN] / whole[SOFTMAX], "kinds": layers}


def measure_step(stopwatch: Stopwatch, mechanisms: Sequence[Mechanism], length: int, dtype: torch.dtype) -> Document:
    """Time the attention of all layers to one token more, and count the bytes that they keep."""
    states: list[Any] = []
    caches: list[DynamicLayer] = []
    for mechanism in tqdm(mechanisms, desc="contexts"):
        query, key, value = random_heads(mechanism.layer, length, dtype)
        states.append(mechanism(query[:, :, -1:], key, value)[1])
        caches.append(DynamicLayer())
        caches[-1].update(key.contiguous(), value.contiguous())
    query, key, value = random_heads(mechanisms[0].layer, 1, dtype)

    def plan() -> None:
        for number, mechanism in enumerate(mechanisms):
            _, states[number] = mechanism(query, key, value, None, None, states[number])

    runs = {
        SOFTMAX: lambda: [softmax(query, cache.keys, cache.values) for cache in caches],
        COPIED: lambda: [softmax(query, *cache.update(key, value)) for cache in caches],
        PLAN: plan,
    }
    seconds = {name: median(times) for name, times in stopwatch.compare(runs).items()}
    sizes = {
        SOFTMAX: sum(x.nbytes for cache in caches for x in (cache.keys, cache.values)),
        PLAN: sum(held_bytes(x) for state in states for x in state),
    }
    ratios = {name: seconds[PLAN] / seconds[name] for name in (SOFTMAX, COPIED)}
    share = sizes[PLAN] / sizes[SOFTMAX]
    return {"tokens": length, "seconds": seconds, "ratio": ratios, "bytes": sizes, "share": share}


def measure_models(
    stopwatch: Stopwatch, models: dict[str, PreTrainedModel], lengths: Sequence[int]
) -> list[Document]:
    """Time prompts, read once, and tokens after them."""
    return [_measure_models(stopwatch, models, length) for length in tqdm(lengths, desc="whole model")]


def _measure_models(stopwatch: Stopwatch, models: dict[str, PreTrainedModel], length: int) -> Document:
    caches: dict[str, DynamicCache] = {}

    def read(name: str) -> None:
        caches[name] = prefill(models[name], length)

    prompts = {name: stopwatch.once(partial(read, name)) for name in models}
    sizes = {name: state_bytes(cache) for name, cache in caches.items()}
    turns = {name: Turn(stopwatch, model, caches[name]) for name, model in models.items()}
    tokens = {name: median(times) / turns[name].tokens for name, times in stopwatch.compare(turns).items()}
    return {"tokens": length, "prompt_seconds": prompts, "seconds_per_token": tokens, "bytes": sizes}


def main(
    model: Annotated[str, typer.Argument(help="folder of SmolLM2-135M")],
    output: Annotated[Path, typer.Option(help="where the results go; runs of other settings there are kept")] = (
        RESULTS / HEADS_FILE
    ),
    dtype: Annotated[str, typer.Option(help="of weights and activations")] = "float32",
    prompt: Annotated[int, typer.Option(help="tokens")] = PROMPT,
    context: Annotated[int, typer.Option(help="tokens before the one that is decoded")] = CONTEXT,
    length: Annotated[list[int] | None, typer.Option(help="of the whole model; repeatable, 0 for none")] = None,
    clock: Annotated[str, typer.Option(help=f"one of {', '.join(CLOCKS)}, the latter for one thread")] = "wall",
) -> None:
    """Measure and write the JSON."""
    require_known("clock", clock, CLOCKS)
    precision, stopwatch = getattr(torch, dtype), CLOCKS[clock](torch.device("cpu"), TIMES)
    original, patched = (load_model(model, precision).eval() for _ in range(2))
    config = original.config
    plan = plan_of(EXACT, config.num_hidden_layers, config.num_key_value_heads)
    mechanisms = list(get_mechanisms(patch_model(patched, plan)).values())
    lengths = [x for x in (LENGTHS if length is None else length) if x]
    run: Document = {
        "provenance": collect_provenance(torch.device("cpu"), precision, "benchmarks.studies.heads"),
        "model": Path(model).name, "exact_heads": EXACT, "window": WINDOW, "clock": clock,
    }  # fmt: skip
    with torch.no_grad():
        run["prompt"] = measure_prompt(stopwatch, mechanisms, prompt, precision)
        run["token"] = measure_step(stopwatch, mechanisms, context, precision)
        run["whole_model"] = measure_models(stopwatch, {SOFTMAX: original, PLAN: patched}, lengths)
    before = json.loads(output.read_text())["runs"] if output.exists() else []
    settings = [(x["clock"], x["provenance"]["dtype"], x["provenance"]["threads"]) for x in (run, *before)]
    runs = [run, *(x for x, own in zip(before, settings[1:], strict=True) if own != settings[0])]
    write_json(output, {"runs": runs})
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
