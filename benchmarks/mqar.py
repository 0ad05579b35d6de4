"""Multi-query associative recall (Arora et al. 2024, Zoology, arXiv 2312.04927): accuracy against bytes of state.

    python -m benchmarks.mqar                                      # benchmarks/results/mqar.json

A sequence lists key-value pairs, then asks for the values of its keys again, in random order and between fillers. A
model of two layers learns it from scratch, once for each mechanism of constant state and once with softmax. What a
state of fixed size can hold shows in how many of the answers are right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.provenance import collect_provenance
from benchmarks.tables import RESULTS
from hf_linattn import patch_model
from hf_linattn.cache import state_bytes
from hf_linattn.files import write_text

VOCABULARY, PAIRS, LENGTH = 128, 16, 96  # half of the tokens are keys, the other half values; 0 fills
WIDTH, HEADS, LAYERS = 64, 2, 2
IGNORED = -100
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("softmax", {}),
    ("linear", {}),
    ("linear", {"decay": "learned"}),
    ("performer", {"num_features": 64}),
    ("hedgehog", {"feature_dim": 64}),
    ("hedgehog", {"feature_dim": 256}),
    ("learned_exp", {"feature_dim": 64}),
    ("learned_exp", {"feature_dim": 256}),
    ("taylor", {}),
    ("local", {"window_size": 16}),
    ("linformer", {"num_slots": 16, "block_size": 16}),
    ("hybrid", {"window_size": 16, "num_sinks": 1, "linear": "learned_exp"}),
]


def make_batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens and labels [B, N]: after each query stands nothing, and its label is the value of its key."""
    half = VOCABULARY // 2
    keys = 1 + torch.stack([torch.randperm(half - 1, generator=generator)[:PAIRS] for _ in range(size)])
    values = torch.randint(half, VOCABULARY, (size, PAIRS), generator=generator)
    tokens = torch.zeros(size, LENGTH, dtype=torch.long)
    labels = torch.full((size, LENGTH), IGNORED)
    tokens[:, 0 : 2 * PAIRS : 2], tokens[:, 1 : 2 * PAIRS : 2] = keys, values
    for row in range(size):
        places = 2 * PAIRS + torch.randperm(LENGTH - 2 * PAIRS, generator=generator)[:PAIRS]
        tokens[row, places], labels[row, places] = keys[row], values[row]
    return tokens, labels


def make_model(mechanism: str, options: dict[str, Any]) -> LlamaForCausalLM:
    """Return an untrained model; the same weights for every mechanism."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=LENGTH, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return patch_model(model, mechanism, **options)


def train(model: LlamaForCausalLM, steps: int, batch_size: int, learning_rate: float) -> float:
    """Train on fresh sequences and return the share of right answers on others."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    for _ in tqdm(range(steps), leave=False):
        tokens, labels = make_batch(batch_size, generator)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    tokens, labels = make_batch(512, torch.Generator().manual_seed(2))
    with torch.no_grad():
        answers = model.eval()(input_ids=tokens, use_cache=False).logits.argmax(-1)
    asked = labels != IGNORED
    return float((answers == labels)[asked].double().mean())


def held(model: LlamaForCausalLM) -> int:
    """Return the bytes of decoding state after one sequence."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.ones(1, LENGTH, dtype=torch.long), past_key_values=cache, use_cache=True)
    return state_bytes(cache)


def run(rows: list[tuple[str, dict[str, Any]]], steps: int, batch_size: int, rates: list[float]) -> dict[str, Any]:
    """Train every row with every learning rate and keep the best."""
    results = []
    for mechanism, options in tqdm(rows, desc="mqar"):
        scores = {rate: train(make_model(mechanism, options), steps, batch_size, rate) for rate in rates}
        best = max(scores, key=scores.__getitem__)
        results.append(
            {
                "mechanism": mechanism, "options": options, "accuracy": scores[best], "learning_rate": best,
                "state_bytes": held(make_model(mechanism, options).eval()),
            }
        )  # fmt: skip
    return {
        "provenance": collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.mqar"),
        "task": {"vocabulary": VOCABULARY, "pairs": PAIRS, "length": LENGTH, "chance": 2 / VOCABULARY},
        "training": {"steps": steps, "batch_size": batch_size, "learning_rates": rates},
        "rows": results,
    }


def main(
    steps: Annotated[int, typer.Option(help="optimizer steps of each training")] = 2000,
    batch_size: Annotated[int, typer.Option(help="sequences per step")] = 32,
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / "mqar.json",
) -> None:
    """Measure and write the JSON."""
    results = run(ROWS, steps, batch_size, [3e-3, 1e-2])
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, json.dumps(results, indent=1) + "\n")
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
