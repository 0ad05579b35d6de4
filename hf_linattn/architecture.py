"""What the attention modules of a transformers model are: their sizes, dtypes, rotations, and the layers around them.

Read from the names that transformers uses. Which modules of a model are attention says `attention_modules.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from .attention_call import causal_by_itself
from .attention_modules import self_attention_modules
from .errors import UnsupportedModelError
from .mechanisms import AttentionLayer
from .positions.rope import Rotation, find_rotation

# where attention modules and configs keep their sizes, most specific first
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "decoder_self_attention_heads")  # RF-DETR
HEAD_DIM = ("head_dim", "attention_head_size", "dim_head", "d_head")
# the projections that make keys of whole heads, and of latent attention the queries, whose heads are as wide as keys
KEY_PROJECTIONS = ("k_proj", "key", "k_lin")
LATENT_QUERIES = ("q_b_proj", "q_proj")
# models whose attention modules say is_causal=False, and which pass is_causal=True with every call
CALLED_CAUSAL = (
    "CLIPTextModel", "CLIPSegTextModel", "MetaClip2TextModel", "OwlViTTextTransformer", "Owlv2TextTransformer",
    "XCLIPTextModel",
)  # fmt: skip
CLASSIFIERS = frozenset(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())
# attention modules of models that read what comes out for pads: the last token, or every patch of a picture
READ_AT_PADS = ("SiglipAttention", "Siglip2Attention", "Idefics3VisionAttention", "SmolVLMVisionAttention")
# what mechanisms can compute in; quantised weights have other dtypes, of which those of 8 bits are floating, too
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# what the projection of the heads' outputs is called, in the attention module or, in BERT's kind, beside it
OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "out_proj", "out_lin", "Wo", "dense", "output.dense")


def root_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside any wrapper (PEFT, torch.compile, DDP ...)."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise UnsupportedModelError(
        f"model must be a transformers PreTrainedModel or a wrapper around one, got {type(model).__name__}"
    )


def require_token_ids(model: nn.Module, remedy: str, *, alone: bool = True) -> None:
    """Raise `UnsupportedModelError`, which ends in a remedy, unless a model reads token ids.

    alone: that must be all that it reads, which it is not of an encoder-decoder.
    """
    root = root_model(model)
    name = type(root).__name__
    if root.main_input_name != "input_ids":
        raise UnsupportedModelError(f"{name} reads {root.main_input_name} and no text alone; {remedy}")
    if alone and root.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder, of which text alone is half of the input; {remedy}"
        )


def classifies_texts(model: nn.Module) -> bool:
    """Return whether a model, wrapped or not, is a classifier of texts, by its class or one that it is made from."""
    return any(kind.__name__ in CLASSIFIERS for kind in type(root_model(model)).__mro__)


def layer_stacks(model: PreTrainedModel, paths: Iterable[str]) -> list[str]:
    """Return the paths of the lists of layers in which the attention modules at `paths` lie.

    >>> from transformers import GPT2Config, GPT2Model
    >>> layer_stacks(GPT2Model(GPT2Config(n_layer=2, n_head=2, n_embd=8)), ["h.0.attn", "h.1.attn"])
    ['h']
    """
    stacks: dict[str, None] = {}
    for path in paths:
        names = path.split(".")
        numbered = [place for place, name in enumerate(names) if name.isdigit()]
        stack = ".".join(names[: numbered[-1]]) if numbered else ""
        if not isinstance(model.get_submodule(stack), nn.ModuleList):
            raise UnsupportedModelError(f"{type(model).__name__}: {path} lies in no list of layers")
        stacks[stack] = None
    return list(stacks)


def describe_cross_layers(model: PreTrainedModel, attention: dict[str, nn.Module]) -> dict[str, AttentionLayer]:
    """Describe the cross-attention modules of a model: no order of queries and keys, so no causality, no rotation."""
    layers = {path: describe_layer(i, module, model) for i, (path, module) in enumerate(attention.items())}
    return {path: replace(layer, causal=False, cross=True) for path, layer in layers.items()}


def describe_layers(model: PreTrainedModel, attention: dict[str, nn.Module]) -> dict[str, AttentionLayer]:
    """Describe all self-attention modules of a model, with their rotary positions."""
    rotations = {path: find_rotation(model, path, module) for path, module in attention.items()}
    called = [path for path, part in model.named_modules() if type(part).__name__ in CALLED_CAUSAL]
    causal = tuple(f"{path}." if path else "" for path in called)
    layers = {
        path: describe_layer(i, module, model, rotations[path]) for i, (path, module) in enumerate(attention.items())
    }
    depths = {path: next((int(part) for part in path.split(".") if part.isdigit()), None) for path in layers}
    return {
        path: replace(layer, causal=layer.causal or path.startswith(causal), depth=depths[path])
        for path, layer in layers.items()
    }


def sees_ahead(model: PreTrainedModel) -> bool:
    """Whether every self-attention layer of a model is bidirectional, as far as they can be described."""
    try:
        layers = describe_layers(model, self_attention_modules(model))
    except UnsupportedModelError:
        return False
    return not any(layer.causal for layer in layers.values())


def describe_layer(
    index: int, module: nn.Module, model: PreTrainedModel, rotation: Rotation | None = None
) -> AttentionLayer:
    """Read a layer's sizes off its module, else off its config; the widths of its heads off their projections."""
    config: Any = module.config
    num_heads = _first(module, config, NUM_HEADS)
    if num_heads is None:
        raise UnsupportedModelError(
            f"neither layer {index}, a {type(module).__name__}, nor its config says how many heads it has under one of"
            f" the names {', '.join(NUM_HEADS)}; set config.num_heads"
        )
    # transformers shares keys by this field alone: what a config says of shared heads, not every model reads
    shared_heads = num_heads // (getattr(module, "num_key_value_groups", None) or 1)
    head_dim, value_dim = _head_widths(module, num_heads, shared_heads)
    head_dim = head_dim or _first(module, config, HEAD_DIM) or config.hidden_size // num_heads
    head_dim += getattr(module, "head_dim_padding", 0)  # zeros that Moonshine puts behind all heads
    scaling = getattr(module, "scaling", None)
    stored_on = _first_device(module, model)
    hook = getattr(module, "_hf_hook", None)  # accelerate's, when the weights are kept elsewhere between calls
    device = stored_on if stored_on.type != "meta" else getattr(hook, "execution_device", None)
    return AttentionLayer(
        index=index,
        num_heads=num_heads,
        num_key_value_heads=shared_heads,
        head_dim=head_dim,
        causal=causal_by_itself(module),
        scaling=float(scaling) if isinstance(scaling, (int, float)) else head_dim**-0.5,
        device=torch.device(device if device is not None else "meta"),
        dtype=floating_dtype(module, model),
        rotation=rotation,
        value_dim=value_dim or getattr(module, "v_head_dim", None),
        has_sinks=getattr(module, "sinks", None) is not None,
        reads_pads=type(module).__name__ in READ_AT_PADS,
        hidden_size=_width(module, KEY_PROJECTIONS, "in_features", 1) or _first(config, config, ("hidden_size",)),
    )


