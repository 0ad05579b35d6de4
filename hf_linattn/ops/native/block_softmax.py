"""Softmax attention over the key blocks that a table names, by `block_softmax.c`: nothing is copied together first."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .library import Operand, call, dense_rows

OPERANDS = ("query", "key", "value", "out", "log", "shared_key", "shared_value")
GROUPED = ("query", "out", "log")
SIZES = ("batches", "heads", "groups", "length", "key_size", "value_size")
PLACES = (
    "first", "blocks", "block_size", "table_heads", "width", "shared", "columns", "continued", "causal", "threads"
)  # fmt: skip


class Problem(ctypes.Structure):
    """`struct problem` of block_softmax.c."""

    _fields_ = (
        *((name, Operand) for name in (*OPERANDS, "bias")),
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in (*SIZES, *PLACES)),
        ("scaling", ctypes.c_float),
    )


@torch.library.custom_op("hf_linattn::block_softmax", mutates_args=("out",))
def block_softmax(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor | None, shared_key: Tensor,
    shared_value: Tensor, bias: Tensor | None, table: Tensor, first: int, block_size: int, scaling: float,
    causal: bool = False,
) -> None:
    """Attend with some blocks of queries to the keys that a table names for them; without gradients.

    Args:
        query: [B, Hkv, G, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv].
        out: [B, Hkv, G, N, Dv], of which the rows of blocks `first` ... `first` + T - 1 are written.
        log: [B, Hkv, G, N]; where not None, what stands in `out` counts as one more key with the weight exp(log).
        shared_key, shared_value: [B, Hkv, S, D or Dv], which stand before the blocks; S may be 0.
        bias: [B or 1, T or 1, H or 1, C or 1, K], added to the scores; hidden keys have `LOWEST`. K is S, or
            S + c block_size. What has none is seen, in a query's own block and if `causal` only what comes no later.
        table: int64 [T, H or 1, c], blocks of keys, -1 for none.
    """
    blocks, table_heads, width = table.shape
    shown = Operand()
    if bias is not None:
        steps = zip(bias.shape[:-1], bias.stride(), strict=False)
        batch, block, head, row = (0 if size == 1 else step for size, step in steps)
        shown = Operand(bias.data_ptr(), batch, head, block, row)
    sizes = (*query.shape[:2], query.shape[2], query.shape[3], query.shape[4], value.shape[3])
    places = (
        first, blocks, block_size, table_heads, width, shared_key.shape[2], 0 if bias is None else bias.shape[-1],
        log is not None, causal, torch.get_num_threads(),
    )  # fmt: skip
    operands = (query, key, value, out, log, shared_key, shared_value)
    problem = Problem(
        **{name: Operand.of(x, name in GROUPED, False) for name, x in zip(OPERANDS, operands, strict=True)},
        bias=shown,
        table=table.data_ptr(),
        **dict(zip(SIZES + PLACES, sizes + places, strict=True)),
        scaling=scaling,
    )  # fmt: skip
    call("block_softmax", problem)


@block_softmax.register_fake
def _(*_: Any, **__: Any) -> None:
    return None


@register_flop_formula(torch.ops.hf_linattn.block_softmax)
def _flops(
    query: Any, key: Any, value: Any, out: Any, log: Any, shared_key: Any, shared_value: Any, bias: Any, table: Any,
    first: int, block_size: int, *rest: Any, **__: Any,
) -> int:  # fmt: skip
    """Two products of all queries of the table's blocks with all keys that have a column, seen or not."""
    batch, heads, groups, _, width = query
    columns = shared_key[2] + table[2] * block_size
    return 2 * batch * heads * groups * table[0] * block_size * columns * (width + value[-1])


def attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, table: Tensor, out: Tensor, *, first: int,
    block_size: int, scaling: float, shared: Sequence[Tensor] | int = 0, log: Tensor | None = None,
    causal: bool = False,
) -> None:
    """`block_softmax` of operands in any layout, with a bias [T or 1, H or 1, C or 1, K] or one for each row.

    `shared`: the keys and values that stand before the blocks, or how many of the first tokens do.
    """
    before = (key[:, :, :shared], value[:, :, :shared]) if isinstance(shared, int) else shared
    heads, shared_heads = ([dense_rows(x) for x in operands] for operands in ((query, key, value), before))
    if bias is not None:
        bias = dense_rows(bias if bias.dim() == 5 else bias[None])
    table = table.contiguous()
    block_softmax(*heads, out, log, *shared_heads, bias, table, first, block_size, scaling, causal)
