"""The tables of docs/gpu.md: both kinds of kernels beside softmax, and a step of decoding."""

from __future__ import annotations

from benchmarks.measure.operations import BASELINES
from benchmarks.measure.stopwatch import FLASH, SOFTMAX
from benchmarks.measure.targets import BOTH, FORWARD, medians
from benchmarks.result_files import Document
from benchmarks.tables.gpu import summary_length
from benchmarks.tables.markdown import count, number, table, timed

MODE = "causal"
NAMES = ("linear", "local", "hybrid")  # that both kinds of kernels were measured with


def passes_section(large: Document, small: Document) -> str:
    """Return milliseconds of causal attention, forward and with backward, by the kernels of Hopper and of others."""
    length, plan = summary_length(large), large["plan"]
    rows = [_row(large, name, timed(name, large, BASELINES), length) for name in (SOFTMAX, FLASH, *NAMES)]
    rows += [_row(small, name, f"{timed(name, small)}, kernels of other cards", length) for name in NAMES]
    source = large["provenance"]
    what = (
        f"One {source['device']}, {source['dtype']}, batch {plan['batch']}, {plan['num_heads']} heads of"
        f" {plan['head_dim']}. Milliseconds of causal attention over {count(length)} tokens, forward, and forward with"
        " backward:"
    )
    return f"{what}\n\n" + table(["", "forward", "both", "faster than softmax from"], rows)


def _row(document: Document, name: str, title: str, length: int) -> list[str]:
    times = medians(document)
    found = [
        count(x["length"])
        for x in document["crossovers"]
        if (x["mechanism"], x["mode"], x["direction"]) == (name, MODE, BOTH) and x["length"]
    ]
    return [title, *(number(times[name, MODE, one, length]) for one in (FORWARD, BOTH)), "".join(found)]


def steps_section(large: Document, small: Document) -> str:
    """Return microseconds of a layer's step of decoding, from Python and from a CUDA graph."""
    (context,) = {row["context"] for row in large["steps"]}
    rows = [
        [timed(row["mechanism"], large, BASELINES), number(row["microseconds"]), number(row["graph_microseconds"])]
        for row in large["steps"]
    ]
    rows += [
        [
            f"{timed(row['mechanism'], small)}, kernels of other cards",
            number(row["microseconds"]),
            number(row["graph_microseconds"]),
        ]
        for row in small["steps"]
        if row["mechanism"] in NAMES
    ]
    what = f"One layer after {count(context)} tokens, in microseconds:"
    return f"{what}\n\n" + table(["", "from Python", "from a CUDA graph"], rows)
