"""Tables of conversions of models that look far back."""

from __future__ import annotations

import math

from benchmarks.result_files import Document
from benchmarks.tables.markdown import count, share, table
from hf_linattn.training.pretraining.measures import NEEDLES

ORIGINAL = "original"


def mixture_loss(measured: Document) -> float:
    """Return the loss on text and recall in nats, the mean over the eighths of a row."""
    return sum(measured["mixture_loss"]) / len(measured["mixture_loss"])


def needle_share(measured: Document) -> float:
    """Return the share of needles that are found, the mean over their kinds."""
    return sum(measured["needles"].values()) / len(measured["needles"])


def recall_board_section(document: Document) -> str:
    """Return a row for each plan of each model: losses against the best, and what is found before and after."""
    rows: list[list[object]] = []
    for model, original in document["originals"].items():
        own = [row for row in document["rows"] if row["model"] == model]
        best = min(mixture_loss(measured) for measured in (original, *(row["trained"] for row in own)))
        rows.append([model, ORIGINAL, "", "", *_cells(original, best)])
        for row in sorted(own, key=lambda row: row["state_bytes"]):
            first = row.get("calibrated", row["converted"])
            cells = _cells(row["trained"], best)
            rows.append([model, row["name"], count(row["state_bytes"]), share(needle_share(first)), *cells])
    task, taught = document["task"], sorted({row["tokens"] for row in document["rows"]})
    what = (
        f"Rows of {count(task['length'])} tokens, text and, in {task['recall']:.0%} of them, generated recall. Each"
        f" conversion was calibrated and taught with {' or '.join(map(count, taught))} tokens; {task['samples']}"
        " prompts of each kind, 512 tokens long, and as many rows of pairs. Perplexity of the mixture over the best"
        " row's of the same model."
    )
    head = ["model", "row", "bytes of state", "needles, calibrated", "perplexity"]
    return "\n\n".join([what, table([*head, *(name.removeprefix("single_") for name in NEEDLES), "pairs"], rows)])


def _cells(measured: Document, best: float) -> list[str]:
    found = [measured["needles"][name] for name in NEEDLES]
    return [f"{math.exp(mixture_loss(measured) - best):.3f}", *map(share, (*found, measured["pairs"]["accuracy"]))]
