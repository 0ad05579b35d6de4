"""Triton's interpreter, faster, and small tiles for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import triton.language as tl
from triton.runtime import interpreter

from hf_linattn.ops.block_softmax import triton as block_softmax
from hf_linattn.ops.linear import triton_launch as causal_sums
from hf_linattn.ops.window import triton as window_softmax


@pytest.fixture(autouse=True)
def patched_once(monkeypatch):
    """Let a launch replace what kernels call by NumPy's, and not every function of a kernel anew: half of the time."""
    patch, everything = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call(function, *args, **kwargs):
        return function.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", lambda _: patch(everything))
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several segments, tiles of features and of values, all with a rest, in forty tokens."""
    monkeypatch.setattr(causal_sums, "tiles_for", lambda *_: causal_sums.Tiles(16, 16, 4, 1))
    sizes = {"MOST_BYTES": 64, "STATE_KEYS": 16, "STATE_VALUES": 16, "LEAST_CHUNKS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(causal_sums, name, size)
    monkeypatch.setattr(block_softmax, "TILE", 16)
    monkeypatch.setattr(block_softmax, "PARTS", 3)
    for options in (window_softmax.HALF, window_softmax.OTHERS):
        for name in options:
            monkeypatch.setitem(options, name, {"ROWS": 16, "COLUMNS": 16, "num_stages": 1})