def lender_of(module: nn.Module) -> int | None:
    """Return the index of the layer to whose keys a module without its own attends (Gemma 3n, Gemma 4), or None."""
    if not getattr(module, "is_kv_shared_layer", False):
        return None
    config: Any = module.config
    kinds, index = config.layer_types, module.layer_idx
    own = range(config.num_hidden_layers - config.num_kv_shared_layers)
    return max((i for i in own if kinds[i] == kinds[index]), default=None)


def layers_sharing_keys(attention: dict[str, nn.Module]) -> list[list[int]]:
    """Return groups of layers, by their places in `attention`, that attend to the keys of the first of each."""
    modules = list(attention.values())
    places = {(id(module.config), getattr(module, "layer_idx", None)): i for i, module in enumerate(modules)}
    groups: dict[int, list[int]] = {}
    for place, module in enumerate(modules):
        if (lender := lender_of(module)) is not None:
            first = places[id(module.config), lender]
            groups.setdefault(first, [first]).append(place)
    return list(groups.values())


def _head_widths(module: nn.Module, num_heads: int, shared_heads: int) -> tuple[int | None, int | None]:
    """Return how wide the heads of keys and values are, as far as the projections say it.

    In latent attention `head_dim` is that of the rotary part alone: keys have another part beside it, and values are
    as wide as what the output projection takes.
    """
    if hasattr(module, "q_pos_sine_proj"):  # Conditional DETR's keys have a place beside the content
        width = _width(module, ("k_content_proj",), "out_features", shared_heads)
        return width and 2 * width, width
    if getattr(module, "kv_b_proj", None) is None:
        return _width(module, KEY_PROJECTIONS, "out_features", shared_heads), None
    taken = _width(module, OUTPUT_PROJECTIONS, "in_features", num_heads)
    return _width(module, LATENT_QUERIES, "out_features", num_heads), taken


