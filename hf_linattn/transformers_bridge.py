"""The file that knows transformers' internals: where attention is, how it is called, what it is given.

Seams used, each an official extension point: `AttentionInterface` and `AttentionMaskInterface` (one function each
under the name `hf_linattn`), `_can_record_outputs` (which modules are attention), forward pre-hooks (the cache layer).
How models turn rotary heads is known to `rotation.py` alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.configuration_utils import PreTrainedConfig

from .cache import StateLayer
from .errors import UnsupportedModeError, UnsupportedModelError
from .mechanisms import AttentionLayer, Mechanism
from .mechanisms.softmax import SoftmaxMechanism
from .observation import AttentionCall
from .ops.softmax import softmax_attention
from .rotation import Rotation, find_rotation

IMPLEMENTATION = "hf_linattn"  # the name of our attention and mask functions
MECHANISM = "hf_linattn"  # the attribute of an attention module that holds its mechanism
RECORD = "_hf_linattn_layers"  # the attribute of a transformers model that holds its PatchedModel

# where attention modules and configs keep their sizes, most specific first
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIM = ("head_dim", "attention_head_size", "dim_head", "d_head")
POSITION_TABLES = ("wpe", "position_embeddings", "position_embedding", "embed_positions")


# -- what a model is made of ------------------------------------------------------------------------------------------


def root_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside any wrapper (PEFT, torch.compile, DDP ...)."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise UnsupportedModelError(
        f"model must be a transformers PreTrainedModel or a wrapper around one, got {type(model).__name__}"
    )


def self_attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return path -> self-attention module in order, or raise `UnsupportedModelError` saying what is missing."""
    declared = set(_declared(model, "attentions"))
    crossing = set(_declared(model, "cross_attentions"))
    found = {
        path: module
        for path, module in model.named_modules()
        if _is_declared(path, module, declared) and not _is_cross_attention(path, module, crossing)
    }
    family = type(model).__name__
    if not found:
        raise UnsupportedModelError(
            f"{family} declares no attention layers (_can_record_outputs['attentions']): either it has none, or its"
            " code predates transformers' attention interface; use a model that goes through that interface"
        )
    for path, module in found.items():
        code = inspect.unwrap(type(module).forward).__code__
        if "ALL_ATTENTION_FUNCTIONS" not in code.co_names or not isinstance(
            getattr(module, "config", None), PreTrainedConfig
        ):
            raise UnsupportedModelError(
                f"{family}: {path} ({type(module).__name__}) computes its attention itself and not through"
                f" transformers' attention interface{_position_bias_note(module)}, so it cannot be replaced"
            )
        if "position_bias" in code.co_varnames:
            raise UnsupportedModelError(
                f"{family}: {path} ({type(module).__name__}) adds a position bias to every score, which has no"
                " subquadratic form here; use a model with rotary or absolute positions"
            )
    return found


