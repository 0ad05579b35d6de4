"""Decoding state inside transformers' own cache objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from .errors import UnsupportedModeError
from .masks import all_real
from .mechanisms.forward import check_rows
from .ops.common.growing import held_bytes
from .ops.common.tracing import is_recorded, once


class StateLayer(CacheLayerMixin):
    """The cache of one layer whose mechanism remembers a state and not every key and value.

    `update` hands back the new keys and values only; the mechanism reads and replaces `state`, a named tuple of
    tensors whose first dimension is the batch. Keys and values that a softmax layer had cached before (a prefix, a
    cache returned by the original model) are handed out once, in front of the first new ones, and so enter the state.
    Tokens count as read once a state was made of them, so that a call which is refused leaves the cache as it was.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.made_by: Any = None  # the config of the mechanism that made it
        self.made_after = 0  # times that its directions were drawn anew before
        self.seq_length = 0
        self.handed = 0  # new tokens of the last update, which `hold` counts
        self.expected = False  # whether a mechanism announced that it will read what the next update hands out
        self.pending: tuple[Tensor, Tensor] | None = None
        self.noted: tuple[Tensor | None, int] | None = None  # real tokens [B] among the first ones; None: all of them

    def like(self) -> StateLayer:
        """Return a layer for the state of another module that attends to what this one has just handed out."""
        made = self._empty()
        made._keep_none(self.keys, self.values)
        made.seq_length = self.seq_length - self.handed
        return made

    def _empty(self) -> StateLayer:
        return StateLayer()

    def require_own(self, mechanism: Any) -> None:
        """Raise `UnsupportedModeError` if the state is of another config or other directions than the mechanism's."""
        if self.state is None:
            return
        config, index = mechanism.config, mechanism.layer.index
        if self.made_by is not config and self.made_by != config:
            raise UnsupportedModeError(
                f"past_key_values holds a decoding state for layer {index} that was made by {self.made_by}, and the"
                f" layer has {config}; start with a new cache"
            )
        if self.made_after != mechanism.times_redrawn():
            raise UnsupportedModeError(
                f"past_key_values holds a decoding state for layer {index} that was made before a forward in training"
                f" drew the directions of {config.mechanism!r} anew (redraw_interval); start with a new cache, and"
                " call model.eval() before decoding"
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, Hkv, N, D] of the new tokens, behind those that are pending."""
        if not self.expected:
            raise UnsupportedModeError(
                "past_key_values holds a decoding state of a patched layer, which softmax attention cannot continue;"
                " give it a cache of its own"
            )
        self.expected = False
        for kept in (self.state, self.pending):
            if kept is not None:
                check_rows(kept, key_states.shape[0])
        self._keep_none(key_states, value_states)
        self.handed = key_states.shape[-2]
        if self.pending is not None:
            key_states, value_states = (
                torch.cat([old.to(new), new], dim=-2)
                for old, new in zip(self.pending, (key_states, value_states), strict=True)
            )
        return key_states, value_states

    def hold(self, state: Any, mechanism: Any, key_padding_mask: Tensor | None = None) -> None:
        """Remember the state that a mechanism returned of the tokens handed out; count these, and the real ones."""
        self._write(state, mechanism)
        self._count()
        self._note(key_padding_mask)
        self.pending, self.is_initialized = None, True

    def _write(self, state: Any, mechanism: Any) -> None:
        self.state = mechanism.owned_state(state)
        self._sign(mechanism)

    def _sign(self, mechanism: Any) -> None:
        """Note who made the state; in a compiled graph as far as no number is asked for that would change."""
        if self.made_by is not mechanism.config:
            self.made_by = mechanism.config
        if not torch.compiler.is_compiling():
            self.made_after = mechanism.times_redrawn()

    def _count(self) -> None:
        self.seq_length += self.handed

    def _note(self, mask: Tensor | None) -> None:
        """Note how many tokens of each row were real; nothing where some were read in a compiled graph.

        Nor where another cache had a window of keys before: which of those that it dropped were pads, it cannot say.
        """
        if self.pending is not None and self.pending[0].shape[-2] < self.seq_length - self.handed:
            self.noted = None
            return
        first = 0 if self.pending is not None else self.seq_length - self.handed
        real, seen = self.noted or (None, 0)
        if is_recorded() or seen != first:
            self.noted = None if first == 0 else self.noted  # which says itself that it is of fewer tokens
        elif mask is None and real is None:
            self.noted = None, self.seq_length
        else:
            before = first if real is None else real
            self.noted = once(_add_real, before, mask, self.seq_length - first), self.seq_length

    def _keep_none(self, *states: Tensor) -> None:
        # some models ask how many are kept; an empty slice would keep the memory of all the others
        self.keys, self.values = (x.new_empty((*x.shape[:-2], 0, x.shape[-1])) for x in states)

    def own_mask(self, mask: Tensor | None, count: int) -> Tensor | None:
        """Return what a key mask [B, N] says of the last `count` tokens: [B, at least count]; None if all are real."""
        return None if mask is None or all_real(mask, count) else mask

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seq_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.seq_length

    def get_max_length(self) -> int:
        return -1

    @property
    def nbytes(self) -> int:
        """Size of the state in bytes, with the room it has for more."""
        return sum(map(held_bytes, self.state)) if self.state is not None else 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise UnsupportedModeError(
                f"crop({tokens_to_remove}) cannot be undone in a decoding state: it sums up the past. Decode without"
                " rolling back (no assisted generation), or deep-copy the cache before trying tokens out"
            )

    def reset(self) -> None:
        self.state, self.seq_length, self.pending, self.noted = None, 0, None, None
        self.is_initialized = self.expected = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices])

    def offload(self) -> None:
        """The state is small and stays where it is."""

    def prefetch(self) -> None:
        """The state was never moved away."""

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = type(self.state)(*map(function, self.state))
        if self.pending is not None:
            self.pending = (function(self.pending[0]), function(self.pending[1]))
        if self.noted is not None and self.noted[0] is not None:
            self.noted = function(self.noted[0]), self.noted[1]


class StaticStateLayer(StateLayer):
    """The state layer of a static cache: what it remembers stays where it is, and how much it has read is a tensor.

    So one compiled graph, or CUDA graph, serves all steps. The first call makes the state, as `Mechanism.fixed_state`
    wants it; each later one writes into it.

    room: how many keys the layer in whose place it stands would keep. is_sliding: whether these are a window, of which
    other layers ask for the mask.
    """

    is_compileable = True

    def __init__(self, room: int, is_sliding: bool = False) -> None:
        self.room, self.is_sliding = room, is_sliding
        self.read = torch.tensor(0)
        super().__init__()

    def _empty(self) -> StateLayer:
        return StaticStateLayer(self.room, self.is_sliding)

    @property
    def seq_length(self) -> Any:
        """Tokens read so far: a tensor, whose value need not be waited for, or 0 before the first."""
        return self.read if self.is_initialized else 0

    @seq_length.setter
    def seq_length(self, length: int) -> None:
        self.read.fill_(length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.read = self.read.to(key_states.device)
        _stay(self.read)
        super()._keep_none(key_states, value_states)

    def _write(self, state: Any, mechanism: Any) -> None:
        """Write the state that a mechanism returned into the one there is, where it has not done so itself."""
        state = mechanism.fixed_state(state, self.room)
        kept = self.state
        if kept is None or any(old.shape != new.shape for old, new in zip(kept, state, strict=True)):
            self.state = type(state)(*(x.clone() for x in state))
            _stay(*self.state)
        else:
            for old, new in zip(kept, state, strict=True):
                if new is not old:
                    old.copy_(new)
        self._sign(mechanism)

    def own_mask(self, mask: Tensor | None, count: int) -> Tensor | None:
        mask = super().own_mask(mask, count)
        if mask is None or mask.dim() != 2 or mask.shape[1] == count:
            return mask
        columns = torch.arange(self.handed - count, self.handed, device=mask.device)
        columns = columns + self.read.clamp(max=mask.shape[1] - self.handed)
        return mask.index_select(1, columns)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # a window that is full hands out one key less than it keeps in front of the new ones
        return self.room - 1 + query_length if self.is_sliding else max(self.room, query_length), 0

    def get_max_length(self) -> int:
        return self.room

    def _count(self) -> None:
        self.read.add_(self.handed)

    def _note(self, mask: Tensor | None) -> None:
        """How many tokens were read is a tensor here, whose value would have to be waited for."""

    def _keep_none(self, *states: Tensor) -> None:
        if self.keys is None:
            self.lazy_initialization(*states)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        super()._map(function)
        if self.state is not None:
            _stay(*self.state)


def _add_real(before: Any, mask: Tensor | None, count: int) -> Any:
    """Return how many tokens of each row [B] are real, `count` more of them than before."""
    return before + (count if mask is None else mask.bool().sum(1))


def _stay(*tensors: Tensor) -> None:
    """Tell compilers that these tensors stay where they are."""
    if not torch.compiler.is_compiling():
        for x in tensors:
            torch._dynamo.mark_static_address(x)


class EncoderStateLayer(StateLayer):
    """The cache layer of a cross-attention module: what its mechanism keeps of the encoder's tokens, made once.

    transformers hands the tokens to `update` in the first call and takes them from `keys` and `values` in later ones,
    which are empty then: the mechanism reads its state.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.state, self.pending = None, None  # of tokens before these
        self.pending = super().update(key_states, value_states, *args, **kwargs)
        self.seq_length, self.is_initialized = self.handed, True
        self.expected = True  # until the state is made of them
        return self.pending

    def own_mask(self, mask: Tensor | None, count: int) -> Tensor | None:
        return mask

    def keep(self, state: Any, mechanism: Any) -> None:
        """Remember what the mechanism made of the tokens, and no longer themselves."""
        self.state, self.expected = state, False
        self._sign(mechanism)
        if self.pending is not None:  # as wide as they came: some models pad what they hand on
            self._keep_none(*self.pending)
        self.pending = None

    @property
    def keys(self) -> Any:
        """What softmax cached before, once; then no keys."""
        return self._kept(0)

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._keys = keys

    @property
    def values(self) -> Any:
        """As `keys`."""
        return self._kept(1)

    @values.setter
    def values(self, values: Any) -> None:
        self._values = values

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        super()._map(function)
        if self._keys is not None:  # empty, but as many rows as the next call has
            self._keys, self._values = function(self._keys), function(self._values)

    def _kept(self, number: int) -> Any:
        if self.is_initialized and not self.expected:
            raise UnsupportedModeError(
                "past_key_values holds what a patched layer keeps of the encoder's tokens, and no keys; give softmax"
                " attention a cache of its own, and leave return_dict_in_generate out where generate takes the cache"
                " apart, as Whisper's does"
            )
        return (self._keys, self._values)[number] if self.pending is None else self.pending[number]


