"""Long inputs in slabs of `SLAB_SIZE` tokens, each continuing the state of the one before, read by compiled programs.

torch.compile makes a program of one slab, which all others and all layers share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..dispatch import PYTORCH

SLAB_SIZE = 1024
SPLIT = ("query", "key", "value", "log_decay")  # what a call has for every token, in its third dimension


def too_short(call: Any) -> str | None:
    """Return why a call is not worth a program: there is none for one slab and the rest."""
    return None if call.query.shape[2] >= 2 * SLAB_SIZE else f"fewer than {2 * SLAB_SIZE:,} tokens"


def read_slabs(call: Any, read: Callable[[Any], tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
    """Return what `read` returns of a causal call, the output [B, H, N, Dv] and a state, read slab by slab."""
    given = {name: getattr(call, name, None) for name in SPLIT}
    parts: list[Tensor] = []
    state = call.state
    # one layout, whatever the length of the whole: another one would be another program
    slabs = zip(*(x.split(SLAB_SIZE, 2) for x in given.values() if x is not None), strict=True)
    names = [name for name, x in given.items() if x is not None]
    for slab in slabs:
        heads = {name: x.contiguous() for name, x in zip(names, slab, strict=True)}
        # no state before the first slab, fewer tokens in the last: these two are not worth programs of their own
        program = compiled(read) if parts and slab[0].shape[2] == SLAB_SIZE else read
        part, state = program(call._replace(**heads, state=state, policy=PYTORCH))
        parts.append(part)
    return torch.cat(parts, dim=2), state


@functools.cache
def compiled(read: Callable[[Any], tuple[Tensor, Any]]) -> Callable[[Any], tuple[Tensor, Any]]:
    """Return the program of `read`."""
    # made when first needed, as it imports the compiler. Static: seeing two mechanisms, torch.compile would take their
    # sizes for variable, and its programs would be slower
    return torch.compile(read, dynamic=False)
