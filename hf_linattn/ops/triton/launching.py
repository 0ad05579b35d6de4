"""Where kernels run, and what they multiply."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...errors import OptionError
from ..native.library import KINDS


def require_kernels(heads: Tensor) -> None:
    """Raise `OptionError` if the heads are on a CPU, and Triton was not imported to interpret kernels there."""
    if heads.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise OptionError(
            "backend 'triton' got heads on 'cpu', where its kernels do not run; move the model to a GPU, or choose"
            " set_backend(model, 'auto')"
        )


def kinds() -> tuple[torch.dtype, ...]:
    """Return the dtypes that kernels multiply; Triton's interpreter takes bfloat16 for integers."""
    return (torch.float32, torch.float16) if triton.knobs.runtime.interpret else KINDS


def launch(kernel: Any, grid: tuple[int, ...], heads: Tensor, *operands: Any, **sizes: Any) -> None:
    """Run a kernel on the GPU that has the heads, which need not be the current one."""
    with torch.cuda.device_of(heads):
        kernel[grid](*operands, **sizes)


def precision() -> str:
    """How products of float32 are made, by `torch.set_float32_matmul_precision`: "highest" is three of TF32."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
