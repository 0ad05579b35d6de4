"""The report as plots: perplexity of the four models, time and decoding state against length.

Figures are built through matplotlib's objects, not pyplot: no global state and no display are involved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ..atomic_io import write_whole
from ..config import require
from ..evaluation import Spread
from .schema import Report

PLOTS = {
    "perplexity": "perplexity.png", "time": "time.png", "state": "state.png", "layers": "layers.png",
    "bytes": "bytes.png",
}  # fmt: skip
DPI = 150

# Okabe and Ito's palette, distinct in every kind of colour vision
PATCHED, ORIGINAL, CONTROL, INK, GRID = "#D55E00", "#0072B2", "#56B4E9", "#404040", "#E4E4E4"
DASHED = (0, (4, 3))
MODEL_COLOURS = {"original": ORIGINAL, "control": CONTROL, "converted": "#E69F00", "recovered": PATCHED}
MODEL_LABELS = {
    "original": "original",
    "control": "original,\nfine-tuned",
    "converted": "converted,\nbefore recovery",
    "recovered": "converted,\nrecovered",
}


CURVES = (PATCHED, ORIGINAL, "#009E73", "#CC79A7", "#E69F00", CONTROL, "#F0E442")


@dataclass(frozen=True)
class BytesPoint:
    """What a state of `state_bytes` for one sequence comes to: test perplexity, share of recalled answers or None.

    Of a regression the mean squared error stands for the perplexity.
    """

    label: str
    state_bytes: int
    perplexity: float
    recall: float | None = None


def points_of(report: Report) -> list[BytesPoint]:
    """Return the converted layers' state of a report, before and after recovery, and those of its windows."""
    own = [(f"{report.mechanism}, {name}", report.constant_bytes) for name in ("converted", "recovered")]
    points = [
        BytesPoint(label, count, getattr(report.scores, label.rpartition(", ")[2]))
        for label, count in own
        if count is not None
    ]
    names = {False: "window, untrained", True: "window, fine-tuned"}
    score = report.scores.name
    return points + [BytesPoint(names[row.trained], row.state_bytes, getattr(row, score)) for row in report.windows]


def save_plots(report: Report, directory: str | os.PathLike[str]) -> list[Path]:
    """Write the files of `PLOTS` into a directory and return their paths.

    A plot of something that was not measured, such as the decoding state of a masked model, is left out.
    """
    figures: dict[str, Callable[[Report], Figure]] = {"perplexity": perplexity_figure}
    if report.speed:
        figures["time"] = time_figure
    if report.has_state:
        figures["state"] = state_figure
    if report.windows:
        title = _title(report, "The same bytes as a window")
        figures["bytes"] = lambda report: bytes_figure(points_of(report), title, report.scores.label)
    if report.sensitivity:
        figures["layers"] = layers_figure
    return [save_figure(draw(report), Path(directory) / PLOTS[name]) for name, draw in figures.items()]


def perplexity_figure(report: Report) -> Figure:
    """Draw the four test perplexities as bars, or the errors of a regression, with a line at the better softmax model.

    Where perplexities differ by more than ten times the axis is logarithmic from 1, so that a bar is as long as the
    loss.
    """
    scores = report.scores
    figure, (axes,) = _figure(report, scores.label.capitalize(), panels=1)
    found = {name: getattr(scores, name) for name in MODEL_COLOURS}
    values = {name: value for name, value in found.items() if value is not None}
    colours = [MODEL_COLOURS[name] for name in values]
    bars = axes.bar([MODEL_LABELS[name] for name in values], list(values.values()), 0.62, color=colours)
    axes.bar_label(bars, [f"{value:{scores.form}}" for value in values.values()], padding=3, color=INK)
    logarithmic = scores.least > 0 and max(values.values()) > 10 * min(values.values())
    if logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(1, max(values.values()) ** 1.1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, max(values.values()) * 1.12)
    axes.set_ylabel(scores.label.removeprefix("test ") + (" (log scale)" if logarithmic else ""))
    axes.axhline(scores.best, color=INK, linewidth=1, linestyle=DASHED, zorder=0.5)
    axes.set_title(f"recovered / best (dashed) = {report.ratio:.3f}", fontsize=10, color=INK)
    axes.grid(visible=False, axis="x")
    return figure


