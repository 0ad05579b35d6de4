"""Masks as transformers hands them over: pads, whether the future is seen, rules over pairs, packed rows.

A rule (`block_sequence_ids` of images, `or_mask_function`, `and_mask_function`, chunks) is made a mask of all pairs,
as for transformers' own softmax, unless it comes to what layers do anyway. Layers that keep softmax obey that mask,
others refuse it.

Packed rows are told by positions that restart. Many models hand `position_ids` to their layers; others only embed
them, or make rotary tables of them. What else a model is called with reaches the layers of all, as FlashAttention's
lengths do, and again where gradient checkpointing runs a layer once more: so do the positions, as `POSITIONS`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .errors import UnsupportedModeError
from .mechanisms import Mechanism
from .mechanisms.softmax import SoftmaxMechanism
from .ops.common.tracing import counts_positions, is_known, is_recorded, once, order_of_layers

ROWS = 512  # queries for which a rule is compared at a time
RULE = "_hf_linattn_rule"  # the attribute of a mask of pairs that names the rule it was made of
REAL = "_hf_linattn_real"  # that of a key mask: how many of its last columns are known to be true
WINDOW = "_hf_linattn_window"  # that of one which is a sliding window: whether it is causal, and the key mask
UNMASKED = "_hf_linattn_unmasked"  # that of a key mask which masks nothing, handed on for its length or its order
CAUSAL = "_hf_linattn_causal"  # that of a key mask: whether the model made it for causal attention
POSITIONS = "hf_linattn_positions"  # the argument of layers that brings them the positions their model was given

_MADE = threading.local()  # its list `masks`: weak references to the masks with a `RULE` that this thread made


class MaskSizes(NamedTuple):
    """What a mask is made for: `queries` from position `query_offset` on, `keys` from position `key_offset` on."""

    batch: int
    queries: int
    keys: int
    query_offset: Any  # a tensor with a static cache
    key_offset: int

    @property
    def seen(self) -> int | None:
        """How many tokens of a row have come so far; None where a cache has room for more, or none is there."""
        if not isinstance(self.query_offset, int) or self.key_offset + self.keys != self.query_offset + self.queries:
            return None
        return self.query_offset + self.queries


def key_columns(mask: Tensor, sizes: MaskSizes) -> Tensor:
    """Return the columns of a 2-D mask that belong to the keys; refuse one of another batch or length.

    It has a column for each token of a row, and may have more for tokens to come. One as wide as the keys is theirs:
    behind a static cache `generate` makes masks so, and then gives them to the model, which asks again.
    """
    width, seen = mask.shape[1], sizes.seen
    if not is_recorded() and (mask.shape[0] != sizes.batch or (width < (seen or 0) and width != sizes.keys)):
        raise UnsupportedModeError(
            f"attention_mask is {tuple(mask.shape)}, but the call has a batch of {sizes.batch} with"
            f" {seen or sizes.keys} tokens a row, those in the cache counted; give it a column for each of them"
        )
    if width <= sizes.keys:
        return mask[:, :]
    first: Any = sizes.key_offset
    if isinstance(sizes.query_offset, Tensor):  # keys of a static cache: the first, or those of a window that is full
        first = sizes.query_offset + sizes.queries - sizes.keys
    return _columns(mask, first, sizes.keys)


def _columns(mask: Tensor, first: Any, count: int) -> Tensor:
    """Return `count` columns of a mask from that place on, or the nearest that it has."""
    if not isinstance(first, Tensor):
        return mask[:, first:][:, :count]
    return mask.index_select(1, torch.arange(count, device=mask.device) + first.clamp(0, mask.shape[1] - count))


def handed_on(columns: Tensor, sizes: MaskSizes, causal: bool) -> Tensor | None:
    """Return the columns of the keys as layers get them, None if these are known to be true; after one look at them.

    causal: what the mask is made for, which is noted on it. Layers of another order get it where nothing is masked,
    too, if the attention that they had would.

    One token behind a static cache has a column for every place, as one compiled graph takes masks of one width; these
    are looked at on a CPU alone, since elsewhere each look waits for the device.
    """
    step = sizes.queries == 1 and isinstance(sizes.query_offset, Tensor)
    # without a cache, and not of the queries' length: whether that is the keys' shows where these are
    unsure = sizes.seen is None and isinstance(sizes.query_offset, int) and sizes.queries > 1
    against = sizes.queries == sizes.keys and order_of_layers() not in (None, causal)
    setattr(columns, CAUSAL, causal)
    last = 0
    if is_known(columns) and (columns.device.type == "cpu" or not step):
        own = _columns(columns, sizes.query_offset - sizes.key_offset, sizes.queries)
        real = int(2 * columns.all() + own.all())
        if real == 3 and (unsure or against):
            setattr(columns, UNMASKED, True)
            return columns
        if real == 3:
            return None
        last = sizes.queries if real == 1 else 0
    if step:
        columns = torch.nn.functional.pad(columns, (0, sizes.keys - columns.shape[1]), value=1)
    if last:
        setattr(columns, REAL, last)
    return columns


def all_real(mask: Tensor, count: int) -> bool:
    """Whether the last `count` columns of a key mask, or those of the last tokens, are known to be true."""
    return not is_recorded() and getattr(mask, REAL, 0) >= count


def require_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a 2-D mask of another batch than a model's input, before the model makes another shape of it."""
    mask, given = kwargs.get("attention_mask"), given_input(args, kwargs)
    if not (isinstance(mask, Tensor) and isinstance(given, Tensor)) or mask.dim() != 2:
        return
    if len(mask) != len(given):
        raise UnsupportedModeError(
            f"attention_mask is {tuple(mask.shape)}, but the call has a batch of {len(given)}; give it a row for each"
        )