class RecurrentStateLayer(StateLayer, LinearAttentionAndFullAttentionLayer):
    """A state layer in a model whose layer is attention and recurrence at once, and keeps the states of both here.

    It is of the class whose layers transformers does not take for recurrences alone.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, number_of_states: int = 1) -> None:
        StateLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    @classmethod
    def beside(cls, layer: Any) -> RecurrentStateLayer:
        """Return a layer without an attention state that holds the recurrent states of `layer`."""
        found = cls(layer.number_of_states)
        for name in vars(LinearAttentionLayer(layer.number_of_states)):
            setattr(found, name, getattr(layer, name))
        return found

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        kind: Any = LinearAttentionLayer if kwargs else StateLayer  # recurrences name their states, attention does not
        kind.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        StateLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        StateLayer.reorder_cache(self, beam_idx)


def state_bytes(cache: Cache) -> int:
    """Return the bytes that a cache holds: states, those of recurrences too, and kept keys and values."""
    total = 0
    for layer in cache.layers:
        kept = [x for name in ("conv_states", "recurrent_states") for x in getattr(layer, name, {}).values()]
        if isinstance(layer, StateLayer):
            total += layer.nbytes
        elif getattr(layer, "is_initialized", False):  # the layer of a recurrence alone has no keys
            kept += [layer.keys, layer.values]
        total += sum(x.numel() * x.element_size() for x in kept if x is not None)
    return total
