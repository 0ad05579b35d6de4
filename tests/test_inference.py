"""Progress bars: one meaning of `progress` everywhere, and none in the log of a job by default."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import is_dataclass

import pytest

from hf_linattn.advice.advise import advise
from hf_linattn.evaluation.suite import SuiteOptions
from hf_linattn.inference import progress_bar
from tests.test_project import REFERENCE


@pytest.mark.parametrize(("progress", "shown"), [(None, False), (False, False), (True, True)])
def test_a_bar_is_shown_where_it_is_asked_for_and_else_on_a_terminal_alone(progress, shown, capsys):
    """Standard error is none here."""
    assert list(progress_bar([3, 4], progress=progress, desc="reading")) == [3, 4]
    assert ("reading" in capsys.readouterr().err) == shown


def test_progress_has_one_default():
    places = [name.rpartition(".") for name in REFERENCE]
    public = [getattr(importlib.import_module(module), name) for module, _, name in places]
    callables = [x for x in (*public, advise, SuiteOptions) if inspect.isfunction(x) or is_dataclass(x)]
    found = [x for x in callables if "progress" in inspect.signature(x).parameters]
    assert len(found) > 10
    assert [x.__name__ for x in found if inspect.signature(x).parameters["progress"].default is not None] == []
