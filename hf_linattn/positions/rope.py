"""Rotary position embeddings (RoPE): queries and keys rotate to other positions by the model's own code.

Models leave layers without rotary positions inside the forward of their attention, by flags of many names, and some
change keys once more after the turn. So each layer is tried: on a twin with weights of its own, whatever the model's
are, where they lie and how they are stored.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..blueprints import twin_of

CHANGING = ("dynamic", "longrope")  # rope types whose angles depend on the longest position they were asked for
NEAR = 1e-4  # from numbers of about one
TRIAL = "hf_linattn_trial"  # the name of the attention function that ends a trial
# what attention modules raise that are not made, or not called, as most are
UNUSUAL = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Rotation:
    """The rotary positions of one layer: how its model turns heads, whatever their layout and partial width.

    Attributes:
        embedding: position ids -> cosines and sines, as the model calls it.
        apply: (query, key, cosines, sines) -> both, turned; from the module that the attention class comes from.
        layer_type: the third argument of `embedding` where rotations differ by layer.
        hindrance: why its heads cannot be turned back, as far as a trial of the layer says it.
    """

    embedding: nn.Module
    apply: Callable[..., tuple[Tensor, Tensor]]
    layer_type: str | None = None
    hindrance: str | None = None

    def back(self, heads: Tensor, steps: Tensor) -> Tensor:
        """Return heads [B, H, N, D] as they would be `steps` [B or 1, N] positions earlier.

        R(p - s) x = R(-s) R(p) x, and R(-s) is the turn by s with its sines negated.
        """
        cosine, sine = self._angles(heads, steps)
        return self.apply(heads, heads[:, :1], cosine, -sine)[0]

    def embed(self, like: Tensor, position: Tensor) -> Any:
        """Return what the model makes of positions [B, N] for this layer, mostly cosines and sines."""
        extra = () if self.layer_type is None else (self.layer_type,)
        return self.embedding(like, position, *extra)

    def _angles(self, heads: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of a turn by `steps`, without the factor that some rope types give both.

        Where Accelerate spreads a model over devices, its embedding may lie on another one than the heads.
        """
        cosine, sine = (x.to(heads.device) for x in self.embed(heads, steps.expand(len(heads), -1)))
        factor = getattr(self.embedding, "attention_scaling", 1.0)
        return cosine / factor, sine / factor

    def obstacle(self, head_dim: int, device: torch.device) -> str | None:
        """Return why heads cannot be turned back, None if they can; on the meta device no numbers are looked at."""
        kinds = getattr(self.embedding, "rope_type", None)
        kind = kinds.get(self.layer_type) if isinstance(kinds, Mapping) else kinds
        if kind in CHANGING:
            return f"its rope type {kind!r} turns the same position differently in longer inputs"
        if getattr(self.embedding, "mrope_section", None):
            return "its positions have several axes (mrope_section), and do not count tokens where there are images"
        if self.hindrance is not None or device.type == "meta":
            return self.hindrance
        heads = torch.linspace(-1, 1, 2 * head_dim, device=device, dtype=torch.float32).view(1, 1, 2, head_dim)
        steps = torch.tensor([[3, 3]], device=device)
        try:
            turned, _ = self.apply(heads, heads, *self._angles(heads, steps))
            undone = torch.allclose(self.back(turned, steps), heads, atol=NEAR)
        except UNUSUAL as error:  # other arguments, other results, other shapes
            return f"{self.apply.__module__}.{self.apply.__name__} is not called as in most models ({error})"
        return None if undone else f"{self.apply.__module__}.{self.apply.__name__} is not undone by negated sines"


def find_rotation(model: nn.Module, path: str, attention: nn.Module) -> Rotation | None:
    """Return the rotation of the attention module at `path`, from the nearest module around it that has one.

    None where its keys are the same at every position.
    """
    parents = [path[:end] for end in range(len(path), -1, -1) if end == len(path) or path[end] == "."]
    embeddings = (getattr(model.get_submodule(parent), "rotary_emb", None) for parent in [*parents, ""])
    embedding = next((found for found in embeddings if isinstance(found, nn.Module)), None)
    if embedding is None:
        return None
    config: Any = attention.config
    apply: Any = getattr(sys.modules.get(type(attention).__module__), "apply_rotary_pos_emb", None)
    by_layer = "layer_type" in inspect.signature(embedding.forward).parameters
    kinds = getattr(config, "layer_types", None) if by_layer else None
    rotation = Rotation(embedding, apply, kinds[attention.layer_idx] if kinds else None)  # type: ignore[index]
    if _gets_no_angles(config, attention, rotation.layer_type):
        return None
    try:
        angles, turned, plain = _try(attention, rotation)
        if torch.allclose(turned, plain, atol=NEAR):
            return None
        return replace(rotation, hindrance=_hindrance(attention, apply, angles, turned, plain))
    except UNUSUAL as error:
        kind = type(attention).__name__
        return replace(rotation, hindrance=f"{kind} is not made or called as in most models ({error})")


