"""What a pretrained model finds in its context: needles, pairs, its loss by position, what its queries are worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linattn.evaluation.recall import make_prompts
from hf_linattn.training.data import IGNORED_LABEL
from hf_linattn.training.pretraining.architectures import Architecture
from hf_linattn.training.pretraining.items import Material
from hf_linattn.training.pretraining.mixture import Mixture, Stage
from hf_linattn.training.pretraining.rows import recall_row

NEEDLES = ("single_noise", "single_text", "single_uuid")
NEEDLE_LENGTH = 512
SEED = 1_000_000  # of what is measured on; no training has it, as its rows come from another split
BUCKETS = 8
RECALL = 0.25  # of the mixture's rows


@contextmanager
def queries_zeroed(model: PreTrainedModel, architecture: Architecture) -> Iterator[None]:
    """Set the query weights and biases to zero for a while: attention becomes a plain average."""
    queries = [
        architecture.query_of(parameter.data)
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0].endswith(architecture.query_module)
    ]
    kept = [query.clone() for query in queries]
    try:
        for query in queries:
            query.zero_()
        yield
    finally:
        for query, values in zip(queries, kept, strict=True):
            query.copy_(values)


def measure_recall(model: PreTrainedModel, material: Material, length: int, samples: int) -> dict[str, Any]:
    """Return shares of right answers and losses by position, in nats, all on rows that no training had.

    An answer is right if each of its tokens is the likeliest, as greedy decoding would write it.

    Args:
        material: with the text of the test split. length: tokens of a row.
        samples: how many prompts of each needle task, rows of pairs, and batches of the mixture.
    """
    mixture, recall, text = (
        loss_by_position(model, Mixture(material, "test", [Stage(length, 1.0, recall)], samples, 4 * length))
        for recall in (RECALL, 1.0, 0.0)
    )
    return {
        "samples": samples,
        "needles": {task: needle_accuracy(model, material.tokenizer, task, samples) for task in NEEDLES},
        "needle_length": NEEDLE_LENGTH,
        "pairs": pairs_accuracy(model, material, length, samples),
        "positions": [(i + 1) * length // BUCKETS for i in range(BUCKETS)],
        "mixture_loss": mixture,
        "recall_loss": recall,
        "text_loss": text,
    }


def needle_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: str, count: int) -> float:
    """Return the share of prompts of a task (`make_prompts`) answered rightly."""
    prompts = make_prompts(task, tokenizer, NEEDLE_LENGTH, count=count, seed=SEED)
    rows = [np.array([*prompt.prompt_ids, *prompt.answer_ids]) for prompt in prompts]
    spans = [slice(len(prompt.prompt_ids), len(row)) for prompt, row in zip(prompts, rows, strict=True)]
    right = [_likeliest(model, row[None])[0, span] == row[span] for row, span in zip(rows, spans, strict=True)]
    return float(np.mean([tokens.all() for tokens in right]))


def pairs_accuracy(model: PreTrainedModel, material: Material, length: int, count: int) -> dict[str, Any]:
    """Return the share of right answers in rows of pairs, over all and by distance, in quarters of the row.

    A quarter in which nothing was asked has None.
    """
    rows = [recall_row(material, length, np.random.default_rng((SEED, i)), "pairs") for i in range(count)]
    right, distances = [], []
    for row in rows:
        predicted = _likeliest(model, row.input_ids[None])[0]
        right += [bool((predicted[start:stop] == row.input_ids[start:stop]).all()) for start, stop, _ in row.queries]
        distances += [query.start - query.source for query in row.queries]
    of_quarter: list[list[bool]] = [[], [], [], []]
    for answer, distance in zip(right, distances, strict=True):
        of_quarter[distance * 4 // length].append(answer)
    return {
        "answers": len(right),
        "accuracy": float(np.mean(right)),
        "accuracy_by_distance": [float(np.mean(answers)) if answers else None for answers in of_quarter],
    }


@torch.no_grad()
def loss_by_position(model: PreTrainedModel, batches: Mixture) -> list[float | None]:
    """Return the mean loss of the tokens that are predicted, in nats, by eighths of the row; None where nothing is."""
    losses, counts = torch.zeros(BUCKETS), torch.zeros(BUCKETS)
    for step in range(len(batches)):
        labels = batches[step]["labels"][:, 1:]
        logits = model(input_ids=batches[step]["input_ids"], use_cache=False).logits[:, :-1].float()
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
        ).view_as(labels)
        length = labels.shape[1] + 1
        bucket = torch.arange(1, length) * BUCKETS // length
        losses.index_add_(0, bucket, loss.sum(dim=0))
        counts.index_add_(0, bucket, (labels != IGNORED_LABEL).sum(dim=0).float())
    return [float(loss / count) if count else None for loss, count in zip(losses, counts, strict=True)]


@torch.no_grad()
def _likeliest(model: PreTrainedModel, input_ids: np.ndarray) -> np.ndarray:
    """Return the likeliest token at every position [B, N], told those before it; the first is not predicted."""
    predicted = model(input_ids=torch.tensor(input_ids), use_cache=False).logits.argmax(dim=-1)
    return F.pad(predicted[:, :-1], (1, 0), value=IGNORED_LABEL).numpy()
