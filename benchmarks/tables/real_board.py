"""The table of the conversions of a real pretrained model: language, recall and tasks against the original's."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from benchmarks.result_files import ORIGINAL, Document
from benchmarks.tables.markdown import count, share, table, weights_said

BANDS = ((1024, 2047), (2048, 4095), (4096, 8191))  # positions, of which the loss is shown
PATCHED, CALIBRATED = "patched", "calibrated"
STAGES = {PATCHED: "`patch_model`", CALIBRATED: "`calibrate`"}  # of a row, in their order -> as shown


def real_board_section(rows: Mapping[str, Document]) -> str:
    """Return a table of rows, name -> document, in the order of their last perplexity."""
    original = rows[ORIGINAL]["stages"][PATCHED]
    last = {name: row["stages"][_last(row)] for name, row in rows.items()}
    lines = [
        line
        for name in sorted(rows, key=lambda name: (name != ORIGINAL, last[name]["perplexity"]))
        for line in _lines(name, rows[name], original)
    ]
    first, samples = rows[ORIGINAL], original["recall"][0]["num_samples"]
    source, devices = first["provenance"], sorted({row["provenance"]["device"] for row in rows.values()})
    softmax = next((row["state_bytes"] for row in rows.values() if "state_bytes" in row), None)
    whole = f"; softmax has {softmax['softmax'] / 1e6:.1f} MB" if softmax else ""
    state = f"State after {count(softmax['length'])} tokens{whole}. " if softmax else ""
    what = (
        f"{first['model']}, {source['dtype']}, on {' or '.join(devices)}, CPU threads: {source['threads']}. {state}"
        f"Perplexity of test books over the original's, {original['perplexity']:.1f}; loss by position less the"
        f" original's, in nats; needles in noise, of {samples} prompts a length; the mean of the zero-shot tasks, as a"
        " share of the original's, and the same above chance. Most prompts of these tasks are shorter than a"
        " window of 256."
        f"{weights_said(first['model'], source['dtype'])}"
    )
    bands = [f"{low // 1024} to {(high + 1) // 1024} k" for low, high in BANDS]
    needles = [f"needles, {count(row['length'])}" for row in original["recall"]]
    head = ["row", "state", "after", "perplexity", *bands, *needles, "tasks", "above chance", "minutes"]
    return f"{what}\n\n{table(head, lines)}"


def _last(row: Document) -> str:
    return [stage for stage in STAGES if stage in row["stages"]][-1]


def _lines(name: str, row: Document, original: Document) -> list[list[object]]:
    size = f"{row['state_bytes']['row'] / 1e6:.1f} MB" if "state_bytes" in row else ""
    lines: list[list[object]] = []
    for stage, after in STAGES.items():
        if stage not in row["stages"]:
            continue
        found = row["stages"][stage]
        if any(not error["taken"] for error in found.get("whole", [])):
            after += ", all fits taken back"
        minutes = (found["seconds"] + found.get("calibration_seconds", 0.0)) / 60
        needles = {cell["length"]: share(cell["found"]) for cell in found["recall"]}
        lines.append(
            [
                name, size, "" if name == ORIGINAL else after, f"{found['perplexity'] / original['perplexity']:,.3f}",
                *_by_position(found, original), *(needles.get(cell["length"], "") for cell in original["recall"]),
                *_tasks(found, original), f"{minutes:.0f}",
            ]
        )  # fmt: skip
    return lines


def _by_position(found: Document, original: Document) -> list[str]:
    if "positions" not in found:
        return [""] * len(BANDS)
    own, others = ({cell["first"]: cell["loss"] for cell in x["positions"]} for x in (found, original))
    return [f"{own[first] - others[first]:+.3f}" if first in others else "" for first, _ in BANDS]


def _tasks(found: Document, original: Document) -> list[str]:
    """Return the mean of the tasks' scores over the original's, and the same of what is above chance."""
    if not found.get("tasks"):
        return ["", ""]
    ratios = []
    for floor in (0.0, 1.0):
        own, other = (fmean(cell["score"] - floor * cell["chance"] for cell in x["tasks"]) for x in (found, original))
        ratios.append(share(own / other))
    return ratios
