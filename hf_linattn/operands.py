"""Whether a mechanism can take what it is called with, before anything is computed; once in every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import OperandError, UnsupportedModeError
from .ops.common.precision import accum_dtype
from .ops.common.tracing import is_known, is_open, is_recorded, is_watched


def fitting(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sequence_ids: Tensor | None, state: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Return mask and ids of all rows, where one row may stand for all of them.

    Programs that are being recorded are not checked: their sizes may be symbols, and they call no C.

    Raises:
        OperandError: the arguments of `Mechanism.forward` do not fit each other or the `AttentionLayer`.
    """
    if not is_recorded():
        _check_sizes(layer, query, key, value, mask, sequence_ids, state is not None)
        if state is not None:
            check_rows(state, query.shape[0])
    rows = query.shape[0]
    mask = mask if mask is None or mask.shape[0] == rows else mask.expand(rows, -1)
    ids = sequence_ids
    return mask, ids if ids is None or ids.shape[0] == rows else ids.expand(rows, -1)


def _check_sizes(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sequence_ids: Tensor | None,
    stateful: bool,
) -> None:  # fmt: skip
    given, known, width = query.shape, key.shape, layer.head_dim
    if len(given) != 4 or len(known) != 4 or value.dim() != 4:
        _refuse("query, key and value", query, key, value, "must have four dimensions [B, H, N, D]")
    batch, heads = given[:2]
    if known[0] != batch or not known[1] or heads % known[1] or given[3] != width or known[3] != width:
        _refuse("query and key", query, key, f"must be [B, H, Nq, {width}] and [B, Hkv, Nk, {width}], Hkv dividing H")
    if value.shape[:3] != known[:3]:
        _refuse("key and value", key, value, "must have the same rows, heads and tokens")
    if not layer.cross and known[2] < given[2]:
        what = "these are the last tokens" if layer.causal else "leave layers that pool their keys out of `layers`"
        _refuse("query and key", query, key, f"must have at least as many keys as queries: {what}")
    rows = ((batch, known[2]), (1, known[2]))
    if layer.cross and stateful:
        return  # the state has the keys, and what masked them
    if mask is not None and mask.shape not in rows:
        _refuse("key_padding_mask", mask, f"must be {list(rows[0])}: a row of the batch, a column for each key")
    if sequence_ids is not None and sequence_ids.shape not in rows:
        _refuse("sequence_ids", sequence_ids, f"must be {list(rows[0])}: a row of the batch, a column for each key")


def fitting_hidden(mechanism: Any, query: Tensor, key: Tensor, hidden_states: Tensor | None) -> Tensor | None:
    """Return the layer's input for a mechanism that reads it, beside its heads and in their dtype; else None.

    Raises:
        UnsupportedModeError: nobody handed it over. OperandError: it is not [B, Nk, E].
    """
    if not mechanism.reads_hidden:
        return None
    options, layer = " and ".join(mechanism.reads_hidden), mechanism.layer
    if hidden_states is None:
        raise UnsupportedModeError(
            f"mechanism {mechanism.config.mechanism!r} of layer {layer.index} has {options}, for which it reads the"
            " layer's input, and this attention was called without it; leave these options out, or call the attention"
            " module with its hidden_states"
        )
    want = (key.shape[0], key.shape[2], layer.hidden_size)
    if tuple(hidden_states.shape) != want:
        raise OperandError(
            f"hidden_states {list(hidden_states.shape)} must be {list(want)} for {options}: a token of the layer's"
            " input for every key; keys that came without it, as from a prefix, need these options left out"
        )
    return hidden_states.to(query.device, accum_dtype(query))


def check_rows(state: Any, batch: int) -> None:
    """Raise `OperandError` where a decoding state, tensors with the batch first, is that of another number of rows."""
    for x in state:
        if isinstance(x, Tensor) and x.dim() and x.shape[0] != batch:
            raise OperandError(
                f"the decoding state has {x.shape[0]} rows, and {batch} are to continue it; give every row a state of"
                " its own (cache.batch_repeat_interleave, cache.reorder_cache) or start with a new cache"
            )


def _refuse(what: str, *found: Any) -> None:
    *tensors, rule = found
    raise OperandError(f"{what} {' and '.join(str(list(x.shape)) for x in tensors)} {rule}")


def admitted(half: bool, *heads: Tensor) -> tuple[Tensor, ...]:
    """Return heads as they are, if that is in one dtype and half precision may come; else in the first one's, wide."""
    if half and all(x.dtype == heads[0].dtype for x in heads):
        return heads
    return tuple(x.to(accum_dtype(heads[0])) for x in heads)


def require_recordable(mechanism: Any, query: Tensor, *masks: Tensor | None) -> None:
    """Refuse a program in which lengths, paddings or packings of its example would stand for those of all inputs.

    Args:
        mechanism: one that has `any_length` is right in every such program.
        query: [B, H, N, D]. masks: its mask and sequence ids, each [B, N], if there are any.

    Raises:
        UnsupportedModeError: torch.jit.trace; torch.export of a dynamic size, or with a mask or ids; torch.func.vmap
        over a mask or ids.
    """
    if not is_watched() or mechanism.any_length:
        return
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return  # torch.compile makes another program where these differ
    if not is_open(query) and all(x is None or is_known(x) for x in masks):
        return
    raise UnsupportedModeError(
        f"mechanism {mechanism.config.mechanism!r} of layer {mechanism.layer.index} works by the length, padding and"
        " packing that it sees, and torch.jit.trace, torch.export with dynamic sizes or a mask, and torch.func.vmap"
        " over masks make one program for all: patch with a mechanism on the linear base (linear, performer,"
        " hedgehog, gla, retention, ...) or softmax, or export with static sizes and neither attention_mask nor"
        " position_ids"
    )
