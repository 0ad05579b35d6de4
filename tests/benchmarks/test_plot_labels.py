"""Names beside the points of a plot."""

from __future__ import annotations

from itertools import combinations

import pytest

from benchmarks.plot_labels import place_labels
from hf_linattn.report.plots import blank_figure

pytestmark = pytest.mark.tools


def test_names_lie_on_no_point_and_not_on_each_other():
    _, (panel,) = blank_figure("points", 1)
    points = {"at the right edge": (1.0, 1.0), "beside it": (0.9, 1.0), "on it": (0.9, 1.0), "below": (0.9, 0.98)}
    for point in points.values():
        panel.plot(*point, marker="o", markersize=3)
    panel.set_xlim(0, 1.02)
    place_labels(panel, list(points.items()))
    assert {label.get_text(): label.xy for label in panel.texts} == points
    boxes = [label.get_window_extent() for label in panel.texts]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    pixels = panel.transData.transform(list(points.values()))
    assert not any(box.contains(*pixel) for box in boxes for pixel in pixels)
    assert all(panel.bbox.x0 <= box.x0 and box.x1 <= panel.bbox.x1 for box in boxes)
