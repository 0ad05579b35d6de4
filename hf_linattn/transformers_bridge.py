"""The file that knows how transformers runs attention: how it is called, what it is given, what it caches.

Seams used, each an official extension point: `AttentionInterface` and `AttentionMaskInterface` (one function each
under the name `hf_linattn`) and forward pre-hooks (the cache layer). Which modules are attention is known to
`attention_modules.py`, how models turn rotary heads to `positions/rope.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from . import pinning
from .attention_call import (
    MECHANISM,
    AttentionCall,
    begin_call,
    current_call,
    end_call,
    interceptor_of,
    is_replica,
    looks_back,
    mechanism_of,
    order_option,
    scaled,
)
from .attention_modules import owners
from .cache import EncoderStateLayer, StateLayer
from .cache_layers import (
    find_layer,
    has_begun,
    is_due,
    is_static_step,
    keeps_states,
    require_fitting,
    require_same_past,
    seen_columns,
)
from .errors import PatchError, UnsupportedModeError, UnsupportedModelError
from .frozen_mechanisms import warn_of_frozen
from .masks import (
    POSITIONS,
    MaskSizes,
    PositionArgument,
    given_input,
    handed_on,
    is_softmax,
    key_columns,
    mask_of_rule,
    masked_window,
    masks_of,
    require_batch,
    require_no_pairs,
    sequence_ids,
    window_of,
)
from .mechanisms import Mechanism
from .open_forwards import OpenForwards, require_unswitched
from .ops.common.exact_softmax import softmax_attention
from .ops.common.tracing import begin_forward, end_forward, once
from .pinning import CHOICE, IMPLEMENTATION, refuse_paging, require_left_out
from .positions.tables import check_length, position_tables
from .tensor_parallel import heads_apart, refuse_other_heads

RECORD = "_hf_linattn_layers"  # the attribute of a transformers model that holds its PatchedModel


# -- selecting our attention ------------------------------------------------------------------------------------------


def get_implementation(config: PreTrainedConfig) -> str:
    """Return the name of the attention function this config selects."""
    return config._attn_implementation


def set_implementation(config: PreTrainedConfig, name: str) -> None:
    """Select an attention function for one config, without touching those nested in it."""
    vars(config)[CHOICE] = name  # a pinned config refuses this to everybody else


# -- hooks ------------------------------------------------------------------------------------------------------------


@dataclass
class PatchedModel:
    """What the hooks of one transformers model need to know; kept on it as the attribute `_hf_linattn_layers`."""

    attention: dict[str, nn.Module]
    # path of a learned position table -> the first position it serves and the one after the last
    position_tables: dict[str, tuple[int, int]]
    positions: PositionArgument
    eager: bool  # whether the attention that it had obeys masks that mask nothing, too, which others leave out
    verified: bool = False
    warned: bool = False  # of mechanisms that are not trained, or found that there is nothing to warn of
    joined: tuple[Mechanism, ...] = ()
    open: OpenForwards = field(default_factory=OpenForwards)

    @classmethod
    def of(cls, model: PreTrainedModel, attention: dict[str, nn.Module]) -> PatchedModel:
        """Collect the facts of `model`, the innermost transformers model that holds these attention modules."""
        mechanisms, own = tuple(map(mechanism_of, attention.values())), get_implementation(model.config)
        eager = own == "eager" or (own == IMPLEMENTATION and not model._supports_sdpa)
        return cls(attention, position_tables(model), PositionArgument.of(model.forward), eager, joined=mechanisms)

    @property
    def order(self) -> bool | None:
        """Whether the layers are causal, None if they differ, or if masks that mask nothing do not count."""
        if not self.eager:
            return None
        orders = {mechanism.layer.causal for mechanism in self.joined if not mechanism.layer.cross}
        return orders.pop() if len(orders) == 1 else None

    @property
    def active(self) -> bool:
        """Whether the model runs our attention now and not, for a while, its own."""
        return any(get_implementation(module.config) == IMPLEMENTATION for module in self.attention.values())

    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Return the mechanisms of all layers; where PEFT put copies in their places, these join each other anew."""
        found = tuple(mechanism_of(module) for module in self.attention.values())
        if any(now is not before for now, before in zip(found, self.joined, strict=True)):
            for i, mechanism in enumerate(found):
                mechanism.join(found[:i])
        self.joined = found
        return found


