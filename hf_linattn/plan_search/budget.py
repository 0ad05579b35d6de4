"""How many heads or layers a plan may keep exact: a share of them, a number, or what fits into a number of bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch.utils._pytree import tree_leaves

from ..config import require
from ..errors import OptionError, UnsupportedModeError
from ..mechanisms import Mechanism
from ..ops.common.growing import SPARE
from .gates import Gates
from .options import SearchOptions


def number_to_keep(gates: Gates, keep: float | int, unit: str, options: SearchOptions) -> int:
    """Return how many of the gates' places stay exact: at least one, and not all.

    Args:
        keep: a share as a float below 1, rounded to the nearest number of at least one; or the number as an int.

    Raises:
        OptionError: it is nothing, everything, or more than there are, or there is one place alone.
    """
    count = len(gates)
    if count < 2:
        raise OptionError(
            f"keep={keep}: the model has {count} {unit} to choose from, so a plan would keep all or nothing; name a"
            " mechanism for the whole model"
        )
    if options.state_bytes is not None and options.length is not None:
        return _number_within(gates, options.state_bytes, options.length, unit)
    number = isinstance(keep, (int, float)) and not isinstance(keep, bool)
    places = f"key/value {unit}s" if unit == "head" else f"{unit}s"
    expected = f"a share above 0 and below 1, or a number from 1 to {count - 1} of the model's {count} {places}"
    share = isinstance(keep, float)
    require("keep", keep, number and (0 < keep < 1 if share else 1 <= keep < count), expected)
    return min(max(1, round(keep * count)), count - 1) if share else int(keep)


def _number_within(gates: Gates, state_bytes: int, length: int, unit: str) -> int:
    """Return how many places may stay exact where any choice of as many is to fit."""
    sizes = {mechanism.layer.index: _bytes_of_layer(mechanism, length) for mechanism in gates.mechanisms.values()}
    added = sorted((len(place.heads) * sizes[place.layer][1] for place in gates.places), reverse=True)
    totals = list(accumulate(added, initial=sum(replaced for replaced, _ in sizes.values())))
    fitting = sum(total <= state_bytes for total in totals[1:])
    expected = f"from {totals[1]:,} to {totals[-1] - 1:,} at {length:,} tokens, for one {unit} to all but one"
    require("state_bytes", state_bytes, 1 <= fitting < len(gates), expected)
    return fitting


def _bytes_of_layer(mechanism: Mechanism, length: int) -> tuple[int, int]:
    """Return the bytes of decoding state of a layer after `length` tokens, and at most how many an exact head adds.

    That has keys and values, and a byte a token for which of these are no pads, all with the room that the first
    decoded token makes; what a head that is replaced takes is what a layer with one more has more.
    """
    layer = mechanism.layer
    if not layer.causal:
        raise UnsupportedModeError(
            f"state_bytes: layer {layer.index} is bidirectional and keeps no decoding state; give keep"
        )
    alone = replace(layer, num_heads=layer.num_heads // layer.num_key_value_heads, num_key_value_heads=1)
    single = type(mechanism)(mechanism.config, alone).to(device=layer.device, dtype=layer.dtype)
    whole, one = (_state_bytes(kind, length) for kind in (mechanism, single))
    others = layer.num_key_value_heads - 1
    replaced = (whole - one) // others if others else whole
    width = layer.head_dim + (layer.head_dim if layer.value_dim is None else layer.value_dim)
    return whole, (length + SPARE) * (width * layer.dtype.itemsize + 1) - replaced


@torch.no_grad()
def _state_bytes(mechanism: Mechanism, length: int) -> int:
    layer = mechanism.layer
    like = torch.zeros(1, 1, 1, 1, dtype=layer.dtype, device=layer.device)
    query = like.expand(1, layer.num_heads, length, layer.head_dim)
    key = like.expand(1, layer.num_key_value_heads, length, layer.head_dim)
    value = like.expand(*key.shape[:3], layer.head_dim if layer.value_dim is None else layer.value_dim)
    hidden = like[0].expand(1, length, layer.hidden_size or 1)
    _, state = mechanism(query, key, value, **mechanism.keywords({"hidden_states": hidden}))
    return sum(x.nbytes for x in tree_leaves(state) if isinstance(x, torch.Tensor))