def time_figure(report: Report) -> Figure:
    """Draw prefill time and, for models that decode, time per decoded token against length, both on log axes."""
    figure, panels = _figure(report, "Time against length", panels=1 + report.decodes)
    draw_prefill(panels[0], report)
    if report.decodes:
        draw_decoding(panels[1], report)
    return figure


def draw_prefill(axes: Axes, report: Report) -> None:
    """Draw the time of one forward against length, and where the patched model overtakes."""
    rows = sorted(report.speed, key=lambda row: row.length)
    patched = [_prefill_milliseconds(row.patched_prefill, row.length * row.batch_size) for row in rows]
    original = [_prefill_milliseconds(row.original_prefill, row.length * row.batch_size) for row in rows]
    _curves(axes, [row.length for row in rows], patched, original, f"original ({rows[0].original_attention})")
    crossover = report.crossover_length
    verdict = f"patched faster from {crossover:,} tokens on" if crossover else "no crossover in the measured range"
    axes.set_title(f"Prefill: {verdict}", fontsize=10, color=INK)
    axes.set_ylabel("time of one forward (ms)")
    if crossover is not None:
        axes.axvline(crossover, color=INK, linewidth=1, linestyle=DASHED, label="crossover")
    axes.legend(frameon=False)


def draw_decoding(axes: Axes, report: Report) -> None:
    """Draw the time of a decoded token against the length before it."""
    found = [
        (row.length, row.patched_decode, row.original_decode)
        for row in sorted(report.speed, key=lambda row: row.length)
        if row.patched_decode is not None and row.original_decode is not None
    ]
    lengths, patched, original = zip(*found, strict=True)
    _curves(axes, lengths, patched, original, f"original ({report.speed[0].original_attention})")
    axes.set_title("Decoding after that many tokens", fontsize=10, color=INK)
    axes.set_ylabel("time per token (ms)")
    axes.legend(frameon=False)


def state_figure(report: Report) -> Figure:
    """Draw the bytes of decoding state of one sequence against length, on log axes."""
    figure, (axes,) = _figure(report, "Decoding state against length", panels=1)
    draw_state(axes, report)
    return figure


def draw_state(axes: Axes, report: Report) -> None:
    """Draw the bytes of decoding state of one sequence."""
    rows = [row for row in report.memory if row.patched_state is not None]
    _draw_bytes(axes, [(row.length, row.patched_state or 0, row.original_state or 0) for row in rows])
    axes.set_ylabel("state of one sequence (bytes)")


def draw_peaks(axes: Axes, report: Report) -> None:
    """Draw the largest memory of a forward of one sequence, without the weights."""
    _draw_bytes(axes, [(row.length, row.patched_peak, row.original_peak) for row in report.memory])
    axes.set_ylabel("peak of a forward (bytes)")


def _draw_bytes(axes: Axes, rows: Sequence[tuple[int, int, int]]) -> None:
    rows = sorted(rows)
    patched, original = ([Spread.of([row[place]]) for row in rows] for place in (1, 2))
    _curves(axes, [row[0] for row in rows], patched, original)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.legend(frameon=False)


