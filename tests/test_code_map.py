"""CONTRIBUTING's list of the files that one forward runs through is what a trace finds, and the list is short."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import hf_linattn
from hf_linattn import patch_model
from hf_linattn.ops.runtime import cpu as library
from tests.helpers import make_tokens
from tests.models import make_model

PACKAGE = Path(hf_linattn.__file__).parent
# mechanism -> options, with which there are keys beyond the window; most files of Python, most of C. The C of an
# operation has two files of Python, the backend and the functions that call it. hybrid has two mechanisms, its own and
# the one beyond the window; two operations, the sums there and the softmax of its window, with what all their backends
# share; and it takes rows apart by their padding, as all that count positions do
LIMITS: dict[str, tuple[dict[str, Any], int, int]] = {"performer": ({}, 11, 4), "hybrid": ({"window_size": 6}, 21, 7)}


def files_of_forward(model: torch.nn.Module, **inputs: Any) -> tuple[list[str], list[str]]:
    """Return the library's files whose functions run in the second of two forwards, as they are entered first.

    First those of Python; then those of C, by the functions that are called.
    """
    entered: dict[str, None] = {}
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        # evaluation measures forwards and is part of none; memory that it counted before may die in this one
        if event == "call" and path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "evaluation"):
            entered[path.relative_to(PACKAGE).as_posix()] = None
            if frame.f_code is library.call.__code__:
                called[frame.f_locals["function"]] = None

    with torch.no_grad():
        model(**inputs)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            model(**inputs)
        finally:
            sys.setprofile(before)
    return list(entered), list(dict.fromkeys(file for function in called for file in files_of(function)))


def files_of(function: str) -> list[str]:
    """Return the file that defines a function of the C, and those with functions that it includes."""
    found = [x for x in (PACKAGE / "csrc").rglob("*.c") if f"LAYOUT({function}, " in x.read_text(encoding="utf-8")]
    for path in found:  # which grows
        names = re.findall(r'^#include "(.*)"', path.read_text(encoding="utf-8"), flags=re.M)
        found += [x for name in names if (x := (path.parent / name).resolve()) not in found]
    with_functions = [x for x in found if re.search(r"^\{", x.read_text(encoding="utf-8"), flags=re.M)]
    return [x.relative_to(PACKAGE).as_posix() for x in with_functions]


@pytest.mark.parametrize("name", LIMITS)
def test_a_forward_opens_few_files(name, capsys):
    options, most, most_c = LIMITS[name]
    model, mask = patch_model(make_model("llama"), name, **options), torch.ones(2, 19, dtype=torch.long)
    mask[1, :4] = 0
    python, c = files_of_forward(model, input_ids=make_tokens(2, 19), attention_mask=mask, use_cache=False)
    found = "\n".join(f"{number}. `{file}`" for number, file in enumerate(python + c, 1))
    with capsys.disabled():
        print(f"\n{name}:\n{found}")
    assert len(python) <= most and len(c) <= most_c
    if name == "performer":
        page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
        (listed,) = re.findall(r"<!-- forward -->\n(.*?)<!-- /forward -->", page, flags=re.S)
        assert re.findall(r"`([\w/]+\.\w+)`", listed) == python + c
