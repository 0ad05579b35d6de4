"""Tables of associative recall over numbers of pairs and lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping

from benchmarks.result_files import Document
from benchmarks.tables.markdown import code, count, options_text, table


def mean_of(scores: Mapping[str, float]) -> float:
    """Return the mean share of right answers over all points."""
    return sum(scores.values()) / len(scores)


def title_of(row: Document) -> str:
    """Return a row's mechanism and options in few words."""
    said = (str(value) for value in row["options"].values() if isinstance(value, int | str))
    return " ".join([row["mechanism"], *said])


def sweep_section(document: Document) -> str:
    """Return the mean over all points, and every number of pairs at the largest length, smallest state first.

    Each is the mean over seeds, with the smallest and the largest of them behind it.
    """
    task: Document = document["task"]
    kinds: dict[tuple[int, str, str], list[Document]] = {}
    for row in document["rows"]:
        kinds.setdefault((row["state_bytes"], row["mechanism"], json.dumps(row["options"])), []).append(row)
    longest = task["lengths"][-1]
    columns = [f"{pairs} | {longest}" for pairs in task["pairs"]]
    rows = []
    for (size, *_), own in sorted(kinds.items()):
        scores = [row["trained"] for row in own]
        cells = [_spread([mean_of(x) for x in scores]), *(_spread([x[column] for x in scores]) for column in columns)]
        rows.append([code(own[0]["mechanism"]), code(options_text(own[0]["options"])), count(size), len(own), *cells])
    what = (
        f"{task['pairs'][0]} to {task['pairs'][-1]} pairs in {task['lengths'][0]} to {count(longest)} tokens"
        f" of {count(task['vocabulary'])} kinds, all mixed in one training of {task['steps']} steps of"
        f" {count(task['batch_tokens'])} tokens after the conversion; right answers in per cent, mean over seeds"
        " (least to most)."
    )
    head = ["mechanism", "options", "bytes of state", "seeds", "all points"]
    return "\n\n".join([what, table([*head, *(f"{pairs} of {count(longest)}" for pairs in task["pairs"])], rows)])


def _spread(values: list[float]) -> str:
    mean = f"{100 * sum(values) / len(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ({100 * min(values):.1f} to {100 * max(values):.1f})"
