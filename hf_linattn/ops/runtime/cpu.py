"""The C that was compiled with the library, and what all of it is called with.

There is one build for each instruction set of `VARIANTS`; the one that PyTorch found the processor to have is loaded.
Where none was built, `available` is false and PyTorch's operations do the work.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import BuildError, OperandError
from ..common.tracing import is_watched
from .operands import check_operands

logger = logging.getLogger(__name__)

CHECKOUT = Path(__file__).resolve().parents[3]  # of an installed package, what it was installed into
VARIANTS = {"AVX512": "_avx512", "AVX2": "_avx2"}  # PyTorch's names of what the CPU can do
KINDS = (torch.float32, torch.bfloat16, torch.float16)  # `enum kind` of tensor.h
BAD_NUMBERS = 2  # as in simd.h
PLACES = {  # what the C says no to by BAD_NUMBERS
    **dict.fromkeys(("causal_sums", "causal_sums_backward"), "'packed' names tokens that its rows do not have"),
    **dict.fromkeys(("bucket_softmax", "bucket_softmax_backward"), "'of_query' or 'of_key' names a bucket too many"),
    **dict.fromkeys(("block_softmax", "block_softmax_backward"), "'table' has numbers that are no 32-bit ones"),
    "hard_keys": "'start', 'end' or 'hard_position' names tokens that are not there, or 'key_features' is missing",
}
OPERATIONS = torch.library.Library("hf_linattn", "FRAGMENT")


class Operand(ctypes.Structure):
    """`tensor_view` of tensor.h: an address, and numbers from one batch, head, group and token to the next."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "group", "token", "kind")),
    )

    @classmethod
    def of(cls, tensor: Tensor | None, grouped: bool, reverse: bool) -> Operand:
        """Describe [B, Hkv, N, ...], or [B, Hkv, G, N, ...] if `grouped`, read from its end if `reverse`."""
        if tensor is None:
            return cls()
        dim = 3 if grouped else 2
        batch, head, *group, token = tensor.stride()[: dim + 1]
        last = (tensor.shape[dim] - 1) * token if reverse else 0
        place, group = tensor.data_ptr() + tensor.itemsize * last, group or [0]
        return cls(place, batch, head, *group, -token if reverse else token, KINDS.index(tensor.dtype))


@functools.cache
def load_variant(name: str) -> Any:
    """Return one build, None where there is none; of a checkout, which has the sources, a log line says so, once."""
    if name not in VARIANTS:
        return None
    spec = importlib.util.find_spec(f"{__package__}.{VARIANTS[name]}")
    if spec is not None and spec.origin is not None:
        return ctypes.CDLL(spec.origin)
    if (CHECKOUT / "setup.py").is_file():
        logger.warning(
            "the C of %s is not compiled, and PyTorch's slower operations do its work; run"
            " `python setup.py build_ext --inplace` there, or `make install`", CHECKOUT,
        )  # fmt: skip
    return None


def layout_of(problem: type[ctypes.Structure]) -> tuple[int, int]:
    """Return how many bytes a problem has, and a checksum of what its fields are called, in their order."""

    def names(kind: Any) -> str:
        nested = hasattr(kind, "_fields_")
        return "(" + " ".join(name + names(own) for name, own, *_ in kind._fields_) + ")" if nested else ""

    return ctypes.sizeof(problem), zlib.crc32(names(problem).encode())


@functools.cache
def _require_layout(library: Any, function: str, problem: type[ctypes.Structure]) -> None:
    """Raise `BuildError` where a function of a build takes another struct: it was built of another version."""
    try:
        found = [
            kind.in_dll(library, f"{function}_{name}").value
            for kind, name in ((ctypes.c_int64, "size"), (ctypes.c_uint32, "fields"))
        ]
    except ValueError:  # it knows nothing of the like
        found = []
    if found != list(layout := layout_of(problem)):
        raise BuildError(
            f"{library._name} is the build of another version: {function} takes a struct of (bytes, names)"
            f" {tuple(found) or 'unknown layout'} there and {layout} here; build it again: `make install`, or"
            " `pip install --force-reinstall -e .`, or call set_backend(model, 'torch')"
        )