def _gets_no_angles(config: Any, attention: Any, layer_type: str | None) -> bool:
    """Whether the model calls this layer without angles: its config says so, and not the attention module."""
    by_type: Any = getattr(config, "rope_parameters", None) or {}
    bases: Any = getattr(config, "layer_rope_theta", None)
    return by_type.get(layer_type, 1) is None or (bool(bases) and not bases[attention.layer_idx])


def _hindrance(attention: Any, apply: Any, angles: Any, turned: Tensor, plain: Tensor) -> str | None:
    """Return why a layer that turns its keys cannot turn them back, given them turned by these angles and plain."""
    kind, config = type(attention), attention.config
    if not callable(apply):
        return f"{kind.__module__} has no apply_rotary_pos_emb"
    cosine, sine = angles
    if not torch.allclose(apply(turned, turned, cosine, -sine)[0], plain, atol=NEAR):
        return f"{kind.__name__} changes its keys after it has turned them"
    bases = getattr(config, "layer_rope_theta", None)
    if bases and bases[attention.layer_idx] != config.rope_parameters["rope_theta"]:
        return "layer_rope_theta gives it another base than rope_parameters"
    return None


# -- trying a layer ---------------------------------------------------------------------------------------------------


class _TrialEnd(Exception):  # noqa: N818  # no error
    """Ends the trial of a layer, with the keys that its attention function gets."""


def _end_trial(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> None:
    raise _TrialEnd(key)


AttentionInterface.register(TRIAL, _end_trial)


def _try(attention: nn.Module, rotation: Rotation) -> tuple[Any, Tensor, Tensor]:
    """Return angles, the keys [1, Hkv, 2, D] that a twin of the layer turns by them, and the same keys unturned.

    The angles of all pairs of numbers are one, whose cosine is 0.6, so that no layout of them matters.
    """
    device = next((x.device for x in rotation.embedding.buffers()), torch.device("cpu"))
    like, position = torch.zeros(1, 1, 2, 1, device=device), torch.zeros(1, 2, dtype=torch.long, device=device)
    shapes = rotation.embed(like, position)
    # a model that is being loaded is patched on the meta device, and in its own dtype
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad():
        twin = twin_of(attention, TRIAL)
        angles = _same_angles(shapes, 0.6, 0.8)
        return angles, _keys(twin, angles), _keys(twin, _same_angles(shapes, 1.0, 0.0))


def _same_angles(shapes: Any, cosine: float, sine: float) -> Any:
    """Return cosines and sines as an embedding gives them, or their complex numbers, all of one angle."""
    if isinstance(shapes, Tensor):
        return torch.full(shapes.shape, complex(cosine, sine), dtype=torch.complex64)
    return tuple(torch.full(x.shape, y, dtype=torch.float32) for x, y in zip(shapes, (cosine, sine), strict=True))


def _keys(twin: Any, angles: Any) -> Tensor:
    """Return the keys that the attention function gets of two tokens, whose hidden states are one number each."""
    if isinstance(own := getattr(twin, "rotary_emb", None), nn.Module):
        own.forward = lambda *call, **options: angles
    offered = {
        "hidden_states": torch.tensor([[[1.0], [2.0]]], dtype=torch.float32), "position_embeddings": angles,
        "attention_mask": None, "position_ids": torch.zeros(1, 2, dtype=torch.long),
        "layer_idx": getattr(twin, "layer_idx", None),
    }  # fmt: skip
    taken = inspect.signature(twin.forward).parameters
    try:
        twin(**{name: value for name, value in offered.items() if name in taken})
    except _TrialEnd as end:
        return end.args[0]
    raise ValueError("it does not call its attention function")
