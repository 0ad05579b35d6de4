"""Small mechanisms on Triton's interpreter, and kernels that are compiled for GPUs without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer, Mechanism
from tests.helpers import OPTIONS, is_plain_pattern

ROOT = Path(__file__).resolve().parents[2]
# begins a program that compiles decoding kernels as they are launched on a GPU; memory: the shared one that each takes
COMPILING = """
import json, sys, torch
from triton.compiler import ASTSource
from tests.ops.gpu_compiler import compile_for

KINDS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", int: "i32", float: "fp32"}
memory, CAPABILITIES, OPTIONS = [], (80, 90), {}  # kernel -> capability -> options that its launch has

def compile_kernel(kernel, grid, heads, *operands, num_warps=4, **sizes):
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= {name: KINDS[getattr(x, "dtype", type(x))] for name, x in zip(kernel.arg_names, operands)}
    steps = "_batch", "_head", "_token"
    aligned = [name for name, kind in signature.items() if kind[0] == "*" or name.endswith(steps)]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=sizes, attrs=attributes)
    for capability in CAPABILITIES:
        options = OPTIONS.get(kernel, {}).get(capability, {"num_warps": num_warps})
        compiled = compile_for(capability, source, options)
        memory.append(compiled.metadata.shared)
"""
ON_TRITON = [name for name in MECHANISMS.names() if "triton" in MECHANISMS.get(name).backends]


def each_form(forms: list[tuple[str, str]]) -> list[Any]:
    """Return mechanisms and modes as parameters, plain patterns marked exhaustive: to a kernel they are tables."""
    marks = {True: [pytest.mark.exhaustive], False: []}
    return [pytest.param(name, mode, marks=marks[is_plain_pattern(name)]) for name, mode in forms]


def each_map(names: list[str]) -> list[Any]:
    """Return mechanisms on sums over keys as parameters, those marked exhaustive whose maps and decays others have."""
    marks = {True: [pytest.mark.exhaustive], False: []}
    return [pytest.param(name, marks=marks[name in ("learned_exp", "retention", "t2r", "taylor")]) for name in names]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process where kernels are not interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def sizes_in(found: Any) -> list[int]:
    """Return the numbers of a list, or of the values of a dict, however deep."""
    if isinstance(found, int):
        return [found]
    return [size for x in (found.values() if isinstance(found, dict) else found) for size in sizes_in(x)]


def require_fit(program: str, count: int, least: int = 1) -> None:
    """Check that a program compiles `count` kernels and that each fits: 99 KiB is what the smallest GPU has."""
    done = run(program, "all")
    assert done.returncode == 0, done.stderr
    sizes = sizes_in(json.loads(done.stdout))
    assert len(sizes) == count and all(least <= size <= 99 * 1024 for size in sizes), done.stdout


def make_mechanism(name: str, causal: bool = True, **options: Any) -> Mechanism:
    layer = AttentionLayer(
        index=0, num_heads=2, num_key_value_heads=1, head_dim=8, causal=causal, scaling=8**-0.5,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    return MECHANISMS.get(name)(make_config(name, {**OPTIONS.get(name, {}), **options}), layer)
