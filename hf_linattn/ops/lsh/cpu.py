"""Softmax attention to the keys that share a bucket with the query, by `lsh_fwd.c`: no pair is kept."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.derivatives import first_order
from ..runtime.cpu import (
    Operand,
    call,
    dense_rows,
    empty_output,
    flop_formula,
    operation,
    product_parts,
    refusal,
    require,
    size_of,
)  # fmt: skip
from .types import Lists, LshCall

OPERANDS = ("query", "key", "value", "out", "log", "grad", "weight_grad", "d_query", "d_key", "d_value")
GROUPED = ("query", "out", "log", "grad", "weight_grad", "d_query")
POINTERS = ("query_bucket", "key_bucket", "member", "bounds")
LISTS = ("of_query", "of_key", "member", "bounds")
SIZES = ("batches", "heads", "groups", "length", "key_size", "value_size")
CHOICES = ("rounds", "buckets", "behind", "ahead", "shared", "threads", "parts")


class LshArgs(ctypes.Structure):
    """`struct lsh_args` of lsh.h."""

    _fields_ = (
        *((name, Operand) for name in OPERANDS),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in (*SIZES, *CHOICES)),
        ("scaling", ctypes.c_float),
    )


class Buckets(NamedTuple):
    """Which keys a query sees.

    of_query: int32 [R, B, Hkv G, N]. of_key: int32 [R, B, Hkv, N]; both contiguous.
    member: int32 [R, B, Hkv, N], the keys by bucket. bounds: int32 [R, B, Hkv, buckets + 1], where these begin.
    behind, ahead: how many keys of its bucket a query sees in a round up to its own place, and after it.
    shared: whether a query sees its own key only where it sees no other; else it always does.
    """

    of_query: Tensor
    of_key: Tensor
    member: Tensor
    bounds: Tensor
    behind: int
    ahead: int
    shared: bool


def _run(function: str, operands: dict[str, Tensor], buckets: Buckets, scaling: float) -> None:
    require(function, "behind", buckets.behind, 0)
    require(function, "ahead", buckets.ahead, 0)
    lists = dict(zip(LISTS, buckets[:4], strict=True))
    fixed = [("Q", size_of(operands["query"], 1) * size_of(operands["query"], 2))]
    call(function, operands | lists, fixed, lambda: _describe(operands, buckets, scaling))


def _describe(operands: dict[str, Tensor], buckets: Buckets, scaling: float) -> LshArgs:
    sizes = (*operands["query"].shape, operands["value"].shape[3])
    how = torch.get_num_threads(), product_parts(operands["query"], exact=False)
    places = (len(buckets.member), buckets.bounds.shape[-1] - 1, *buckets[4:], *how)
    return LshArgs(
        **{name: Operand.of(x, name in GROUPED, False) for name, x in operands.items()},
        **{name: x.data_ptr() for name, x in zip(POINTERS, buckets[:4], strict=True)},
        **dict(zip(SIZES + CHOICES, (*sizes, *places), strict=True)),
        scaling=scaling,
    )


@operation("out", "log", "member", "bounds")
def bucket_softmax(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor, of_query: Tensor, of_key: Tensor,
    member: Tensor, bounds: Tensor, behind: int, ahead: int, shared: bool, scaling: float,
) -> None:
    """Write the output and the lists of keys of one problem; without gradients.

    Args:
        query: [B, Hkv, G, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]. out: [B, Hkv, G, N, Dv].
        log: [B, Hkv, G, N], the logs of what the weights add up to, `LOWEST` where a query has its own value.
        of_query ... shared: `Buckets`.
    """
    operands = {"query": query, "key": key, "value": value, "out": out, "log": log}
    _run("bucket_softmax", operands, Buckets(of_query, of_key, member, bounds, behind, ahead, shared), scaling)


@operation("d_query", "d_key", "d_value", "member", "bounds")
def bucket_softmax_backward(
    query: Tensor, key: Tensor, value: Tensor, log: Tensor, grad: Tensor, weight_grad: Tensor, d_query: Tensor,
    d_key: Tensor, d_value: Tensor, of_query: Tensor, of_key: Tensor, member: Tensor, bounds: Tensor, behind: int,
    ahead: int, shared: bool, scaling: float,
) -> None:  # fmt: skip
    """Add to the gradients of queries, keys and values, which are shaped as they are.

    Args:
        log: as it was left by `bucket_softmax`. grad: [B, Hkv, G, N, Dv], of its output. weight_grad: [B, Hkv, G, N],
            the sum of grad x output, less the gradient of `log`. The others as above.
    """
    operands = {
        "query": query, "key": key, "value": value, "log": log, "grad": grad, "weight_grad": weight_grad,
        "d_query": d_query, "d_key": d_key, "d_value": d_value,
    }  # fmt: skip
    buckets = Buckets(of_query, of_key, member, bounds, behind, ahead, shared)
    _run("bucket_softmax_backward", operands, buckets, scaling)


def _count_pairs(query: Any, member: Any, behind: int, ahead: int) -> int:
    """Every query with as many keys as it can see in all rounds."""
    batch, heads, groups, length, _ = query
    return batch * heads * groups * length * member[0] * min(behind + ahead, length)


@flop_formula(bucket_softmax)
def _flops(query: Any, value: Any, member: Any, behind: int, ahead: int, **_: Any) -> int:
    """Scores and their product with the values."""
    return 2 * _count_pairs(query, member, behind, ahead) * (query[-1] + value[-1])


@flop_formula(bucket_softmax_backward)
def _backward_flops(query: Any, value: Any, member: Any, behind: int, ahead: int, **_: Any) -> int:
    """Scores once more, and one product each for the gradients of weights, queries, keys and values."""
    return 2 * _count_pairs(query, member, behind, ahead) * (3 * query[-1] + 2 * value[-1])


def unsupported(call: LshCall) -> str | None:
    """Return why the C cannot compute a call."""
    begins = call.earlier is None and call.found is None
    return refusal(*call[:3]) if begins else "tokens after a state"


def run(call: LshCall) -> tuple[Tensor, Tensor, Lists | None]:
    """Return the output [B, H, N, Dv], the log of its weights [B, H, N], and the lists of keys."""
    output, log, member, bounds = attend_buckets(
        call.query, call.key, call.value, call.query_bucket, call.key_bucket, num_buckets=call.num_buckets,
        behind=call.behind, ahead=call.ahead, shared=call.shared, scaling=call.scaling,
    )  # fmt: skip
    member = member.long()
    return output, log, Lists(call.key_code.gather(-1, member), member, bounds)


def attend_buckets(
    query: Tensor, key: Tensor, value: Tensor, query_bucket: Tensor, key_bucket: Tensor, *, num_buckets: int,
    behind: int, ahead: int, shared: bool, scaling: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output [B, H, N, Dv] and the log of its weights [B, H, N], for heads and buckets in any layout, and
    `member` and `bounds` of `Buckets`."""
    query, key, value = (dense_rows(x) for x in (query.unflatten(1, (key.shape[1], -1)), key, value))
    of_query, of_key = (x.to(torch.int32).contiguous() for x in (query_bucket, key_bucket))
    member, bounds = torch.empty_like(of_key), of_key.new_empty(*of_key.shape[:3], num_buckets + 1)
    buckets = Buckets(of_query, of_key, member, bounds, behind, ahead, shared)
    output, log = _AttendBuckets.apply(query, key, value, buckets, scaling)
    return output.flatten(1, 2), log.flatten(1, 2), member, bounds


class _AttendBuckets(torch.autograd.Function):
    """Keeps no pair for the backward pass, which makes the weights again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, buckets: Buckets, scaling: float
    ) -> tuple[Tensor, Tensor]:
        output, log = empty_output(query, value), query.new_empty(query.shape[:4])
        bucket_softmax(query, key, value, output, log, *buckets, scaling)
        ctx.save_for_backward(query, key, value, output, log)
        ctx.how = *buckets, scaling
        return output, log

    @staticmethod
    @first_order()
    def backward(ctx: Any, grad: Tensor, log_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log = ctx.saved_tensors
        grad, weight_grad = dense_rows(grad), (grad * output).sum(-1) - log_grad
        gradients = [torch.zeros_like(x) for x in (query, key, value)]
        bucket_softmax_backward(query, key, value, log, grad, weight_grad, *gradients, *ctx.how)
        return *gradients, None, None
