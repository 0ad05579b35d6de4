"""The C that was compiled with the library, what all of it is called with, and memory for what it writes.

There is one build for each instruction set of `VARIANTS`; the one that PyTorch found the processor to have is loaded.
Where none was built, `available` is false and PyTorch's operations do the work.

Outputs get memory in large pages, which is taken up again where nobody uses it any more. What is larger than 32 MB the
C library gives back to the system with every tensor and asks for with every new one. The system clears it each time,
at a few GB/s: for linear attention a fifth of the whole call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import math
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...errors import BuildError, OperandError
from ..common.precision import accum_dtype
from ..common.tracing import is_watched
from .operands import MOST, check

logger = logging.getLogger(__name__)

CHECKOUT = Path(__file__).resolve().parents[3]  # of an installed package, what it was installed into
VARIANTS = {"AVX512": "_avx512", "AVX2": "_avx2"}  # PyTorch's names of what the CPU can do
KINDS = (torch.float32, torch.bfloat16, torch.float16)  # `enum kind` of tensor.h
BAD_NUMBERS = 2  # as in tensor.h
LARGE_BYTES = 8 << 20  # memory of this size gets large pages and is kept
KEPT_BYTES = 128 << 20  # at most, of what may be taken up again
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
    `torch.set_float32_matmul_precision("medium")` or `torch.backends.mkldnn.matmul.fp32_precision = "bf16"` allows it;
    else three, which have all digits of float32.
    """
    settings: Any = torch.backends.mkldnn
    few = all(x.dtype == torch.bfloat16 for x in heads) or settings.matmul.fp32_precision == "bf16"
    parts = 1 if few else 3 if exact else 0
    return parts if parts and has_matrix_unit() else 0


def size_of(x: Tensor | None, dim: int) -> int:
    """A size of a tensor; 0 where there is no such dimension or none at all, which `check_operands` then says."""
    return x.shape[dim] if x is not None and x.dim() > dim else 0


def require(function: str, name: str, number: int, least: int, end: int = MOST) -> None:
    """Raise `OperandError` where a number is none that the C can count with."""
    if not least <= number < end:
        raise OperandError(f"{function}: {name} is {number}, which must be at least {least} and less than {end}")


CHECKED = functools.lru_cache(maxsize=1024)(check)  # what was found right: steps of decoding all look the same


def check_operands(function: str, operands: Mapping[str, Tensor | None], sizes: Iterable[tuple[str, int]]) -> None:
    """Raise `OperandError` unless the operands of a call fit each other and what the C expects of them.

    operands: by their names in `FORMS`; None where there is none. sizes: what the call says of dimensions of forms.
    """
    seen = tuple([(name, None if x is None else (x.shape, x.stride(), x.dtype)) for name, x in operands.items()])
    CHECKED(function, seen, tuple(sizes))


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


def flop_formula(operation: Any, get_raw: bool = False) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that makes a function the FLOPs of an operation.

    It gets the arguments by the names that the operation has for them, shapes in place of tensors unless `get_raw`.
    """
    arguments = operation._schema.arguments
    defaults = {x.name: x.default_value for x in arguments if x.has_default_value()}

    def enter(formula: Callable[..., int]) -> Callable[..., int]:
        def count(*given: Any, out_val: Any = None, **named: Any) -> int:
            handed = {x.name: value for x, value in zip(arguments, given, strict=False)}
            return formula(**defaults | handed | named)

        register_flop_formula(operation.overloadpacket, get_raw=get_raw)(count)
        return formula

    return enter


def dense_rows(x: Tensor) -> Tensor:
    """x, its last dimension contiguous, as all operands have it."""
    return x if x.stride(-1) == 1 else x.contiguous()


# -- memory for outputs -----------------------------------------------------------------------------------------------


def empty_output(query: Tensor, value: Tensor, exact: bool = False) -> Tensor:
    """Memory [B, Hkv, G, N, Dv] for queries [B, Hkv, G, N, D], in the order [B, N, H, Dv], in which models go on; in
    the dtype of `value`, or if `exact` in at least float32."""
    (batch, heads, groups, length, _), dtype = query.shape, accum_dtype(value) if exact else value.dtype
    return _empty(value, (batch, length, heads, groups, value.shape[-1]), dtype).permute(0, 2, 3, 1, 4)


def output_for(query: Tensor, value: Tensor) -> Tensor | None:
    """Return memory [B, Hkv, G, N, Dv] into which the output is written part by part, so that it is fetched once.

    None where gradients or a graph need parts.
    """
    if torch.is_grad_enabled() or is_watched():
        return None
    return empty_output(query.unflatten(1, (value.shape[1], -1)), value)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory in the order that x has, its last dimension contiguous; in the dtype of x for None."""
    order = [*sorted(range(x.dim() - 1), key=x.stride, reverse=True), x.dim() - 1]
    place = sorted(range(x.dim()), key=order.__getitem__)
    return _empty(x, tuple(x.shape[dim] for dim in order), dtype or x.dtype).permute(place)


