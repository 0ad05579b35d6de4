"""The pictures of the page: lines of SVG that take their colours from the page, so that they suit light and dark."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..plots import (
    CONTROL,
    DASHED,
    GRID,
    INK,
    MODEL_COLOURS,
    ORIGINAL,
    PATCHED,
    apart,
    blank_figure,
    draw_decoding,
    draw_layers,
    draw_peaks,
    draw_prefill,
    draw_state,
)
from ..schema import Report

WIDTH, HEIGHT = 4.6, 3.3  # inches: as wide as a phone shows it, text keeps its size
COLOURS = {INK: "--ink", GRID: "--line", ORIGINAL: "--original", PATCHED: "--patched", CONTROL: "--control"}
STYLE = {"svg.fonttype": "none", "font.family": "sans-serif", "axes.edgecolor": INK, "text.color": INK}
OF_A_FILE = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)  # nothing that holds for a page


@dataclass(frozen=True)
class Picture:
    """A drawing and what it shows in words."""

    svg: Markup
    text: str


def pictures_of(report: Report) -> dict[str, list[Picture]]:
    """Return the pictures of a report by the section of the page they belong to."""
    drawn: dict[str, list[tuple[str, Callable[[Axes, Report], None], str, bool]]] = {
        "speed": [
            ("prefill", draw_prefill, "Time of one forward against length, for both models.", bool(report.speed)),
            ("decoding", draw_decoding, "Time of one decoded token against the length before it.", report.decodes),
        ],
        "memory": [
            ("state", draw_state, "Bytes of the decoding state of one sequence against length.", report.has_state),
            ("peak", draw_peaks, "Largest memory of a forward of one sequence.", bool(report.memory)),
        ],
        "layers": [
            ("layers", draw_layers, "Divergence from the original, layer by layer.", bool(report.sensitivity)),
        ],
    }
    return {
        section: [picture(draw, report, name, text) for name, draw, text, there in kinds if there]
        for section, kinds in drawn.items()
    }


def positions_picture(read: Mapping[str, Sequence[Mapping[str, Any]]]) -> Picture:
    """Return perplexity by position: model -> rows of `first`, `last`, `loss`, and `low`, `high` or None."""
    text = f"Perplexity by position in the context, of {', '.join(read)}."
    return picture(draw_positions, read, "positions", text)


def draw_positions(axes: Axes, read: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw a curve for each model at the end of each bucket of positions, and its interval behind it."""
    for (name, rows), marker in zip(read.items(), "s^o", strict=False):
        ends, colour = [row["last"] for row in rows], MODEL_COLOURS[name]
        line = DASHED if name == "control" else "-"
        values = [math.exp(row["loss"]) for row in rows]
        axes.plot(ends, values, color=colour, marker=marker, markersize=5, linestyle=line, label=name)
        if all(row["low"] is not None for row in rows):
            low, high = ([math.exp(row[end]) for row in rows] for end in ("low", "high"))
            axes.fill_between(ends, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(apart(ends)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("up to position (tokens)")
    axes.set_ylabel("perplexity")
    axes.legend(frameon=False)


def picture(draw: Callable[[Axes, Any], None], shown: Any, name: str, text: str) -> Picture:
    """Return what `draw` makes of something, with its text for those who do not see it."""
    figure, (axes,) = blank_figure("", panels=1)
    figure.set_size_inches(WIDTH, HEIGHT)
    draw(axes, shown)
    return Picture(inline(figure, name, text), text)


def inline(figure: Figure, name: str, text: str) -> Markup:
    """Return a figure as an SVG element whose ids begin with its name and whose colours are those of the page."""
    file = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name, "svg.id": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    drawn = OF_A_FILE.sub("", file.getvalue())
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r'\bid="(?=[^"]*_\d+")', f'id="{name}-', drawn)  # what is numbered; the others have the salt
    for colour, variable in COLOURS.items():
        drawn = re.sub(re.escape(colour), f"var({variable})", drawn, flags=re.IGNORECASE)
    head, _, body = drawn.partition(">")
    size, title = re.search(r'viewBox="[^"]*"', head), escape(text)
    box = size.group() if size else ""
    opened = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" role="img" aria-label="{title}" {box}>'
    return Markup(f"{opened}<title>{title}</title>{body}")
