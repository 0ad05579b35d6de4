"""Causal sums by Triton: kernel attention of features on a GPU, forward and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import OptionError
from ..common.numerics import LOWEST
from ..runtime.cpu import flop_formula, operation
from ..runtime.triton import is_large, launch, padded, precision, require_kernels, strides
from .triton_kernels import read_states, write_states
from .triton_scales import Scales
from .types import LEAST_WEIGHT


class Tiles(NamedTuple):
    """rows: tokens in a chunk. values: columns of values in a program."""

    rows: int
    values: int
    num_warps: int
    num_stages: int


# by the bytes of a row of features, or in gradients of values, that a program has, rounded up to a power of two
TILES = {256: Tiles(64, 64, 4, 2), 512: Tiles(64, 64, 8, 2), 1024: Tiles(32, 32, 8, 1)}
# where products of warps leave fewer registers, see `is_large`
SMALL_TILES = {256: Tiles(32, 32, 4, 2), 512: Tiles(16, 32, 4, 2), 1024: Tiles(16, 16, 8, 1)}
MOST_BYTES = 256  # of features; more of them are read in parts, which is faster than a larger state
STATE_KEYS, STATE_VALUES = 64, 128  # of `write_states`
STATE_OPTIONS = {True: {"num_warps": 4, "num_stages": 3}, False: {"num_warps": 8, "num_stages": 1}}  # by `is_large`
PROGRAMS, LEAST_CHUNKS = 256, 8  # programs that keep a GPU busy; fewest chunks in a segment


def too_wide(value: Tensor) -> str | None:
    """Return why there are no tiles for values of that width, None if there are."""
    fits = padded(value.shape[-1]) * value.itemsize <= max(TILES)
    return None if fits else f"values of {value.shape[-1]} numbers of {value.dtype}"


def tiles_for(rows: Tensor, size: int | None = None) -> Tiles:
    """Return the tiles for rows of `size` numbers, those of `rows` [..., D] for None."""
    size = rows.shape[-1] if size is None else size
    width = max(min(TILES), padded(size) * rows.itemsize)
    if width not in TILES:
        raise OptionError(
            f"backend 'triton' got values of {size} numbers of {rows.dtype}, of which its kernels take"
            f" {max(TILES) // rows.itemsize} at most; choose set_backend(model, 'torch')"
        )
    return (TILES if is_large(rows.device) else SMALL_TILES)[width]


def feature_parts(query: Tensor) -> list[slice]:
    """Return which features of query [..., F] programs have at a time."""
    size, most = query.shape[-1], MOST_BYTES // query.itemsize
    return [slice(at, min(at + most, size)) for at in range(0, size, most)]


class Cut(NamedTuple):
    """How sequences are cut: into chunks of `rows` tokens, and segments of `chunks` chunks."""

    rows: int
    num_chunks: int
    chunks: int
    num_segments: int

    @classmethod
    def of(cls, length: int, rows: int, programs: int) -> Cut:
        """As many segments as the GPU has room for beside `programs` for each."""
        num_chunks = -(-length // rows)
        chunks = max(LEAST_CHUNKS, -(-num_chunks // max(1, PROGRAMS // programs)))
        return cls(rows, num_chunks, min(chunks, num_chunks), -(-num_chunks // chunks))


def cut_for(query: Tensor, value: Tensor) -> Cut:
    """Return how query [B, Hkv, G, N, F] and value [B, Hkv, N, Dv] are cut, forward and back."""
    tiles, others = tiles_for(query, feature_parts(query)[0].stop), tiles_for(value)
    programs = query.shape[:3].numel() * -(-value.shape[-1] // tiles.values)
    return Cut.of(query.shape[3], min(tiles.rows, others.rows), programs)


def pack(starts: Tensor | None, cut: Cut) -> Tensor | None:
    """Return starts [B, N] for all places of all chunks."""
    if starts is None:
        return None
    missing = cut.num_chunks * cut.rows - starts.shape[1]
    return torch.cat([starts, starts[:, -1:].expand(-1, missing)], dim=1)


def add_up(
    key: Tensor, value: Tensor, states: Tensor, cut: Cut, *, scales: Scales | None, extra: Tensor | None = None,
    reverse: bool = False,
) -> None:  # fmt: skip
    """Run `write_states`, see there, over states [B, Hkv, (G,) T, F, Dv + 1] of the first T segments."""
    *heads, count, key_size, width = states.shape
    if not count:
        return
    columns = min(STATE_VALUES, padded(width - 1))
    weight, left = (states, states) if scales is None else (scales.weight, scales.left)
    grid = (math.prod(heads) * count, -(-key_size // STATE_KEYS), -(-(width - 1) // columns))
    launch(
        write_states, grid, key, key, value, states if extra is None else extra, weight, left, states, *strides(key),
        *strides(value), heads[1], math.prod(heads[2:]), key.shape[-2], cut.num_chunks, cut.chunks, count,
        KEY_SIZE=key_size, VALUE_SIZE=width - 1, ROWS=cut.rows, KEYS=STATE_KEYS, VALUES=columns,
        SCALED=scales is not None, EXTRA=extra is not None, REVERSE=reverse, PRECISION=precision(),
        **STATE_OPTIONS[is_large(key.device)],
    )  # fmt: skip


def walk(query: Tensor, key: Tensor, value: Tensor, sums: Tensor, states: Tensor, cut: Cut, **how: Any) -> None:
    """Run `read_part` over all features, the keys of these sums; arguments as there."""
    parts = feature_parts(query) if how.get("features_first", True) else []
    if len(parts) < 2:
        return read_part(query, key, value, sums, states, cut, **how)
    partial = torch.empty_like(sums, dtype=torch.float32)
    weights = list(sums.new_empty(2, *sums.shape[:-1], dtype=torch.float32))
    of_states = ("state", "state_after")
    for number, part in enumerate(parts):
        own = how | {name: how[name][..., part, :] for name in of_states if how.get(name) is not None}
        own |= {"partial": partial, "weights": weights, "adds": number > 0, "goes_on": number + 1 < len(parts)}
        read_part(
            query[..., part], key[..., part], value, sums, states[..., part, :], cut, features=query.shape[-1], **own
        )
        weights.reverse()


def read_part(
    query: Tensor, key: Tensor, value: Tensor, sums: Tensor, states: Tensor, cut: Cut, *, scales: Scales | None = None,
    starts: Tensor | None = None, state: Tensor | None = None, state_after: Tensor | None = None,
    rest: Tensor | None = None, factor: Tensor | None = None, row_factor: Tensor | None = None,
    extra: Tensor | None = None, extra_of: str | None = None, features_first: bool = True, normalise: bool = False,
    reverse: bool = False, shared: bool = True, partial: Tensor | None = None,
    weights: Sequence[Tensor | None] = (None, None), adds: bool = False, goes_on: bool = False, features: int = 0,
    pairs: bool = True, log_max_after: Tensor | None = None, log: Tensor | None = None, top: Tensor | None = None,
) -> None:  # fmt: skip
    """Run `read_states`, see there, over sums [B, Hkv, G, N, Dv]; shared: whether groups have states in common.

    features: how many all are, where these are a part. pairs: whether queries see keys up to their own only.
    log_max_after: is written zero, as it is without scales. log: is written. top: what it has besides.
    """
    batch, heads, groups, length, value_size = sums.shape
    tiles, unused = tiles_for(query), states  # a placeholder for what is not read
    columns = min(tiles.values, padded(value_size))
    of_tokens = (unused,) * 5 if scales is None else scales[:5]
    through = unused if scales is None else scales.through
    of_rows = (rest, partial, factor, log, top, *weights, row_factor, extra)
    given = (*of_rows, *of_tokens, starts, state, states, through, state_after, log_max_after)
    launch(
        read_states, (batch * heads * groups * cut.num_segments, -(-value_size // columns)), query,
        query, key, value, sums, *(unused if x is None else x for x in given),
        *strides(query), *strides(key), *strides(value), *strides(sums), heads, groups, groups if shared else 1,
        length, cut.num_chunks, cut.chunks, cut.num_segments,
        features or (query if features_first else sums).shape[-1], LEAST_WEIGHT[torch.float32],
        KEY_SIZE=query.shape[-1], VALUE_SIZE=value_size, ROWS=cut.rows,
        KEYS=padded(query.shape[-1]), VALUES=columns, FEATURES_FIRST=features_first,
        NORMALISE=normalise, WEIGHED=row_factor is not None, EXTRA=extra_of, EXACT=rest is not None, ADDS=adds,
        GOES_ON=goes_on, BEGINS=state is not None, ENDS=state_after is not None, ZEROED=log_max_after is not None,
        SCALED=scales is not None, PACKED=starts is not None, PAIRS=pairs, REVERSE=reverse, LOGS=log is not None,
        TOPS=top is not None, PRECISION=precision(), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


@operation("sums", "rest", "factor", "top", "log", "states", "state_after", "log_max_after", devices=("CPU", "CUDA"))
def causal_sums_triton(
    query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None, log_decay: Tensor | None, sums: Tensor,
    rest: Tensor | None, factor: Tensor, top: Tensor | None, log: Tensor | None, state: Tensor | None,
    log_max: Tensor | None, states: Tensor, state_after: Tensor, log_max_after: Tensor, starts: Tensor | None,
    causal: bool,
) -> None:  # fmt: skip
    """Kernel attention of features; see `autograd.attend`.

    Args:
        query: [B, Hkv, G, N, F]. key: [B, Hkv, N, F]. value: [B, Hkv, N, Dv]. log_scale, log_decay: [B, Hkv, N].
        sums: [B, Hkv, G, N, Dv], the output. rest: like `sums`, what it lacks for having been rounded.
        factor: [B, Hkv, G, N], one over the weights of each query, which exp(top) more belongs to. top: the same, with
            scales. log: the same, the log of these weights, `LOWEST` for none.
        state: [B, Hkv, F, Dv + 1], contiguous. log_max: [B, Hkv]. Both None at the start. Likewise what they become.
        states: what segments add to the state [B, Hkv, T, F, Dv + 1]: all but the last, or all if not `causal`.
        starts: [B, N], where the sequence of each token starts, if rows hold several; with log scales.
        causal: whether queries see keys up to their own only; if not, there is nothing before and no decay.

    Products of float32 follow `torch.set_float32_matmul_precision`: three of TF32 each for "highest", else one.
    Features, values and sums may be of half precision, all alike.

    Raises:
        OptionError: the heads are on a CPU, and Triton was not imported to interpret kernels there; or there are more
            values than programs take.
    """
    require_kernels(query)
    cut = cut_for(query, value)
    starts = pack(starts, cut)
    scaled = log_scale is not None or log_decay is not None
    how: dict[str, Any] = {"rest": rest, "factor": factor, "normalise": True, "log": log, "top": top}
    if causal:
        scales = None
        if scaled:
            scales = Scales.of(cut, key, log_scale, log_decay, log_max, starts, log_max_after, top)
        how |= {"scales": scales, "starts": starts, "state": state, "state_after": state_after}
        how |= {} if scaled else {"log_max_after": log_max_after}
        add_up(key, value, states, cut, scales=scales)
    else:
        scales = None if log_scale is None else Scales.of_all(cut.rows, log_scale)
        add_up(key, value, states, cut, scales=scales)
        log_max_after.zero_() if scales is None else log_max_after.copy_(scales.after)
        if top is not None:
            top.copy_(log_max_after[:, :, None, None].expand_as(top))
        how |= {"state": torch.sum(states, 2, out=state_after), "pairs": False}
    walk(query, key, value, sums, states, cut, **how)


@operation("d_query", "d_key", "d_value", "before", "before_max", devices=("CPU", "CUDA"))
def causal_sums_backward_triton(
    query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None, log_decay: Tensor | None, grad: Tensor,
    extra: Tensor, factor: Tensor, top: Tensor | None, state: Tensor | None, log_max: Tensor | None, states: Tensor,
    d_state: Tensor | None, d_state_max: Tensor | None, d_query: Tensor, d_key: Tensor, d_value: Tensor,
    before: Tensor, before_max: Tensor, starts: Tensor | None, starts_back: Tensor | None, causal: bool,
) -> None:  # fmt: skip
    """Write the gradients of queries, and for each group of queries those of keys and values; arguments as before.

    With the gradients g_i of the outputs, extra e_i = -g_i . o_i and w_i, what the weights of query i add up to,

        dL/dphi(q_i) = 1 / w_i sum_{j <= i} (g_i . v_j + e_i) phi(k_j)
        dL/dphi(k_j) = sum_{i >= j} (v_j . g_i + e_i) phi(q_i) / w_i
        dL/dv_j      = sum_{i >= j} (phi(k_j) . phi(q_i)) g_i / w_i

    are causal sums again, the last two read from the end, with the same states; 1 / w_i is a scale of what is read as
    a key there.

    Args:
        state: that before; if not `causal`, that after.
        grad, d_query: as `sums` and query. extra: [B, Hkv, G, N]. d_key, d_value: [B, Hkv, G, N, F] and Dv.
        d_state: [B, Hkv, G, F, Dv + 1], gradient of the state after, of exponent d_state_max [B, Hkv, G]; `before`
            and before_max likewise of the state before.
        starts_back: `starts` as tokens are read from the end.
    """
    cut = cut_for(query, value)
    of_keys, of_queries = pack(starts, cut), pack(starts_back, cut)
    scales = None
    if causal and (log_scale is not None or log_decay is not None):
        scales = Scales.of(cut, key, log_scale, log_decay, log_max, of_keys)
    walk(
        grad, value, key, d_query, states, cut, scales=scales, starts=of_keys, state=state, row_factor=factor,
        extra=extra, extra_of="rows", features_first=False, pairs=causal,
    )  # fmt: skip
    row_factor = torch.empty_like(factor)
    if causal:
        given = (top, log_scale, log_decay, d_state_max, of_queries)
        back = Scales.of_queries(cut, factor, *given, before_max, row_factor)
    else:
        share = torch.where(factor > 0, factor.log() - (0.0 if top is None else top), LOWEST).flatten(1, 2)
        back = Scales.of_all(cut.rows, share)
        before_max.copy_(back.after.view_as(before_max))
        own = before_max[..., None] if log_scale is None else before_max[..., None] + log_scale[:, :, None]
        row_factor.copy_(own.exp().expand_as(row_factor))
    states = states.new_empty(*query.shape[:3], *states.shape[2:])
    add_up(query, grad, states, cut, scales=back, extra=extra, reverse=causal)
    how: dict[str, Any] = {
        "scales": back, "starts": of_queries, "state": d_state if causal else states.sum(3), "reverse": causal,
        "row_factor": row_factor, "shared": False, "pairs": causal,
    }  # fmt: skip
    walk(key, query, grad, d_value, states, cut, **how)
    how |= {"extra": extra, "extra_of": "keys", "features_first": False, "state_after": before if causal else None}
    walk(value, grad, query, d_key, states, cut, **how)


@flop_formula(causal_sums_triton)
def _flops(query: Any, value: Any, **_: Any) -> int:
    """Half of the pairs inside a chunk, twice; reading the state for every query, adding every key to it."""
    (batch, heads, groups, length, key_size), value_size = query, value[-1]
    pairs = groups * (TILES[min(TILES)].rows + 1) * (key_size + value_size)
    return batch * heads * length * (pairs + 2 * (groups + 1) * key_size * value_size)


@flop_formula(causal_sums_backward_triton)
def _backward_flops(query: Any, value: Any, **_: Any) -> int:
    """Three times the sums, of which two have the states in common."""
    (batch, heads, groups, length, key_size), value_size = query, value[-1]
    return 3 * _flops(query, value) - 2 * batch * heads * groups * length * key_size * value_size
