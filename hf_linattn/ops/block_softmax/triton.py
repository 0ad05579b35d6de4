"""Block softmax by Triton: what `cpu` computes, on a GPU, without copying keys together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LN_2, LOWEST
from ..common.precision import wide
from ..runtime.cpu import flop_formula, operation
from ..runtime.triton import head_strides, launch, merge_groups, no_kernels, padded, precision, require_kernels
from ..runtime.triton_row_products import row_products
from ..window.autograd import Window
from ..window.triton import TRITON_WINDOW, attend_prompt
from ..window.triton_decode import keep_last, step_attention
from . import in_place
from .autograd import BlockSoftmax, count_flops, count_reverse_flops
from .patterns import trained_weights
from .triton_kernels import attend_blocks, reverse_keys, reverse_queries
from .types import BlockSoftmaxCall, KeptKeys, RingKeys

TILE, WIDE_TILE = 32, 16  # queries, and keys, in a tile; of more than 128 numbers. In half precision twice as many
LARGEST = 256  # size of heads: more does not fit into shared memory
ALIGNED = 16  # what Triton asks strides for to be multiples of, before it loads several numbers at a time
PARTS = 16  # programs that share the queries which meet the same keys that stand by themselves


@operation("out", "log", devices=("CPU", "CUDA"))
def block_softmax_triton(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor, before: Tensor | None,
    before_log: Tensor | None, begun: int, shared_key: Tensor, shared_value: Tensor, bias: Tensor | None,
    table: Tensor, first: int, block_size: int, scaling: float, causal: bool,
) -> None:  # fmt: skip
    """`cpu.block_softmax`; arguments and results as there.

    Products of float32 follow `torch.set_float32_matmul_precision`, as those of `causal_sums_triton`.

    Raises:
        OptionError: the heads are on a CPU, and Triton was not imported to interpret kernels there.
    """
    require_kernels(query)
    (batch, heads, groups, length, _), begins = query.shape, before is not None and before_log is not None
    before, before_log = (out, log) if before is None or before_log is None else (before, before_log)
    shown, strides, *columns = _bias(bias, query, shared_key.shape[2])
    query, out, before = query.flatten(1, 2), merge_groups(out), before.flatten(1, 2)
    sizes = sizes_for(query, value)
    grid = (batch * heads * groups * len(table) * -(-block_size // sizes["ROWS"]),)
    launch(
        attend_blocks, grid, query,
        query, key, value, out, log.view(-1), before, before_log.contiguous(), shared_key, shared_value, shown, table,
        *head_strides(query, key, value, out, before, shared_key, shared_value), *strides,
        heads * groups, groups, length, first, block_size, *table.shape, shared_key.shape[2], *columns, begun,
        before_log.shape[3], scaling, **sizes, CAUSAL=causal, BEGINS=begins, BIASED=bias is not None,
    )  # fmt: skip


@operation("d_query", "d_key", "d_value", "d_before", "d_before_log", "d_shared_key", "d_shared_value",
           devices=("CPU", "CUDA"))  # fmt: skip
def block_softmax_backward_triton(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor, grad: Tensor, log_grad: Tensor,
    d_query: Tensor, d_key: Tensor, d_value: Tensor, before: Tensor | None, before_log: Tensor | None,
    d_before: Tensor | None, d_before_log: Tensor | None, begun: int, shared_key: Tensor, shared_value: Tensor,
    d_shared_key: Tensor, d_shared_value: Tensor, bias: Tensor | None, table: Tensor, first: int, block_size: int,
    scaling: float, causal: bool,
) -> None:  # fmt: skip
    """`cpu.block_softmax_backward`; arguments and results as there."""
    batch, heads, groups, length, _ = query.shape
    weight_grad = row_products(grad, out) - log_grad
    if before is not None:
        rows = slice(first * block_size, min((first + len(table)) * block_size, length))
        _reverse_before(before, before_log, d_before, d_before_log, grad, log, weight_grad, rows, begun)
    # without keys all scores are LOWEST, and weights zero
    sums = (torch.where(log > LOWEST / 2, log, 0.0) / LN_2).contiguous(), weight_grad.contiguous()
    shown, strides, *columns = _bias(bias, query, shared_key.shape[2])
    query, grad, d_query = query.flatten(1, 2), grad.flatten(1, 2), merge_groups(d_query)
    sizes, shared, biased = sizes_for(query, value), shared_key.shape[2], bias is not None
    grid: tuple[int, ...] = (batch * heads * groups * len(table) * -(-block_size // sizes["ROWS"]),)
    launch(
        reverse_queries, grid, query,
        query, key, value, grad, *sums, d_query, shared_key, shared_value, shown, table,
        *head_strides(query, key, value, grad, d_query, shared_key, shared_value), *strides,
        heads * groups, groups, length, first, block_size, *table.shape, shared, *columns, scaling,
        **sizes, CAUSAL=causal, BIASED=biased,
    )  # fmt: skip

    def give(
        key: Tensor, value: Tensor, d_key: Tensor, d_value: Tensor, meetings: tuple[Tensor, Tensor], size: int,
        offset: int, causal: bool,
    ) -> None:  # fmt: skip
        met_by, met_from = meetings
        parts, number = d_key.shape[0], met_from.shape[1] - 1
        grid = (batch * heads * number * -(-size // sizes["COLUMNS"]), parts)
        launch(
            reverse_keys, grid, query,
            query, key, value, grad, *sums, d_key, d_value, shown, met_by, met_from.contiguous(),
            *head_strides(query, key, value, grad), *d_key.stride()[:4], *d_value.stride()[:4], *strides,
            heads * groups, groups, length, first, block_size, len(met_from), offset, columns[1], key.shape[2], size,
            number, scaling, **sizes, CAUSAL=causal, BIASED=biased,
        )  # fmt: skip

    give(key, value, d_key[None], d_value[None], meet(table, -(-length // block_size)), block_size, columns[0], causal)
    if shared:
        parts = [x.new_zeros(PARTS, *x.shape) for x in (d_shared_key, d_shared_value)]
        everyone = torch.arange(len(table), device=table.device)
        all_meet = torch.stack([everyone, 0 * everyone], 1), torch.tensor([[0, len(table)]], device=table.device)
        give(shared_key, shared_value, parts[0], parts[1], all_meet, shared, 0, False)
        for gradient, part in zip((d_shared_key, d_shared_value), parts, strict=True):
            gradient += part.sum(0)


def _reverse_before(
    before: Tensor, before_log: Any, d_before: Any, d_before_log: Any, grad: Tensor, log: Tensor, weight_grad: Tensor,
    rows: slice, begun: int,
) -> None:  # fmt: skip
    """Write the gradients of what queries in `rows` begin with: its share of the output's, as every value's."""
    start = max(rows.start, begun)
    if start >= rows.stop:
        return
    own, old = slice(start, rows.stop), slice(start - begun, rows.stop - begun)
    begin, grad, log = before_log[..., old], grad[..., own, :], log[..., own]
    share = torch.where(begin > LOWEST / 2, (begin - log).exp(), 0.0)
    d_before[..., old, :] = share[..., None] * grad
    d_before_log[..., old] = share * ((wide(grad) * before[..., old, :]).sum(-1) - weight_grad[..., own])


def meet(table: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the table [T, H, c] as `reverse_keys` reads it: met_by [M, 2] and met_from [H, blocks + 1].

    Blocks of keys come in order, and for each the query blocks and the entries that name it. Some rows name blocks
    behind the last.
    """
    table = table.transpose(0, 1)
    head, block, entry = ((table >= 0) & (table < blocks)).nonzero(as_tuple=True)
    number = head * blocks + table[head, block, entry]
    order = number.argsort(stable=True)
    ends = torch.bincount(number, minlength=len(table) * blocks).cumsum(0).view(-1, blocks)
    starts = torch.cat([ends.new_zeros(1), ends.flatten()[:-1]]).view_as(ends)
    return torch.stack([block[order], entry[order]], 1), torch.cat([starts, ends[:, -1:]], 1)


