"""Gates: a number for each key/value head between its exact output and that of what would replace it.

    o = g exact + (1 - g) replaced

With all gates at 1 the model is the original, with all at 0 the one in which nothing stays exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..architecture import root_model
from ..attention_call import AttentionCall, Interceptor, intercept_attention
from ..config import MechanismConfig
from ..errors import DataError
from ..inference import accepted, evaluation_mode, kept_flags
from ..mechanisms import Mechanism
from ..patching import get_mechanisms, patch_model, unpatch_model
from ..pinning import same_configs

UNITS = ("head", "layer")
KEPT_BYTES = 2**31  # of activations, for one backward pass; layers beyond them are made again


class Place(NamedTuple):
    """What one gate is for: key/value heads of a layer."""

    layer: int
    heads: tuple[int, ...]


class Gates:
    """The gates of a patched model whose weights are frozen, in the places [U] that a unit gives them.

    Attributes:
        model: the patched model. mechanisms: path of an attention module -> what would replace its softmax.
        places: what each gate is for. values: [U], the gates, in float32 or wider.
    """

    def __init__(self, model: nn.Module, unit: str):
        self.model, self.mechanisms = model, get_mechanisms(model)
        layers = [mechanism.layer for mechanism in self.mechanisms.values()]
        self.places = [
            Place(layer.index, heads)
            for layer in layers
            for heads in (
                [(head,) for head in range(layer.num_key_value_heads)]
                if unit == "head"
                else [tuple(range(layer.num_key_value_heads))]
            )
        ]
        dtypes = [torch.float32, *(layer.dtype for layer in layers)]
        self.values = torch.zeros(len(self.places), dtype=torch.float64 if torch.float64 in dtypes else torch.float32)
        self._interceptors: dict[str, Interceptor] = {}
        first = 0
        for path, mechanism in self.mechanisms.items():
            own = [place for place in self.places if place.layer == mechanism.layer.index]
            self._interceptors[path] = partial(self._answer, mechanism, slice(first, first + len(own)))
            first += len(own)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def window(self) -> int:
        """The most tokens on which what replaces heads equals softmax; 0 where it never does."""
        replaced = next(iter(self.mechanisms.values()))  # the same in all layers
        return replaced.limit.window(replaced.config) or 0

    def beyond_window(self, examples: Sequence[Any], lengths: Sequence[int], longest: str, longer: str) -> list[Any]:
        """Return the examples of more tokens than the window; what heads differ by on the others is rounding.

        longest, longer: for the message, what the longest example is called and what to give.

        Raises:
            DataError: there is none.
        """
        if max(lengths) <= self.window:
            name = next(iter(self.mechanisms.values())).config.mechanism
            raise DataError(
                f"{longest} has {max(lengths)} tokens, and up to {self.window} of them {name!r} equals softmax, so"
                f" that no head differs from another; give longer {longer}, or a smaller window_size"
            )
        return [example for example, length in zip(examples, lengths, strict=True) if length > self.window]

    def longest_row(self, inputs: Mapping[str, Any]) -> int:
        """Return the most real tokens, of a row or of a document of packed rows, that a layer attends to.

        Layers are asked, as inputs may be frames or samples of which several make a token.
        """
        found: list[int] = []

        def count(call: AttentionCall, mechanism: Mechanism) -> Tensor:
            found.append(call.longest_row)
            return call.run_softmax(mechanism)

        counters = {path: partial(count, mechanism=mechanism) for path, mechanism in self.mechanisms.items()}
        with torch.no_grad(), intercept_attention(self.mechanisms, counters):
            self.model(**{**inputs, **accepted(self.model, use_cache=False)})
        return max(found, default=0)

    def run(self, values: Tensor, inputs: Mapping[str, Any]) -> Any:
        """Return the model's output with these gates [U]; gradients reach those."""
        self.values = values
        options = accepted(self.model, use_cache=False)
        with ExitStack() as stack:
            stack.enter_context(self._open())
            if values.requires_grad and torch.is_grad_enabled():
                stack.enter_context(_made_again(self.model, list(self.mechanisms), self._open))
            return self.model(**{**inputs, **options})

    def run_original(self, inputs: Mapping[str, Any]) -> Any:
        """Return the original's output, without gradients."""
        with torch.no_grad(), intercept_attention(self.mechanisms):
            return self.model(**{**inputs, **accepted(self.model, use_cache=False)})

    def _open(self) -> Any:
        return intercept_attention(self.mechanisms, self._interceptors)

    def _answer(self, mechanism: Mechanism, own: slice, call: AttentionCall) -> Tensor:
        """Return [B, H, N, Dv] of one layer, whose gates are `values[own]`."""
        gates = self.values[own]
        shut, recorded = not bool(gates.any()), gates.requires_grad and torch.is_grad_enabled()
        if not recorded and shut:
            return call.run(mechanism)
        if not recorded and bool((gates == 1).all()):
            return call.run_softmax(mechanism)
        replaced = call.run(mechanism)
        if shut:  # nothing depends on what is behind a shut gate but the gate
            with torch.no_grad():
                difference = call.run_softmax(mechanism) - replaced
        else:
            difference = call.run_softmax(mechanism) - replaced
        heads = mechanism.layer.num_heads // len(gates)
        wide = gates.to(difference.device).repeat_interleave(heads)[None, :, None, None]
        return replaced + (wide * difference).to(replaced.dtype)