def require_no_pairs(args: tuple[Any, ...], kwargs: Mapping[str, Any], mechanisms: Iterable[Mechanism]) -> None:
    """Refuse masks of pairs that only some layers could take, before these put the tokens into their cache."""
    masks = {name: kwargs.get(name) for name in ("attention_mask", "encoder_attention_mask")}
    pairs = {name: x for name, x in masks.items() if isinstance(x, Tensor) and x.dim() == 4}
    pairs = {name: x for name, x in pairs.items() if not hasattr(_made(x), RULE)}
    if not pairs:
        return
    given = given_input(args, kwargs)
    one = isinstance(given, Tensor) and given.shape[1] == 1
    for mechanism in mechanisms:
        mask = pairs.get("encoder_attention_mask" if mechanism.layer.cross else "attention_mask")
        if not (mask is None or is_softmax(mechanism) or _same_for_all(mask, one, mechanism.layer.causal)):
            _refuse_pairs(mask, mechanism)


def given_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a model's input [B, N, ...]; None without one."""
    return next((x for x in (*map(kwargs.get, ("input_ids", "inputs_embeds")), *args[:1]) if x is not None), None)


def _same_for_all(mask: Tensor, one: bool, causal: bool) -> bool:
    """Whether a mask of pairs says the same of all queries, of which there is but one or which see the future."""
    return mask.shape[1] == mask.shape[2] == 1 and (one or not causal)


def rule_of(mask_function: Any, use_vmap: bool, local_size: int | None, config: Any) -> str | None:
    """Return the name of a rule beyond the order of tokens, sliding windows and packed rows; None without one."""
    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return None
    if use_vmap:
        return "or_mask_function or and_mask_function"
    name = mask_function.__name__
    if name != "and_mask":
        return "block_sequence_ids" if name == "or_mask" else f"the mask function {name}"
    chunk = getattr(config, "attention_chunk_size", None)
    chunked = chunk is not None and local_size == chunk and chunk != getattr(config, "sliding_window", None)
    return f"attention_chunk_size={chunk}" if chunked else None