def zeros_like(x: Tensor) -> Tensor:
    """`empty_output` filled with zeros, in at least float32."""
    return empty_like(x, accum_dtype(x)).zero_()


def zeros(like: Tensor, shape: torch.Size) -> Tensor:
    """Zeros of this shape, in at least float32, for the rest as `like` is."""
    return _empty(like, shape, accum_dtype(like)).zero_()


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape) * dtype.itemsize
    if count < LARGE_BYTES or type(like) is not Tensor or not suits(like, kinds=KINDS):  # others may have no memory
        return like.new_empty(shape, dtype=dtype)
    storage = KEPT.take(count)
    if storage is not None:
        return like.new_empty(0, dtype=dtype).set_(storage).view(shape)
    new = like.new_empty(shape, dtype=dtype)
    fetch_pages(new)
    if can_keep():
        KEPT.put(new.untyped_storage())
    return new


def fetch_pages(x: Tensor) -> None:
    """Give new memory large pages, all of them at once."""
    size, threads = ctypes.c_int64(x.nbytes), ctypes.c_int64(torch.get_num_threads())
    if hasattr(build(), "large_pages"):  # not in a build of an older version, which `library.call` refuses
        build().large_pages(ctypes.c_void_p(x.data_ptr()), size, threads)


class Kept:
    """Storages in the order in which they were taken, the last at the end; most of them are in use.

    One is free again when nothing but this refers to it, neither a tensor nor, in Python, the storage itself.
    """

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.lock = threading.Lock()
        self.pauses = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which all memory is made anew and none is kept: for counting what is alive."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def take(self, count: int) -> torch.UntypedStorage | None:
        """Return a free one of `count` bytes, None if there is none."""
        with self.lock:
            # what was sent to another process lies in memory that this one has no count of
            self.storages = [x for x in self.storages if not x.is_shared()]
            for number in range(0 if self.pauses else len(self.storages)):
                if self.storages[number].nbytes() == count and self._is_free(number):
                    self.storages.append(self.storages.pop(number))
                    return self.storages[-1]
        return None

    def put(self, storage: torch.UntypedStorage) -> None:
        """Keep one, and the last ones before it as far as KEPT_BYTES go."""
        with self.lock:
            self.storages += [] if self.pauses else [storage]
            while sum(x.nbytes() for x in self.storages) > KEPT_BYTES:
                self.storages.pop(0)

    def _is_free(self, number: int) -> bool:
        # Python counts the list, what `getrefcount` is called with and, where PyTorch tells it, tensors, which PyTorch
        # counts always, and as one what Python has
        named = sys.getrefcount(self.storages[number]) > 2
        return not named and torch._C._storage_Use_Count(self.storages[number]._cdata) == 1


@functools.cache
def can_keep() -> bool:
    """Whether this Python and this PyTorch, which has no public count, overlook no user of a storage."""
    if not hasattr(torch._C, "_storage_Use_Count"):
        return False
    kept, x = Kept(), torch.empty(1)
    count = x.nbytes
    kept.put(x.untyped_storage())
    found = [kept.take(count)]
    part = x[:1]
    del x
    found.append(kept.take(count))
    storage = part.untyped_storage()
    del part
    found.append(kept.take(count))
    del storage
    return found == [None] * 3 and kept.take(count) is not None


KEPT = Kept()
