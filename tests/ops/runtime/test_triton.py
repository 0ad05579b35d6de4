"""Which GPUs get which kernels: not those whose assembler would make something else of them."""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from triton.backends.amd.compiler import HIPOptions
from triton.backends.nvidia import compiler

from hf_linattn.backends import use_backend
from hf_linattn.ops.dispatch import Policy, absent, no_triton, recording
from hf_linattn.ops.linear.triton import unsupported
from hf_linattn.ops.linear.types import LinearCall
from hf_linattn.ops.runtime import triton as launching
from hf_linattn.ops.runtime.cpu import product_parts
from tests.ops.feature_maps import elu_map
from tests.ops.triton_cases import make_mechanism

GPU = torch.device("cuda", 0)
CACHED = (no_triton, launching.is_large, launching.assembler_version)


@pytest.fixture
def machine(monkeypatch):
    """Return what makes GPU one of some generation, with a `ptxas` of some version."""

    def make(generation: int, version: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (generation, 0))
        tools = {90: SimpleNamespace(version=version), 80: SimpleNamespace(version="99.9")}  # that of other GPUs
        monkeypatch.setattr(compiler, "get_ptxas", tools.get)
        for function in CACHED:
            function.cache_clear()

    yield make
    for function in CACHED:
        function.cache_clear()


@pytest.mark.parametrize(
    ("generation", "version", "why"),
    [(9, "13.3", None), (9, "14.0", None), (9, "12.9", "ptxas of CUDA 12.9"), (8, "13.3", "no Hopper")],
)
def test_auto_is_triton_where_its_kernels_were_run(machine, generation, version, why):
    machine(generation, version)
    call = SimpleNamespace(query=SimpleNamespace(device=GPU), policy=Policy("auto"))
    reason = absent("triton", call)
    assert reason is None if why is None else why in str(reason)
    assert absent("triton", SimpleNamespace(query=torch.empty(1), policy=Policy("auto"))) == "heads on 'cpu'"
    call.policy = Policy("triton")  # which was chosen for the model, whatever it is
    assert absent("triton", call) is None


def test_the_assembler_asked_is_the_one_that_triton_calls_for_hopper():
    """Triton has two, of two versions of CUDA."""
    launching.assembler_version.cache_clear()
    version = ".".join(map(str, launching.assembler_version()))
    assert f"release {version}," in compiler.get_ptxas_version(launching.HOPPER)


def test_the_environment_asks_for_the_kernels_of_older_gpus(machine, monkeypatch):
    machine(9, "13.3")
    assert launching.is_large(GPU)
    monkeypatch.setenv("HF_LINATTN_SMALL_TILES", "1")
    machine(9, "13.3")
    assert not launching.is_large(GPU) and launching.why_small(GPU) == "HF_LINATTN_SMALL_TILES=1"


@pytest.mark.parametrize(("version", "trusted"), [("13.3", True), ("13.2", False)])
def test_kernels_do_without_products_of_warp_groups_where_these_go_wrong(machine, monkeypatch, version, trusted):
    """While a kernel is launched, which may compile it, and not a moment longer."""
    machine(9, version)
    monkeypatch.setenv(launching.GROUPS[0], "0")
    monkeypatch.delenv(launching.GROUPS[1], raising=False)
    before = {name: os.environ.get(name) for name in launching.GROUPS}
    with pytest.raises(ValueError), launching.without_groups(GPU):
        assert {os.environ.get(name) for name in launching.GROUPS} == ({"0", None} if trusted else {"1"})
        raise ValueError
    assert {name: os.environ.get(name) for name in launching.GROUPS} == before


def test_threads_that_compile_at_a_time_leave_the_environment_as_it_was(machine, monkeypatch):
    machine(8, "13.3")
    monkeypatch.setenv(launching.GROUPS[0], "0")
    monkeypatch.delenv(launching.GROUPS[1], raising=False)
    first, second = launching.without_groups(GPU), launching.without_groups(GPU)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert {os.environ.get(name) for name in launching.GROUPS} == {"1"}, "the second one still compiles"
    second.__exit__(None, None, None)
    assert [os.environ.get(name) for name in launching.GROUPS] == ["0", None]


@pytest.mark.parametrize(("said", "want"), [("ieee", "tf32x3"), ("tf32", "tf32"), ("none", "tf32x3")])
def test_products_are_as_exact_as_torch_backends_asks(said, want):
    """As `TrainingArguments(tf32=True)` does, after which `torch.get_float32_matmul_precision` raises."""
    asked = torch.get_float32_matmul_precision()
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    try:
        for settings in products:
            settings.fp32_precision = "none"  # as it is until the other way sets it: what is said of all holds
        torch.backends.fp32_precision = said
        assert launching.precision() == want
        assert product_parts(torch.empty(1)) in (0, 3), "no processor has products of TF32"
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision(asked)


@pytest.mark.parametrize(("asked", "want"), [("highest", "tf32x3"), ("high", "tf32"), ("medium", "tf32")])
def test_products_are_as_exact_as_the_matmul_precision(asked, want):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(asked)
        assert launching.precision() == want
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("asked", ["highest", "high"])
def test_products_on_amd_are_those_that_triton_has_there(monkeypatch, asked):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.version, "hip", "7.2")
    try:
        torch.set_float32_matmul_precision(asked)
        assert launching.precision() in HIPOptions.allowed_dot_input_precisions
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", ["performer", "hybrid", "local", "bigbird", "linformer"])
def test_on_other_devices_pytorch_computes(name, monkeypatch):
    """Where no operation of Triton's is registered, as on Intel's GPUs; "meta" stands for them and has no numbers."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: nullcontext())  # which knows no such device
    mechanism = make_mechanism(name, **({"window_size": 8} if name == "hybrid" else {})).to("meta")
    use_backend(mechanism, "triton")
    heads = [torch.empty(1, heads, 200, 8, device="meta") for heads in (2, 1, 1)]
    with recording() as decisions, torch.no_grad():
        mechanism(*heads)
    assert decisions and all(x.passed_over == {"triton": "heads on 'meta'"} for x in decisions)


@pytest.mark.parametrize(
    ("kind", "size", "fits"),
    [(torch.float32, 256, True), (torch.float32, 257, False), (torch.float16, 512, True), (torch.float16, 513, False)],
)
def test_values_that_no_tile_holds_are_left_to_other_backends(kind, size, fits):
    query, value = (torch.empty(1, 1, 4, x, dtype=kind) for x in (8, size))
    assert (unsupported(LinearCall(query, query, value, elu_map, elu_map)) is None) == fits
