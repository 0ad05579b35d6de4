"""What recipes measure and draw at their end is there, and takes no time: other tests look at it."""

from __future__ import annotations

from functools import partial

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_reports():
    from hf_linattn.report import plots
    from hf_linattn.training.stages import report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "measure_speed", partial(report.measure_speed, repeats=1, decode_tokens=1, warmup=0))
        patch.setattr(plots, "DPI", 20)
        yield
