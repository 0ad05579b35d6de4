"""Which layer of a cache an attention module has, what it must be able to hold, and what is seen of a static one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
    StaticLayer,
)

from .architecture import lender_of
from .cache import EncoderStateLayer, RecurrentStateLayer, StateLayer, StaticStateLayer
from .errors import UnsupportedModeError
from .masks import is_softmax
from .mechanisms import MECHANISMS, Mechanism
from .mechanisms.composite import CompositeMechanism
from .ops.common.tracing import is_known, is_recorded

# what a decoder attends across to, where it does so in some forwards alone
ENCODER_INPUTS = ("encoder_hidden_states", "cross_attention_states", "pixel_values")


def keeps_states(mechanism: Mechanism) -> bool:
    """Whether the cache holds states for a mechanism; softmax and bidirectional layers need the keys themselves."""
    return mechanism.layer.mode != "bidirectional" and not is_softmax(mechanism)


def find_layer(module: nn.Module, mechanism: Mechanism, given: Cache) -> tuple[Any, Any]:
    """Return a module's layer of the cache that it is given, a state layer if a state is kept, and what was read.

    The layer is None without one. What was read is its length, None where the new tokens are already in it; across, it
    is the length of the decoder's own layer, whose attention runs first.
    """
    across = mechanism.layer.cross
    decoded = _decoded(given) if across else None
    if (cache := _side_of(given, across)) is None:
        return None, decoded
    if (lender := lender_of(module)) is not None:
        return _shared_layer(module, mechanism, cache, lender), None
    index = place_in_cache(module, mechanism)
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    if keeps_states(mechanism):
        if not isinstance(cache.layers[index], StateLayer):
            kind = EncoderStateLayer if across else StateLayer
            cache.layers[index] = _adopted(cache.layers[index], kind)
        cache.layers[index].expected = True
        _leave_inference_mode(cache.layers[index])
    return cache.layers[index], decoded if across else cache.layers[index].get_seq_length()


def _adopted(layer: CacheLayerMixin, kind: type[StateLayer]) -> StateLayer:
    """Return a state layer that continues what `layer` holds."""
    if isinstance(layer, LinearAttentionLayer):
        adopted: StateLayer = RecurrentStateLayer.beside(layer)
    elif isinstance(layer, StaticLayer) and kind is StateLayer:
        adopted = StaticStateLayer(layer.max_cache_len, layer.is_sliding)
    else:
        adopted = kind()
    seen = int(layer.get_seq_length())
    if seen:
        keys, values = layer.keys, layer.values
        whole = isinstance(keys, Tensor) and keys.dim() == 4 and (layer.is_sliding or keys.shape[-2] >= seen)
        if not whole:
            raise UnsupportedModeError(
                f"past_key_values holds a {type(layer).__name__}, whose keys cannot be read;"
                " start with a new cache or an unquantised one"
            )
        adopted.pending = (keys[:, :, :seen], values[:, :, :seen])  # a static layer is longer than what it holds
        adopted.seq_length, adopted.is_initialized = seen, True
    elif isinstance(layer, DynamicLayer) and layer.is_initialized:  # as the parts of a cache with states are
        raise UnsupportedModeError(
            "past_key_values holds keys of 0 tokens, as a cache does that was made anew from the parts of another,"
            " which are no decoding states; give the cache that the model returned, or a new one"
        )
    return adopted


def _leave_inference_mode(layer: StateLayer) -> None:
    """Copy what a layer keeps from `torch.inference_mode()` where gradients count now: autograd saves none of it."""
    if torch.is_grad_enabled() and not is_recorded():
        kept = (*(layer.state or ()), *(layer.pending or ()))
        if any(x.is_inference() for x in kept):
            layer._map(torch.clone)


def place_in_cache(module: nn.Module, mechanism: Mechanism) -> Any:
    """Return which layer of a cache an attention module has; None of an encoder's.

    Zamba's say none, or -1, and are told in each call.
    """
    said = getattr(module, "layer_idx", None)
    missing = (said is None or said < 0) and mechanism.layer.causal
    return mechanism.layer.depth if missing else said


def _decoded(given: Cache) -> Any:
    """Return how many tokens of the decoder its own attention has read; None if it keeps none.

    Its first layer says so: where a cache has but one side, as of Mllama, layers across keep an image's tokens in it.
    """
    own: Any = _side_of(given, False)
    read = own.get_seq_length()
    return read if isinstance(read, Tensor) else read or None


def _shared_layer(module: nn.Module, mechanism: Mechanism, cache: Cache, lender: int) -> Any:
    """Return the layer of a module that attends to the keys of layer `lender`: that one, or a state of its own."""
    lent, index = cache.layers[lender], cast(int, module.layer_idx)
    _require_alike(index, keeps_states(mechanism), lender, isinstance(lent, StateLayer))
    if not isinstance(lent, StateLayer):
        return lent
    cache.layers += [lent.like() for _ in range(len(cache.layers), index + 1)]  # in older transformers they end before
    if not isinstance(cache.layers[index], StateLayer):
        cache.layers[index] = lent.like()
    cache.layers[index].handed = lent.handed
    return cache.layers[index]


def _require_alike(index: int, state: bool, lender: int, lent_state: bool) -> None:
    """Refuse layers that share keys where one of them keeps a state and the other one needs the keys."""
    if state != lent_state:
        stateful, other = (index, lender) if state else (lender, index)
        raise UnsupportedModeError(
            f"layer {index} attends to the keys of layer {lender}, and layer {stateful} keeps a decoding state, beside"
            f" which layer {other} has no keys; patch both with 'softmax' or neither, or pass use_cache=False"
        )


def _side_of(cache: Cache, across: bool) -> Cache | None:
    """Return the cache of self-attention, or if `across` of cross-attention; None where the decoder alone has one."""
    if isinstance(cache, EncoderDecoderCache):
        return cache.cross_attention_cache if across else cache.self_attention_cache
    return None if across else cache  # the encoder's tokens come with every call


def has_begun(cache: Cache) -> bool:
    """Whether a cache holds a decoding state; keys alone, which PEFT's prefix tuning gives every forward, are none."""
    sides = (_side_of(cache, across) for across in (False, True))
    layers = (layer for side in sides for layer in getattr(side, "layers", ()))
    return any(isinstance(layer, StateLayer) and layer.state is not None for layer in layers)


