"""What patch_model does to the parts of a transformers model, kept so that all of it can be undone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from . import pinning, saved_config, sliced_masks
from . import transformers_bridge as bridge
from .attention_modules import owners
from .chunked_mlp import FeedForward
from .mechanisms import Mechanism
from .plan import PatchConfig
from .positions.extend import undo_last_extension
from .tensor_parallel import require_heads_apart

HOOKS = (  # where PyTorch keeps those of a module, and what was said of them
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip
# what a model and its parts have of their own while they are patched
ATTRIBUTES = (bridge.RECORD, pinning.EXACT, pinning.FORMER_NAME, pinning.PAGING, sliced_masks.SLICING)


@dataclass
class Patch:
    """Everything that was done to a model, and what it was before.

    It holds parts of the model and never the model, which holds it: Python frees a model at once that is in no ring.
    """

    config: PatchConfig
    attention: dict[str, nn.Module]
    implementations: list[tuple[PreTrainedConfig, str]]
    handles: list[RemovableHandle] = field(default_factory=list)
    feed_forwards: list[FeedForward] = field(default_factory=list)
    parted: list[tuple[nn.Module, PreTrainedConfig]] = field(default_factory=list)
    names: list[tuple[Any, str, str]] = field(default_factory=list)
    extended: bool = False

    @classmethod
    def of(cls, config: PatchConfig, attention: dict[str, nn.Module], model: PreTrainedModel) -> Patch:
        """Remember what attention modules compute now, and the models that make their masks."""
        configs = pinning.configs_of([*attention.values(), *owners(model, attention)])
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
            self.handles.append(owner.register_forward_pre_hook(bridge.model_pre_hook, with_kwargs=True))
            self.handles.append(owner.register_forward_hook(bridge.model_post_hook, with_kwargs=True))
            self.handles.append(owner.register_forward_hook(bridge.model_end_hook, with_kwargs=True, always_call=True))
        exact = pinning.keeping_softmax(model, self.attention, [config for config, _ in self.implementations])
        for module in exact:
            setattr(module, pinning.EXACT, True)
        self.parted = pinning.part_configs(exact, self.implementations)
        for config, _ in self.implementations:
            bridge.set_implementation(config, bridge.IMPLEMENTATION)
            pinning.pin_config(config)
        saved_config.mark_config(model.config, self.config.to_dict())
        pinning.forbid_paging(model)
        sliced_masks.keep_key_masks(model)
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
        owners = [part for part in model.modules() if bridge.RECORD in vars(part)]
        models = [model, *owners, *pinning.modules_with_mechanisms(model)]
        return pinning.with_copies(self.implementations, models)

    def detach(self, model: PreTrainedModel) -> None:
        """Undo `attach` and `chunk`, also one that stopped half-way."""
        self.chunk([], 0)
        pinning.give_names(model, self.names)
        saved_config.unmark_config(model.config)
        patched = {*self.attention.values(), *pinning.modules_with_mechanisms(model)}
        for config, original in self.choices(model):
            pinning.unpin_config(config)
            bridge.set_implementation(config, original)
        for module, config in self.parted:
            module.config = config
        for handle in self.handles:
            handle.remove()
        for part in model.modules():
            for name in ATTRIBUTES:
                vars(part).pop(name, None)
        for module in patched:
            _take_off(module, self.handles)
        if self.extended:
            undo_last_extension(model)


def _take_off(module: nn.Module, handles: list[RemovableHandle]) -> None:
    """Take its mechanism off an attention module, and hooks that it has as the copy of a patched one."""
    if hasattr(module, bridge.MECHANISM):
        delattr(module, bridge.MECHANISM)
    for name in HOOKS:
        for handle in handles:
            getattr(module, name).pop(handle.id, None)
