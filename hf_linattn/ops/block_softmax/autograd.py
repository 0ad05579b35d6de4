"""Softmax attention over the key blocks that a table names, by an operation in C or in Triton, and its gradients.

The backward pass keeps no pair: with the log of what the weights of a query come to they are made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.derivatives import first_order
from ..common.grad_accumulator import GradAccumulator
from ..common.precision import accum_dtype
from ..runtime.cpu import dense_rows, empty_like, empty_output, zeros_like


class BlockSoftmax(NamedTuple):
    """Kernels of a backend, called as `cpu.block_softmax` is, and their backward pass.

    window: a `WindowSoftmax` (ops/window/autograd.py) for the same heads; None: a window is a table with a bias.
    gates: whether it takes a `Before` with a gate.
    """

    forward: Callable[..., None]
    backward: Callable[..., None]
    window: Any = None
    gates: bool = False


class Keys(NamedTuple):
    """What some blocks of queries see: keys and values that stand by themselves, then those of blocks.

    first: the number of the first query block. table: int64 [T, H or 1, c], blocks of keys, -1 for none.
    bias: [T or 1, H or 1, C or 1, K], or one for each row, added to the scores; hidden keys have `LOWEST`. K is S, or
    S + c block_size. What has none is seen, in a query's own block and if `causal` only what comes no later.
    shared: what stands by itself, a key and a value [B, Hkv, S, D or Dv], or how many of the first tokens do.
    """

    first: int
    table: Tensor
    bias: Tensor | None
    shared: tuple[Tensor, Tensor] | int = 0


class Before(NamedTuple):
    """What queries from `first` on begin with, one more value of the weight exp(log).

    output: [B, Hkv, G, M, Dv]. log: [B, Hkv, G, M]; `LOWEST` is nothing. Rows behind the last query mean nothing.
    gate: [Hkv, G], c: its share of the attention is multiplied by that, and what is left goes to the keys. The log
    that is returned is then that of the keys alone. None is a gate of 1, and the log that of both.
    """

    output: Tensor
    log: Tensor
    first: int = 0
    gate: Tensor | None = None


def _count_pairs(query: Any, shared_key: Any, table: Any, block_size: int) -> int:
    """All queries of the table's blocks with all keys that have a column, seen or not."""
    batch, heads, groups, _, _ = query
    return batch * heads * groups * table[0] * block_size * (shared_key[2] + table[2] * block_size)


def count_flops(query: Any, value: Any, shared_key: Any, table: Any, block_size: int, **_: Any) -> int:
    """Scores and their product with the values."""
    return 2 * _count_pairs(query, shared_key, table, block_size) * (query[-1] + value[-1])


def count_reverse_flops(query: Any, value: Any, shared_key: Any, table: Any, block_size: int, **_: Any) -> int:
    """Scores once more, and one product each for the gradients of weights, queries, keys and values."""
    return 2 * _count_pairs(query, shared_key, table, block_size) * (3 * query[-1] + 2 * value[-1])


