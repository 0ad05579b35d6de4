"""What a transformers model is made of, as far as attention is concerned: which modules, of which sizes.

Read from what models declare (`_can_record_outputs`) and from the names that transformers uses for sizes and layers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
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
# parts by which an attention module chooses its keys, told to its own mask or cache
OWN_CHOICE = ("indexer", "compressor")
# attention modules that no mechanism can stand for, and why
IRREPLACEABLE = {
    "T5Gemma2MergedAttention": "attends to the encoder's tokens and its own under one softmax",
    "DogeAttention": "makes a mask of its own from its values",
}
# attention modules of models that read what comes out for pads: the last token, or every patch of a picture
READ_AT_PADS = ("SiglipAttention", "Siglip2Attention", "Idefics3VisionAttention", "SmolVLMVisionAttention")
# what mechanisms can compute in; quantised weights have other dtypes, of which those of 8 bits are floating, too
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# what models call a module that attends to other tokens than its own, where they declare it as any other
CROSSING = re.compile(r"cross_?att|\bx_attn\b")
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


def self_attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return path -> self-attention module in order, or raise `UnsupportedModelError` saying what is missing."""
    found = _find_attention(model, across=False)
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} declares no attention layers (_can_record_outputs['attentions']): either it has"
            " none, or its code predates transformers' attention interface; use a model that goes through that"
            " interface"
        )
    _require_replaceable(model, found)
    _require_apart(model, found)
    return found


def cross_attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return path -> module of the layers that attend to an encoder's tokens; raise as `self_attention_modules`."""
    found = _find_attention(model, across=True)
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} declares no cross-attention layers (_can_record_outputs['cross_attentions']):"
            " cross_attention= is for these; leave it out"
        )
    _require_replaceable(model, found)
    _require_apart(model, found)
    return found


def _find_attention(model: PreTrainedModel, across: bool) -> dict[str, nn.Module]:
    crossing = _crossing(model)
    declared = crossing | set(_declared(model, "attentions"))
    return {
        path: module
        for path, module in model.named_modules()
        if _is_declared(path, module, declared) and _is_cross_attention(path, module, crossing) == across
    }


def _require_replaceable(model: PreTrainedModel, found: dict[str, nn.Module]) -> None:
    """Raise `UnsupportedModelError` unless all go through transformers' interface and choose no keys themselves."""
    family = type(model).__name__
    for path, module in found.items():
        code = inspect.unwrap(type(module).forward).__code__
        if "ALL_ATTENTION_FUNCTIONS" not in code.co_names or not isinstance(
            getattr(module, "config", None), PreTrainedConfig
        ):
            raise UnsupportedModelError(
                f"{family}: {path} ({type(module).__name__}) computes its attention itself and not through"
                f" transformers' attention interface{_position_bias_note(module)}, so it cannot be replaced"
            )
        if (kind := type(module).__name__) in IRREPLACEABLE:
            raise UnsupportedModelError(f"{family}: {path} ({kind}) {IRREPLACEABLE[kind]}, so it cannot be replaced")
        for part in OWN_CHOICE:
            if getattr(module, part, None) is not None:
                raise UnsupportedModelError(
                    f"{family}: {path} ({kind}) chooses its keys by a part of its own ({part}): it is sparse already"
                )
        if "position_bias" in code.co_varnames:
            raise UnsupportedModelError(
                f"{family}: {path} ({type(module).__name__}) adds a position bias to every score, which has no"
                " subquadratic form here; use a model with rotary or absolute positions"
            )


def _require_apart(model: PreTrainedModel, found: dict[str, nn.Module]) -> None:
    """Raise `UnsupportedModelError` where a list has one layer in two places: saved and loaded, it would be two."""
    for path, stack in model.named_modules():
        first: dict[nn.Module, int] = {}
        for place, layer in enumerate(stack if isinstance(stack, nn.ModuleList) else ()):
            before = first.setdefault(layer, place)
            if before != place and not {*layer.modules()}.isdisjoint(found.values()):
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {path}.{place} is {path}.{before} once more, one layer in two places,"
                    f" which no checkpoint says; put copy.deepcopy(model.{path}[{before}]) there before patch_model"
                )


def _declared(model: PreTrainedModel, output: str) -> Iterator[tuple[Any, str | None]]:
    """Yield (class, part of the path) of the modules that any part of the model names as the source of `output`."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            entries = (getattr(part, "_can_record_outputs", None) or {}).get(output, ())
            for entry in entries if isinstance(entries, (list, tuple)) else (entries,):
                kind = getattr(entry, "target_class", entry)
                if isinstance(kind, type):  # some name a class by its name, of a part that declares it itself
                    yield kind, getattr(entry, "layer_name", None)


def _crossing(model: PreTrainedModel) -> set[tuple[Any, str | None]]:
    """Return what the model names as cross-attention and, as it stands, nothing else."""
    own = {kind for kind, _ in _declared(model, "attentions")}
    return {(kind, name) for kind, name in _declared(model, "cross_attentions") if name or kind not in own}


def _is_declared(path: str, module: nn.Module, declared: set[tuple[type[nn.Module], str | None]]) -> bool:
    return any(isinstance(module, kind) and (name is None or name in path) for kind, name in declared)


def _is_cross_attention(path: str, module: nn.Module, crossing: set[tuple[type[nn.Module], str | None]]) -> bool:
    named = any(isinstance(module, kind) and (name is None or name in path) for kind, name in crossing)
    return named or bool(getattr(module, "is_cross_attention", False)) or bool(CROSSING.search(path))


def _position_bias_note(module: nn.Module) -> str:
    biased = any("bias" in name and isinstance(m, nn.Embedding) for name, m in module.named_modules())
    return " (it adds a learned position bias to every score)" if biased else ""


def owners(model: PreTrainedModel, modules: dict[str, nn.Module]) -> dict[PreTrainedModel, dict[str, nn.Module]]:
    """Return the innermost transformers models around the modules, which make their masks, with those of each."""
    parts = {path: part for path, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    owned: dict[PreTrainedModel, dict[str, nn.Module]] = {}
    for path, module in modules.items():
        owner = max((p for p in parts if p == "" or path.startswith(p + ".")), key=len)
        owned.setdefault(parts[owner], {})[path] = module
    return owned


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
