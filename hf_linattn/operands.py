"""Whether what a mechanism is called with fits together, before anything is computed; once in every call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .errors import OperandError
from .ops.common.tracing import is_recorded


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
    if layer.causal and not layer.cross and known[2] < given[2]:
        _refuse("query and key", query, key, "must have at least as many keys as queries: these are the last tokens")
    rows = ((batch, known[2]), (1, known[2]))
    if layer.cross and stateful:
        return  # the state has the keys, and what masked them
    if mask is not None and mask.shape not in rows:
        _refuse("key_padding_mask", mask, f"must be {list(rows[0])}: a row of the batch, a column for each key")
    if sequence_ids is not None and sequence_ids.shape not in rows:
        _refuse("sequence_ids", sequence_ids, f"must be {list(rows[0])}: a row of the batch, a column for each key")


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
