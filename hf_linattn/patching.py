"""patch_model, unpatch_model, original_attention: attach mechanisms to attention modules, and undo all of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from . import architecture, pinning, saved_config, sliced_masks
from . import transformers_bridge as bridge
from .building import build_all, warn_of_sinks
from .chosen_plan import ChosenPlan
from .chunked_mlp import FeedForward, find_feed_forwards
from .config import require_count
from .errors import OptionError, PatchError
from .longer_positions import extend_positions, undo_last_extension
from .mechanisms import AttentionLayer, Mechanism
from .plan import LayerSpec, PatchConfig, Plan
from .tensor_parallel import require_heads_apart

logger = logging.getLogger(__name__)

PATCH = "_hf_linattn_patch"  # the attribute of the outermost transformers model that holds its Patch
HOOKS = (  # where PyTorch keeps those of a module, and what was said of them
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass
class Patch:
    """Everything that was done to a model, and what it was before."""

    config: PatchConfig
    attention: dict[str, nn.Module]
    implementations: list[tuple[PreTrainedConfig, str]]
    handles: list[RemovableHandle] = field(default_factory=list)
    owners: list[PreTrainedModel] = field(default_factory=list)
    feed_forwards: list[FeedForward] = field(default_factory=list)
    exact: list[nn.Module] = field(default_factory=list)
    names: list[tuple[Any, str, str]] = field(default_factory=list)
    replaced: list[tuple[nn.Module, str]] = field(default_factory=list)
    extended: bool = False

    @classmethod
    def of(cls, config: PatchConfig, attention: dict[str, nn.Module], model: PreTrainedModel) -> Patch:
        """Remember what attention modules compute now, and the models that make their masks."""
        configs = pinning.configs_of([*attention.values(), *architecture.owners(model, attention)])
        softmax = "sdpa" if model._supports_sdpa else "eager"  # of a model that was asked to be ours when it was made
        chosen = [(c, bridge.get_implementation(c)) for c in configs]
        return cls(config, attention, [(c, softmax if x == bridge.IMPLEMENTATION else x) for c, x in chosen])

    def attach(self, mechanisms: Mapping[str, Mechanism], model: PreTrainedModel) -> None:
        """Put mechanisms, hooks and the attention implementation in place."""
        require_heads_apart(model, self.attention, mechanisms)
        for path, module in self.attention.items():
            setattr(module, bridge.MECHANISM, mechanisms[path].train(module.training))
            self.handles.append(module.register_forward_pre_hook(bridge.attention_pre_hook, with_kwargs=True))
            self.handles.append(
                module.register_forward_hook(bridge.attention_post_hook, with_kwargs=True, always_call=True)
            )
        for owner, record in bridge.base_models(model, self.attention).items():
            setattr(owner, bridge.RECORD, record)
            self.owners.append(owner)
            self.handles.append(owner.register_forward_pre_hook(bridge.model_pre_hook, with_kwargs=True))
            self.handles.append(owner.register_forward_hook(bridge.model_post_hook, with_kwargs=True))
            self.handles.append(owner.register_forward_hook(bridge.model_end_hook, with_kwargs=True, always_call=True))
        self.exact = pinning.keeping_softmax(model, self.attention, [config for config, _ in self.implementations])
        for module in self.exact:
            setattr(module, pinning.EXACT, True)
        for config, _ in self.implementations:
            bridge.set_implementation(config, bridge.IMPLEMENTATION)
            pinning.pin_config(config)
        saved_config.mark_config(model.config, self.config.to_dict())
        self.replaced += pinning.forbid_paging(model) + sliced_masks.keep_key_masks(model)
        self.names = pinning.take_names(model)

    def chunk(self, feed_forwards: list[FeedForward], chunk_size: int) -> None:
        """Split these feed-forwards into chunks of tokens, and no others."""
        for feed_forward in self.feed_forwards:
            feed_forward.detach()
        self.feed_forwards = feed_forwards
        for feed_forward in feed_forwards:
            feed_forward.attach(chunk_size)

    def choices(self, model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str]]:
        """Return each config that selects our attention, copies of layers have some of their own, and what it did."""
        models = [model, *self.owners, *pinning.modules_with_mechanisms(model)]
        return pinning.with_copies(self.implementations, models)

    def detach(self, model: PreTrainedModel) -> None:
        """Undo `attach` and `chunk`, also one that stopped half-way."""
        self.chunk([], 0)
        pinning.give_names(self.names)
        for part, method in self.replaced:
            delattr(part, method)
        saved_config.unmark_config(model.config)
        patched = {*self.attention.values(), *pinning.modules_with_mechanisms(model)}
        for config, original in self.choices(model):
            pinning.unpin_config(config)
            bridge.set_implementation(config, original)
        for module in self.exact:
            if hasattr(module, pinning.EXACT):
                delattr(module, pinning.EXACT)
        for handle in self.handles:
            handle.remove()
        for owner in self.owners:
            delattr(owner, bridge.RECORD)
        for module in patched:
            _take_off(module, self.handles)
        if self.extended:
            undo_last_extension(model)


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
            counted by themselves; what is needed of these is computed once and cached. None keeps softmax.
        chunk_feed_forward: at most how many tokens the feed-forward of every layer takes at a time, see
            `hf_linattn.chunk_feed_forward`; None is all at once. It is not saved with the model.
        max_positions: tokens of the longest input, for a model whose positions end before: `extend_positions` with its
            default method. None leaves them alone.
        **options: options of the named mechanism.

    Raises:
        UnknownNameError: no such mechanism; the message has the nearest names.
        OptionError: no such option, a value out of range, a layer the model does not have.
        PatchError: the model is patched already, or a plan was chosen for another (`choose_plan`).
        UnsupportedModelError: its attention cannot be reached, its feed-forward or heads not be split; it says why.
        UnsupportedModeError: the mechanism lacks the causal, bidirectional or cross form the model needs.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50))
    >>> model = patch_model(model, "performer", num_features=32)
    >>> model.transformer.h[0].attn.hf_linattn.feature_map.projection.shape
    torch.Size([32, 8])
    """
    root = _unpatched_root(model)
    with ExitStack() as undo:
        if max_positions is not None:
            extend_positions(model, max_positions)
            undo.callback(undo_last_extension, root)
        patch, mechanisms = _attached(model, root, mechanism, layers, options, cross_attention)
        undo.callback(patch.detach, root)
        patch.chunk(_feed_forwards(root, patch.attention, chunk_feed_forward), chunk_feed_forward or 0)
        undo.pop_all()
    patch.extended = max_positions is not None
    setattr(root, PATCH, patch)
    _forget_compiled(model)
    warn_of_sinks(mechanisms, type(root).__name__)
    count, layers_of = patch.config.count, len(patch.attention)
    logger.debug("patched %d of %d attention layers of %s", count, layers_of, type(root).__name__)
    return model


