"""Memory for outputs: in large pages, and taken up again where nobody uses it any more.

What is larger than 32 MB the C library gives back to the system with every tensor and asks for with every new one. The
system clears it each time, at a few GB/s: for linear attention a fifth of the whole call.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..common.precision import accum_dtype
from ..common.tracing import is_watched
from .cpu import KINDS, build, suits

LARGE_BYTES = 8 << 20  # of this size it gets large pages and is kept
KEPT_BYTES = 128 << 20  # at most, of what may be taken up again


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
    """The same, of zeros, in at least float32."""
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
