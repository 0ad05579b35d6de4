"""Softmax attention to the keys that share a bucket with the query, by `bucket_softmax.c`: no pair is kept."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .library import Operand, call, dense_rows, empty_output

OPERANDS = ("query", "key", "value", "out")
POINTERS = ("query_bucket", "key_bucket", "member", "bounds")
SIZES = ("batches", "heads", "groups", "length", "key_size", "value_size")
CHOICES = ("rounds", "buckets", "behind", "ahead", "shared", "threads")


class Problem(ctypes.Structure):
    """`struct problem` of bucket_softmax.c."""

    _fields_ = (
        *((name, Operand) for name in OPERANDS),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in (*SIZES, *CHOICES)),
        ("scaling", ctypes.c_float),
    )


@torch.library.custom_op("hf_linattn::bucket_softmax", mutates_args=("out", "member", "bounds"))
def bucket_softmax(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, query_bucket: Tensor, key_bucket: Tensor, member: Tensor,
    bounds: Tensor, behind: int, ahead: int, shared: bool, scaling: float,
) -> None:
    """Write the output and the lists of keys of one problem; without gradients.

    Args:
        query: [B, Hkv, G, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]. out: [B, Hkv, G, N, Dv].
        query_bucket: int32 [R, B, Hkv G, N]. key_bucket: int32 [R, B, Hkv, N]; both contiguous.
        member: int32 [R, B, Hkv, N], the keys by bucket. bounds: int32 [R, B, Hkv, buckets + 1], where these begin.
        behind, ahead: how many keys of its bucket a query sees in a round up to its own place, and after it.
        shared: whether a query sees its own key only where it sees no other; else it always does.
    """
    sizes = (*query.shape[:2], query.shape[2], query.shape[3], query.shape[4], value.shape[3])
    choices = (len(member), bounds.shape[-1] - 1, behind, ahead, shared, torch.get_num_threads())
    pointers = (x.data_ptr() for x in (query_bucket, key_bucket, member, bounds))
    problem = Problem(
        *(Operand.of(x, x.dim() == 5, False) for x in (query, key, value, out)), *pointers, *sizes, *choices, scaling
    )
    call("bucket_softmax", problem)


@bucket_softmax.register_fake
def _(*_: Any, **__: Any) -> None:
    return None


@register_flop_formula(torch.ops.hf_linattn.bucket_softmax)
def _flops(
    query: Any, key: Any, value: Any, out: Any, query_bucket: Any, key_bucket: Any, member: Any, bounds: Any,
    behind: int, ahead: int, *rest: Any, **__: Any,
) -> int:  # fmt: skip
    """Two products of every query with as many keys as it can see in all rounds."""
    batch, heads, groups, length, width = query
    seen = member[0] * min(behind + ahead, length)
    return 2 * batch * heads * groups * length * seen * (width + value[-1])


def attend_buckets(
    query: Tensor, key: Tensor, value: Tensor, query_bucket: Tensor, key_bucket: Tensor, *, num_buckets: int,
    behind: int, ahead: int, shared: bool, scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output [B, H, N, Dv] for heads and buckets in any layout, and `member` and `bounds` as above."""
    query, key, value = (dense_rows(x) for x in (query.unflatten(1, (key.shape[1], -1)), key, value))
    of_query, of_key = (x.to(torch.int32).contiguous() for x in (query_bucket, key_bucket))
    output, member = empty_output(query, value), torch.empty_like(of_key)
    bounds = of_key.new_empty(*of_key.shape[:3], num_buckets + 1)
    bucket_softmax(query, key, value, output, of_query, of_key, member, bounds, behind, ahead, shared, scaling)
    return output.flatten(1, 2), member, bounds
