"""For sanitizers: every operand of the C lies in memory of its own that ends where it ends, and none is kept.

As a plugin of pytest (`-p tests.ops.exact_operands`) it is so in all tests. In a script none is kept, by

    python -m tests.ops.exact_operands script.py

but operands stay as they are, as what sees every operation would be in the way of tracing and exporting.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linattn.ops.runtime import cpu as library


def exact(x: Any) -> Any:
    """Return a copy with the same shape and strides in memory of exactly its size; no tensor as it is."""
    if not isinstance(x, Tensor) or not x.numel():
        return x
    owned = [slice(0, 1) if step == 0 else slice(None) for step in x.stride()]
    part = x.detach()[tuple(owned)]
    copy = torch.empty_strided(part.shape, part.stride(), dtype=x.dtype).copy_(part)
    return copy.as_strided(x.shape, x.stride())


def exact_all(operands: Sequence[Any]) -> list[Any]:
    """The same of several; one that lies inside another one, as a part of it, is that part of its copy."""
    copies: list[Any] = [exact(x) for x in operands]
    wholes = [(x, copy) for x, copy in zip(operands, copies, strict=True) if isinstance(x, Tensor) and x.numel()]
    for number, x in enumerate(operands):
        for whole, copy in wholes if isinstance(x, Tensor) and x.numel() else ():
            if whole is not x and _extent(x) != _extent(whole) and _is_within(x, whole):
                offset = x.storage_offset() - whole.storage_offset()
                copies[number] = copy.as_strided(x.shape, x.stride(), offset)
    return copies


def _extent(x: Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in its storage, in bytes."""
    last = sum((count - 1) * step for count, step in zip(x.shape, x.stride(), strict=True))
    return x.storage_offset() * x.itemsize, (x.storage_offset() + last + 1) * x.itemsize


def _is_within(x: Tensor, whole: Tensor) -> bool:
    same = x.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() and x.dtype == whole.dtype
    (begin, end), (first, last) = _extent(x), _extent(whole)
    return same and first <= begin and end <= last and 0 not in whole.stride()


class ExactOperands(TorchDispatchMode):
    """Calls every operation of the library with exact copies, and copies what it wrote back.

    before: called with the operation, its arguments and the names of these before each call.
    """

    def __init__(self, before: Callable[[Any, list[Any], list[str]], None] = lambda *_: None):
        super().__init__()
        self.before, self.calls = before, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "hf_linattn":
            return func(*args, **(kwargs or {}))
        schema = func._schema.arguments
        given = [*args, *(x.default_value for x in schema[len(args) :])]
        self.calls += 1
        self.before(func, given, [x.name for x in schema])
        copies = exact_all(given)
        func(*copies)
        for x, copy, argument in zip(given, copies, schema, strict=True):
            if isinstance(x, Tensor) and argument.is_write:
                x.copy_(copy)
        return None


@pytest.fixture(autouse=True)
def exact_operands():
    """All tests of a run with this plugin."""
    with library.KEPT.paused(), ExactOperands():
        yield


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with library.KEPT.paused():
        runpy.run_path(sys.argv[0], run_name="__main__")
