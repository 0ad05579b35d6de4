"""A chosen plan as a picture: the score of every head, layer by layer, and which stay exact."""

from __future__ import annotations

import math
import os
from pathlib import Path

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ..chosen_plan import ChosenPlan
from .plots import INK, ORIGINAL, PATCHED, blank_figure, save_figure

COLOURS = LinearSegmentedColormap.from_list("scores", ["#FFFFFF", ORIGINAL])


def plan_figure(plan: ChosenPlan) -> Figure:
    """Draw layers from left to right, key/value heads upwards; the darker, the steeper. What stays exact is framed.

    Scores below zero are white: opening these gates would harm.
    """
    record = plan.record
    kept = f"{record.num_kept} of {sum(record.heads)} key/value heads exact"
    figure, (axes,) = blank_figure(f"{record.model}: {kept}", panels=1)
    rows = max(map(len, record.scores))
    columns = [[*column, *[math.nan] * (rows - len(column))] for column in record.scores]
    highest = max((score for column in record.scores for score in column), default=0.0)
    image = axes.imshow(
        list(map(list, zip(*columns, strict=True))), origin="lower", aspect="auto", cmap=COLOURS,
        vmin=0, vmax=highest if highest > 0 else 1,
    )  # fmt: skip
    for layer, head in record.kept:
        if record.unit == "head" or head == 0:
            axes.add_patch(Rectangle((layer - 0.5, head - 0.5), 1, 1, fill=False, edgecolor=PATCHED, linewidth=1.6))
    axes.set_xlabel("layer")
    axes.set_ylabel("key/value head" if record.unit == "head" else "")
    axes.set_title(f"framed: exact; others: {record.replace['mechanism']}", fontsize=10, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    figure.colorbar(image, label=f"score ({record.search}, {record.signal})")
    return figure


def save_plan_picture(plan: ChosenPlan, path: str | os.PathLike[str]) -> Path:
    """Write `plan_figure` as PNG, whole or not at all."""
    return save_figure(plan_figure(plan), Path(path))
