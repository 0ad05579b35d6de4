"""Window softmax by Triton: what `ops.window.autograd` needs, on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.precision import accum_dtype
from ..runtime.cpu import dense_rows, empty_output, flop_formula, operation
from ..runtime.triton import head_strides, is_large, launch, merge_groups, padded, precision, require_kernels
from .autograd import Window, WindowSoftmax, count_flops, count_reverse_flops
from .triton_kernels import attend_window, reverse_window_keys, reverse_window_queries

# of heads in half precision of at most 128 numbers; all fit into the 99 KiB of shared memory of the smallest GPUs
HALF: dict[str, dict[str, Any]] = {
    "attend_window": {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2},
    "reverse_window_queries": {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2},
    "reverse_window_keys": {"ROWS": 32, "COLUMNS": 64, "num_warps": 4, "num_stages": 3},
}
# where products are made from shared memory, so that 168 registers do, with which more programs run at a time
NARROW = HALF | {
    "attend_window": {"ROWS": 64, "COLUMNS": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 168},
    "reverse_window_queries": {"ROWS": 64, "COLUMNS": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
}
WIDE = HALF | {"attend_window": {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 168}}
WIDE_WINDOW = 128  # tokens, from which on windows are wide
# of float32, whose digits come in three products, and of more numbers
OTHERS: dict[str, dict[str, Any]] = {
    "attend_window": {"ROWS": 32, "COLUMNS": 32, "num_warps": 4, "num_stages": 1},
    "reverse_window_queries": {"ROWS": 16, "COLUMNS": 32, "num_warps": 4, "num_stages": 1},
    "reverse_window_keys": {"ROWS": 32, "COLUMNS": 32, "num_warps": 4, "num_stages": 1},
}
WIDEST = 512  # bytes of a head, of which tiles fit there
SINKS = 16  # sinks in a tile, which has no fewer


@operation("out", "rest", "log", devices=("CPU", "CUDA"))
def window_softmax_triton(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, rest: Tensor | None, log: Tensor, before: Tensor | None,
    before_log: Tensor | None, begun: int, ends: Tensor | None, window: int, sinks: int, scaling: float, causal: bool,
    starts: Tensor | None = None, sink: Tensor | None = None, mix: Tensor | None = None, rate: Tensor | None = None,
    far_gate: Tensor | None = None,
) -> None:  # fmt: skip
    """Attend to a `Window`; without gradients.

    Args:
        query: [B, Hkv, G, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv].
        out: [B, Hkv, G, N, Dv], written. rest: what rounding took from it, which lies in memory as it does, or None.
        log: [B, Hkv, G, N], the logs of what all weights add up to, `LOWEST` for a query without keys.
        before, before_log, begun: a `Before`, or None.
        ends: [B], real tokens at the start of each row; None if all are.
        starts ... far_gate: what `attend_prompt` has besides; a `Far` without logs after it.

    Raises:
        OptionError: the heads are on a CPU, and Triton was not imported to interpret kernels there.
    """
    require_kernels(query)
    (batch, heads, groups, length, _), begins, split = query.shape, before is not None, rest is not None
    given = {"STARTS": starts, "ENDS": ends, "BESIDE": sink, "FAR": mix, "DECAYED": rate, "GATED": far_gate}
    begin, begin_log = (out, log) if before is None or before_log is None else (before, before_log.contiguous())
    sizes = sizes_for(attend_window, query, value, window)
    query, place, begin = query.flatten(1, 2), merge_groups(out), begin.flatten(1, 2)
    launch(
        attend_window, (batch * heads * groups * -(-length // sizes["ROWS"]),), query,
        query, key, value, place, place if rest is None else merge_groups(rest), log.view(-1), begin, begin_log,
        *(log if x is None else x.contiguous() for x in given.values()),
        *head_strides(query, key, value, place, begin),
        heads * groups, groups, length, begun, begin_log.shape[3], window, sinks, scaling,
        **sizes, SINKS=SINKS if sinks else 0, CAUSAL=causal, BEGINS=begins, SPLIT=split,
        **{name: x is not None for name, x in given.items()},
    )  # fmt: skip


@operation("d_query", "d_key", "d_value", "d_before", "d_before_log", devices=("CPU", "CUDA"))
def window_softmax_backward_triton(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, rest: Tensor | None, log: Tensor, grad: Tensor,
    log_grad: Tensor, d_query: Tensor, d_key: Tensor, d_value: Tensor, before: Tensor | None,
    before_log: Tensor | None, d_before: Tensor | None, d_before_log: Tensor | None, begun: int, ends: Tensor | None,
    window: int, sinks: int, scaling: float, causal: bool,
) -> None:  # fmt: skip
    """Write the gradients of all, each in the dtype that it has.

    Args:
        out, rest, log: as `window_softmax_triton` left them. grad: [B, Hkv, G, N, Dv], of `out`.
        log_grad: [B, Hkv, G, N], of `log`. The others as above.
    """
    (batch, heads, groups, length, _), begins, split = query.shape, before is not None, rest is not None
    given = [x for x in (before, before_log, d_before, d_before_log) if x is not None]
    begin, begin_log, d_begin, d_begin_log = given or (out, log, out, log)
    flags = {"CAUSAL": causal, "ENDS": ends is not None}
    sizes = sizes_for(reverse_window_queries, query, value, window)
    tiles = -(-length // sizes["ROWS"])
    of_sinks = [x.new_empty(batch, heads, groups * tiles, sinks, x.shape[-1], dtype=log.dtype) for x in (key, value)]
    query, grad, begin, place = query.flatten(1, 2), grad.flatten(1, 2), begin.flatten(1, 2), merge_groups(out)
    d_query, d_begin, weight_grad = merge_groups(d_query), merge_groups(d_begin), torch.empty_like(log)
    where, begin_log = log if ends is None else ends.contiguous(), begin_log.contiguous()
    launch(
        reverse_window_queries, (batch * heads * groups * tiles,), query,
        query, key, value, grad, place, place if rest is None else merge_groups(rest), log, log_grad.contiguous(),
        begin, begin_log, where, d_query, d_begin, d_begin_log, weight_grad, *of_sinks,
        *head_strides(query, key, value, grad, place, begin, d_query, d_begin),
        heads * groups, groups, length, begun, begin_log.shape[3], window, sinks, scaling,
        **sizes, SINKS=SINKS if sinks else 0, BEGINS=begins, SPLIT=split, **flags,
    )  # fmt: skip
    sizes = sizes_for(reverse_window_keys, query, value, window)
    launch(
        reverse_window_keys, (batch * heads * -(-length // sizes["COLUMNS"]),), query,
        query, key, value, grad, log, weight_grad, where, d_key, d_value,
        *head_strides(query, key, value, grad, d_key, d_value), heads * groups, groups, length, window, sinks, scaling,
        **sizes, **flags,
    )  # fmt: skip
    for gradient, parts in zip((d_key, d_value), of_sinks, strict=True):
        gradient[:, :, :sinks] = parts.sum(2)


class Far(NamedTuple):
    """What queries from place `first` on begin with beside a window: an average of keys beyond it.

    output: [B, Hkv, G, M, Dv]. log: [B, Hkv, G, M], of what their weights add up to, without the mix [H] and the rate
    [Hkv], a distance of a whole window, that belong to it (`HybridWeights`). gate: [H], as it is stored there.
    """

    output: Tensor
    log: Tensor
    first: int
    mix: Tensor
    rate: Tensor | None
    gate: Tensor | None


def attend_prompt(
    query: Tensor, key: Tensor, value: Tensor, window: Window, scaling: float, *, starts: Tensor | None = None,
    sink: Tensor | None = None, far: Far | None = None,
) -> Tensor:  # fmt: skip
    """Return the causal output [B, H, N, Dv] of rows without a state before them, in one launch; no gradients.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv].
        window: its `ends` count tokens. starts: [B], the place of each row's first token; None if that is 0. With it
            outputs of pads are zero.
        sink: [H], the score of one more key without value.
    """
    heads = [dense_rows(x) for x in (query.unflatten(1, (key.shape[1], -1)), key, value)]
    output = empty_output(heads[0], value)
    log = query.new_empty(heads[0].shape[:4] if far is None else (1,), dtype=accum_dtype(query))
    before: Any = (None, None, 0)
    rest: dict[str, Any] = {}
    if far is not None:
        before = dense_rows(far.output), far.log, far.first
        rest = {"mix": far.mix, "rate": far.rate, "far_gate": far.gate}
    window_softmax_triton(
        *heads, output, None, log, *before, window.ends, window.size, window.sinks, scaling, window.causal,
        starts=starts, sink=sink, **rest,
    )  # fmt: skip
    return output.flatten(1, 2)


def sizes_for(kernel: Any, query: Tensor, value: Tensor, window: int) -> dict[str, Any]:
    """What a kernel is compiled for."""
    keys, values = (padded(x.shape[-1]) for x in (query, value))
    options = OTHERS
    if query.itemsize == 2 and max(keys, values) <= 128:
        options = (NARROW if window < WIDE_WINDOW else WIDE) if is_large(query.device) else HALF
    sizes = {"KEY_SIZE": query.shape[-1], "VALUE_SIZE": value.shape[-1], "KEYS": keys, "VALUES": values}
    return {**sizes, "PRECISION": precision(), **options[kernel.__name__]}


def suits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether tiles of such heads fit into shared memory; `no_kernels` says what else is needed."""
    return all(x.itemsize * padded(x.shape[-1]) <= WIDEST for x in (query, value))


TRITON_WINDOW = WindowSoftmax(window_softmax_triton, window_softmax_backward_triton, suits)
flop_formula(window_softmax_triton)(count_flops)
flop_formula(window_softmax_backward_triton)(count_reverse_flops)
