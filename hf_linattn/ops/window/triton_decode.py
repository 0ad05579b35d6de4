"""A window in decoding by Triton: what is kept of a prompt, and one token more; a launch for each."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..runtime.cpu import dense_rows, flop_formula, operation
from ..runtime.triton import launch, padded, require_kernels
from .triton_decode_kernels import keep_window, step_window

MOST_VALUES, NUMBERS = 32, 8192  # columns of values in a program, and numbers in a tile of keys
COPIED = 4096  # numbers in a tile that is copied


@operation("out", "key_after", "value_after", "position_after", "length_after", devices=("CPU", "CUDA"))
def window_step_triton(
    query: Tensor, key: Tensor, value: Tensor, kept_key: Tensor, kept_value: Tensor, kept_position: Tensor,
    length: Tensor, sink: Tensor | None, ends: Tensor | None, num_sinks: int, scaling: float, out: Tensor,
    key_after: Tensor, value_after: Tensor, position_after: Tensor, length_after: Tensor,
) -> None:  # fmt: skip
    """Write the attention of one more token [B, H, 1, Dv] into `out`, and the state after it.

    Args:
        query: [B, H, 1, D]. key: [B, Hkv, 1, D]. value: [B, Hkv, 1, Dv]. Rows are contiguous, as is all else.
        kept_key ... length: of a `KeptKeys` of a window, whose first min(length, M) places are taken, in order.
        sink: [H], the score of one more key without value. num_sinks: of the first keys, which stay.
        ends: [B], zero for a pad, after which the state is as it was, and one for a token; None if all are.

    Raises:
        OptionError: the heads are on a CPU, and Triton was not imported to interpret kernels there.
    """
    require_kernels(query)
    (batch, heads, _, key_size), value_size, room = key.shape, value.shape[-1], kept_key.shape[2]
    keys, values = padded(key_size), min(MOST_VALUES, padded(value_size))
    rows = min(max(1, NUMBERS // keys), triton.next_power_of_2(max(1, room)))
    launch(
        step_window, (batch * heads, -(-value_size // values)), query,
        query, key, value, kept_key, kept_value, kept_position, length, length if sink is None else sink,
        length if ends is None else ends, out, key_after, value_after, position_after, length_after,
        *(number for x in (query, key, value) for number in x.stride()[:2]), heads, query.shape[1] // heads, scaling,
        KEY_SIZE=key_size, KEYS=keys, VALUE_SIZE=value_size, VALUES=values, ROOM=room, ROWS=rows, SINKS=num_sinks,
        BESIDE=sink is not None, ENDS=ends is not None, num_warps=8,
    )  # fmt: skip


@operation("kept_key", "kept_value", "kept_position", "length_after", devices=("CPU", "CUDA"))
def keep_window_triton(
    key: Tensor, value: Tensor, starts: Tensor | None, ends: Tensor | None, num_sinks: int, kept_key: Tensor,
    kept_value: Tensor, kept_position: Tensor, length_after: Tensor,
) -> None:  # fmt: skip
    """Write what decoding keeps of rows from position 0: the first `num_sinks` keys [B, Hkv, N, D] and the last.

    Args:
        starts: [B], the place of each row's first token; None if that is 0. ends: [B], its tokens; None if all are.
        kept_key ... length_after: of a `KeptKeys` of M keys.

    Raises:
        OptionError: the heads are on a CPU, and Triton was not imported to interpret kernels there.
    """
    require_kernels(key)
    (batch, heads, length, key_size), value_size, room = key.shape, value.shape[-1], kept_key.shape[2]
    keys, values = padded(key_size), padded(value_size)
    rows = min(max(1, COPIED // max(keys, values)), triton.next_power_of_2(max(1, room)))
    launch(
        keep_window, (batch * heads * max(1, -(-room // rows)),), key,
        key, value, *(length_after if x is None else x.contiguous() for x in (starts, ends)), kept_key, kept_value,
        kept_position, length_after,
        *(number for x in (key, value) for number in x.stride()[:3]), heads, length,
        KEY_SIZE=key_size, KEYS=keys, VALUE_SIZE=value_size, VALUES=values, ROOM=room, ROWS=rows, SINKS=num_sinks,
        STARTS=starts is not None, ENDS=ends is not None,
    )  # fmt: skip


@flop_formula(window_step_triton)
def _flops(query: Any, value: Any, kept_key: Any, **_: Any) -> int:
    """Scores of kept keys and the new one, and their average."""
    return 2 * query[0] * query[1] * (kept_key[2] + 1) * (query[-1] + value[-1])


@flop_formula(keep_window_triton)
def _no_flops(**_: Any) -> int:
    return 0


def step_attention(
    query: Tensor, key: Tensor, value: Tensor, state: Any, num_sinks: int, scaling: float, sink: Tensor | None,
    ends: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Return the output [B, H, 1, Dv] and what is in the next `KeptKeys`; `state` stays as it is. No gradients."""
    out, before = value.new_empty(*query.shape[:3], value.shape[-1]), [x.contiguous() for x in state]
    after, heads = tuple(map(torch.empty_like, before)), map(dense_rows, (query, key, value))
    numbers = (x if x is None else x.contiguous() for x in (sink, ends))
    window_step_triton(*heads, *before, *numbers, num_sinks, scaling, out, *after)
    return out, after


def keep_last(
    key: Tensor, value: Tensor, num_sinks: int, room: int, ends: Tensor | None, starts: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return what is in the `KeptKeys` of `room` keys after rows of `ends` tokens from the places `starts` on."""
    batch, heads = key.shape[:2]
    kept = tuple(x.new_empty(batch, heads, room, x.shape[-1]) for x in (key, value))
    position, length = key.new_empty(batch, 1, room, dtype=torch.long), key.new_empty(batch, dtype=torch.long)
    keep_window_triton(*map(dense_rows, (key, value)), starts, ends, num_sinks, *kept, position, length)
    return *kept, position, length