def base_models(model: PreTrainedModel, modules: dict[str, nn.Module]) -> dict[PreTrainedModel, PatchedModel]:
    """Return what the hooks of these models need to know; each of them is called once per forward."""
    return {owner: PatchedModel.of(owner, inside) for owner, inside in owners(model, modules).items()}


def _given_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    """Return the cache among the arguments of a forward, by name or by position; None if there is none."""
    return next((x for x in (*kwargs.values(), *args) if isinstance(x, Cache)), None)


def attention_pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hand this layer's cache to the attention function, a state layer in its place if a state is what it keeps."""
    call = begin_call(module)
    mechanism: Mechanism = mechanism_of(module)
    if get_implementation(module.config) != IMPLEMENTATION:
        return
    call.keep_input(mechanism, args, kwargs)
    if (cache := _given_cache(args, kwargs)) is not None:
        call.layer, call.read = find_layer(module, mechanism, cache)


def attention_post_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forget the call, however it ended."""
    end_call(module)


def model_pre_hook(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Refuse what no patched model can answer, before anything ran; return the arguments with positions for layers."""
    patched: PatchedModel = getattr(model, RECORD)
    positions = patched.positions.given(args, kwargs)
    begin_forward(positions is not None, patched.order)
    cache = _given_cache(args, kwargs)
    begun = cache is not None and has_begun(cache)
    if not (begun or torch.compiler.is_compiling() or is_replica(model)):
        require_in_place(model)
    if patched.active:
        _begin(model, patched, args, kwargs, cache, begun)
    return args, patched.positions.handed_on(kwargs, positions if patched.active else None)


def require_in_place(model: PreTrainedModel) -> None:
    """Raise `PatchError` unless each layer that was patched is there, once, beside copies that PEFT trains."""
    known: list[Any] = []
    found: dict[int, Any] = {}
    inside: list[nn.Module | None] = [model]
    while inside:  # four times as fast as `named_modules`
        if (module := inside.pop()) is None:
            continue
        known += vars(module)[RECORD].joined if RECORD in vars(module) else ()
        if MECHANISM in module._modules:
            found[id(module)] = mechanism_of(module)
        else:
            inside += [x for name, x in module._modules.items() if name != "modules_to_save"]
    first, second = (sorted((x.layer.cross, x.layer.index) for x in several) for several in (known, found.values()))
    if first != second:
        raise PatchError(f"the attention layers of {type(model).__name__} {pinning.MOVED}")


def _begin(
    model: PreTrainedModel, patched: PatchedModel, args: tuple[Any, ...], kwargs: dict[str, Any], cache: Cache | None,
    begun: bool,
) -> None:  # fmt: skip
    """Refuse what no patched model can answer; then let mechanisms do scheduled changes."""
    if kwargs.get("cache") is not None:  # what continuous batching calls its pages
        refuse_paging()
    require_batch(args, kwargs)
    if kwargs.get("output_attentions") or getattr(model.config, "output_attentions", False):
        raise UnsupportedModeError(
            "output_attentions=True asks for N x N matrices, which a patched model never builds; use"
            " hf_linattn.original_attention(model) for the original's, or a mechanism's attention_matrix(...)"
        )
    if patched.position_tables:
        check_length(model, patched.position_tables, args, kwargs, cache)
    if cache is not None:
        compiling = torch.compiler.is_compiling()
        if not (compiling and begun):  # the compiled steps of `generate`, whose prompt was checked, are kept short
            modules = patched.attention.values()
            require_fitting(cache, modules, map(mechanism_of, modules))
            require_no_pairs(args, kwargs, map(mechanism_of, modules))
            if begun and (given := given_input(args, kwargs)) is not None:
                require_same_past(cache, kwargs.get("attention_mask"), given.shape[1])
        if compiling or begun:
            return  # a forward that continues another one changes nothing
    if model.training and not patched.warned:
        patched.warned = warn_of_frozen(model, patched.mechanisms())
    for mechanism in patched.mechanisms():
        if mechanism.scheduled and not patched.open:
            mechanism.before_forward()