def build() -> Any:
    """Return the build for this processor, None where there is none."""
    return load_variant(torch.backends.cpu.get_cpu_capability())


def available() -> bool:
    """Whether there is a build for this processor."""
    return build() is not None


def refusal(*tensors: Tensor, kinds: Sequence[torch.dtype] = (torch.float32,)) -> str | None:
    """Return why C cannot work on these, None if it can: of such kinds, on a CPU, where it was built."""
    for x in tensors:
        if x.device.type != "cpu":
            return f"heads on {x.device.type!r}"
        if x.dtype not in kinds:
            return str(x.dtype).removeprefix("torch.")
    return None if available() else "the C library is not built"


def suits(*tensors: Tensor, kinds: Sequence[torch.dtype] = (torch.float32,)) -> bool:
    """Whether C can work on these where nothing watches, which cannot see into it."""
    return refusal(*tensors, kinds=kinds) is None and not is_watched()


@functools.cache
def _reaches_matrix_unit(name: str) -> bool:
    variant = load_variant(name)
    return hasattr(variant, "has_matrix_unit") and bool(variant.has_matrix_unit())


def has_matrix_unit() -> bool:
    """Whether the processor multiplies tiles of bfloat16 (AMX), and the build for it can have it do so."""
    return _reaches_matrix_unit(torch.backends.cpu.get_cpu_capability())


def product_parts(*heads: Tensor, exact: bool = True) -> int:
    """Of how many numbers of bfloat16 a number is made in products of the matrix unit; 0 for products without it.

    One, the nearest, where heads have no more digits themselves, or where
    `torch.set_float32_matmul_precision("medium")` allows it; else three, which have all digits of float32.
    """
    few = all(x.dtype == torch.bfloat16 for x in heads) or torch.get_float32_matmul_precision() == "medium"
    parts = 1 if few else 3 if exact else 0
    return parts if parts and has_matrix_unit() else 0


def call(
    function: str, operands: Mapping[str, Tensor | None], sizes: Iterable[tuple[str, int]],
    describe: Callable[[], ctypes.Structure],
) -> None:  # fmt: skip
    """Call a function of the build for this processor: the one way to the C.

    Args:
        operands, sizes: see `check_operands`.
        describe: returns its problem, made only of operands that were found right.

    Raises:
        OperandError: they are wrong. MemoryError: there is none for what the function works in.
    """
    check_operands(function, operands, sizes)
    problem, library = describe(), build()
    _require_layout(library, function, type(problem))
    failed = getattr(library, function)(ctypes.byref(problem))
    if failed == BAD_NUMBERS:
        raise OperandError(f"{function}: {PLACES[function]}; nothing was computed")
    if failed:
        raise MemoryError(f"no memory for what {function} works in; use a smaller batch")


def nothing(*_: Any, **__: Any) -> None:
    """What an operation returns that only writes."""


def operation(
    *mutated: str, fake: Callable[..., Any] = nothing, devices: Sequence[str] = ("CPU",)
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function an operation of PyTorch's, which FLOP counters and profilers see.

    `mutated` names the tensors it writes into, all of which are new: nobody has kept them for a backward pass. So it
    does without what `torch.library.custom_op` does about them, 0.1 to 0.3 ms in every call. `fake` returns what it
    would, shaped alike. `devices` are PyTorch's dispatch keys.
    """

    def enter(function: Callable[..., Any]) -> Any:
        name = function.__name__
        OPERATIONS.define(name + torch.library.infer_schema(function, mutates_args=mutated))
        for device in devices:
            OPERATIONS.impl(name, function, device)
        torch.library.register_fake(f"hf_linattn::{name}", fake, lib=OPERATIONS)
        return getattr(torch.ops.hf_linattn, name).default

    return enter


def dense_rows(x: Tensor) -> Tensor:
    """x, its last dimension contiguous, as all operands have it."""
    return x if x.stride(-1) == 1 else x.contiguous()
