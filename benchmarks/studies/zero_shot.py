"""Test perplexity of every mechanism right after `patch_model`, before any training.

    python -m benchmarks.studies.zero_shot                                 # benchmarks/results/zero_shot.json

Beside the mechanisms stand the original and one baseline that looks at nothing: each query gets the mean of the values
it may see. A mechanism that does worse than this tells the model less than no attention would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.measure.provenance import collect_provenance
from benchmarks.result_files import MEAN_OF_VALUES, ORIGINAL, RESULTS, ROOT, Document
from hf_linattn import get_mechanisms, list_mechanisms, patch_model, unpatch_model
from hf_linattn.atomic_io import write_json
from hf_linattn.evaluation import is_masked_language_model, perplexity
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.training.data import load_text_splits
from hf_linattn.training.task import load_model

MODELS = {name: f"recipes/pretrained/{name}" for name in ("bert", "gpt2", "llama")}
LENGTH = 256  # tokens per window; those of causal models advance by half of it: 128 to 255 stand before a scored token
MASK_PROBABILITY = 0.15  # of the tokens that a masked model predicts

# Many defaults are exact at 256 tokens. Under these options a query of a sparse mechanism sees 40 to 75 keys on
# average. A mechanism that is not named here is measured with its defaults.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "atrous": [{"window_size": 64, "dilation": 4}],
    "bigbird": [{"block_size": 16, "num_random": 2, "window_blocks": 1, "num_global": 4}],
    "checkerboard": [{"block_size": 16, "window_size": 128}],
    "conv": [{"window_size": 64, "kernel_radius": 4}],
    "deltanet": [{}, {"gate": True}],
    "dynamic_sparse": [{"block_size": 16, "num_blocks": 3}],
    "evo": [{"window_size": 64, "kernel_radius": 4}],
    "fixed_pattern": [{"block_size": 16, "group_size": 64, "num_summary": 16, "num_groups": 4}],
    "fusion": [{"members": {"local": {"window_size": 64}, "linear": {}}}],
    "gated_deltanet": [{}, {"expand_key": 2}],
    "hybrid": [{"window_size": 64, "num_sink_tokens": 4}],
    "learned_sparse": [{"block_size": 16, "reach": 4}],
    "linear": [{}, {"decay": "learned"}],
    "linformer": [{"num_slots": 64, "block_size": 32}, {"num_slots": 64, "block_size": 32, "exact_block": True}],
    "local": [{"window_size": 64}],
    "longformer": [{"window_size": 64, "num_global": 4}],
    "lsh": [
        {"num_rounds": 4, "bucket_size": 16, "num_buckets": 8},
        {"num_rounds": 8, "bucket_size": 8, "num_buckets": 8},
    ],
    "nystrom": [{"num_landmarks": 32, "block_size": 32}],
    "performer": [{}, {"decay": "learned"}],
    "radial": [{"block_size": 16, "window_blocks": 2}],
    "random_blocks": [{"block_size": 16, "num_random": 4}],
    "streaming": [{"window_size": 64, "num_sink_tokens": 4}],
    "sparse_transformer": [{"block_size": 16, "window_size": 32, "stride": 4, "num_strides": 4}],
    "vq": [{"num_codes": 64, "block_size": 32}],
}

Score = Callable[[PreTrainedModel], float]


def mean_of_values(model: PreTrainedModel) -> PreTrainedModel:
    """Patch a model so that each query gets the mean of the values it may see: softmax of queries that are zero."""
    patch_model(model, "softmax")
    for mechanism in get_mechanisms(model).values():
        mechanism.register_forward_pre_hook(lambda _, heads: (torch.zeros_like(heads[0]), *heads[1:]))
    return model


@contextmanager
def patched(model: PreTrainedModel, mechanism: str, options: Mapping[str, Any]) -> Iterator[PreTrainedModel]:
    """Give a model the mechanism, or the baseline of that name, for a while."""
    if mechanism == ORIGINAL:
        yield model
        return
    if mechanism == MEAN_OF_VALUES:
        mean_of_values(model)
    else:
        patch_model(model, mechanism, **options)
    try:
        yield model
    finally:
        unpatch_model(model)


def candidates(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what is measured, in the table's order: the baselines, then each mechanism with each of its options."""
    entries = [(name, options) for name in names for options in OPTIONS.get(name, [{}])]
    baselines: list[tuple[str, dict[str, Any]]] = [(ORIGINAL, {}), (MEAN_OF_VALUES, {})]
    return [{"mechanism": name, "options": options} for name, options in [*baselines, *entries]]


def serves(mechanism: str, model: PreTrainedModel) -> bool:
    """Return whether a mechanism, or a baseline, has the form that a model needs: bidirectional if it is masked."""
    mode = "bidirectional" if is_masked_language_model(model) else "causal"
    return mechanism in (ORIGINAL, MEAN_OF_VALUES) or mode in MECHANISMS.get(mechanism).modes


def measure(models: Mapping[str, tuple[PreTrainedModel, Score]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per candidate, with the perplexity of each model it serves; the models are left as they were."""
    rows = candidates(names)
    for row in tqdm(rows, desc="zero-shot"):
        row["perplexity"] = {}
        for name, (model, score) in models.items():
            if serves(row["mechanism"], model):
                with patched(model, row["mechanism"], row["options"]):
                    row["perplexity"][name] = score(model)
    return rows


def load(path: str, texts: Sequence[str], scored: dict[str, int]) -> tuple[PreTrainedModel, Score]:
    """Return a bundled model with the function that scores it; `scored[path]` becomes the count of scored tokens."""
    model, tokenizer = load_model(str(ROOT / path), torch.float32), AutoTokenizer.from_pretrained(ROOT / path)

    def score(model: PreTrainedModel) -> float:
        result = perplexity(
            model, tokenizer, texts, max_length=LENGTH, batch_size=16, mask_probability=MASK_PROBABILITY,
            progress=False,
        )  # fmt: skip
        scored[path] = result["num_tokens"]
        return result["perplexity"]

    return model, score


def run(names: Sequence[str], documents: int | None) -> Document:
    """Measure the bundled models on the bundled test split and return the JSON document."""
    texts, scored = load_text_splits()["test"]["text"][:documents], dict[str, int]()
    models = {name: load(path, texts, scored) for name, path in MODELS.items()}
    rows = measure(models, names)
    evaluation = {"data": "test split of the documentation of Python's standard library", "documents": len(texts)}
    windows = {"max_length": LENGTH, "stride": LENGTH // 2, "mask_probability": MASK_PROBABILITY}
    return {
        "provenance": collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.studies.zero_shot"),
        "evaluation": {**evaluation, **windows, "num_tokens": scored},
        "rows": rows,
    }


def main(
    mechanism: Annotated[list[str] | None, typer.Option(help="repeatable; by default every one")] = None,
    documents: Annotated[int | None, typer.Option(help="at most that many documents of the test split")] = None,
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / "zero_shot.json",
) -> None:
    """Measure and write the JSON; `python -m docs.generate` makes the table from it."""
    results = run(mechanism or list_mechanisms(), documents)
    write_json(output, results)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