def _declared(model: PreTrainedModel, output: str) -> Iterator[tuple[Any, str | None]]:
    """Yield (class, part of the path) of the modules that any part of the model names as the source of `output`."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            entries = (getattr(part, "_can_record_outputs", None) or {}).get(output, ())
            for entry in entries if isinstance(entries, (list, tuple)) else (entries,):
                yield getattr(entry, "target_class", entry), getattr(entry, "layer_name", None)


def _is_declared(path: str, module: nn.Module, declared: set[tuple[type[nn.Module], str | None]]) -> bool:
    return any(isinstance(module, kind) and (name is None or name in path) for kind, name in declared)


def _is_cross_attention(path: str, module: nn.Module, crossing: set[tuple[type[nn.Module], str | None]]) -> bool:
    named = any(isinstance(module, kind) and name is not None and name in path for kind, name in crossing)
    return named or bool(getattr(module, "is_cross_attention", False)) or "crossattention" in path


def _position_bias_note(module: nn.Module) -> str:
    biased = any("bias" in name and isinstance(m, nn.Embedding) for name, m in module.named_modules())
    return " (it adds a learned position bias to every score)" if biased else ""


def describe_layers(model: PreTrainedModel, attention: dict[str, nn.Module]) -> dict[str, AttentionLayer]:
    """Describe all attention modules of a model, with their rotary positions."""
    rotations = {path: find_rotation(model, path, module) for path, module in attention.items()}
    return {path: describe_layer(i, attention[path], rotations[path]) for i, path in enumerate(attention)}


def describe_layer(index: int, module: nn.Module, rotation: Rotation | None = None) -> AttentionLayer:
    """Read a layer's sizes off its module, else off its config."""
    config: Any = module.config
    num_heads = _first(module, config, NUM_HEADS)
    head_dim = _first(module, config, HEAD_DIM) or config.hidden_size // num_heads
    groups = getattr(module, "num_key_value_groups", None)
    shared_heads = num_heads // groups if groups else _first(module, config, ("num_key_value_heads",))
    scaling = getattr(module, "scaling", None)
    parameter = next(module.parameters())
    hook = getattr(module, "_hf_hook", None)  # accelerate's, when the weights are kept elsewhere between calls
    device = parameter.device if parameter.device.type != "meta" else getattr(hook, "execution_device", None)
    return AttentionLayer(
        index=index,
        num_heads=num_heads,
        num_key_value_heads=shared_heads or num_heads,
        head_dim=head_dim,
        causal=bool(getattr(module, "is_causal", getattr(config, "is_decoder", False))),
        scaling=float(scaling) if isinstance(scaling, (int, float)) else head_dim**-0.5,
        device=torch.device(device if device is not None else "meta"),
        dtype=parameter.dtype,
        rotation=rotation,
    )


def _first(module: nn.Module, config: PreTrainedConfig, names: tuple[str, ...]) -> Any:
    for owner in (module, config):
        for name in names:
            if isinstance(value := getattr(owner, name, None), int):
                return value
    return None


def get_implementation(config: PreTrainedConfig) -> str:
    """Return the name of the attention function this config selects."""
    return config._attn_implementation


def own_config(model: nn.Module) -> None:
    """Give the model a config of its own: what is done to it must not reach another model made from the same one."""
    copies: dict[int, Any] = {}
    copy.deepcopy(root_model(model).config, copies)
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and id(config) in copies:
            module.config = copies[id(config)]


def set_implementation(config: PreTrainedConfig, name: str) -> None:
    """Select an attention function for one config, without touching those nested in it."""
    config._attn_implementation_internal = name


# -- hooks ------------------------------------------------------------------------------------------------------------


@dataclass
class PatchedModel:
    """What the hooks of one transformers model need to know; kept on it as the attribute `_hf_linattn_layers`."""

    attention: dict[str, nn.Module]
    # path of a learned position table -> the first position it serves and the one after the last
    position_tables: dict[str, tuple[int, int]]
    verified: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel, attention: dict[str, nn.Module]) -> PatchedModel:
        """Collect the facts of `model`, the innermost transformers model that holds these attention modules."""
        tables = {
            path: _served_positions(table)
            for path, table in model.named_modules()
            if path.rsplit(".", 1)[-1] in POSITION_TABLES and isinstance(table, nn.Embedding)
        }
        return cls(attention, tables)

    @property
    def active(self) -> bool:
        """Whether the model runs our attention now and not, for a while, its own."""
        return any(get_implementation(module.config) == IMPLEMENTATION for module in self.attention.values())


def _served_positions(table: nn.Embedding) -> tuple[int, int]:
    """RoBERTa's positions start behind its padding index; OPT's at 0, and its table adds an offset itself."""
    if (offset := getattr(table, "offset", None)) is not None:
        return 0, table.num_embeddings - offset
    return 0 if table.padding_idx is None else table.padding_idx + 1, table.num_embeddings


