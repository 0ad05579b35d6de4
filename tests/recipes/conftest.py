"""What recipes load, measure and draw takes no time: other tests look at it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest


def remembered(load: Callable[..., Any]) -> Callable[..., Any]:
    """Read a checkpoint once and return copies: a run loads its models twenty times, a quarter of its time."""
    read = functools.lru_cache(maxsize=4)(lambda name, dtype, files: load(name, dtype))

    def load_copy(name: str, dtype: Any = "auto") -> Any:
        files = {(path.name, path.stat().st_mtime_ns) for path in Path(name).glob("*")}
        return copy.deepcopy(read(name, dtype, frozenset(files)))

    return load_copy


@pytest.fixture(autouse=True, scope="module")
def quick_reports() -> Iterator[Callable[..., Path]]:
    """Measure speed once, and write pictures without drawing; a test that looks at them gets here what draws them."""
    from hf_linattn.report import plots
    from hf_linattn.training import training_run
    from hf_linattn.training.stages import report

    def empty(figure: Any, path: Path) -> Path:
        path.touch()
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "measure_speed", partial(report.measure_speed, repeats=1, decode_tokens=1, warmup=0))
        patch.setattr(training_run, "load_model", remembered(training_run.load_model))
        patch.setattr(plots, "DPI", 20)
        draw = plots.save_figure
        patch.setattr(plots, "save_figure", empty)
        yield draw