def model_end_hook(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forget what the forward found out, however it ended; it stays open until its backward pass."""
    end_forward()
    patched: PatchedModel = getattr(model, RECORD)
    if model.training and any(mechanism.scheduled for mechanism in patched.joined):
        patched.open.begin(output)
    if model.training:
        require_unswitched(model, output, lambda: patched.active)


def model_post_hook(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """After an evaluation forward, until every mechanism has run, check that those due were, but for softmax."""
    patched: PatchedModel = getattr(model, RECORD)
    if patched.verified or model.training or torch.compiler.is_compiling() or not patched.active or is_replica(model):
        return
    found = {path: (module, mechanism_of(module)) for path, module in patched.attention.items()}
    silent = {path: pair for path, pair in found.items() if not (pair[1].calls or is_softmax(pair[1]))}
    if idle := [path for path, pair in silent.items() if is_due(*pair, kwargs)]:
        raise UnsupportedModelError(
            f"{type(model).__name__}: {', '.join(idle)} never called the mechanism attached to it, so the model only"
            " looks patched; call unpatch_model(model), or leave these layers out of layers= or cross_attention="
        )
    patched.verified = not silent


# -- the attention and mask functions ---------------------------------------------------------------------------------


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, attention_mask: Tensor | None = None,
    device: torch.device | None = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Pass on the 2-D key mask [B, at most kv_length] and build no matrix; None if nothing is masked.

    Only a rule over pairs that no key mask can say becomes a matrix (`masks`).
    """
    sizes = MaskSizes(batch_size, q_length, kv_length, q_offset, kwargs.get("kv_offset", 0))
    options = {**kwargs, "device": device}
    if (pairs := mask_of_rule(attention_mask, sizes, options)) is not None:
        return pairs
    if attention_mask is None:
        return None
    # a rule of which no pairs were made comes to causal attention
    causal = kwargs.get("use_vmap", False) or "allow_is_bidirectional_skip" not in kwargs
    return handed_on(key_columns(attention_mask, sizes), sizes, causal)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of patched models: [B, H, Nq, D] in, [B, Nq, H, Dv] out, as the interface asks.

    Keys and values have Hkv heads. A layer that was left out (cross-attention, unless it was asked for) gets exact
    attention.
    s_aux: the learned sinks [H] in the denominator, as gpt-oss and others have them.
    """
    mechanism: Mechanism | None = mechanism_of(module)
    is_causal = looks_back(module, mechanism, query.shape[2], attention_mask, is_causal)
    layer = _cache_layer(module, mechanism)
    if sliding_window is None and is_causal:
        sliding_window = masked_window(module)
    sliding_window = window_of(module.config, sliding_window, is_causal)
    if layer is not None and is_static_step(layer, mechanism, query, attention_mask):
        attention_mask, sliding_window = seen_columns(attention_mask, layer, sliding_window), None
    else:
        key, value, attention_mask = _read_so_far(module, layer, query.shape[2], key, value, attention_mask)
    masks = masks_of(attention_mask, query, key, is_causal, layer is not None, mechanism)
    exact: dict[str, Any] = {"sliding_window": sliding_window, "softcap": softcap, "dropout": dropout, "sink": s_aux}
    exact |= {} if masks.pairs is None else {"pair_mask": masks.pairs}
    if mechanism is None:
        require_left_out(module)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = softmax_attention(
            query, key, value, scaling=scaling, causal=is_causal, key_padding_mask=masks.keys, **exact
        )
        return output.transpose(1, 2).contiguous(), None
    if query.shape[1] != mechanism.layer.num_heads and not heads_apart(mechanism):
        refuse_other_heads(mechanism, query.shape[1])
    if mechanism.layer.cross:
        return _attend_across(module, mechanism, layer, query, key, value, masks.keys, scaling, exact), None
    exact |= {} if masks.pairs is not None else order_option(mechanism, is_causal, attention_mask)
    positions = kwargs.get(POSITIONS) if position_ids is None or position_ids.dim() != 2 else position_ids
    ids = once(sequence_ids, positions, cu_seq_lens_q, masks.keys, query.shape[2], key.shape[2])
    hidden = running.hidden_states if (running := current_call(module)) else None
    call = AttentionCall(scaled(query, scaling, mechanism), key, value, masks.keys, ids, exact, hidden_states=hidden)
    if (interceptor := interceptor_of(mechanism)) is not None:
        mechanism.record_call()
        output = interceptor(call)
    elif layer is None or not keeps_states(mechanism):  # without a cache, or it holds the keys
        output = call.run(mechanism)
    else:
        output, state = mechanism(*call[:5], layer.state, **call.options(mechanism))
        layer.hold(state, mechanism, masks.keys)
    return output.transpose(1, 2).contiguous(), None


def _read_so_far(
    module: nn.Module, layer: Any, count: int, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys, values and mask of the tokens read, the `count` new ones too: a static cache has room for more."""
    if isinstance(layer, StateLayer):
        return key, value, layer.own_mask(mask, key.shape[2])
    if layer is None:
        return key, value, mask
    mechanism: Mechanism | None = mechanism_of(module)
    across = mechanism is not None and mechanism.layer.cross  # no new token is among its keys
    before = running.read if (running := current_call(module)) and not across else None
    seen = before + count if isinstance(before, int) else int(layer.get_seq_length())
    longer = mask is not None and mask.dim() == 2 and mask.shape[1] > seen
    return key[:, :, :seen], value[:, :, :seen], mask[:, :seen] if longer and mask is not None else mask


def _attend_across(
    module: nn.Module,
    mechanism: Mechanism,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    scaling: float | None,
    exact: dict[str, Any],
) -> Tensor:
    """Attend to an encoder's tokens [B, Hkv, Nk, D], or to what the cache layer keeps of them: [B, Nq, H, Dv]."""
    first = running.first_query(query.shape[2]) if (running := current_call(module)) else None
    query = scaled(query, scaling, mechanism)
    call = AttentionCall(query, key, value, key_padding_mask, None, exact, cross=True, first_query=first)
    if (interceptor := interceptor_of(mechanism)) is not None:
        mechanism.record_call()
        output = interceptor(call)
    elif not isinstance(layer, EncoderStateLayer):
        output = call.run(mechanism)
    else:
        output, state = mechanism(*call[:5], layer.state, **call.options(mechanism))
        layer.keep(state, mechanism)
    return output.transpose(1, 2).contiguous()


def _cache_layer(module: nn.Module, mechanism: Mechanism | None) -> Any:
    """Return the cache layer of this call, None without a cache; refuse what would decode from a wrong state."""
    call = current_call(module)
    if call is None or mechanism is None:
        return None
    layer = call.layer
    if mechanism.layer.cross:
        return layer  # what it has of the tokens came in one call and is only read
    if isinstance(layer, StateLayer) and layer.expected:
        raise UnsupportedModeError(
            f"{type(module).__name__} keeps the keys of layer {mechanism.layer.index} in another place of the cache"
            " than its own, where no decoding state can be; pass use_cache=False"
        )
    if call.consumed:
        raise UnsupportedModeError(
            f"{type(module).__name__} attends more than once in a forward, and layer {mechanism.layer.index} keeps one"
            " decoding state; pass use_cache=False"
        )
    call.consumed = layer is not None and keeps_states(mechanism)
    return layer


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, attention_mask)
