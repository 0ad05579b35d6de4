"""Rotary position embeddings (RoPE): queries and keys rotate to other positions by the model's own code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CHANGING = ("dynamic", "longrope")  # rope types whose angles depend on the longest position they were asked for


@dataclass(frozen=True)
class Rotation:
    """The rotary positions of one layer: how its model turns heads, whatever their layout and partial width.

    Attributes:
        embedding: position ids -> cosines and sines, as the model calls it.
        apply: (query, key, cosines, sines) -> both, turned; from the module that the attention class comes from.
        layer_type: the third argument of `embedding` where rotations differ by layer.
    """

    embedding: nn.Module
    apply: Callable[..., tuple[Tensor, Tensor]]
    layer_type: str | None = None

    def back(self, heads: Tensor, steps: Tensor) -> Tensor:
        """Return heads [B, H, N, D] as they would be `steps` [B or 1, N] positions earlier.

        R(p - s) x = R(-s) R(p) x, and R(-s) is the turn by s with its sines negated.
        """
        cosine, sine = self._angles(heads, steps)
        return self.apply(heads, heads[:, :1], cosine, -sine)[0]

    def _angles(self, heads: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of a turn by `steps`, without the factor that some rope types give both."""
        extra = () if self.layer_type is None else (self.layer_type,)
        cosine, sine = self.embedding(heads, steps.expand(len(heads), -1), *extra)
        factor = getattr(self.embedding, "attention_scaling", 1.0)
        return cosine / factor, sine / factor

    def obstacle(self, head_dim: int, device: torch.device) -> str | None:
        """Return why heads cannot be turned back, None if they can; of the meta device only the type is looked at."""
        kinds = getattr(self.embedding, "rope_type", None)
        kind = kinds.get(self.layer_type) if isinstance(kinds, Mapping) else kinds
        if kind in CHANGING:
            return f"its rope type {kind!r} turns the same position differently in longer inputs"
        if device.type == "meta":
            return None
        heads = torch.linspace(-1, 1, 2 * head_dim, device=device).view(1, 1, 2, head_dim)
        steps = torch.tensor([[3, 3]], device=device)
        try:
            turned, _ = self.apply(heads, heads, *self._angles(heads, steps))
            undone = torch.allclose(self.back(turned, steps), heads, atol=1e-4)
        except (TypeError, ValueError, RuntimeError) as error:  # other arguments, other results, other shapes
            return f"{self.apply.__module__}.{self.apply.__name__} is not called as in most models ({error})"
        return None if undone else f"{self.apply.__module__}.{self.apply.__name__} is not undone by negated sines"


def find_rotation(model: nn.Module, path: str, attention: nn.Module) -> Rotation | None:
    """Return the rotation of the attention module at `path`, from the nearest module around it that has one."""
    apply: Any = getattr(sys.modules.get(type(attention).__module__), "apply_rotary_pos_emb", None)
    parents = [path[:end] for end in range(len(path), -1, -1) if end == len(path) or path[end] == "."]
    for parent in [*parents, ""]:
        embedding = getattr(model.get_submodule(parent), "rotary_emb", None)
        if isinstance(embedding, nn.Module) and callable(apply):
            by_layer = "layer_type" in inspect.signature(embedding.forward).parameters
            kinds = getattr(attention.config, "layer_types", None) if by_layer else None
            return Rotation(embedding, apply, kinds[attention.layer_idx] if kinds else None)  # type: ignore[index]
    return None