@contextmanager
def gated(model: nn.Module, replace: MechanismConfig, unit: str) -> Iterator[Gates]:
    """Give a model gates for a while; afterwards it is as it was, whatever happened."""
    with same_configs(model):
        patch_model(model, replace)
        try:
            with evaluation_mode(model), _frozen(model):
                yield Gates(model, unit)
        finally:
            unpatch_model(model)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Record no gradients of a model's parameters for a while."""
    with kept_flags(model):
        model.requires_grad_(False)
        yield


class _Room:
    """What layers may keep for the backward pass: `left` bytes, weights not counted."""

    def __init__(self, model: nn.Module, size: int):
        self.left = size
        self._counted = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def counted(self) -> Any:
        """Count what is kept inside."""
        return torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._counted:
            self._counted.add(storage.data_ptr())
            self.left -= storage.nbytes()
        return tensor


@contextmanager
def _made_again(model: nn.Module, paths: Sequence[str], within: Any) -> Iterator[None]:
    """Keep of each layer its input alone once `KEPT_BYTES` are kept, and make the rest again in the backward pass.

    A layer is made again inside `within()`. Checkpointing of transformers asks for training mode, and with it for
    dropout.
    """
    layers, room = _layers(root_model(model), paths), _Room(model, KEPT_BYTES)
    before = [(layer, vars(layer).get("forward")) for layer in layers]
    try:
        for layer in layers:
            layer.forward = partial(_run, layer.forward, within, room)
        yield
    finally:
        for layer, forward in before:
            if forward is None:
                vars(layer).pop("forward", None)
            else:
                layer.forward = forward


def _run(forward: Any, within: Any, room: _Room, *args: Any, **kwargs: Any) -> Any:
    """Run a layer, whose activations are kept as far as there is room."""
    if room.left > 0:
        with room.counted():
            return forward(*args, **kwargs)

    def run(*given: Any) -> Any:
        with within():  # the backward pass may be in another thread
            return forward(*given, **kwargs)

    return checkpoint(run, *args, use_reentrant=False)


def _layers(root: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """Return the members of lists of layers that the attention modules at `paths` lie in, the innermost of each."""
    layers: dict[str, nn.Module] = {}
    for path in paths:
        names = path.split(".")
        numbered = [place for place, name in enumerate(names) if name.isdigit()]
        if numbered:
            layer = ".".join(names[: numbered[-1] + 1])
            layers[layer] = root.get_submodule(layer)
    return list(layers.values())
