"""Small mechanisms on Triton's interpreter, and kernels that are compiled for GPUs without one."""

from __future__ import annotations

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


def make_mechanism(name: str, causal: bool = True, **options: Any) -> Mechanism:
    layer = AttentionLayer(
        index=0, num_heads=2, num_key_value_heads=1, head_dim=8, causal=causal, scaling=8**-0.5,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    return MECHANISMS.get(name)(make_config(name, {**OPTIONS.get(name, {}), **options}), layer)
