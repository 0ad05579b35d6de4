"""Names beside the points of a plot, where they lie on neither a point nor each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from hf_linattn.report.plots import INK

GAP = 4  # points between a point and its name
# sides of a point, the better ones first: x, y, and how the name is aligned there
SIDES = (
    (1, 0, "left", "center"), (-1, 0, "right", "center"), (0, 1, "center", "bottom"), (0, -1, "center", "top"),
    (1, 2, "left", "bottom"), (1, -2, "left", "top"), (-1, 2, "right", "bottom"), (-1, -2, "right", "top"),
)  # fmt: skip


def place_labels(panel: Axes, labels: Sequence[tuple[str, tuple[float, float]]], fontsize: float = 5) -> None:
    """Write names beside points, when all that is drawn is there and the limits are final.

    labels: name and point, in data coordinates; a name takes the first side that is free, the longest one first.
    """
    figure: Any = panel.figure
    figure.draw_without_rendering()  # the layout is made, so that pixels are what they will be
    points = np.concatenate([panel.transData.transform(np.asarray(line.get_xydata())) for line in panel.get_lines()])
    taken: list[Bbox] = []
    for name, place in sorted(labels, key=lambda label: -len(label[0])):
        label = panel.annotate(name, place, textcoords="offset points", xytext=(0, 0), fontsize=fontsize, color=INK)
        label.set_in_layout(False)  # the panels stay where they are
        found = [_hidden(_moved(label, side), taken, points, panel.bbox) for side in SIDES]
        taken.append(_moved(label, SIDES[found.index(min(found))]))


def _moved(label: Annotation, side: tuple[int, int, str, str]) -> Bbox:
    """Put a name on a side of its point, and return the pixels that it takes."""
    x, y, horizontal, vertical = side
    label.set(position=(GAP * x, GAP * y), horizontalalignment=horizontal, verticalalignment=vertical)
    return label.get_window_extent()


def _hidden(box: Bbox, taken: Sequence[Bbox], points: NDArray[np.float64], panel: Bbox) -> float:
    """Return how bad a place is: pixels over other names and outside the panel, and points that it covers."""
    shared = [Bbox.intersection(box, other) for other in taken]
    inside = Bbox.intersection(box, panel)
    outside = box.width * box.height - (0 if inside is None else inside.width * inside.height)
    covered = sum(box.contains(*point) for point in points)
    return sum(part.width * part.height for part in shared if part is not None) + outside + 100 * covered