def _attached(
    model: nn.Module, root: PreTrainedModel, mechanism: Any, layers: LayerSpec, options: Mapping[str, Any],
    cross_attention: Any,
) -> tuple[Patch, dict[str, Mechanism]]:  # fmt: skip
    """Build the mechanisms of a plan and attach them; after an error none is."""
    attention = architecture.self_attention_modules(root)
    config = _resolve(mechanism, described := architecture.describe_layers(root, attention), layers, options)
    mechanisms = build_all(config, described)
    if cross_attention is not None or config.cross is not None:
        config, crossing, across = _resolve_cross(root, config, cross_attention)
        attention, mechanisms = attention | crossing, mechanisms | across
    pinning.own_config(model)
    patch = Patch.of(config, attention, root)
    with ExitStack() as undo:
        undo.callback(patch.detach, root)
        patch.attach(mechanisms, root)
        undo.pop_all()
    return patch, mechanisms


def unpatch_model(model: ModelT) -> ModelT:
    """Undo `patch_model`: the model computes bit for bit what it computed before, with the weights it has now.

    Where parts of it were patched, and not the whole, all of them are undone. A model that is not patched, and whose
    positions were extended, gets those back that it had before the last `extend_positions`.

    Raises:
        PatchError: the model is not patched, or is part of one that is patched as a whole.
    """
    root = architecture.root_model(model)
    extended = not is_patched(root) and undo_last_extension(root)
    for part, patch in () if extended else _patches_of(root).values():
        patch.detach(part)
        delattr(part, PATCH)
    _forget_compiled(model)
    return model


