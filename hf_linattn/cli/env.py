"""`hf-linattn env`: versions and devices."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.table import Table

from .. import __version__
from ..ops.dispatch import DEFAULT_BACKEND
from ..ops.runtime import cpu as library
from .common import Json, show

PACKAGES = (
    "torch", "transformers", "huggingface_hub", "safetensors", "accelerate", "datasets", "peft", "evaluate",
)  # fmt: skip


def env(as_json: Json = False) -> None:
    """Show versions and devices, for a bug report."""
    found: dict[str, Any] = {"hf_linattn": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["platform"] = platform.platform()
    found["cuda"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["threads"] = torch.get_num_threads()
    found["native"] = library.available()
    found["backend"] = DEFAULT_BACKEND
    table = Table("what", "value")
    for name, value in found.items():
        table.add_row(name, "not installed" if value is None else str(value))
    show(found, as_json, table)
