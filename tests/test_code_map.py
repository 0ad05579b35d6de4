"""CONTRIBUTING's list of the files that one forward runs through is what a trace finds."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hf_linattn
from hf_linattn import patch_model
from tests.helpers import make_tokens
from tests.models import make_model

PACKAGE = Path(hf_linattn.__file__).parent


def files_of_forward(model: torch.nn.Module, **inputs: Any) -> list[str]:
    """Return the library's files whose functions run in the second of two forwards, as they are entered first."""
    entered: dict[str, None] = {}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        # evaluation measures forwards and is part of none; memory that it counted before may die in this one
        if event == "call" and path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "evaluation"):
            entered[path.relative_to(PACKAGE).as_posix()] = None

    with torch.no_grad():
        model(**inputs)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            model(**inputs)
        finally:
            sys.setprofile(before)
    return list(entered)


def test_the_list_of_one_forward_is_that_of_a_trace():
    model, mask = patch_model(make_model("llama"), "performer"), torch.ones(2, 19, dtype=torch.long)
    mask[1, :4] = 0
    found = files_of_forward(model, input_ids=make_tokens(2, 19), attention_mask=mask, use_cache=False)
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"<!-- forward -->\n(.*?)<!-- /forward -->", page, flags=re.S)
    assert re.findall(r"`([\w/]+\.py)`", listed) == found, "\n".join(f"{n}. `{x}`" for n, x in enumerate(found, 1))
