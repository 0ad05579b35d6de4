"""The contract every mechanism keeps, and the plumbing that keeps most of it for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..config import MechanismConfig
from ..errors import UnsupportedModeError
from ..offloading import loaded
from ..ops import naive
from ..ops.operations import NOTHING
from ..ops.precision import admitted
from ..ops.sequences import find_sequences, from_the_left
from ..registry import Registry
from ..rotation import Rotation
from .recording import require_recordable

PACKAGE = "hf_linattn.mechanisms"
MECHANISMS: Registry[Mechanism] = Registry("mechanism", package=PACKAGE, entry_point_group=PACKAGE)


@dataclass(frozen=True)
class AttentionLayer:
    """What a mechanism is told about its layer.

    Attributes:
        index: position among the model's self-attention layers. num_heads: H. num_key_value_heads: Hkv, divides H.
        head_dim: D. causal: whether a query may see only itself and earlier keys.
        scaling: what the layer multiplies q . k by. device, dtype: where its parameters live.
        rotation: how its rotary positions are turned; None if it has none. value_dim: Dv; None if it is D.
        cross: whether its keys are an encoder's tokens; index then counts the cross-attention layers.
        has_sinks: whether it has learned sinks in its softmax, which it hands over with every call.
    """

    index: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    causal: bool
    scaling: float
    device: torch.device
    dtype: torch.dtype
    rotation: Rotation | None = None
    value_dim: int | None = None
    cross: bool = False
    has_sinks: bool = False

    @property
    def mode(self) -> str:
        """`"cross"`, `"causal"` or `"bidirectional"`."""
        return "cross" if self.cross else "causal" if self.causal else "bidirectional"


@dataclass(frozen=True)
class ExactnessLimit:
    """How a mechanism relates to softmax attention, in words and in a form that can be checked.

    Attributes:
        text: the setting at which it equals softmax attention, or what it converges to.
        equal: for an input of this length, the options with which it equals softmax attention.
        converging: (option, (few, many), rate): its error falls as option^-rate.
        kernel: it is kernel attention: never softmax, but exactly what its `weights` say.
    """

    text: str
    equal: Callable[[int], dict[str, Any]] | None = None
    converging: tuple[str, tuple[int, int], float] | None = None
    kernel: bool = False


class Pairs(NamedTuple):
    """Some queries and the keys they may see, each with its position in its own sequence, pads not counted.

    query [B, H, C, D], key [B, Hkv, N, D], query_position [B or 1, C], key_position [B or 1, N], allowed
    [B or 1, 1, C, N], real [B or 1, 1, C, 1]: queries that are no pads. first: place of the first query in its row.
    """

    query: Tensor
    key: Tensor
    query_position: Tensor
    key_position: Tensor
    allowed: Tensor
    real: Tensor
    first: int

    @property
    def distance(self) -> Tensor:
        """[B or 1, 1, C, N]."""
        return (self.query_position[:, None, :, None] - self.key_position[:, None, None]).abs()


class Mechanism(nn.Module):
    """Attention of one layer: q [B, H, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv] -> [B, H, Nq, Dv].

    A subclass sets the class attributes, builds its parameters in `__init__` and writes `causal_attention` and
    `bidirectional_attention`, and for mode "cross" `cross_state` and `cross_attention`, which all receive float32 (or
    float64) tensors, unless `takes_half`, with autocast off. It must keep the invariants of `hf_linattn.testing`.

    Class attributes:
        config_class: dataclass of its options. modes: what it can do, of {"causal", "bidirectional", "cross"}.
        constant_state: whether its decoding state has a size that does not grow with the context.
        subquadratic: whether its cost grows slower than N^2.
        continuous: whether nearby inputs give nearby outputs; not where rounding may change which keys are chosen.
        averages: whether outputs are weighted means of values (and of zero, with a sink), never beyond their range.
        prepares: whether `prepare` fits anything.
        growth: by how much its cost grows when 2,048 tokens become 4,096; 2 if it is linear.
        position_limit: how many tokens a sequence may have; None: any. any_length: see `recording`.
            An instance may say each of these eight for itself, and `takes_half`.
        takes_exact: whether `forward` takes the layer's own sliding window, soft cap and dropout as keywords.
        takes_half: whether it takes heads in half precision as they come; else they come in float32.
        takes_sink: whether it takes the layer's own learned sinks; an instance may say so for itself.
        backends: which of `hf_linattn.backends` can work through its causal form.
        limit: how it relates to softmax attention; an instance may state its own. citation: the paper it comes from.
    """

    config_class: ClassVar[type[MechanismConfig]] = MechanismConfig
    modes: ClassVar[frozenset[str]] = frozenset({"causal", "bidirectional"})
    constant_state: bool = True
    subquadratic: bool = True
    continuous: bool = True
    averages: bool = True
    prepares: bool = False
    growth: float = 2.0
    position_limit: int | None = None
    any_length: bool = False
    takes_exact: ClassVar[bool] = False
    takes_half: bool = False
    takes_sink: bool = False
    backends: ClassVar[tuple[str, ...]] = ("auto", "torch")
    limit: ExactnessLimit = ExactnessLimit("none stated")
    citation: ClassVar[str] = ""

    def __init__(self, config: MechanismConfig, layer: AttentionLayer):
        super().__init__()
        if (mode := layer.mode) not in self.modes:
            able = sorted(name for name in MECHANISMS.names() if mode in MECHANISMS.get(name).modes)
            raise UnsupportedModeError(
                f"mechanism {config.mechanism!r} has no {mode} form, which layer {layer.index} needs;"
                f" use one of {', '.join(able)}"
            )
        self.config, self.layer = config, layer
        self.calls = 0  # how often forward ran (outside compiled graphs): shows that the layer is really served
        self.cache_layer: Any = None  # set by the bridge for the time of one call, as is the next one
        self.keeps_state = True  # whether the state that causal attention comes to is of use to anyone
        self.backend = "auto"  # set by hf_linattn.backends, as are the next two
        self.causal_reader: Any = None  # calls causal_attention for it, in parts
        self.operations = NOTHING  # what long inputs are read by
        self.observer: Any = None  # set by hf_linattn.observation: answers in this mechanism's place

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        state: Any = None,
    ) -> tuple[Tensor, Any]:
        """Return the output in the dtype of `value`, and the state after the last key (None if bidirectional).

        Args:
            query, key, value: as above, after position encoding. With Nk > Nq the queries are the last Nq positions,
                except in cross-attention, where each sees all keys; with a state, which has these, they are not read.
            key_padding_mask: [B, Nk], true for real keys; None if all are.
            sequence_ids: [B, Nk], equal inside a packed sequence; None if nothing is packed.
            state: what an earlier call returned, if this one continues it.
        """
        self.count_call()
        require_recordable(self, query, key_padding_mask, sequence_ids)
        with loaded(self), torch.autocast(query.device.type, enabled=False):
            query, key, wide_value = admitted(self.takes_half and not self.layer.cross, query, key, value)
            if self.layer.cross:
                state = self.cross_state(key, wide_value, key_padding_mask) if state is None else state
                output, state = self.cross_attention(query, state)
                return output.to(value.dtype), state
            if not self.layer.causal:
                output = self.bidirectional_attention(query, key, wide_value, key_padding_mask, sequence_ids)
                return output.to(value.dtype), None
            earlier = key.shape[2] - query.shape[2]
            if earlier:  # keys that came without their queries, as from a prefix or another model's cache
                query = torch.cat([query.new_zeros(*query.shape[:2], earlier, query.shape[3]), query], dim=2)
            heads = (query, key, wide_value, key_padding_mask, sequence_ids, state)
            output, state = self.causal_reader(self, *heads) if self.causal_reader else self.causal_attention(*heads)
            return (output[:, :, earlier:] if earlier else output).to(value.dtype), state

    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None,
        state: Any,
    ) -> tuple[Tensor, Any]:
        """Return output and state for Nq = Nk positions that follow `state`."""
        raise NotImplementedError

    def bidirectional_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None
    ) -> Tensor:
        """Return the output when every query sees every key of its sequence."""
        raise NotImplementedError

    def cross_state(self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Any:
        """Return what is kept of an encoder's tokens for all queries to come: a named tuple, batch first."""
        raise NotImplementedError

    def cross_attention(self, query: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the output of queries that follow those that `state` has answered, and the state after them."""
        raise NotImplementedError

    def attention_matrix(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None = None, sequence_ids: Tensor | None = None,
        value: Tensor | None = None,
    ) -> Tensor:
        """Return the N x N weights [B, H, N, N] this mechanism implies, in the inputs' precision: for short inputs.

        `value` [B, Hkv, N, Dv] need only be given where they depend on it, which the error without it says.
        """
        allowed = naive.allowed_pairs(
            query.shape[2], key.shape[2], self.layer.causal, key_padding_mask, sequence_ids, query.device
        )
        return self.weights(query, key, allowed) if value is None else self.weights_given(query, key, value, allowed)

    def weights_given(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        """Return `weights`; for mechanisms whose weights depend on the values, too."""
        return self.weights(query, key, allowed)

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        """Return normalised weights [B, H, N, N] over the allowed pairs, by the formula itself."""
        raise UnsupportedModeError(f"mechanism {self.config.mechanism!r} has no attention matrix to show")

    @property
    def has_scores(self) -> bool:
        """Whether `scores` exist: every allowed pair then has a weight above zero."""
        return False

    def scores(self, pairs: Pairs) -> Tensor:
        """Return [B, H, C, N] whose softmax over the allowed keys, beside `log_sink` if there is one, are the weights;
        they may be anything elsewhere."""
        raise UnsupportedModeError(f"mechanism {self.config.mechanism!r} has no scores whose softmax are its weights")

    def log_sink(self, like: Tensor, given: Tensor | None = None) -> Tensor | None:
        """Return the score [H] of the sink in every denominator, in the dtype and place of `like`; None without one.

        given: the layer's own. -inf where only other heads have one."""
        return None

    def without_sink(self) -> list[str]:
        """Return the names of the mechanisms in it that leave a layer's own sinks out."""
        return [] if self.takes_sink else [self.config.mechanism]

    def keywords(self, exact: dict[str, Any]) -> dict[str, Any]:
        """Return what `forward` takes of the layer's sliding window, soft cap, dropout and sink."""
        return {name: x for name, x in exact.items() if (self.takes_sink if name == "sink" else self.takes_exact)}

    @property
    def infers_natively(self) -> bool:
        """Whether operations in C that have no gradients may be used: not in training, where without gradients the
        same bits must come as in a recomputation with them."""
        return self.backend != "torch" and not self.training

    def count_call(self) -> None:
        """Count a forward; a compiled graph does not, as a changing number would have it compiled anew."""
        if not torch.compiler.is_compiling():
            self.calls += 1

    def join(self, earlier: Sequence[Mechanism]) -> None:
        """Called once the mechanisms of all layers are made, with those of the layers before: to share parameters."""

    def before_forward(self) -> None:
        """Called once before every forward of the whole model, never between its layers; for scheduled changes."""

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> None:
        """Called by `calibrate` for each batch before parameters are fitted to it: to fit what gradients cannot."""

    def fitted_parameters(self) -> list[nn.Parameter]:
        """Return what `calibrate` fits: all parameters, unless some are to stay as the options say."""
        return list(self.parameters())

    def generator(self, purpose: str = "") -> torch.Generator:
        """Return a CPU generator for this layer and purpose, seeded from the config; the global one is not touched."""
        text = f"{self.config.seed}/{self.layer.index}/{purpose}"
        return torch.Generator("cpu").manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))

    def extra_repr(self) -> str:
        options = {"causal": self.layer.causal, **self.config.to_options()}
        return ", ".join([self.config.mechanism, *(f"{name}={value!r}" for name, value in options.items())])