def _bias(bias: Tensor | None, like: Tensor, shared: int) -> tuple[Tensor, tuple[int, ...], int, int]:
    """Return a bias, or what stands for none, its strides, the offset of its columns for blocks, and how many it has.

    The first `shared` columns, and the others, get some more that nobody reads: rows from multiples of ALIGNED numbers
    on are loaded several numbers at a time.
    """
    if bias is None:
        return like, (0, 0, 0, 0), 0, 0
    if missing := -shared % ALIGNED:
        bias = torch.cat([F.pad(bias[..., :shared], (0, missing)), bias[..., shared:]], dim=-1)
    if bias.stride(-2) % ALIGNED or bias.shape[-1] % ALIGNED:
        bias = F.pad(bias, (0, -bias.shape[-1] % ALIGNED))
    steps = (0 if size == 1 else step for size, step in zip(bias.shape[:-1], bias.stride(), strict=False))
    return bias, tuple(steps), shared + missing, bias.shape[-1]


def sizes_for(query: Tensor, value: Tensor) -> dict[str, Any]:
    """What kernels are compiled for."""
    keys, values = (padded(x.shape[-1]) for x in (query, value))
    tile = (WIDE_TILE if max(keys, values) > 128 else TILE) * 4 // query.itemsize
    return {
        "KEY_SIZE": query.shape[-1], "VALUE_SIZE": value.shape[-1], "KEYS": keys, "VALUES": values, "ROWS": tile,
        "COLUMNS": tile, "PRECISION": precision(), "num_stages": 1,  # more do not fit into shared memory
    }  # fmt: skip