def require_same_past(cache: Cache, mask: Any, count: int) -> None:
    """Refuse a mask that says of the tokens which a cache's states sum up that others of them are pads.

    One look at them for all layers. On other devices than a CPU each look waits: a mask of one new token has none.

    mask: what a model is given as `attention_mask`. count: how many new tokens come.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not is_known(mask):
        return
    layers = (x for x in getattr(_side_of(cache, False), "layers", ()) if isinstance(x, StateLayer))
    real, length = next((x.noted for x in layers if x.noted is not None and x.noted[1] == x.seq_length), (None, None))
    if length is None or mask.shape[1] != length + count or (count == 1 and mask.device.type != "cpu"):
        return
    given = mask[:, :length].bool().sum(1)
    differs = (given != (length if real is None else real.to(given.device))).nonzero()
    if len(differs):
        row = int(differs[0])
        summed = length if real is None else int(real[row])
        raise UnsupportedModeError(
            f"attention_mask has {int(given[row])} real tokens among the first {length} of row {row}, and the decoding"
            f" states in past_key_values sum up {summed} of them; a state cannot take back what it read, nor take in"
            " later what it left out. Give the mask that these tokens were read with, or start with a new cache and"
            " the whole input"
        )


def require_fitting(cache: Cache, modules: Iterable[nn.Module], mechanisms: Iterable[Mechanism]) -> None:
    """Refuse a cache whose states others made, or that cannot hold them, before any of its layers is read or written.

    Raises:
        UnsupportedModeError: another mechanism's states, a static cache for a mechanism without `static_steps`, a
            state in one alone of two layers that share keys, or layers that have not read as many tokens.
    """
    pairs = list(zip(modules, mechanisms, strict=True))
    states = {place_in_cache(module, mechanism) for module, mechanism in pairs if keeps_states(mechanism)}
    read: dict[int, int] = {}  # number of tokens -> the first layer that has read it
    for module, mechanism in pairs:
        layers: Any = getattr(_side_of(cache, mechanism.layer.cross), "layers", ())
        index = place_in_cache(module, mechanism)
        if not runs(module, index):
            continue
        if (lender := lender_of(module)) is not None:
            _require_alike(index, keeps_states(mechanism), lender, lender in states)
        if index is None:
            continue
        if index >= len(layers):
            if mechanism.layer.causal and lender is None:
                read.setdefault(0, index)  # a cache made without a config has no layer yet that nothing was read in
            continue
        if isinstance(layers[index], StateLayer):
            layers[index].require_own(mechanism)
        elif isinstance(layers[index], StaticLayer) and mechanism.layer.causal and keeps_states(mechanism):
            _require_static(mechanism, layers[index].is_sliding)
        if mechanism.layer.causal and lender is None and not isinstance(layers[index], StaticLayer):
            length = layers[index].get_seq_length()
            if isinstance(length, int):  # the value of a tensor would have to be waited for
                read.setdefault(length, index)
    _require_even(read)


def runs(module: nn.Module, index: int | None) -> bool:
    """Whether a layer is among those that its config has now: assisted generation with an early exit takes fewer."""
    count = None if _has_encoder(module) else getattr(getattr(module, "config", None), "num_hidden_layers", None)
    return index is None or not isinstance(count, int) or index < count


def is_due(module: nn.Module, mechanism: Mechanism, given: Mapping[str, Any]) -> bool:
    """Whether a forward that was given these arguments has to call a layer's mechanism.

    It need not in a layer that an early exit leaves out, nor across to an encoder of which nothing was given.
    """
    if mechanism.layer.cross and not _has_encoder(module):
        return any(given.get(name) is not None for name in ENCODER_INPUTS)
    return runs(module, place_in_cache(module, mechanism))


def _has_encoder(module: nn.Module) -> bool:
    """Whether a layer is of a model with an encoder and a decoder, whose layers run in every forward."""
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def _require_even(read: Mapping[int, int]) -> None:
    """Refuse a cache of which some layers forgot tokens and others could not."""
    if len(read) > 1:
        (length, index), (other, another), *_ = read.items()
        raise UnsupportedModeError(
            f"past_key_values has read {length} tokens in layer {index} and {other} in layer {another}, as where a"
            " crop or a forward ended on the way; start with a new cache"
        )


def _require_static(mechanism: Mechanism, sliding: bool) -> None:
    """Refuse a mechanism that a static layer cannot hold; one with a sliding window has room for that alone."""
    parts = mechanism.parts() if isinstance(mechanism, CompositeMechanism) else [mechanism]
    unable = next((x for x in parts if not _steps_in_place(x, sliding)), None)
    if unable is None:
        return
    room = ", and the cache has room for the layer's sliding window alone" if sliding else ""
    grows = f"keeps a state that grows{room}"
    reason = "looks at numbers of its state in every step" if unable.constant_state else grows
    able = sorted(name for name in MECHANISMS.names() if _steps_in_place(MECHANISMS.get(name), sliding))
    raise UnsupportedModeError(
        f"past_key_values is a static cache, as of generate(cache_implementation='static'), and mechanism"
        f" {unable.config.mechanism!r} of layer {mechanism.layer.index} {reason}; leave cache_implementation out, or"
        f" patch the layer with one of {', '.join(able)}"
    )


def _steps_in_place(mechanism: Mechanism | type[Mechanism], sliding: bool) -> bool:
    """Whether a static layer can hold the state of a mechanism, or of one of that type."""
    return mechanism.static_steps and (mechanism.constant_state or not sliding)


def is_static_step(layer: Any, mechanism: Mechanism | None, query: Tensor, mask: Tensor | None) -> bool:
    """Whether one query gets all keys that a static layer has room for, those to come too, as softmax can.

    Other mechanisms take the last key for that of the query.
    """
    in_places = isinstance(layer, StaticLayer) and not layer.is_sliding and is_softmax(mechanism)
    return in_places and query.shape[2] == 1 and (mask is None or mask.dim() == 2)


def seen_columns(mask: Tensor | None, layer: Any, window: int | None) -> Tensor:
    """Return which keys of a static layer the token sees that it has read last: [B or 1, M].

    mask: [B, N], true for real keys; None if all are. window: how many tokens it sees, its own too; None: all.
    """
    read, room = layer.get_seq_length(), layer.max_cache_len
    place = torch.arange(room, device=layer.keys.device)
    seen = (place < read)[None]
    if window is not None:
        seen = seen & (place >= read - window)
    if mask is None:
        return seen
    return seen & F.pad(mask[:, :room].bool(), (0, max(room - mask.shape[1], 0)), value=True)