def base_models(model: PreTrainedModel, modules: dict[str, nn.Module]) -> dict[PreTrainedModel, PatchedModel]:
    """Return the innermost transformers models around the modules: each of them is called once per forward."""
    parts = {path: part for path, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    owned: dict[str, dict[str, nn.Module]] = {}
    for path, module in modules.items():
        owner = max((p for p in parts if p == "" or path.startswith(p + ".")), key=len)
        owned.setdefault(owner, {})[path] = module
    return {parts[owner]: PatchedModel.of(parts[owner], attention) for owner, attention in owned.items()}


def attention_pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hand the mechanism this layer's cache, and put a state layer in its place first unless it stays softmax."""
    mechanism: Mechanism = getattr(module, MECHANISM)
    mechanism.cache_layer = None
    if get_implementation(module.config) != IMPLEMENTATION:
        return
    cache = next((x for x in (*kwargs.values(), *args) if isinstance(x, Cache)), None)
    if cache is None:
        return
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    index: Any = module.layer_idx
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    if not isinstance(mechanism, SoftmaxMechanism):
        if not isinstance(cache.layers[index], StateLayer):
            cache.layers[index] = StateLayer.adopt(cache.layers[index])
        cache.layers[index].expected = True
    mechanism.cache_layer = cache.layers[index]


def model_pre_hook(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what no patched model can answer, before anything ran; then let mechanisms do scheduled changes."""
    patched: PatchedModel = getattr(model, RECORD)
    if not patched.active:
        return
    if kwargs.get("output_attentions") or getattr(model.config, "output_attentions", False):
        raise UnsupportedModeError(
            "output_attentions=True asks for N x N matrices, which a patched model never builds; use"
            " hf_linattn.original_attention(model) for the original's, or a mechanism's attention_matrix(...)"
        )
    if patched.position_tables:
        _check_length(model, patched.position_tables, args, kwargs)
    cache = kwargs.get("past_key_values")
    if isinstance(cache, Cache) and int(cache.get_seq_length()):
        return  # a forward that continues another one changes nothing
    for module in patched.attention.values():
        getattr(module, MECHANISM).before_forward()


def model_post_hook(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """After the first evaluation forward, check that every layer really called its mechanism."""
    patched: PatchedModel = getattr(model, RECORD)
    if patched.verified or model.training or torch.compiler.is_compiling() or not patched.active:
        return
    idle = [path for path, module in patched.attention.items() if not getattr(module, MECHANISM).calls]
    if idle:
        raise UnsupportedModelError(
            f"{type(model).__name__}: {', '.join(idle)} never called the mechanism attached to it, so the model only"
            " looks patched; call unpatch_model(model), or leave these layers out with layers=..."
        )
    patched.verified = True


def _check_length(
    model: PreTrainedModel, tables: dict[str, tuple[int, int]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Name the position table when an input does not fit in it: the look-up would only say 'index out of range'."""
    inputs = next((x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if x is not None), None)
    positions, cache = kwargs.get("position_ids"), kwargs.get("past_key_values")
    if not isinstance(inputs, Tensor) or torch.compiler.is_compiling():
        return
    for path, (first, end) in tables.items():
        if positions is not None:
            length = int(positions.max()) + 1 - first
        else:
            length = inputs.shape[1] + (int(cache.get_seq_length()) if isinstance(cache, Cache) else 0)
        if length > end - first:
            raise UnsupportedModeError(
                f"the input reaches position {length}, but {type(model).__name__}.{path} holds {end - first}; shorten"
                " the input or use a model with a longer table (attention is not the limit)"
            )


# -- the attention and mask functions ---------------------------------------------------------------------------------


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Pass on the 2-D key mask [B, at most kv_length] and build no matrix; None if nothing is masked."""
    if attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all())):
        return None
    return attention_mask[:, -kv_length:]


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of patched models: [B, H, Nq, D] in, [B, Nq, H, Dv] out, as the interface asks.

    Keys and values have Hkv heads. A layer without a mechanism (cross-attention) gets exact attention.
    """
    mechanism: Mechanism | None = getattr(module, MECHANISM, None)
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    layer = None if mechanism is None else mechanism.cache_layer
    if layer is not None and not isinstance(layer, StateLayer):
        key, value = (x[:, :, : int(layer.get_seq_length())] for x in (key, value))  # a static cache is longer
    num_queries, num_keys = query.shape[2], key.shape[2]
    key_padding_mask = _key_padding_mask(attention_mask, num_keys)
    exact: dict[str, Any] = {"sliding_window": sliding_window, "softcap": softcap, "dropout": dropout}
    if mechanism is None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = softmax_attention(
            query, key, value, scaling=scaling, causal=causal, key_padding_mask=key_padding_mask, **exact
        )
        return output.transpose(1, 2).contiguous(), None
    if causal != mechanism.layer.causal:
        raise UnsupportedModeError(
            f"is_causal={causal} was asked of layer {mechanism.layer.index}, which was patched with"
            f" is_causal={mechanism.layer.causal}; unpatch the model, change it, and patch it again"
        )
    if scaling is not None and scaling != mechanism.layer.scaling:
        query = query * (scaling / mechanism.layer.scaling)  # OPT scales its queries itself and passes 1
    sequence_ids = _sequence_ids(position_ids, cu_seq_lens_q, key_padding_mask, num_queries, num_keys)
    mechanism.cache_layer = None
    if isinstance(mechanism, SoftmaxMechanism):
        output, _ = mechanism(query, key, value, key_padding_mask, sequence_ids, **exact)
        return output.transpose(1, 2).contiguous(), None
    if mechanism.observer is not None:
        mechanism.count_call()
        call = AttentionCall(query, key, value, key_padding_mask, sequence_ids, exact)
        return mechanism.observer(call).transpose(1, 2).contiguous(), None
    output, state = mechanism(
        query, key, value, key_padding_mask, sequence_ids, None if layer is None else layer.state
    )
    if layer is not None:
        layer.state = state
    return output.transpose(1, 2).contiguous(), None


def _key_padding_mask(mask: Tensor | None, num_keys: int) -> Tensor | None:
    """Return the part of the 2-D mask that belongs to the keys at hand."""
    if mask is None:
        return None
    if mask.dim() != 2:
        raise UnsupportedModeError(
            f"attention_mask has {mask.dim()} dimensions {tuple(mask.shape)}; a patched model takes a 2-D key mask"
            " [batch, length] (packed documents: position_ids that restart at 0)"
        )
    return mask[:, -num_keys:].bool()


def _sequence_ids(
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
    key_padding_mask: Tensor | None,
    num_queries: int,
    num_keys: int,
) -> Tensor | None:
    """Number packed sequences [B, Nk] by the restarts of position_ids, or by FlashAttention's cumulative lengths."""
    if num_queries == 1 or num_queries != num_keys:
        return None
    if cu_seq_lens is not None:
        steps = torch.arange(num_queries, device=cu_seq_lens.device)
        return torch.searchsorted(cu_seq_lens[1:].to(steps.dtype), steps, right=True)[None]
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != num_queries:
        return None
    restart = position_ids[:, 1:] <= position_ids[:, :-1]
    if key_padding_mask is not None:
        # the positions of padding mean nothing, and what stands before the first real token is no sequence
        begun = key_padding_mask[:, :-1].cumsum(1) > 0
        restart = restart & key_padding_mask[:, 1:] & begun
    if not torch.compiler.is_compiling() and not bool(restart.any()):
        return None
    ids = torch.nn.functional.pad(restart.cumsum(1), (1, 0))
    return ids if key_padding_mask is None else ids.expand(key_padding_mask.shape[0], -1)


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, attention_mask)