def no_blocks(*heads: Tensor) -> str | None:
    """Return why there are no kernels for such heads, None if there are."""
    if reason := no_kernels(*heads):
        return reason
    widest = max(x.shape[-1] for x in heads)
    return None if widest <= LARGEST else f"heads of {widest} numbers"


def is_window_step(call: BlockSoftmaxCall) -> bool:
    """Whether a call has one token of each row behind a window that has no fixed places, and no gradients."""
    state, inference = call.state, call.policy.inference and call.in_window
    plain = state is not None and not isinstance(state, RingKeys) and state.key.dtype == call.key.dtype
    return inference and plain and call.query.shape[2] == 1


def is_window_prompt(call: BlockSoftmaxCall) -> bool:
    """Whether a call has rows of a window without a state before them, and no gradients."""
    begins = call.state is None and call.causal and call.in_window and call.policy.inference
    return begins and TRITON_WINDOW.suits(*call[:3])


def unsupported(call: BlockSoftmaxCall) -> str | None:
    """Return why there are no kernels for a call."""
    if reason := trained_weights(call) or no_blocks(*call[:3]):
        return reason
    if call.starts is not None and not is_window_prompt(call):
        return "rows that begin further on"
    return None if is_window_step(call) else in_place.stuck(call)


def run(call: BlockSoftmaxCall) -> tuple[Tensor, KeptKeys | None]:
    """Return the output [B, H, N, Dv], and the state after it where a call has one before, or keeps a window."""
    first, window = call.pattern.num_global, call.pattern.window or 1
    if is_window_step(call):
        output, after = step_attention(*call[:3], call.state, first, call.scaling, call.sink, call.lengths)
        return output, KeptKeys(*after)
    if is_window_prompt(call):
        ends = None if call.starts is None else call.ends  # no query sees what stands behind it
        output = attend_prompt(
            *call[:3], Window(window, first, True, ends), call.scaling, starts=call.starts, sink=call.sink
        )
        state = None
    else:
        output, state = in_place.attend(TRITON_BLOCKS, call)
    if call.keep and call.in_window and call.policy.inference:
        state = KeptKeys(*keep_last(*call[1:3], first, first + window - 1, call.ends, call.starts))
    return output, state


TRITON_BLOCKS = BlockSoftmax(block_softmax_triton, block_softmax_backward_triton, TRITON_WINDOW)
flop_formula(block_softmax_triton)(count_flops)
flop_formula(block_softmax_backward_triton)(count_reverse_flops)