def mask_of_rule(key_mask: Tensor | None, sizes: MaskSizes, options: Mapping[str, Any]) -> Tensor | None:
    """Return the pairs that a rule in `options`, of transformers' call for a mask, lets see each other.

    None without a rule, or if it comes to causal attention; [B, 1, 1, Nk] if all queries see the same keys; else
    [B, 1, Nq, Nk].
    """
    function, config = options.get("mask_function", causal_mask_function), options.get("config")
    rule = rule_of(function, options.get("use_vmap", False), options.get("local_size"), config)
    if rule is None:
        return None
    given = {**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    given |= {"batch_size": sizes.batch, "kv_length": sizes.keys, "kv_offset": sizes.key_offset}
    whole = {**given, "q_length": sizes.queries, "q_offset": sizes.query_offset}
    if is_recorded():
        return sdpa_mask(**whole, attention_mask=key_mask)
    columns = None if key_mask is None else key_columns(key_mask, sizes).bool()
    window = options.get("local_size") or getattr(config, "sliding_window", None)
    found = _plain_patterns(sizes, window, given, columns)
    if (True, None) in found:
        return None
    if (False, None) in found:
        every = torch.ones(sizes.batch, sizes.keys, dtype=torch.bool, device=options.get("device"))
        mask = (every if columns is None else columns)[:, None, None]
    else:
        mask = sdpa_mask(**whole, attention_mask=key_mask)
    setattr(mask, RULE, rule)
    if found and mask.shape[2] == sizes.queries:  # others than softmax do not ask how wide a layer's window is
        if found[0][0] and columns is not None:  # without those of tokens to come
            columns = columns[:, : int(sizes.query_offset) + sizes.queries - sizes.key_offset]
        setattr(mask, WINDOW, (found[0][0], columns))
    _MADE.masks = [x for x in getattr(_MADE, "masks", ()) if x() is not None] + [weakref.ref(mask)]
    return mask


def _made(mask: Tensor) -> Tensor:
    """Return the mask with a `RULE` of which this one is a copy, as Accelerate makes on other devices; or itself."""
    if mask.dim() != 4 or hasattr(mask, RULE) or is_recorded():
        return mask
    for made in [x() for x in getattr(_MADE, "masks", ())]:
        if made is not None and made.shape == mask.shape and made.dtype == mask.dtype:
            if torch.equal(made.to(mask.device), mask):
                return made
    return mask


def _plain_patterns(
    sizes: MaskSizes, window: int | None, given: Mapping[str, Any], columns: Tensor | None
) -> list[tuple[bool, Any]]:
    """Return which patterns (causal, window) a rule comes to, whatever it says of pads, which nobody sees."""
    pads: Any = False
    if columns is not None:  # of a static cache there may be fewer than it has room for
        pads = ~torch.nn.functional.pad(columns, (0, sizes.keys - columns.shape[1]))[:, None, None]
    left = [(causal, width) for causal in (True, False) for width in {None, window}]
    keys = torch.arange(sizes.keys, device=given.get("device")) + sizes.key_offset
    for first in range(0, sizes.queries, ROWS):
        rows, offset = min(ROWS, sizes.queries - first), sizes.query_offset + first
        allowed = sdpa_mask(**given, q_length=rows, q_offset=offset, attention_mask=None)
        distance = (torch.arange(rows, device=keys.device) + offset)[:, None] - keys
        left = [x for x in left if bool(((allowed == _in_pattern(distance, *x)) | pads).all())]
        if not left:
            break
    return left


def _in_pattern(distance: Tensor, causal: bool, window: int | None) -> Tensor:
    """Return which pairs at these distances, of queries from their keys, see each other."""
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


def window_of(config: PreTrainedConfig, sliding_window: int | None, causal: bool) -> int | None:
    """Return how far away the first key is that a query does not see, for the sliding window a layer hands over.

    transformers' masks for windows both ways let a query see keys that are exactly `config.sliding_window` tokens
    away. Most encoders hand over one more than that; those that do not are corrected here. Gemma 3 has its own mask.
    """
    if causal or sliding_window is None or sliding_window != getattr(config, "sliding_window", None):
        return sliding_window
    return sliding_window + (getattr(config, "use_bidirectional_attention", None) is not True)


def masked_window(module: nn.Module) -> int | None:
    """Return the sliding window of a causal layer whose model says so in the mask alone; None without such a one."""
    config: Any = getattr(module, "config", None)
    width, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    kind: Any = type(module)
    if not width or not _leaves_window_to_mask(kind):
        return None
    return width if kinds is None or kinds[module.layer_idx] == "sliding_attention" else None


@functools.cache
def _leaves_window_to_mask(kind: Any) -> bool:
    code = inspect.unwrap(kind.forward).__code__
    handed_over = any("sliding_window" in names for names in code.co_consts if isinstance(names, tuple))
    return not handed_over and hasattr(sys.modules[kind.__module__], "create_sliding_window_causal_mask")


class Masks(NamedTuple):
    """What one attention call is masked by: pads [B, Nk], true for real keys, and pairs [B or 1, H or 1, Nq, Nk]."""

    keys: Tensor | None = None
    pairs: Tensor | None = None


def masks_of(
    mask: Tensor | None, query: Tensor, key: Tensor, causal: bool, cached: bool, mechanism: Mechanism | None
) -> Masks:
    """Return what a mask that an attention function is given says, for a mechanism or, without one, for softmax.

    query [B, H, Nq, D], key [B, Hkv, Nk, D]. cached: whether the mask may have columns for keys that are not at hand.
    """
    if mask is None:
        return Masks()
    (batch, heads, num_queries, _), num_keys = query.shape, key.shape[2]
    shape, unmasked, softmax = tuple(mask.shape), hasattr(mask, UNMASKED), is_softmax(mechanism)
    window = None if softmax else getattr(_made(mask), WINDOW, None)
    if window is not None and window[0] == causal:
        columns = None if window[1] is None else window[1].to(mask.device)
        return masks_of(columns, query, key, causal, cached, mechanism)
    if mask.dim() == 4 and not softmax and _same_for_all(mask, num_queries == 1, causal):
        mask = mask[:, 0, 0]  # what some models add to the scores of all queries alike
        mask = mask if mask.dtype == torch.bool else mask >= 0
        unmasked = num_queries > 1 and is_known(mask) and bool(mask.all())
    if mask.dim() not in (2, 4):
        raise UnsupportedModeError(
            f"attention_mask has {mask.dim()} dimensions {shape}; it must be a key mask [batch, length] or, for layers"
            " that keep softmax, a mask of pairs [batch, 1, queries, keys]"
        )
    fits = mask.shape[0] in (1, batch) and (mask.shape[-1] == num_keys or (cached and mask.shape[-1] > num_keys))
    if mask.dim() == 4:
        fits = fits and mask.shape[1] in (1, heads) and mask.shape[2] in (1, num_queries)
    if not (fits or is_recorded()):
        raise UnsupportedModeError(
            f"attention_mask is {shape}, but the attention is of a batch of {batch} with {num_queries} queries and"
            f" {num_keys} keys; give it as many rows and columns"
        )
    if mask.dim() == 4:
        if mechanism is not None and not softmax:
            _refuse_pairs(mask, mechanism)
        return Masks(pairs=mask[..., :num_keys])
    return Masks() if unmasked else Masks(keys=once(_key_mask, mask, num_keys, batch))


def _key_mask(mask: Tensor, num_keys: int, batch: int) -> Tensor:
    return mask[:, -num_keys:].bool().expand(batch, -1)


def is_softmax(mechanism: Mechanism | None) -> bool:
    """Whether a layer keeps softmax: its mechanism is that, or None where it was left out."""
    return mechanism is None or isinstance(mechanism, SoftmaxMechanism)


def _refuse_pairs(mask: Tensor, mechanism: Mechanism) -> NoReturn:
    if (rule := getattr(_made(mask), RULE, None)) is not None:
        raise UnsupportedModeError(
            f"the model masks pairs by {rule}, which mechanism {mechanism.config.mechanism!r} of layer"
            f" {mechanism.layer.index} cannot keep; for such inputs patch the model with 'softmax' in that layer, or"
            " leave the rule out"
        )
    raise UnsupportedModeError(
        f"attention_mask, given or the model's own, has 4 dimensions {tuple(mask.shape)}; a patched model takes"
        " [batch, length] (packed documents: position_ids that restart at 0); layers that keep softmax take pairs, too"
    )


# -- packed rows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PositionArgument:
    """How the forward of a model takes `position_ids`: their place among its arguments; whether it takes any others.

    place: None if it does not take them.
    """

    place: int | None
    takes_others: bool

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> PositionArgument:
        """Read it from the signature of a bound forward."""
        parameters = inspect.signature(forward).parameters
        place = list(parameters).index("position_ids") if "position_ids" in parameters else None
        return cls(place, any(p.kind is p.VAR_KEYWORD for p in parameters.values()))

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the positions that a forward is called with."""
        if self.place is not None and self.place < len(args):
            return args[self.place]
        return kwargs.get("position_ids")

    def handed_on(self, kwargs: dict[str, Any], positions: Tensor | None) -> dict[str, Any]:
        """Return `kwargs` with the model's own positions for its layers, and none of a model around it."""
        others = {name: x for name, x in kwargs.items() if name != POSITIONS}
        return others if positions is None or not self.takes_others else {**others, POSITIONS: positions}


def sequence_ids(
    position_ids: Tensor | None, cu_seq_lens: Tensor | None, key_padding_mask: Tensor | None, num_queries: int,
    num_keys: int,
) -> Tensor | None:  # fmt: skip
    """Number packed sequences [B, Nk] by the restarts of position_ids, or by FlashAttention's cumulative lengths.

    One begins where positions fall, or stay at the row's least; not in rows where others stay, or none rises.
    """
    if num_queries == 1 or num_queries != num_keys:
        return None
    if cu_seq_lens is not None:
        steps = torch.arange(num_queries, device=cu_seq_lens.device)
        return torch.searchsorted(cu_seq_lens[1:].to(steps.dtype), steps, right=True)[None]
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != num_queries or counts_positions():
        return None
    real, before, kept = position_ids, position_ids[:, :-1], True
    if key_padding_mask is not None:
        # the positions of padding mean nothing, and what stands before the first real token is no sequence
        position_ids, mask = torch.broadcast_tensors(position_ids, key_padding_mask)
        last = torch.arange(num_keys, device=mask.device).where(mask, -1).cummax(1).values[:, :-1]
        before, kept = position_ids.gather(1, last.clamp_min(0)), mask[:, 1:] & (last >= 0)
        real = position_ids.masked_fill(~mask, torch.iinfo(position_ids.dtype).max)
    step = position_ids[:, 1:] - before
    fall, stay, rise = (step < 0) & kept, (step == 0) & kept, (step > 0) & kept
    first = position_ids[:, 1:] == real.amin(1, keepdim=True)
    restart = (fall | stay & first & ~(stay & ~first).any(1, keepdim=True)) & rise.any(1, keepdim=True)
    if is_known(restart) and not bool(restart.any()):
        return None
    return torch.nn.functional.pad(restart.cumsum(1), (1, 0))
