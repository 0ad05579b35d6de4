"""A comparison as a picture: perplexity against memory, and the speed on a prompt, at the longest length."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

from ..report.plots import CURVES, DASHED, INK, blank_figure
from .measure import Comparison
from .table import Record, records


def comparison_figure(comparison: Comparison, title: str) -> Figure:
    """Draw each plan in a colour of its own: left its perplexity and bytes, right how fast it reads.

    The names stand beside the bars on the right, where none can hide another. A ring is the perplexity as patched, a
    dot the one after `calibrate`. The dashed lines are softmax.
    """
    longest = max(comparison.options.lengths)
    rows = [row for entry in comparison.entries for row in records(comparison, entry) if row.tokens == longest]
    figure, (left, right) = blank_figure(f"{title}, {longest:,} tokens", panels=2)
    colours = [CURVES[number % len(CURVES)] for number in range(len(rows))]
    for row, colour in zip(rows, colours, strict=True):
        _draw_quality(left, row, colour)
    fitted = any(row.calibrated for row in rows)
    left.axhline(comparison.original.perplexity, color=INK, linewidth=1, linestyle=DASHED)
    left.set_xscale("log")
    left.xaxis.set_major_formatter(EngFormatter(unit="B"))
    lowest, highest = left.get_ylim()
    if highest > 3 * lowest:
        left.set_yscale("log")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    left.set_xlabel("decoding state of one sequence" if comparison.decodes else "peak of a forward")
    left.set_ylabel("perplexity (ring: untrained, dot: calibrated)" if fitted else "perplexity")
    speeds = [row.prompt_speedup or 0.0 for row in rows]
    bars = right.barh(range(len(rows)), speeds, 0.62, color=colours)
    right.set_yticks(range(len(rows)), [row.attention for row in rows])
    right.invert_yaxis()
    right.bar_label(bars, [f"{speed:.2f}" if speed else "not measured" for speed in speeds], padding=3, color=INK)
    right.axvline(1, color=INK, linewidth=1, linestyle=DASHED)
    right.set_xlabel("reads a prompt, times as fast as softmax")
    right.grid(visible=False, axis="y")
    return figure


def _draw_quality(axes: Axes, row: Record, colour: str) -> None:
    """Draw the perplexity of one plan as patched and, joined to it, as fitted."""
    count = row.bytes[0]
    if count is None or row.untrained is None:
        return
    before = row.untrained.perplexity
    axes.plot([count], [before], color=colour, marker="o", markersize=7, fillstyle="none")
    if row.calibrated is not None:
        after = row.calibrated.perplexity
        axes.plot([count, count], [before, after], color=colour, alpha=0.4)
        axes.plot([count], [after], color=colour, marker="o", markersize=7)
