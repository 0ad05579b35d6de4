"""What `extend_positions` puts into the modules, configs and tokenizer of a model, and how it is undone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..blueprints import buffers_of, plain_attributes
from .tables import position_configs


@dataclass
class ModuleChange:
    """What one module gets, and after `apply` what it had."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Tensor]
    weight: nn.Parameter | None = None
    kept: bool = False  # whether the old rows are the first of the new weight
    old_attributes: dict[str, Any] = field(default_factory=dict)
    old_buffers: dict[str, Tensor] = field(default_factory=dict)
    old_weight: nn.Parameter | None = None

    def apply(self) -> None:
        """Put the new values in place; of the old ones all are kept, as `dynamic` changes more while it runs."""
        replaced = {name: x for name, x in vars(self.module).items() if name in self.attributes}
        self.old_attributes, self.old_buffers = plain_attributes(self.module) | replaced, buffers_of(self.module)
        vars(self.module).update(self.attributes)
        self.module._buffers.update(self.buffers)
        if self.weight is not None:
            self.old_weight, self.module.weight = self.module.weight, self.weight  # type: ignore[assignment]

    def undo(self) -> None:
        """Put the old values back, where the module is now; of a table whose rows were kept, with those of now."""
        vars(self.module).update(self.old_attributes)
        for name, old in self.old_buffers.items():
            now: Any = self.module._buffers[name]
            self.module._buffers[name] = old.to(now.device, now.dtype)
        if self.old_weight is not None:
            weight: Any = self.module.weight
            rows = weight.detach()[: len(self.old_weight)].clone() if self.kept else self.old_weight.data.to(weight)
            self.old_weight.data = rows
            self.module.weight = self.old_weight.requires_grad_(weight.requires_grad)


@dataclass
class Extension:
    """What was done to a model, its configs and its tokenizer."""

    changes: list[ModuleChange]
    fields: list[tuple[int, str, Any]]  # which of `position_configs`, name, value before: `patch_model` copies configs
    tokenizer: tuple[Any, Any]  # and its model_max_length before

    @classmethod
    def of(
        cls, root: PreTrainedModel, changes: list[ModuleChange], fields: list[tuple[int, str]], tokenizer: Any
    ) -> Extension:
        """Remember what configs and tokenizer say now."""
        configs = position_configs(root.config)
        before = [(index, name, getattr(configs[index], name)) for index, name in fields]
        return cls(changes, before, (tokenizer, getattr(tokenizer, "model_max_length", None)))

    def apply(self, root: PreTrainedModel, longer: Any, max_length: int) -> None:
        """Put the changes in place, and what the longer config says."""
        for change in self.changes:
            change.apply()
        configs, new = position_configs(root.config), position_configs(longer)
        for index, name, _ in self.fields:
            setattr(configs[index], name, getattr(new[index], name))
        if self.tokenizer[0] is not None:
            self.tokenizer[0].model_max_length = max_length

    def undo(self, root: PreTrainedModel) -> None:
        """Put everything back."""
        for change in reversed(self.changes):
            change.undo()
        configs, (tokenizer, length) = position_configs(root.config), self.tokenizer
        for index, name, value in self.fields:
            setattr(configs[index], name, value)
        if tokenizer is not None:
            tokenizer.model_max_length = length
