"""Markdown tables of a GPU's speed: both passes beside two softmaxes, memory, a decoding step, and fla's kernels."""

from __future__ import annotations

from benchmarks.fla_kernels import FLA, FLA_ALONE, FLA_MAPPED
from benchmarks.markdown import Document, table
from benchmarks.speed_tables import LENGTH, Target, describe, judged, milliseconds_table, operations_table
from benchmarks.stopwatch import FLASH, SOFTMAX

FORWARD, BOTH, BACKWARD = "forward", "forward+backward", "backward"
MODES = ("causal", "bidirectional")
# what a causal mechanism is held to: times faster than FlashAttention, forward and backward
FASTER_THAN_FLASH = {"linear": (8, 4), "hedgehog": (4, 2), "hybrid": (4, 2)}
STEP_MICROSECONDS = 30  # of a decoding step, at most
Key = tuple[str, str, str, int]  # mechanism or baseline, mode, pass, length


def medians(document: Document) -> dict[Key, float]:
    """Return milliseconds, those of the backward pass alone among them: what both take less the forward pass.

    A length at which one of the two was not measured has none, nor has one at which both took no longer than one.
    """
    found = {
        (row["mechanism"], row["mode"], row["direction"], row["length"]): row["milliseconds"]["median"]
        for row in document["operations"]
    }
    rest = {
        (name, mode, BACKWARD, length): value - found[name, mode, FORWARD, length]
        for (name, mode, direction, length), value in found.items()
        if direction == BOTH and (name, mode, FORWARD, length) in found
    }
    return found | {key: value for key, value in rest.items() if value > 0}


def summary_length(document: Document) -> int:
    """Return the length that the summary is of: that of the targets, or the longest with gradients."""
    lengths = document["plan"]["backward_lengths"]
    return LENGTH if LENGTH in lengths else max(lengths)


def passes_table(document: Document) -> str:
    """Return milliseconds of both passes at one length, with how many times faster they are than both softmaxes."""
    length, times = summary_length(document), medians(document)
    found = {
        (row["mechanism"], row["mode"], row["direction"]): row
        for row in document["operations"]
        if row["length"] == length
    }
    operands = operand_bytes(document, length)
    rows = []
    for mode in MODES:
        for name in (*document["baselines"], *document["options"]):
            if (name, mode, FORWARD) not in found:
                continue
            cells = [x for one in (FORWARD, BACKWARD) for x in pass_cells(document, times, (name, mode, one, length))]
            both = found.get((name, mode, BOTH), {})
            shares = [x.get("floor_share") for x in (found[name, mode, FORWARD], both)]
            peak = both.get("peak_bytes")
            memory = "" if peak is None else f"{peak / operands:.2g}"
            rows.append([shown(name), mode, *cells, *("" if x is None else f"{x:.0%}" for x in shares), memory])
    sides = [x for one in (FORWARD, BACKWARD) for x in (f"{one}, ms", "softmax /", "FlashAttention /", "faster from")]
    return table(["", "mode", *sides, "floor, forward", "floor, both", "memory"], rows)


def pass_cells(document: Document, times: dict[Key, float], key: Key) -> list[str]:
    """Return milliseconds of one pass, what both softmaxes take over it, and from which length it pays."""
    name, mode, one, length = key
    own = times.get(key)
    ratios = [over(times.get((x, mode, one, length)), own) for x in (SOFTMAX, FLASH)]
    measured = FORWARD if one == FORWARD else BOTH
    starts = [
        "not yet" if x["length"] is None else f"{x['length']:,}"
        for x in document["crossovers"]
        if (x["mechanism"], x["mode"], x["direction"]) == (name, mode, measured)
    ]
    return ["" if own is None else f"{own:.3g}", *ratios, "".join(starts)]


def over(other: float | None, own: float | None) -> str:
    """Return how many times faster than another one something is."""
    return "" if other is None or own is None else f"{other / own:.3g}"


def shown(name: str) -> str:
    """Return a name as tables have it: a mechanism's as code."""
    return name if name in (SOFTMAX, FLASH, *FLA) else f"`{name}`"


