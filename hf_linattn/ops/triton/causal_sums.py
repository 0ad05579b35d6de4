"""Causal sums by Triton: what `native.causal_sums` computes from features, on a GPU, for all tokens at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from ..causal_sums import CausalSums
from ..chunk_sums import LEAST_WEIGHT
from ..exponential import LOWEST
from ..native.library import operation
from .causal_kernels import read_states, write_states
from .causal_step import step_attention
from .features import make_features
from .launching import kinds, launch, precision, require_kernels

SEGMENT, ROWS = 256, 64  # tokens that share a state, and queries or keys in a tile
STATE_TILE, KEYS, VALUES = 64, 32, 128  # of a state; features at a time; columns of values at most


def running_max(value: Tensor, gain: Tensor) -> Tensor:
    """Return m_t = max(value_t, m_{t-1} + gain_t) along the last dimension, in steps of twice the distance each."""
    distance = 1
    while distance < value.shape[-1]:
        earlier = F.pad(value[..., :-distance], (distance, 0), value=LOWEST)
        value = torch.maximum(value, earlier + gain)
        gain = gain + F.pad(gain[..., :-distance], (distance, 0))
        distance *= 2
    return value


class Scales(NamedTuple):
    """What log scales and decays make of keys, queries and states, number by number; T segments of S tokens.

    exponent: of the keys, counted from where their segment begins. top: the largest exponent a query sees, counted so,
    and kept: what the state before its segment weighs beside it. weight: of the keys as seen from the end of their
    segment. All [B, Hkv, T, S]. left: of a state at the end of a segment [B, Hkv, T]. after: the next state's largest
    exponent [B, Hkv]. passed: what a token's own place adds to `top` [B, Hkv, T, S].
    """

    exponent: Tensor
    top: Tensor
    kept: Tensor
    weight: Tensor
    left: Tensor
    after: Tensor
    passed: Tensor

    @classmethod
    def of(cls, log_scale: Tensor, log_decay: Tensor, log_max: Tensor, starts: Tensor | None = None) -> Scales:
        """Work them out for log_scale and log_decay [B, Hkv, N] after a state of the largest exponent `log_max`.

        starts: [B, T S], where the sequence of each place starts; None if rows hold one.
        """
        missing = (0, -log_scale.shape[-1] % SEGMENT)
        log_scale = F.pad(log_scale, missing, value=LOWEST).unflatten(-1, (-1, SEGMENT))
        passed = F.pad(log_decay, missing).unflatten(-1, (-1, SEGMENT)).cumsum(-1)
        exponent, through = log_scale - passed, passed[..., -1]
        at_end, going_on, top, continues = exponent, through, exponent.cummax(-1).values, None
        if starts is not None:
            start = starts[:, None].unflatten(-1, (-1, SEGMENT))
            last = start[..., -1:]
            carried = torch.cat([start[:, :, :1, :1], last[:, :, :-1]], dim=2)  # the sequence of the state before
            continues = start == carried
            at_end = exponent.masked_fill(start != last, LOWEST)
            going_on = through.masked_fill((last != carried)[..., 0], LOWEST)
            begins = F.pad(start[..., 1:] != start[..., :-1], (1, 0))
            top = running_max(exponent, torch.where(begins, LOWEST, 0.0).expand_as(exponent))
        own = (at_end.amax(-1) + through).clamp(min=LOWEST / 2)
        own = torch.cat([torch.maximum(own[..., :1], log_max[..., None] + going_on[..., :1]), own[..., 1:]], dim=-1)
        after = running_max(own, going_on)
        before = torch.cat([log_max[..., None], after[..., :-1]], dim=-1)
        seen = before[..., None] if continues is None else torch.where(continues, before[..., None], LOWEST)
        top = torch.maximum(top, seen).clamp(min=LOWEST / 2)
        return cls(
            exponent,
            top,
            (seen - top).exp(),
            (at_end + (through - after)[..., None]).exp(),
            (before + going_on - after).exp(),
            after[..., -1],
            passed,
        )

    def row_top(self, length: int, reverse: bool) -> Tensor:
        """The log of what the sums of every query were divided by [B, Hkv, N]."""
        top = (self.top + self.passed).flatten(-2)[..., :length]
        return top.flip(-1) if reverse else top


@operation("sums", "factor", "top", "state_after", "log_max_after", devices=("CPU", "CUDA"))
def causal_sums_triton(
    query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None, log_decay: Tensor | None,
    row_scale: Tensor | None, sums: Tensor, factor: Tensor, top: Tensor, state: Tensor, log_max: Tensor,
    state_after: Tensor, log_max_after: Tensor, normalise: bool, reverse: bool, starts: Tensor | None = None,
) -> None:  # fmt: skip
    """`native.causal_sums.causal_sums` of features; arguments and results as there.

    starts: [B, N], where the sequence of each token starts, as they are read, if rows hold several; with log scales.

    The states before all segments take B Hkv N / 256 K Dv numbers while it runs. Products of float32 follow
    `torch.set_float32_matmul_precision`: three of TF32 each for "highest", else one. Features, values and sums may be
    of half precision, all alike.

    Raises:
        OptionError: the heads are on a CPU, and Triton was not imported to interpret kernels there.
    """
    require_kernels(query)
    batch, heads, groups, length, key_size = query.shape
    num_segments, scales = -(-length // SEGMENT), None
    if starts is not None:
        starts = torch.cat([starts, starts[:, -1:].expand(-1, num_segments * SEGMENT - length)], dim=1)
    if log_scale is not None or log_decay is not None:
        zeros = log_max.new_zeros(key.shape[:3])
        scale, decay = (zeros if x is None else x.flip(-1) if reverse else x for x in (log_scale, log_decay))
        scales = Scales.of(scale, decay, log_max, starts)
        top.copy_(scales.row_top(length, reverse)[:, :, None].expand_as(top))
        log_max_after.copy_(scales.after)
    else:
        top.zero_()
        log_max_after.copy_(log_max)
    if not normalise:
        factor.copy_(torch.ones_like(top) if row_scale is None else (row_scale + top).exp())
    states = log_max.new_empty(batch, heads, num_segments, key_size, value.shape[-1])
    totals = log_max.new_empty(batch, heads, num_segments, key_size)
    unused = totals  # in the place of numbers that are not read
    sizes = {
        "KEY_SIZE": key_size, "VALUE_SIZE": value.shape[-1], "SEGMENT": SEGMENT, "ROWS": ROWS,
        "SCALED": scales is not None, "NORMALISE": normalise, "REVERSE": reverse,
        "PRECISION": precision(),
    }  # fmt: skip
    weight, left = (unused, unused) if scales is None else (scales.weight.contiguous(), scales.left.contiguous())
    grid: tuple[int, ...] = (batch * heads, -(-key_size // STATE_TILE), -(-value.shape[-1] // STATE_TILE))
    launch(
        write_states, grid, query,
        key, value, weight, left, state, state_after, states, totals, *key.stride()[:3], *value.stride()[:3],
        heads, length, num_segments, **sizes, KEYS=STATE_TILE, VALUES=STATE_TILE,
    )  # fmt: skip
    columns = min(VALUES, max(16, 1 << (value.shape[-1] - 1).bit_length()))
    of_rows = (unused,) * 3 if scales is None else (scales.exponent, scales.top, scales.kept)
    grid = (batch * heads * groups, -(-length // ROWS), -(-value.shape[-1] // columns))
    launch(
        read_states, grid, query,
        query, key, value, states, totals, *(x.contiguous() for x in of_rows), unused if starts is None else starts,
        factor, sums, factor,
        *query.stride()[:4], *key.stride()[:3], *value.stride()[:3], *sums.stride()[:4],
        heads, groups, length, num_segments, LEAST_WEIGHT[torch.float32], **sizes, KEYS=KEYS, VALUES=columns,
        WEIGHED=row_scale is not None and not normalise, PACKED=starts is not None,
    )  # fmt: skip


def packed_rows(sequence_ids: Tensor) -> tuple[Tensor]:
    """Return where the sequence of each token starts [B, N], int32."""
    begins = F.pad(sequence_ids[:, 1:] != sequence_ids[:, :-1], (1, 0))
    steps = torch.arange(begins.shape[1], device=begins.device, dtype=torch.int32)
    return (torch.where(begins, steps, 0).cummax(1).values,)


TRITON_SUMS = CausalSums(causal_sums_triton, packed_rows, kinds, make_features, step_attention)


@register_flop_formula(torch.ops.hf_linattn.causal_sums_triton)
def _flops(query: Any, key: Any, value: Any, *rest: Any, **__: Any) -> int:
    """Half of the pairs inside a segment, twice; reading the state for every query, adding every key to it."""
    (batch, heads, groups, length, key_size), value_size = query, value[-1]
    pairs = groups * (SEGMENT + ROWS) * (key_size + value_size)
    return batch * heads * length * (pairs + 2 * (groups + 1) * key_size * value_size)