class SequenceMechanism(Mechanism):
    """Base of mechanisms that count positions from the start of a sequence: blocks, windows, sinks, slots.

    A subclass writes `causal_sequences` and `bidirectional_sequences`, which see rows that start at position 0 and are
    padded on the right only. Every padding and packing is brought into that form here and back again, so a sequence
    gets what it would get alone. A state is a named tuple of tensors with the batch first.
    """

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: Any
    ) -> tuple[Tensor, Any]:
        """Return output and state for rows that continue `state` (None: that begin).

        `lengths` [B] counts the real tokens at the start of each row (maybe none); None if all are real, or no state
        is kept, as no query sees what stands behind it. What comes out behind them is dropped, and must not get into
        the state. The state may be None unless `self.keeps_state`.
        """
        raise NotImplementedError

    def bidirectional_sequences(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the output when every query sees every key of its row up to `lengths`."""
        raise NotImplementedError

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        if key_padding_mask is None and sequence_ids is None:
            return self.causal_sequences(query, key, value, None, state)
        return self._each_sequence(query, key, value, key_padding_mask, sequence_ids, state)

    def bidirectional_attention(self, query, key, value, key_padding_mask, sequence_ids):
        if key_padding_mask is None and sequence_ids is None:
            return self.bidirectional_sequences(query, key, value, None)
        return self._each_sequence(query, key, value, key_padding_mask, sequence_ids, None)[0]

    def cross_sequences(self, key: Tensor, value: Tensor, lengths: Tensor | None) -> Any:
        """Return `cross_state` of rows that start at position 0; `lengths` as in `causal_sequences`."""
        raise NotImplementedError

    def cross_state(self, key, value, key_padding_mask):
        return self.cross_sequences(*from_the_left(key, value, key_padding_mask))

    @torch.compiler.disable  # where the sequences lie is data: compiled graphs end here and begin again
    def _each_sequence(self, query, key, value, key_padding_mask, sequence_ids, state):
        if sequence_ids is None and bool(key_padding_mask.all()):
            key_padding_mask = None  # as in every step of a padded batch
            if self.layer.causal:
                return self.causal_sequences(query, key, value, None, state)
        output = value.new_zeros(*query.shape[:3], value.shape[3])
        states: list[tuple[Tensor, Any]] = []
        told = key_padding_mask, sequence_ids, query.device
        for number, group in enumerate(find_sequences(*query.shape[:3:2], *told)):
            heads = [group.take(x) for x in (query, key, value)]
            if self.layer.causal:
                # what stands behind a sequence cannot be seen in a causal output, and without a state nowhere
                lengths = group.lengths if self.keeps_state else None
                rows, after = self.causal_sequences(*heads, lengths, None if number else state)
                if self.keeps_state:
                    states.append((group.rows[group.last], select_rows(after, group.last)))
            else:
                rows = self.bidirectional_sequences(*heads, group.lengths)
            output = group.put(rows.to(output.dtype), output)
        return output, merge_rows(states) if states else None


def select_rows(state: Any, chosen: Tensor) -> Any:
    """Return the chosen rows of every tensor of a state."""
    return type(state)(*(x[chosen] for x in state))


def merge_rows(states: list[tuple[Tensor, Any]]) -> Any:
    """Put states, with the numbers of their rows, together to one batch; a shorter third dimension is zero-padded."""
    order = torch.cat([rows for rows, _ in states]).argsort()
    merged = []
    for parts in zip(*(state for _, state in states), strict=True):
        if parts[0].dim() > 2:
            longest = max(part.shape[2] for part in parts)
            parts = tuple(nn.functional.pad(x, (0, 0) * (x.dim() - 3) + (0, longest - x.shape[2])) for x in parts)
        merged.append(torch.cat(parts)[order])
    return type(states[0][1])(*merged)


def register_mechanism(name: str) -> Callable[[type[Mechanism]], type[Mechanism]]:
    """Return a class decorator that makes a mechanism known as `name`.

    Its `config_class` must be its own subclass of `MechanismConfig`. A distribution can also list the class under the
    entry-point group `hf_linattn.mechanisms`.

    >>> @dataclass
    ... class MeanConfig(MechanismConfig):
    ...     pass
    >>> @register_mechanism("mean_of_values")
    ... class MeanOfValues(Mechanism):
    ...     config_class, modes = MeanConfig, frozenset({"bidirectional"})
    """

    def enter(mechanism: type[Mechanism]) -> type[Mechanism]:
        MECHANISMS.register(name)(mechanism)
        mechanism.config_class.mechanism = name
        return mechanism

    return enter


def list_mechanisms() -> list[str]:
    """Return the names `patch_model` accepts.

    >>> {"linear", "performer", "softmax"} <= set(list_mechanisms())
    True
    """
    return MECHANISMS.names()
