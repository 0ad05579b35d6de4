"""Masks of a model that drops queries: Gemma 4 does before the layers that read the keys of others."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from .masks import POSITIONS, sequence_ids
from .mechanisms import Mechanism
from .ops.common.tracing import is_recorded, once
from .pinning import replace_method

SLICING = "_maybe_slice_kv_shared_inputs"  # the method of Gemma 4 that drops queries before layers with others' keys


def keep_key_masks(root: nn.Module) -> None:
    """Have a model and its parts leave key masks as they are, from which it would take the rows of dropped queries.

    Where a mechanism reads the queries of other tokens, or the layer's input, none is dropped.
    """
    replace_method(root, SLICING, KeepsKeyMasks)


class KeepsKeyMasks:
    """The method of one part, which it holds weakly, as the part holds it; a copy is that of the part's copy."""

    def __init__(self, part: nn.Module) -> None:
        self.part = weakref.ref(part)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeepsKeyMasks, (self.part(),)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        part: Any = self.part()
        return _slice_queries(part, *args, **kwargs)


def _slice_queries(part: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    *before, masks, count = args
    keys = {name: mask for name, mask in masks.items() if mask is not None and mask.dim() == 2}
    length, key_mask = before[0].shape[1], next(iter(keys.values()), None)
    behind_cache = key_mask is not None and key_mask.shape[1] != length  # whose tokens it covers too
    if behind_cache or any(isinstance(x, Mechanism) and (x.reads_queries or x.reads_hidden) for x in part.modules()):
        return *before, masks
    packing = kwargs.get(POSITIONS), kwargs.get("cu_seq_lens_q"), key_mask
    if once(sequence_ids, *packing, length, length) is not None:  # dropped queries would not know their documents
        return *before, masks
    *sliced, pairs = getattr(type(part), SLICING)(part, *before, {**masks, **dict.fromkeys(keys)}, count, **kwargs)
    for name, mask in pairs.items():
        if mask is not None and not is_recorded():
            vars(mask).update(vars(masks[name]))  # what rule it is of
    return *sliced, {**pairs, **keys}
