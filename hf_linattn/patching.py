"""patch_model, unpatch_model, original_attention: attach mechanisms to attention modules, and undo all of it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from . import architecture, pinning
from . import transformers_bridge as bridge
from .attachment import Patch
from .attention_modules import cross_attention_modules, self_attention_modules, warn_of_undeclared
from .building import build_all, warn_of_sinks
from .chosen_plan import ChosenPlan
from .chunked_mlp import FeedForward, find_feed_forwards
from .config import require_count
from .errors import OptionError, PatchError
from .mechanisms import AttentionLayer, Mechanism
from .plan import LayerSpec, PatchConfig, Plan
from .positions.extend import reach_max_positions, undo_last_extension

logger = logging.getLogger(__name__)

PATCH = "_hf_linattn_patch"  # the attribute of the outermost transformers model that holds its Patch

ModelT = TypeVar("ModelT", bound=nn.Module)


def patch_model(
    model: ModelT,
    mechanism: Plan | PatchConfig,
    layers: LayerSpec = None,
    *,
    cross_attention: Plan | None = None,
    chunk_feed_forward: int | None = None,
    max_positions: int | None = None,
    **options: Any,
) -> ModelT:
    """Replace the attention of a transformers model, in place, and return it.

    Its attention modules project, rotate and cache as before, and call the mechanism in place of softmax. All else is
    ordinary transformers: forward, generate, Trainer, PEFT, saving. After an error the model is as it was.

    Args:
        model: a model that uses transformers' attention interface; plain, PEFT-wrapped, compiled or device-mapped.
        mechanism: a name (`list_mechanisms()`), a mechanism config, or a plan: `{"performer": "0-5", "local": [6]}`,
            `{"performer": {"layers": "0-5", "num_features": 128}}`, or a list of `{"mechanism": ..., "layers": ...,
            "heads": ..., "options": {...}}`, in which a mechanism may stand more than once. What a plan leaves out
            keeps softmax. Layers of which a plan names key/value heads, as `"heads": "0-2"`, become `by_head`.
        layers: with a name or config: which layers, as `3`, `"0-5"`, `"0-2,7"` or `[6, 7]`; None is all.
        cross_attention: as `mechanism`, with options as in a plan, for layers that attend to an encoder's tokens,
            counted by themselves; what is needed of these is cached once. None keeps softmax.
        chunk_feed_forward: tokens that feed-forwards take at a time, see the function of that name; None: all.
        max_positions: tokens of the longest input, for a model whose positions end before: `extend_positions` with its
            default method. None leaves them alone.
        **options: options of the named mechanism.

    Raises:
        UnknownNameError: no such mechanism; the message has the nearest names.
        OptionError: no such option, a value out of range, a layer the model does not have.
        PatchError: the model is patched already, or a plan was chosen for another (`choose_plan`).
        UnsupportedModelError: its attention cannot be reached, its feed-forward or heads not be split; it says why.
        UnsupportedModeError: the mechanism lacks the causal, bidirectional or cross form the model needs.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_linattn import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50))
        >>> model = patch_model(model, "performer", num_features=32)
        >>> model.transformer.h[0].attn.hf_linattn.feature_map.projection.shape
        torch.Size([32, 8])
    """
    root = _unpatched_root(model)
    with ExitStack() as undo:
        if max_positions is not None:
            reach_max_positions(model, max_positions)
            undo.callback(undo_last_extension, root)
        patch, mechanisms = _attached(model, root, mechanism, layers, options, cross_attention)
        undo.callback(patch.detach, root)
        patch.chunk(_feed_forwards(root, patch.attention, chunk_feed_forward), chunk_feed_forward or 0)
        undo.pop_all()
    patch.extended = max_positions is not None
    setattr(root, PATCH, patch)
    _forget_compiled(model)
    warn_of_sinks(mechanisms, type(root).__name__)
    warn_of_undeclared(root)
    logger.debug("patched %d of %d layers of %s", patch.config.count, len(patch.attention), type(root).__name__)
    return model


def _attached(
    model: nn.Module, root: PreTrainedModel, mechanism: Any, layers: LayerSpec, options: Mapping[str, Any],
    cross_attention: Any,
) -> tuple[Patch, dict[str, Mechanism]]:  # fmt: skip
    """Build the mechanisms of a plan and attach them; after an error none is."""
    attention = self_attention_modules(root)
    config = _resolve(mechanism, described := architecture.describe_layers(root, attention), layers, options)
    mechanisms = build_all(config, described)
    if cross_attention is not None or config.cross is not None:
        config, crossing, across = _resolve_cross(root, config, cross_attention)
        attention, mechanisms = attention | crossing, mechanisms | across
    if any(hasattr(x, "peft_config") for x in (model, root)):  # it saves its adapters alone, and has frozen the rest
        for built in mechanisms.values():
            built.requires_grad_(False)
    pinning.own_config(model)
    patch = Patch.of(config, attention, root)
    with ExitStack() as undo:
        undo.callback(patch.detach, root)
        patch.attach(mechanisms, root)
        patch.names += pinning.take_adapter_names(model)
        undo.pop_all()
    return patch, mechanisms


def unpatch_model(model: ModelT) -> ModelT:
    """Undo `patch_model`: the model computes bit for bit what it computed before, with the weights it has now.

    Where parts of it were patched, and not the whole, all of them are undone. A model that is not patched, and whose
    positions were extended, gets those back that it had before the last `extend_positions`.

    Args:
        model: a patched model, or a wrapper around one.

    Raises:
        PatchError: the model is not patched, or is part of one that is patched as a whole.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_linattn import is_patched, patch_model, unpatch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
        >>> is_patched(unpatch_model(patch_model(model, "linear")))
        False
    """
    root = architecture.root_model(model)
    extended = not is_patched(root) and undo_last_extension(root)
    names = {pinning.NAME_IN_MEMORY, root.name_or_path}
    for part, patch in () if extended else _patches_of(root).values():
        patch.detach(part)
        delattr(part, PATCH)
    if not extended:
        pinning.rename_adapters(model, names, root.name_or_path)
    _forget_compiled(model)
    return model


def chunk_feed_forward(model: ModelT, chunk_size: int | None) -> ModelT:
    """Have the feed-forward of every layer of a patched model take at most `chunk_size` tokens at a time; return it.

    Its activations, several times as wide as the hidden states, then exist for `chunk_size` tokens and not for all
    B x N; the tokens of a batch count together. Where gradients are recorded they are made again in the backward pass,
    a chunk at a time: a third more work in the feed-forward. With gradient checkpointing a layer's backward pass holds
    the same few. These are Reformer's chunks (Kitaev et al. 2020, section 3); `chunked_mlp.py` says what is split.

    On one CPU thread outputs are bit-equal to those of all tokens at once, for chunks of 8 tokens and more. Several
    threads and GPUs share an operation out by its size, and round in other places: there outputs agree within
    rounding, and so do, everywhere, the gradients of weights, which are sums over chunks. Dropout draws other numbers
    than for all tokens at once, from the same distribution; those that a chunk is made again with are the same.

    It is a choice for this process: it is not saved with the model, and `unpatch_model` undoes it. After an error the
    model is as it was.

    Args:
        model: a patched model, or a wrapper around one.
        chunk_size: tokens at a time, at least 1; None is all at once.

    Raises:
        PatchError: the model is not patched.
        OptionError: `chunk_size` is no integer of at least 1.
        UnsupportedModelError: the feed-forward of a layer cannot be split: it is no module of its own (OPT, BART), or
            chooses among experts (Mixtral).

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn import chunk_feed_forward, patch_model
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = patch_model(LlamaForCausalLM(config), "linear", chunk_feed_forward=512)
        >>> model = chunk_feed_forward(model, 256)
    """
    root = architecture.root_model(model)
    patch = _patch_of(root)
    patch.chunk(_feed_forwards(root, patch.attention, chunk_size), chunk_size or 0)
    _forget_compiled(model)
    return model


@contextmanager
def original_attention(model: ModelT) -> Iterator[ModelT]:
    """Run a patched model with its original attention for a while: the softmax teacher, on the same weights.

    Only the attention function is switched; mechanisms and their parameters stay attached. Caches made inside and
    outside must not be mixed: a decoding state cannot be turned back into keys. The switch is in the model's config:
    threads that run the model meanwhile get the original, too. A copy made meanwhile is a patched model; for a teacher
    that stays one, call `unpatch_model(copy.deepcopy(model))`. With gradient checkpointing the backward pass of a
    forward inside must be inside, too, and of one outside, outside: it makes the layers again.

    Args:
        model: a patched model, or a wrapper around one.

    Yields:
        The model itself.

    Raises:
        PatchError: the model is not patched; later, by such a backward pass.

    Examples:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_linattn import original_attention, patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50)).eval()
        >>> tokens = torch.arange(8)[None]
        >>> before = model(tokens).logits
        >>> model = patch_model(model, "linear")
        >>> with original_attention(model):
        ...     torch.equal(model(tokens).logits, before)
        True
        >>> torch.equal(model(tokens).logits, before)
        False
    """
    switched = [
        (part, patch, config, original, bridge.get_implementation(config))
        for part, patch in _patches_of(architecture.root_model(model)).values()
        for config, original in patch.choices(part)
    ]
    try:
        for _, _, config, original, _ in switched:
            bridge.set_implementation(config, pinning.Meanwhile(original))
        yield model
    finally:
        for part, patch, config, _, before in switched:
            if vars(part).get(PATCH) is patch:  # and was not undone meanwhile
                bridge.set_implementation(config, before)


def is_patched(model: nn.Module) -> bool:
    """Return whether `patch_model` was applied to a model, to a part of it or to what it is part of.

    Args:
        model: a transformers model, or a wrapper around one.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_linattn import is_patched, patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
        >>> is_patched(model), is_patched(patch_model(model, "linear"))
        (False, True)
    """
    return bool(pinning.modules_with_mechanisms(architecture.root_model(model)))


def patched_parts(model: nn.Module) -> dict[str, tuple[PreTrainedModel, Patch]]:
    """Return path -> part and what was done to it, of each that `patch_model` was applied to; `""` is `model`."""
    return {path: (part, vars(part)[PATCH]) for path, part in model.named_modules() if PATCH in vars(part)}  # type: ignore[misc]


def rename_patched(model: PreTrainedModel, name: str) -> None:
    """Name a patched model and its parts after the checkpoint that loads it as it is."""
    model.name_or_path = model.config._name_or_path = name
    for part, patch in patched_parts(model).values():
        pinning.give_names(part, patch.names, name)


def get_patch_config(model: nn.Module) -> PatchConfig:
    """Return which mechanism serves which layer.

    Args:
        model: a model that is patched as a whole, or a wrapper around one.

    Raises:
        PatchError: the model is not patched, or in a part alone.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_linattn import get_patch_config, patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50))
        >>> get_patch_config(patch_model(model, "linear", layers=[1])).to_dict()["groups"][0]["layers"]
        [1]
    """
    return _patch_of(architecture.root_model(model)).config


def get_mechanisms(model: nn.Module) -> dict[str, Mechanism]:
    """Return path of the attention module -> its mechanism; a layer that keeps softmax has one, too.

    Args:
        model: a patched model, or a wrapper around one.

    Raises:
        PatchError: the model is not patched.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_linattn import get_mechanisms, patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50))
        >>> mechanisms = get_mechanisms(patch_model(model, "linear", layers=[1]))
        >>> {path: mechanism.config.mechanism for path, mechanism in mechanisms.items()}
        {'transformer.h.0.attn': 'softmax', 'transformer.h.1.attn': 'linear'}
    """
    return {
        f"{part}.{path}" if part else path: bridge.mechanism_of(module)
        for part, (_, patch) in _patches_of(architecture.root_model(model)).items()
        for path, module in patch.attention.items()
    }


def _patches_of(root: PreTrainedModel) -> dict[str, tuple[PreTrainedModel, Patch]]:
    """Return path -> what was patched: the whole, or parts of it."""
    found = patched_parts(root)
    if not found:
        whole = "is part of a model that is patched already; call this with the whole, or unpatch_model(whole) first"
        why = whole if is_patched(root) else "is not patched; call patch_model(model, ...) first"
        raise PatchError(f"{type(root).__name__} {why}")
    return found


def _unpatched_root(model: nn.Module) -> PreTrainedModel:
    root = architecture.root_model(model)
    for path, (_, patch) in _patches_of(root).items() if is_patched(root) else ():
        done = ", ".join(sorted({config.mechanism for config in patch.config.layers.values()}))
        inside = f", its part {path!r}" if path else ""
        raise PatchError(f"{type(root).__name__} is patched already{inside} ({done}); call unpatch_model(model) first")
    return root


def _patch_of(root: PreTrainedModel) -> Patch:
    path, (_, patch) = next(iter(_patches_of(root).items()))
    if path:
        raise PatchError(f"{type(root).__name__} is patched in its part {path!r} alone; call this with that part")
    return patch


def _resolve(
    mechanism: Any, described: Mapping[str, AttentionLayer], layers: LayerSpec, options: Mapping[str, Any]
) -> PatchConfig:
    num_layers = len(described)
    if isinstance(mechanism, ChosenPlan):
        mechanism.require_layers(list(described.values()))
    if not isinstance(mechanism, PatchConfig):
        return PatchConfig.from_plan(mechanism, num_layers, layers, options)
    if given := ["layers"] * (layers is not None) + list(options):
        raise OptionError(f"a patch config names its layers and options itself; remove the argument {given[0]!r}")
    if mechanism.num_layers != num_layers:
        raise PatchError(
            f"the patch config is for {mechanism.num_layers} attention layers, the model has {num_layers}"
        )
    return copy.deepcopy(mechanism)


def _resolve_cross(
    root: PreTrainedModel, config: PatchConfig, plan: Any
) -> tuple[PatchConfig, dict[str, nn.Module], dict[str, Mechanism]]:
    """Return the config with what serves the cross-attention layers, as it or the plan says, these and theirs."""
    if config.cross is not None and plan is not None:
        raise OptionError("a patch config names its cross-attention itself; remove the argument 'cross_attention'")
    crossing = cross_attention_modules(root)
    layers = architecture.describe_cross_layers(root, crossing)
    cross = _resolve(plan if config.cross is None else config.cross, layers, None, {})
    return replace(config, cross=cross), crossing, build_all(cross, layers)


def _feed_forwards(
    root: PreTrainedModel, attention: Mapping[str, nn.Module], chunk_size: int | None
) -> list[FeedForward]:
    """Return what a chunk size is for; nothing without one."""
    require_count("chunk_feed_forward", chunk_size, optional=True)
    return [] if chunk_size is None else find_feed_forwards(root, attention)


def _forget_compiled(model: nn.Module) -> None:
    """Drop graphs that were compiled with the other attention."""
    if any(isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl is not None for m in model.modules()):
        torch.compiler.reset()