def _width(module: nn.Module, names: tuple[str, ...], side: str, heads: int) -> int | None:
    """Return the numbers of one head on one side of the first of these projections that there is."""
    sizes = (getattr(getattr(module, name, None), side, None) for name in names)
    size = next((size for size in sizes if isinstance(size, int)), None)
    return size // heads if size and size % heads == 0 else None


def floating_dtype(module: nn.Module, model: PreTrainedModel) -> torch.dtype:
    """Return the dtype that an attention module computes in: float16, bfloat16, float32 or float64.

    It is that of the first parameter, if this is one of them. Quantised projections have weights of another dtype, or
    no parameters at all: then it is the dtype of the model, whose embeddings and norms are not quantised, else the one
    that a projection says it computes in, else the one of the config.

    Raises:
        UnsupportedModelError: none of these says it.
    """
    first = next(module.parameters(), None)
    if first is not None and first.dtype in COMPUTE_DTYPES:
        return first.dtype
    stated = chain(
        (parameter.dtype for parameter in model.parameters()),
        (getattr(part, "compute_dtype", None) for part in module.modules()),
        (getattr(config, "dtype", None) for config in (module.config, model.config)),
    )
    for dtype in stated:
        if dtype in COMPUTE_DTYPES:
            return dtype
    raise UnsupportedModelError(
        f"{type(model).__name__} has no parameter of a floating dtype, and its config says dtype="
        f"{getattr(model.config, 'dtype', None)!r}: its mechanisms need one of"
        f" {', '.join(str(dtype).removeprefix('torch.') for dtype in COMPUTE_DTYPES)}; set model.config.dtype to it"
    )


def _first_device(module: nn.Module, model: PreTrainedModel) -> torch.device:
    """Return where an attention module is stored; some quantised projections have buffers only, or neither."""
    tensors = chain(module.parameters(), module.buffers(), model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _first(module: nn.Module, config: PreTrainedConfig, names: tuple[str, ...]) -> Any:
    for owner in (module, config):
        for name in names:
            if isinstance(value := getattr(owner, name, None), int):
                return value
    return None


def output_projection(model: PreTrainedModel, path: str) -> tuple[str, nn.Module]:
    """Return path and module of the linear layer that takes the heads' outputs of the attention module at `path`.

    Raises:
        UnsupportedModelError: it has none of the names that transformers uses.
    """
    for owner in (path, path.rpartition(".")[0]):
        for name in OUTPUT_PROJECTIONS:
            try:
                module = model.get_submodule(f"{owner}.{name}")
            except AttributeError:
                continue
            if isinstance(getattr(module, "base_layer", module), (nn.Linear, Conv1D)):  # PEFT wraps it in an adapter
                return f"{owner}.{name}", module
    raise UnsupportedModelError(
        f"{type(model).__name__}: the output projection of {path} is not one of {', '.join(OUTPUT_PROJECTIONS)}; name"
        " the modules yourself"
    )


def attention_projections(model: PreTrainedModel, path: str) -> list[str]:
    """Return the paths of the linear layers that make queries, keys and values and take the heads' outputs."""
    attention = model.get_submodule(path)
    inside = [
        f"{path}.{name}" for name, module in attention.named_modules() if isinstance(module, (nn.Linear, Conv1D))
    ]
    return list(dict.fromkeys([*inside, output_projection(model, path)[0]]))
