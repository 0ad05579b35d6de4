"""Masks of a model that drops queries: Gemma 4 does before the layers that read the keys of others."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from .ops.common.tracing import is_recorded

SLICING = "_maybe_slice_kv_shared_inputs"  # the method of Gemma 4 that drops queries before layers with others' keys


def slicing(part: nn.Module) -> Any:
    """Return what stands in place of `SLICING` of a model: that one takes rows out of masks, and a key mask has none.
    """
    return functools.partial(_slice_queries, part)


def _slice_queries(part: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    *before, masks, count = args
    keys = {name: mask for name, mask in masks.items() if mask is not None and mask.dim() == 2}
    *sliced, pairs = getattr(type(part), SLICING)(part, *before, {**masks, **dict.fromkeys(keys)}, count, **kwargs)
    for name, mask in pairs.items():
        if mask is not None and not is_recorded():
            vars(mask).update(vars(masks[name]))  # what rule it is of
    return *sliced, {**pairs, **keys}
