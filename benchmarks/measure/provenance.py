"""Where the numbers of a run come from, found out with nothing but torch and transformers installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_linattn


def collect_provenance(device: torch.device, dtype: torch.dtype, module: str = "benchmarks.run") -> dict[str, Any]:
    """Return where the numbers come from; what cannot be found out is null. `module` is the one that was run.

    A copy of the sources that git does not know, or knows as another commit, has its own in HF_LINATTN_COMMIT, a
    variable of the environment.
    """
    cuda = cuda_versions() if device.type == "cuda" else {}
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "small_tiles": os.environ.get("HF_LINATTN_SMALL_TILES") == "1",  # of Triton's kernels, as older GPUs run them
        "allocator": {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")},
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_linattn": hf_linattn.__version__,
            **cuda,
        },
        "commit": os.environ.get("HF_LINATTN_COMMIT") or output_of("git", "rev-parse", "HEAD"),
        "command": shlex.join(["python", "-m", module, *map(without_folders, sys.argv[1:])]),
    }


def without_folders(argument: str) -> str:
    """Return an argument of a command; a path that leaves the project without the folders of the machine it is on.

    >>> without_folders("/data/books"), without_folders("../../data/books"), without_folders("models/own")
    ('books', 'books', 'models/own')
    """
    path = Path(argument)
    return path.name if path.is_absolute() or ".." in path.parts else argument


def cuda_versions() -> dict[str, Any]:
    """Return the versions of what runs on a GPU."""
    found = importlib.util.find_spec("triton") is not None
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "triton": importlib.metadata.version("triton") if found else None,
        "ptxas": _assembler() if found else None,
    }


def _assembler() -> str:
    from hf_linattn.ops.runtime.triton import assembler_version

    return ".".join(map(str, assembler_version()))


def output_of(*command: str) -> str | None:
    """Return what a command wrote; null if it failed, or if there is none of that name."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def processor_name() -> str:
    """Return the CPU's model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def has_amx() -> bool:
    """Whether the CPU has AMX, whose matrix units take bfloat16."""
    info = Path("/proc/cpuinfo")
    return info.exists() and " amx_tile" in info.read_text()