def bytes_figure(points: Sequence[BytesPoint], title: str, score: str = "test perplexity") -> Figure:
    """Draw perplexity and, where it was measured, recall against the bytes of decoding state, one curve a label.

    Points of one label are joined in the order of their bytes, and a point of its own is marked alone. A label that
    begins with `window` is drawn dashed and grey: what a state of that size has to be worth more than.
    score: what the perplexity of a point is called.

    Raises:
        OptionError: there is no point, or one has no bytes.

    >>> points = [BytesPoint("window", 40_000, 34.2, 0.2), BytesPoint("gla", 50_000, 39.0, 0.3)]
    >>> [axes.get_ylabel() for axes in bytes_figure(points, "SmolLM2").axes]
    ['test perplexity', 'recall (share of answers)']
    """
    require("points", len(points), bool(points) and all(p.state_bytes > 0 for p in points), "some, each with bytes")
    recalled = any(point.recall is not None for point in points)
    figure, panels = blank_figure(title, panels=1 + recalled)
    labels = list(dict.fromkeys(point.label for point in points))
    drawn = [("perplexity", score), ("recall", "recall (share of answers)")]
    for axes, (name, label) in zip(panels, drawn, strict=False):
        for number, kind in enumerate(labels):
            own = [p for p in points if p.label == kind and getattr(p, name) is not None]
            own.sort(key=lambda point: point.state_bytes)
            plain = kind.startswith("window")
            axes.plot(
                [point.state_bytes for point in own], [getattr(point, name) for point in own], label=kind,
                color=INK if plain else CURVES[number % len(CURVES)], linestyle=DASHED if plain else "-",
                marker="s" if plain else "o", markersize=5,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        axes.set_xlabel("state of one sequence (bytes)")
        axes.set_ylabel(label)
    panels[0].legend(frameon=False)
    if recalled:
        panels[1].set_ylim(-0.03, 1.03)
    return figure


def layers_figure(report: Report) -> Figure:
    """Draw what converting each layer alone costs, and which layers kept softmax for it."""
    figure, (axes,) = _figure(report, "What each layer costs", panels=1)
    draw_layers(axes, report)
    return figure


def draw_layers(axes: Axes, report: Report) -> None:
    """Draw the divergence of each layer alone as a bar, in the colour of what serves it."""
    converted = {int(index) for index in str(report.options["layers"]).split(",")}
    for name, colour, wanted in (("converted", PATCHED, True), ("keeps softmax", ORIGINAL, False)):
        chosen = [i for i in range(len(report.sensitivity)) if (i in converted) is wanted]
        axes.bar(chosen, [report.sensitivity[i] for i in chosen], 0.62, color=colour, label=name)
    axes.set_xlabel("layer")
    axes.set_ylabel("KL from the original (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    axes.grid(visible=False, axis="x")


def _figure(report: Report, title: str, panels: int) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with a row of panels, titled with the model and its mechanism."""
    return blank_figure(_title(report, title), panels)


def _title(report: Report, what: str) -> str:
    return f"{what}: {_short(report.base_model)}, {report.mechanism}"


def blank_figure(title: str, panels: int, rows: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of empty panels, and these row by row; panels: of all rows."""
    columns = panels // rows
    figure = Figure(figsize=(5.6 * columns if panels > 1 else 6.4, 4.2 * rows), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(INK)
        panel.tick_params(colors=INK, labelsize=9)
        panel.xaxis.label.set_color(INK)
        panel.yaxis.label.set_color(INK)
        panel.grid(color=GRID, linewidth=0.8)
        panel.set_axisbelow(True)
    return figure, list(axes)


def _short(base_model: str) -> str:
    """The last part of a path or of a Hub name."""
    return Path(base_model).name or base_model


def _prefill_milliseconds(tokens_per_second: Spread, tokens: int) -> Spread:
    """Turn a speed into the time of one forward; the fastest repeat takes the least time."""
    milliseconds = [1000 * tokens / speed for speed in (tokens_per_second.maximum, tokens_per_second.minimum)]
    return Spread(1000 * tokens / tokens_per_second.median, *milliseconds)


def _curves(
    axes: Axes,
    lengths: Sequence[int],
    patched: Sequence[Spread],
    original: Sequence[Spread],
    original_label: str = "original",
) -> None:
    """Draw two curves of medians with the range of the repeats behind them, on log axes."""
    for values, label, colour, marker in (
        (original, original_label, ORIGINAL, "s"),
        (patched, "patched", PATCHED, "o"),
    ):
        axes.plot(lengths, [v.median for v in values], color=colour, marker=marker, markersize=5, label=label)
        axes.fill_between(
            lengths, [v.minimum for v in values], [v.maximum for v in values], color=colour, alpha=0.18, linewidth=0
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(apart(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel("length (tokens)")


def apart(lengths: Sequence[int]) -> list[int]:
    """Keep those of the sorted lengths whose labels do not run into each other on a log axis."""
    ratio = max(1.4, (lengths[-1] / lengths[0]) ** (1 / 8))
    shown: list[int] = []
    for length in lengths:
        if not shown or length >= ratio * shown[-1]:
            shown.append(length)
    return shown


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, whole or not at all."""
    return write_whole(path, lambda temporary: figure.savefig(temporary, format="png"))
