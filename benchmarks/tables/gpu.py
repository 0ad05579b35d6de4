"""Tables of a GPU's speed: both passes beside two softmaxes, memory, a decoding step, and fla's kernels."""

from __future__ import annotations

from benchmarks.measure.fla_kernels import FLA
from benchmarks.measure.operations import BASELINES
from benchmarks.measure.stopwatch import FLASH, SOFTMAX
from benchmarks.measure.targets import BACKWARD, BOTH, FORWARD, LENGTH, Key, find_gpu_targets, medians
from benchmarks.result_files import Document
from benchmarks.tables.markdown import MODES, count, number, share, table, timed
from benchmarks.tables.speed import describe, judged, milliseconds_table, operations_table


def summary_length(document: Document) -> int:
    """Return the length that the summary is of: that of the targets, or the longest with gradients."""
    lengths = document["plan"]["backward_lengths"]
    return LENGTH if LENGTH in lengths else max(lengths)


def passes_table(document: Document) -> str:
    """Return milliseconds of both passes at one length, with how many times faster they are than both softmaxes."""
    length, times, plan = summary_length(document), medians(document), document["plan"]
    found = {
        (row["mechanism"], row["mode"], row["direction"]): row
        for row in document["operations"]
        if row["length"] == length
    }
    wide = 4 if document["provenance"]["dtype"] == "float32" else 2  # bytes of a number
    operands = 8 * plan["batch"] * plan["num_heads"] * plan["head_dim"] * length * wide  # and their gradients
    rows = []
    for mode in MODES:
        for name in (*document["baselines"], *document["options"]):
            if (name, mode, FORWARD) not in found:
                continue
            cells = [x for one in (FORWARD, BACKWARD) for x in pass_cells(document, times, (name, mode, one, length))]
            both = found.get((name, mode, BOTH), {})
            shares = [share(x.get("floor_share")) for x in (found[name, mode, FORWARD], both)]
            peak = both.get("peak_bytes")
            # the peak is counted from where query, key, value and the gradient of the output are there, half of them
            memory = "" if peak is None else f"{peak / operands + 0.5:.3g}"
            rows.append([timed(name, document, BASELINES), mode, *cells, *shares, memory])
    sides = [x for one in (FORWARD, BACKWARD) for x in (f"{one}, ms", "softmax /", "FlashAttention /", "faster from")]
    return table(["", "mode", *sides, "floor, forward", "floor, both", "memory"], rows)


def pass_cells(document: Document, times: dict[Key, float], key: Key) -> list[str]:
    """Return milliseconds of one pass, what both softmaxes take over it, and from which length it pays."""
    name, mode, one, length = key
    measured = (name, mode, FORWARD if one == FORWARD else BOTH)
    ratios = [over(times.get((x, mode, one, length)), times.get(key)) for x in (SOFTMAX, FLASH)]
    starts = [
        count(x["length"])
        for x in document["crossovers"]
        if (x["mechanism"], x["mode"], x["direction"]) == measured
    ]
    return [number(times.get(key)), *ratios, "".join(starts)]


def over(other: float | None, own: float | None) -> str:
    """Return how many times faster than another one something is."""
    return "" if other is None or own is None else number(other / own)


def steps_table(document: Document) -> str:
    """Return the time of a decoding step of one layer, launched one by one and from a graph."""
    steps, ways = document["steps"], ("microseconds", "graph_microseconds")
    softmax = next(row for row in steps if row["mechanism"] == SOFTMAX)
    rows = [
        [
            timed(row["mechanism"], document, BASELINES),
            *(number(row[way] or None) for way in ways),
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
    return table(["times faster than", *map(count, lengths)], rows)


def gpu_parts(document: Document) -> list[str]:
    """Return what docs/speed.md says of a GPU."""
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
