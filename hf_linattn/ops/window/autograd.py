"""Softmax attention inside a window that slides token by token, and to sinks, by an operation that reads places alone.

What `block_softmax` does for any table of blocks and any bias is done here without both. The backward pass keeps no
pair: with the log of what the weights of a query come to they are made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..block_softmax.autograd import Before
from ..common.derivatives import first_order
from ..common.grad_accumulator import GradAccumulator
from ..common.precision import accum_dtype
from ..runtime.cpu import dense_rows, empty_like, empty_output


class WindowSoftmax(NamedTuple):
    """An operation, called as `ops.window.triton.window_softmax_triton` is, its backward pass, and what it suits.

    suits: of query, key and value that the `BlockSoftmax` suits which has this.
    """

    forward: Callable[..., None]
    backward: Callable[..., None]
    suits: Callable[..., bool]


class Window(NamedTuple):
    """What a query sees: keys less than `size` tokens away, and the first `sinks`; if causal only what comes no later.

    ends: [B], real tokens at the start of each row; None if all are. Outputs behind them mean nothing.
    """

    size: int
    sinks: int
    causal: bool
    ends: Tensor | None = None


def _count_pairs(query: Any, window: int, sinks: int, causal: bool) -> int:
    """All queries with a whole window and all sinks."""
    batch, heads, groups, length, _ = query
    return batch * heads * groups * length * (min(window if causal else 2 * window - 1, length) + sinks)


def count_flops(query: Any, value: Any, window: int, sinks: int, causal: bool, **_: Any) -> int:
    """Scores and their product with the values."""
    return 2 * _count_pairs(query, window, sinks, causal) * (query[-1] + value[-1])


def count_reverse_flops(query: Any, value: Any, window: int, sinks: int, causal: bool, **_: Any) -> int:
    """Scores once more, and one product each for the gradients of weights, queries, keys and values."""
    return 2 * _count_pairs(query, window, sinks, causal) * (3 * query[-1] + 2 * value[-1])


def attend_window(
    operation: WindowSoftmax, query: Tensor, key: Tensor, value: Tensor, window: Window, *, scaling: float,
    before: Before | None = None, sources: Sequence[GradAccumulator] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output [B, Hkv, G, N, Dv] and log weights [B, Hkv, G, N], at least float32, of operands in any layout.

    Args:
        operation: does it.
        before: what queries begin with, without a gate.
        sources: what query, key and value are the whole of, if parts of them are used elsewhere: these take over the
            gradients.
    """
    output, log, begun, _ = before or (None, None, 0, None)  # no gate, see `BlockSoftmax`
    output = None if output is None else dense_rows(output)
    gradients = [source.gradient for source in sources] or [None] * 3
    what = operation, window, scaling, begun, torch.is_grad_enabled()
    return _AttendWindow.apply(what, gradients, output, log, *map(dense_rows, (query, key, value)))


class _AttendWindow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, what: tuple[WindowSoftmax, Window, float, int, bool], gradients: list[Any], before: Tensor | None,
        before_log: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        operation, (size, sinks, causal, ends), scaling, begun, exact = what
        output = empty_output(query, value)
        # differences to the output are gradients, for which half precision has too few digits
        split = exact and output.dtype != accum_dtype(value)
        rest = empty_output(query, value) if split else None
        log = query.new_empty(query.shape[:4], dtype=accum_dtype(query))
        sums = output, rest, log, before, before_log
        operation.forward(query, key, value, *sums, begun, ends, size, sinks, scaling, causal)
        ctx.save_for_backward(query, key, value, *sums)
        ctx.what, ctx.gradients = what, gradients
        return output, log

    @staticmethod
    @first_order()
    def backward(ctx: Any, grad: Tensor, log_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, rest, log, before, before_log = ctx.saved_tensors
        operation, (size, sinks, causal, ends), scaling, begun, _ = ctx.what
        made = [empty_like(x) for x in (query, key, value)]
        d_before: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if before is not None:
            d_before = empty_like(before), torch.empty_like(before_log)
            for x in d_before:
                x[:, :, :, query.shape[3] - begun :] = 0  # rows that no query has
        operation.backward(
            query, key, value, output, rest, log, dense_rows(grad), log_grad, *made, before, before_log, *d_before,
            begun, ends, size, sinks, scaling, causal,
        )  # fmt: skip
        pairs = zip(ctx.gradients, made, strict=True)
        return None, None, *d_before, *(d if gradient is None else gradient.take_over(d) for gradient, d in pairs)
