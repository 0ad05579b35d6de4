"""Tables of classifiers: what conversions keep of tasks, and what long documents are worth and cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from scipy import stats

from benchmarks.measure.stopwatch import SOFTMAX
from benchmarks.result_files import CONTROL, CUT, ORIGINAL, PROBE, WINDOWS, Document
from benchmarks.tables.markdown import code, count, options_text, table

TASK_NAMES = {"cola": "CoLA", "sst2": "SST-2", "rte": "RTE"}
BASELINES = (CUT, WINDOWS, SOFTMAX)


def kept_share(scores: Sequence[float], bests: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean score over the mean of the best, and its 95 % interval: Student's t of the differences.

    Both come in pairs, of the same task and seed; the mean of the best is taken as it is.

    >>> kept_share([0.5, 0.7], [0.5, 0.7])
    (1.0, 1.0, 1.0)
    """
    whole, differences = fmean(bests), [a - b for a, b in zip(scores, bests, strict=True)]
    share = 1 + fmean(differences) / whole
    if len(differences) < 2:
        return share, math.nan, math.nan
    spread = stats.t.ppf(0.975, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences)) / whole
    return share, share - spread, share + spread


def by_row(rows: Iterable[Document], *names: str) -> dict[str, dict[tuple[object, ...], Document]]:
    """Return the name of a row -> the values of its fields `names` -> the row."""
    found: dict[str, dict[tuple[object, ...], Document]] = {}
    for row in rows:
        found.setdefault(row["row"], {})[tuple(row[name] for name in names)] = row
    return found


def tasks_table(document: Document) -> str:
    """Return what conversions keep of classifiers of sentences: scores by task, and their share of the best.

    The best is the better of original and control, for each task and seed.
    """
    rows = by_row(document["rows"], "task", "seed")
    best = {place: max(row["score"], rows[ORIGINAL][place]["score"]) for place, row in rows[CONTROL].items()}
    tasks = [task for task in TASK_NAMES if any(task == place[0] for place in best)]

    def mean(places: Mapping[tuple[object, ...], Document], task: str, field: str) -> str:
        values = [row[field] for place, row in places.items() if place[0] == task]
        return f"{fmean(values):.3f}" if values else ""

    lines = [[ORIGINAL, "", *("" if field != "score" else mean(rows[ORIGINAL], task, field)
             for task in tasks for field in ("converted", "score")), "", ""]]  # fmt: skip
    for name, own in rows.items():
        if name == ORIGINAL:
            continue
        first = next(iter(own.values()))
        cells = [mean(own, task, field) for task in tasks for field in ("converted", "score")]
        paired = [place for place in own if place in best]
        share, low, high = kept_share([own[place]["score"] for place in paired], [best[place] for place in paired])
        interval = "" if math.isnan(low) else f"{low:.3f} to {high:.3f}"
        said = ["", ""] if name == CONTROL else [f"**{share:.3f}**", interval]
        shown = name if name == CONTROL else code(name)
        lines.append([shown, code(options_text(first["options"])), *cells, *said])
    heads = [f"{TASK_NAMES[task]}{after}" for task in tasks for after in (", converted", "")]
    seeds = len({place[1] for place in best})
    what = f"{seeds} seed{'s' * (seeds > 1)}; tasks: {', '.join(TASK_NAMES[task] for task in tasks)}."
    return "\n\n".join([what, table(["row", "options", *heads, "x best", "95 % interval"], lines)])


def documents_table(document: Document) -> str:
    """Return the scores of readers of long documents, mean over the seeds, and the smallest and largest of them."""
    rows = by_row(document["rows"], "set", "seed")
    sets = list(dict.fromkeys(row["set"] for row in document["rows"]))
    lines = []
    for name, own in rows.items():
        cells = []
        for each in sets:
            scores = [row["score"] for place, row in own.items() if place[0] == each]
            spread = f" ({min(scores):.3f} to {max(scores):.3f})" if len(scores) > 1 else ""
            cells.append(f"{fmean(scores):.3f}{spread}" if scores else "")
        reader = name.removeprefix(PROBE)
        shown = reader if reader in BASELINES else code(reader)
        lines.append([PROBE * name.startswith(PROBE) + shown, *cells])
    return table(["reader", *sets], lines)


def documents_speed_table(document: Document) -> str:
    """Return seconds and peak memory of a document by its length, and the ratios to softmax."""
    rows = by_row(document["rows"], "tokens")
    lengths = list(dict.fromkeys(row["tokens"] for row in document["rows"]))
    lines = []
    for name, own in rows.items():
        cells = []
        for length in lengths:
            row = own[length,]
            times = "" if name == SOFTMAX else f" ({row['times_faster']:.1f}x)"
            memory = f"{row['peak_bytes'] / 1e6:,.0f} MB" + ("" if name == SOFTMAX else f" ({row['memory']:.2f})")
            cells += [f"{row['milliseconds']['median'] / 1e3:.2f} s{times}", memory]
        lines.append([name if name == SOFTMAX else code(name), *cells])
    heads = [f"{count(length)} tokens{after}" for length in lengths for after in ("", ", memory")]
    return table(["attention", *heads], lines)