def operand_bytes(document: Document, length: int) -> int:
    """Return the bytes of query, key, value, output and their gradients."""
    plan, wide = document["plan"], document["provenance"]["dtype"] == "float32"
    return 8 * plan["batch"] * plan["num_heads"] * plan["head_dim"] * length * (4 if wide else 2)


def steps_table(document: Document) -> str:
    """Return the time of a decoding step of one layer, launched one by one and from a graph."""
    steps, ways = document["steps"], ("microseconds", "graph_microseconds")
    softmax = next(row for row in steps if row["mechanism"] == SOFTMAX)
    rows = [
        [
            shown(row["mechanism"]),
            *(f"{row[way]:.3g}" if row[way] else "" for way in ways),
            over(softmax[ways[1]], row[ways[1]]),
        ]
        for row in steps
    ]
    return table(["a step", "µs per layer", "from a CUDA graph", "softmax /"], rows)


def fla_table(document: Document) -> str:
    """Return how many times faster than fla's kernels `linear` is, forward, against length."""
    times, lengths = medians(document), document["plan"]["lengths"]
    keys = [("causal", FORWARD, length) for length in lengths]
    rows = [[name, *(over(times.get((name, *key)), times.get(("linear", *key))) for key in keys)] for name in FLA]
    return table(["times faster than", *(f"{length:,}" for length in lengths)], rows)


def find_gpu_targets(document: Document) -> list[Target]:
    """Return the targets of what was measured at their length; a step's are times that it is below its own."""
    times, targets = medians(document), []
    for name, wanted in FASTER_THAN_FLASH.items():
        for one, at_least in zip((FORWARD, BACKWARD), wanted, strict=True):
            own, flash = (times.get((x, "causal", one, LENGTH)) for x in (name, FLASH))
            if own and flash:
                targets.append(Target(f"`{name}`, {one}: FlashAttention / its time", flash / own, at_least))
    for fla in (FLA_MAPPED, FLA_ALONE):
        own, other = (times.get((x, "causal", FORWARD, LENGTH)) for x in ("linear", fla))
        if own and other:
            targets.append(Target(f"`linear`, forward: {fla} / its time", other / own, 1))
    for row in document["steps"]:
        if row["mechanism"] in FASTER_THAN_FLASH and row["graph_microseconds"]:
            below = STEP_MICROSECONDS / row["graph_microseconds"]
            targets.append(Target(f"`{row['mechanism']}`, a step: {STEP_MICROSECONDS} µs / its time", below, 1))
    return targets


def gpu_parts(document: Document) -> list[str]:
    """Return what the project's README says of a GPU."""
    version, source = document.get("fla_version"), document["provenance"]
    parts = [
        f"{describe(document)} Commit {source['commit'] or 'unknown'}, `{source['command']}`.",
        f"At {summary_length(document):,} tokens: milliseconds, and how many times as long softmax takes"
        " (`scaled_dot_product_attention` as PyTorch chooses its kernel), and the same held to FlashAttention."
        " Backward is what forward and backward together take less forward alone, for all; where it is faster from is"
        " that of both together. The floor is the share of the time that matrix products or one copy of the operands"
        " would take; memory is what a training step has at most, over the bytes of query, key, value, output and"
        " their gradients.",
        passes_table(document),
        "Times faster than softmax, against length:",
        operations_table(document),
    ]
    if document["steps"]:
        context = document["steps"][0]["context"]
        parts += [f"A decoding step after {context:,} tokens, one layer of the same heads:", steps_table(document)]
    if set(FLA) & set(document["baselines"]):
        parts.append(f"Causal `linear` beside fla {version}, forward, which is given heads in its own layout:")
        parts.append(fla_table(document))
    else:
        parts.append("fla was not installed." if version is None else f"fla {version} could not be measured.")
    return parts


def gpu_results_parts(document: Document) -> list[str]:
    """Return what the results page says of a GPU besides: the targets, what failed, and every time."""
    parts = ["### Targets", judged(f"target, {LENGTH:,} tokens, causal", find_gpu_targets(document))]
    if document["failures"]:
        lines = [f"- {row['what']}: {row['error'].splitlines()[0]}" for row in document["failures"]]
        parts += ["### Failures", "\n".join(lines)]
    return [*parts, "### Milliseconds", milliseconds_table(document)]
