"""Softmax attention over the key blocks that a table names, by csrc/block_softmax: no key is copied first."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..runtime.cpu import KINDS, Operand, call, flop_formula, operation, product_parts, refusal, require, size_of
from . import in_place
from .autograd import BlockSoftmax, count_flops, count_reverse_flops
from .patterns import trained_weights
from .types import BlockSoftmaxCall, KeptKeys

OPERANDS = (
    "query", "key", "value", "out", "log", "before", "before_log", "gate", "shared_key", "shared_value",
    "grad", "log_grad", "d_query", "d_key", "d_value", "d_shared_key", "d_shared_value", "d_before", "d_before_log",
    "d_gate",
)  # fmt: skip
GROUPED = (
    "query", "out", "log", "before", "before_log", "grad", "log_grad", "d_query", "d_before", "d_before_log", "d_gate"
)  # fmt: skip
SIZES = ("batches", "heads", "groups", "length", "key_size", "value_size")
PLACES = (
    "first", "blocks", "block_size", "table_heads", "width", "shared", "columns", "begun", "causal", "threads",
    "parts",
)  # fmt: skip
LEAST_KEYS = 192  # of a query block: with fewer of them products in exact parts do not pay


class BlockSoftmaxArgs(ctypes.Structure):
    """`struct block_softmax_args` of block_softmax.h."""

    _fields_ = (
        *((name, Operand) for name in (*OPERANDS, "bias")),
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in (*SIZES, *PLACES)),
        ("scaling", ctypes.c_float),
    )


def _run(
    function: str, operands: dict[str, Any], bias: Tensor | None, table: Tensor, first: int, size: int,
    scaling: float, begun: int, causal: bool,
) -> None:  # fmt: skip
    for name, number, least in (("block_size", size, 1), ("first", first, 0), ("begun", begun, 0)):
        require(function, name, number, least)
    heads, groups, length = (size_of(operands["query"], dim) for dim in (1, 2, 3))
    blocks, width, shared = size_of(table, 0), size_of(table, 2), size_of(operands["shared_key"], 2)
    # a bias of what stands by itself, or of that and of the blocks
    columns = shared if bias is not None and bias.shape[-1] == shared else shared + width * size
    fixed = [("T", blocks), ("Q", heads * groups), ("C", size), ("K", columns), ("L", max(length - begun, 0))]
    how = first, size, scaling, begun, causal
    call(function, {**operands, "bias": bias, "table": table}, fixed, lambda: _describe(operands, bias, table, *how))


def _describe(
    operands: dict[str, Any], bias: Tensor | None, table: Tensor, first: int, size: int, scaling: float, begun: int,
    causal: bool,
) -> BlockSoftmaxArgs:  # fmt: skip
    (blocks, table_heads, width), shown, columns = table.shape, Operand(), 0
    if bias is not None:
        steps = zip(bias.shape[:-1], bias.stride(), strict=False)
        batch, block, head, row = (0 if count == 1 else step for count, step in steps)
        shown, columns = Operand(bias.data_ptr(), batch, head, block, row), bias.shape[-1]
    shared = operands["shared_key"].shape[2]
    parts = product_parts(operands["query"], exact=shared + width * size >= LEAST_KEYS)
    places = (
        first, blocks, size, table_heads, width, shared, columns, begun, causal, torch.get_num_threads(), parts
    )  # fmt: skip
    return BlockSoftmaxArgs(
        **{name: Operand.of(x, name in GROUPED, False) for name, x in operands.items() if name != "gate"},
        gate=_gate_operand(operands["gate"]),
        bias=shown,
        table=table.data_ptr(),
        **dict(zip(SIZES + PLACES, (*operands["query"].shape, operands["value"].shape[3], *places), strict=True)),
        scaling=scaling,
    )


def _gate_operand(gate: Tensor | None) -> Operand:
    """Describe [Hkv, G], the same for all rows and tokens."""
    return Operand() if gate is None else Operand(gate.data_ptr(), 0, *gate.stride(), 0)


@operation("out", "log")
def block_softmax(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor, before: Tensor | None,
    before_log: Tensor | None, begun: int, shared_key: Tensor, shared_value: Tensor, bias: Tensor | None,
    table: Tensor, first: int, block_size: int, scaling: float, causal: bool, gate: Tensor | None = None,
) -> None:  # fmt: skip
    """Attend with some blocks of queries to `Keys`; without gradients.

    Args:
        query: [B, Hkv, G, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]. Half precision is read as it is, as is
            what they begin with.
        out: [B, Hkv, G, N, Dv], of which the rows of blocks `first` ... `first` + T - 1 are written.
        log: [B, Hkv, G, N], the logs of what all weights add up to, `LOWEST` for a query without keys.
        before, before_log, begun, gate: a `Before`, which may be `out` and `log` themselves, or None.
    """
    operands = (query, key, value, out, log, before, before_log, gate, shared_key, shared_value)
    named = dict(zip(OPERANDS, operands, strict=False))
    _run("block_softmax", named, bias, table, first, block_size, scaling, begun, causal)


@operation("d_query", "d_key", "d_value", "d_before", "d_before_log", "d_shared_key", "d_shared_value", "d_gate")
def block_softmax_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor, grad: Tensor, log_grad: Tensor,
    d_query: Tensor, d_key: Tensor, d_value: Tensor, before: Tensor | None, before_log: Tensor | None,
    d_before: Tensor | None, d_before_log: Tensor | None, begun: int, shared_key: Tensor, shared_value: Tensor,
    d_shared_key: Tensor, d_shared_value: Tensor, bias: Tensor | None, table: Tensor, first: int, block_size: int,
    scaling: float, causal: bool, gate: Tensor | None = None, d_gate: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients of these queries and of what they begin with, and add to those of keys and values.

    Gradients that are added to are float32.

    Args:
        out, log: as they were left by `block_softmax`. grad: [B, Hkv, G, N, Dv], of `out`.
        log_grad: [B, Hkv, G, N], of `log`. d_gate: as before_log, of which the sum of a head is the gradient of its
            gate. The others as above.
    """
    operands = {
        "query": query, "key": key, "value": value, "out": out, "log": log, "grad": grad, "log_grad": log_grad,
        "d_query": d_query, "d_key": d_key, "d_value": d_value, "before": before, "before_log": before_log,
        "d_before": d_before, "d_before_log": d_before_log, "gate": gate, "d_gate": d_gate,
        "shared_key": shared_key, "shared_value": shared_value,
        "d_shared_key": d_shared_key, "d_shared_value": d_shared_value,
    }  # fmt: skip
    _run("block_softmax_backward", operands, bias, table, first, block_size, scaling, begun, causal)


def unsupported(call: BlockSoftmaxCall) -> str | None:
    """Return why the C cannot compute a call."""
    if call.starts is not None:
        return "rows that begin further on"
    if call.learned:
        return "a pattern with parameters, in training"
    return trained_weights(call) or refusal(*call[:3], kinds=KINDS) or in_place.stuck(call)


def run(call: BlockSoftmaxCall) -> tuple[Tensor, KeptKeys | None]:
    """Return the output [B, H, N, Dv], and the state after a call that goes on after one."""
    return in_place.attend(NATIVE_BLOCKS, call)


NATIVE_BLOCKS = BlockSoftmax(block_softmax, block_softmax_backward, gates=True)
flop_formula(block_softmax)(count_flops)
flop_formula(block_softmax_backward)(count_reverse_flops)
