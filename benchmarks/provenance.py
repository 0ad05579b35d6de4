"""Where the numbers of a run come from, found out with nothing but torch and transformers installed."""

from __future__ import annotations

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
    """Return where the numbers come from; what cannot be found out is null. `module` is the one that was run."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "allocator": {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")},
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_linattn": hf_linattn.__version__,
        },
        "commit": git.stdout.strip() or None,
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
    }


def processor_name() -> str:
    """Return the CPU's model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