def attend_blocks(
    blocks: BlockSoftmax, query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Keys], *, block_size: int,
    scaling: float, causal: bool, before: Before | None = None, sources: Sequence[GradAccumulator] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output [B, Hkv, G, N, Dv] and log weights [B, Hkv, G, N], at least float32, of operands in any layout.

    Args:
        blocks: does it.
        parts: what each query block sees; together they have all query blocks.
        before: what queries begin with.
        sources: what query, key and value are the whole of, if parts of them are used elsewhere: these take over the
            gradients.
    """
    shared = [x for part in parts if not isinstance(part.shared, int) for x in part.shared]
    heads = [dense_rows(x) for x in (query, key, value, *shared)]
    counts = [part.shared if isinstance(part.shared, int) else -1 for part in parts]
    known = [(x.first, x.table.contiguous(), _with_rows(x.bias), n) for x, n in zip(parts, counts, strict=True)]
    output, log, first, gate = before or (None, None, 0, None)
    output = None if output is None else dense_rows(output)
    gradients = [source.gradient for source in sources] or [None] * 3
    what = blocks, known, block_size, scaling, causal, first, torch.is_grad_enabled()
    return _AttendBlocks.apply(what, gradients, output, log, gate, *heads)


def continue_blocks(
    blocks: BlockSoftmax, query: Tensor, key: Tensor, value: Tensor, part: Keys, out: Tensor, log: Tensor, *,
    block_size: int, scaling: float, causal: bool, begin: bool = False, gate: Tensor | None = None,
) -> None:  # fmt: skip
    """Go on from what stands in `out`, one more key with the weight exp(log), unless to `begin`; without gradients.

    gate: of a `Before`.
    """
    count = part.shared
    alone = (key[:, :, :count], value[:, :, :count]) if isinstance(count, int) else count
    query, key, value, *shared = (dense_rows(x) for x in (query, key, value, *alone))
    known = _with_rows(part.bias), part.table.contiguous(), part.first, block_size, scaling, causal
    before = (None, None) if begin else (out, log)
    blocks.forward(query, key, value, out, log, *before, 0, *shared, *known, *_given(gate))


def _given(*gates: Tensor | None) -> list[Tensor]:
    """What operations without gates are not called with."""
    return [x for x in gates if x is not None]


def _with_rows(bias: Tensor | None) -> Tensor | None:
    """A bias [B or 1, T or 1, H or 1, C or 1, K]."""
    return None if bias is None else dense_rows(bias if bias.dim() == 5 else bias[None])


def _with_shared(known: list[Any], *sources: Sequence[Tensor]) -> Iterator[Any]:
    """Yield each part with what stands before its blocks: first tokens, or the next two that stand by themselves.

    sources: key and value, and the list of what stands by itself; their gradients in the same way.
    """
    taken = 0
    for part in known:
        count = part[-1]
        if count < 0:
            yield part, *(others[taken : taken + 2] for others in sources[1::2])
            taken += 2
        else:
            yield part, *([x[:, :, :count] for x in tokens] for tokens in sources[::2])


class _AttendBlocks(torch.autograd.Function):
    """Keeps no pair for the backward pass, which makes the weights again."""

    @staticmethod
    def forward(
        ctx: Any, what: tuple[BlockSoftmax, list[Any], int, float, bool, int, bool], gradients: list[Any],
        before: Tensor | None, before_log: Tensor | None, gate: Tensor | None, query: Tensor, key: Tensor,
        value: Tensor, *shared: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        blocks, known, block_size, scaling, causal, begun, exact = what
        # differences to the output are gradients, for which half precision has too few digits
        output = empty_output(query, value, exact)
        log = query.new_empty(query.shape[:4], dtype=accum_dtype(query))
        for (first, table, bias, _), *alone in _with_shared(known, (key, value), shared):
            blocks.forward(
                query, key, value, output, log, before, before_log, begun, *alone[0], bias, table, first, block_size,
                scaling, causal, *_given(gate),
            )  # fmt: skip
        ctx.save_for_backward(query, key, value, output, log, before, before_log, gate, *shared)
        ctx.what, ctx.gradients = what, gradients
        return output.to(value.dtype), log

    @staticmethod
    @first_order()
    def backward(ctx: Any, grad: Tensor, log_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log, before, before_log, gate, *shared = ctx.saved_tensors
        blocks, known, block_size, scaling, causal, begun, _ = ctx.what
        grad = dense_rows(grad)
        d_query, (d_key, d_value) = empty_like(query), map(zeros_like, (key, value))
        d_shared, d_gate = [zeros_like(x) for x in shared], None
        d_before: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if before is not None:
            d_before = empty_like(before), torch.empty_like(before_log)
            d_gate = None if gate is None else torch.empty_like(before_log)
            for x in _given(*d_before, d_gate):
                x[:, :, :, query.shape[3] - begun :] = 0  # rows that no query has
        for (first, table, bias, _), alone, d_alone in _with_shared(
            known, (key, value), shared, (d_key, d_value), d_shared
        ):
            blocks.backward(
                query, key, value, output, log, grad, log_grad, d_query, d_key, d_value, before, before_log, *d_before,
                begun, *alone, *d_alone, bias, table, first, block_size, scaling, causal, *_given(gate, d_gate),
            )  # fmt: skip
        made = zip(ctx.gradients, (d_query, d_key, d_value), strict=True)
        heads = (d if gradient is None else gradient.take_over(d) for gradient, d in made)
        return None, None, *d_before, None if d_gate is None else d_gate.sum((0, 3)), *heads, *d_shared
