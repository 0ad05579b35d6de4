"""Where kernels run, and what they multiply."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from ...errors import OptionError
from .cpu import KINDS

DEVICES = {"cpu", "cuda"}  # which its operations are registered for: NVIDIA's and AMD's GPUs, and the interpreter
HOPPER = 90  # the generation as Triton's compiler counts them
SOUND = (13, 3)  # the CUDA whose `ptxas` is, see `is_large`
GROUPS = ("DISABLE_MMA_V3", "DISABLE_MMA_V5")  # what Triton's compiler asks for in the environment
_LOCK = threading.Lock()
_BEFORE: list[dict[str, str | None]] = []  # what the environment had, for each thread that compiles without groups


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


def no_kernels(*heads: Tensor) -> str | None:
    """Return why there are no kernels for heads, None if there may be: there, and of one dtype that they multiply."""
    if heads[0].device.type not in DEVICES:
        return f"heads on {heads[0].device.type!r}"
    if any(x.dtype != heads[0].dtype for x in heads):
        return "heads of several dtypes"
    return None if heads[0].dtype in kinds() else str(heads[0].dtype).removeprefix("torch.")


def merge_groups(x: Tensor) -> Tensor:
    """Return x [B, Hkv, G, N, D] as [B, H, N, D] in the same memory, to be written."""
    return x.view(x.shape[0], -1, *x.shape[3:])


def head_strides(*tensors: Tensor) -> list[int]:
    """Return the numbers from one batch, head and token of each tensor to the next."""
    return [step for x in tensors for step in x.stride()[:3]]


def launch(kernel: Any, grid: tuple[int, ...], heads: Tensor, *operands: Any, **sizes: Any) -> None:
    """Run a kernel on the GPU that has the heads, which need not be the current one."""
    with torch.cuda.device_of(heads), without_groups(heads.device):
        kernel[grid](*operands, **sizes)


@functools.cache
def assembler_version() -> tuple[int, ...]:
    """Return the version of CUDA that the `ptxas` comes from which Triton calls for Hopper.

    Before Triton 3.9 that is `ptxas`, which `TRITON_PTXAS_PATH` replaces; from then on `ptxas-blackwell`, which
    `TRITON_PTXAS_BLACKWELL_PATH` does.
    """
    from triton.backends.nvidia.compiler import get_ptxas  # here: Triton for other GPUs may have no such backend

    return tuple(map(int, get_ptxas(HOPPER).version.split(".")))


def small_tiles_forced() -> bool:
    """Whether the environment asks for the kernels of older GPUs on all."""
    return os.environ.get("HF_LINATTN_SMALL_TILES") == "1"


@functools.cache
def is_large(device: torch.device) -> bool:
    """Whether kernels are those of Hopper, see `why_small`."""
    return why_small(device) is None


def why_small(device: torch.device) -> str | None:
    """Return why a GPU gets the kernels that all can run, None where it gets those of Hopper.

    Those need the shared memory and the products of warp groups that Hopper brought, and an assembler to be trusted:
    older `ptxas` give the registers or the shared memory of such products away while they are read, so that kernels
    with several of them compute something else or fail: that of CUDA 12.8 did here, that of 13.3, whose release notes
    say it is mended, did not (triton-lang/triton#11366, #11781). Triton 3.9 brings that of 13.4; for older ones
    `TRITON_PTXAS_PATH` names another than that in Triton, as pip's nvidia-cuda-nvcc has it.

    With HF_LINATTN_SMALL_TILES=1 in the environment a Hopper runs the kernels of other GPUs, to test them.
    """
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
        return "the GPU is no Hopper"
    if small_tiles_forced():
        return "HF_LINATTN_SMALL_TILES=1"
    if (version := assembler_version()) >= SOUND:
        return None
    return f"Triton calls the ptxas of CUDA {'.'.join(map(str, version))}, older than {'.'.join(map(str, SOUND))}"


@contextlib.contextmanager
def without_groups(device: torch.device) -> Iterator[None]:
    """Have kernels that are compiled here do without products of warp groups where these cannot be trusted."""
    if is_large(device):
        yield
        return
    with _LOCK:  # threads share the environment: the first one in sets it, the last one out puts it back
        _BEFORE.append(_BEFORE[0] if _BEFORE else {name: os.environ.get(name) for name in GROUPS})
        os.environ.update(dict.fromkeys(GROUPS, "1"))
    try:
        yield
    finally:
        with _LOCK:
            before = _BEFORE.pop()
            for name, value in before.items() if not _BEFORE else ():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def precision() -> str:
    """How products of float32 are made: in one of TF32 where PyTorch may make them so, else in three.

    `torch.set_float32_matmul_precision` and `torch.backends.fp32_precision` say so; the former's getter raises where
    the latter was set. On AMD they are of float32: most GPUs have no TF32.
    """
    if torch.version.hip:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def padded(size: int) -> int:
    """Return how many columns a tile has for `size` numbers: a power of two, and as many as a product needs."""
    return max(16, 1 << (size - 1).bit_length())


def strides(x: Tensor) -> tuple[int, ...]:
    """Numbers from one batch, head, group and token of x [B, Hkv, (G,) N, D] to the next."""
    return x.stride()[:4] if x.dim() == 5 else (*x.stride()[:2], 0, x.stride(2))
