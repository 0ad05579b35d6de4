"""What recipes measure and draw at their end is there, and takes no time: other tests look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_reports() -> Iterator[Callable[..., Path]]:
    """Measure speed once, and write pictures without drawing; a test that looks at them gets here what draws them."""
    from hf_linattn.report import plots
    from hf_linattn.training.stages import report

    def empty(figure: Any, path: Path) -> Path:
        path.touch()
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "measure_speed", partial(report.measure_speed, repeats=1, decode_tokens=1, warmup=0))
        patch.setattr(plots, "DPI", 20)
        draw = plots.save_figure
        patch.setattr(plots, "save_figure", empty)
        yield draw
