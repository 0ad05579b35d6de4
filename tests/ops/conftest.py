"""What holds for the tests of all operations, and what those of a backend share."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from hf_linattn.ops.block_softmax import cpu as block_softmax
from hf_linattn.ops.hybrid import cpu_kernels as hard_keys
from hf_linattn.ops.linear import cpu_kernels as causal_sums
from hf_linattn.ops.runtime import cpu as library

CAPABILITIES = list(library.VARIANTS)  # the most able first
THIS = torch.backends.cpu.get_cpu_capability()
ABLE = CAPABILITIES[CAPABILITIES.index(THIS) :] if THIS in CAPABILITIES else []
BUILT = [name for name in ABLE if library.load_variant(name)]


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN: an operation that leaves a number unwritten, or reads one, shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(params=BUILT)
def variant(request, monkeypatch):
    """One build after the other, as if the processor could do no more; returns what it was called with."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    library._reaches_matrix_unit(request.param)  # is asked once
    sizes, load = [], library.load_variant

    def count(name):
        assert name == request.param
        sizes.append(name)
        return load(name)

    monkeypatch.setattr(library, "load_variant", count)
    return sizes


@pytest.fixture(params=["by vectors"] + ["in parts"] * library.has_matrix_unit())
def products(request, monkeypatch):
    """How products of float32 are made, wherever they could be made so."""
    if request.param == "by vectors":
        monkeypatch.setattr(library, "has_matrix_unit", lambda: False)
    monkeypatch.setattr(block_softmax, "LEAST_KEYS", 0)
    monkeypatch.setattr(hard_keys, "LEAST_KEYS", 0)
    monkeypatch.setattr(causal_sums, "LEAST_FEATURES", 0)


@pytest.fixture(autouse=True)
def patched_once(request, monkeypatch):
    """Let a launch replace what kernels call by NumPy's, and not every function of a kernel anew: half of the time."""
    if not request.path.name.startswith("test_triton"):
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch, everything = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call(function, *args, **kwargs):
        return function.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", lambda _: patch(everything))
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


@pytest.fixture
def small_tiles(monkeypatch):
    """For Triton: several segments, tiles of features and of values, all with a rest, in forty tokens."""
    from hf_linattn.ops.block_softmax import triton as block_triton
    from hf_linattn.ops.linear import triton_launch
    from hf_linattn.ops.window import triton as window_triton

    monkeypatch.setattr(triton_launch, "tiles_for", lambda *_: triton_launch.Tiles(16, 16, 4, 1))
    sizes = {"MOST_BYTES": 64, "STATE_KEYS": 16, "STATE_VALUES": 16, "LEAST_CHUNKS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(triton_launch, name, size)
    monkeypatch.setattr(block_triton, "TILE", 16)
    monkeypatch.setattr(block_triton, "PARTS", 3)
    for options in (window_triton.HALF, window_triton.OTHERS):
        for name in options:
            monkeypatch.setitem(options, name, {"ROWS": 16, "COLUMNS": 16, "num_stages": 1})