def chunk_feed_forward(model: nn.Module, chunk_size: int | None) -> None:
    """Have the feed-forward of every layer of a patched model take at most `chunk_size` tokens at a time; None: all.

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

    Raises:
        PatchError: the model is not patched.
        OptionError: `chunk_size` is no integer of at least 1.
        UnsupportedModelError: the feed-forward of a layer cannot be split: it is no module of its own (OPT, BART), or
            chooses among experts (Mixtral).

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_linattn import chunk_feed_forward, patch_model
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    >>> model = patch_model(LlamaForCausalLM(config), "linear", chunk_feed_forward=512)
    >>> chunk_feed_forward(model, 256)
    """
    root = architecture.root_model(model)
    patch = _patch_of(root)
    patch.chunk(_feed_forwards(root, patch.attention, chunk_size), chunk_size or 0)
    _forget_compiled(model)


@contextmanager
def original_attention(model: ModelT) -> Iterator[ModelT]:
    """Run a patched model with its original attention for a while: the softmax teacher, on the same weights.

    Only the attention function is switched; mechanisms and their parameters stay attached. Caches made inside and
    outside must not be mixed: a decoding state cannot be turned back into keys. The switch is in the model's config:
    threads that run the model meanwhile get the original, too. A copy made meanwhile is a patched model; for a teacher
    that stays one, call `unpatch_model(copy.deepcopy(model))`. With gradient checkpointing the backward pass of a
    forward inside must be inside, too, and of one outside, outside: it makes the layers again.

    Raises:
        PatchError: the model is not patched; later, by such a backward pass.
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
    """Whether `patch_model` was applied to the model, the one inside this wrapper, a part of it or what it is part of.
    """
    return bool(pinning.modules_with_mechanisms(architecture.root_model(model)))


def patched_parts(model: nn.Module) -> dict[str, tuple[PreTrainedModel, Patch]]:
    """Return path -> part and what was done to it, of each that `patch_model` was applied to; `""` is `model`."""
    return {path: (part, vars(part)[PATCH]) for path, part in model.named_modules() if PATCH in vars(part)}  # type: ignore[misc]


def rename_patched(model: PreTrainedModel, name: str) -> None:
    """Name a patched model and its parts after the checkpoint that loads it as it is."""
    model.name_or_path = model.config._name_or_path = name
    for _, patch in patched_parts(model).values():
        pinning.give_names(patch.names, name)


def get_patch_config(model: nn.Module) -> PatchConfig:
    """Return which mechanism serves which layer; `PatchError` if the model is not patched."""
    return _patch_of(architecture.root_model(model)).config


def get_mechanisms(model: nn.Module) -> dict[str, Mechanism]:
    """Return path of the attention module -> its mechanism; `PatchError` if the model is not patched."""
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
    return mechanism


def _resolve_cross(
    root: PreTrainedModel, config: PatchConfig, plan: Any
) -> tuple[PatchConfig, dict[str, nn.Module], dict[str, Mechanism]]:
    """Return the config with what serves the cross-attention layers, as it or the plan says, these and theirs."""
    if config.cross is not None and plan is not None:
        raise OptionError("a patch config names its cross-attention itself; remove the argument 'cross_attention'")
    crossing = architecture.cross_attention_modules(root)
    layers = architecture.describe_cross_layers(root, crossing)
    cross = _resolve(plan if config.cross is None else config.cross, layers, None, {})
    return replace(config, cross=cross), crossing, build_all(cross, layers)


def _feed_forwards(
    root: PreTrainedModel, attention: Mapping[str, nn.Module], chunk_size: int | None
) -> list[FeedForward]:
    """Return what a chunk size is for; nothing without one."""
    require_count("chunk_feed_forward", chunk_size, optional=True)
    return [] if chunk_size is None else find_feed_forwards(root, attention)


def _take_off(module: nn.Module, handles: list[RemovableHandle]) -> None:
    """Take its mechanism off an attention module, and hooks that it has as the copy of a patched one."""
    if hasattr(module, bridge.MECHANISM):
        delattr(module, bridge.MECHANISM)
    for name in HOOKS:
        for handle in handles:
            getattr(module, name).pop(handle.id, None)


def _forget_compiled(model: nn.Module) -> None:
    """Drop graphs that were compiled with the other attention."""
    if any(isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl is not None for m in model.modules()):
        torch.compiler.reset()
