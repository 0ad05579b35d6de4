"""The contract every mechanism keeps, and the plumbing that keeps most of it for them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..accelerate_hooks import loaded
from ..config import MechanismConfig
from ..errors import UnsupportedModeError
from ..operands import fitting
from ..ops import naive
from ..ops.operations import DEFAULT_BACKEND, NOTHING
from ..ops.precision import admitted
from ..registry import Registry
from ..rope import Rotation
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


class CallOptions(NamedTuple):
    """What a mechanism is told of one call beside its heads. It is not kept on the mechanism: calls may overlap.

    keep_state: whether the state that causal attention comes to is of use to anyone. sink: the layer's own learned
    sinks [H], for mechanisms with `takes_sink`.
    """

    keep_state: bool = True
    sink: Tensor | None = None


PLAIN = CallOptions()
# methods of a mechanism that get the `CallOptions` if they name an argument `call`
HOOKS = (
    "causal_attention", "bidirectional_attention", "cross_state", "cross_attention", "weights", "weights_given",
    "causal_sequences", "bidirectional_sequences", "cross_sequences",
)  # fmt: skip


class Mechanism(nn.Module):
    """Attention of one layer: q [B, H, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv] -> [B, H, Nq, Dv].

    A subclass sets the class attributes, builds its parameters in `__init__` and writes `causal_attention` and
    `bidirectional_attention`, and for mode "cross" `cross_state` and `cross_attention`, which all receive float32 (or
    float64) tensors, unless `takes_half`, with autocast off. It must keep the invariants of `hf_linattn.testing`.
    Any of these methods that names one more argument `call` gets the `CallOptions` of the call.

    Class attributes:
        config_class: dataclass of its options. modes: what it can do, of {"causal", "bidirectional", "cross"}.
        constant_state: whether its decoding state has a size that does not grow with the context.
        subquadratic: whether its cost grows slower than N^2. prepares: whether `prepare` fits anything.
        continuous: whether nearby inputs give nearby outputs; not where rounding may change which keys are chosen.
        averages: whether outputs are weighted means of values (and of zero, with a sink), never beyond their range.
        growth: what 4,096 tokens cost, as a multiple of 2,048.
        position_limit: most tokens of a sequence, or None. any_length: see `recording`. An instance may say these
            eight, and `takes_half`, itself.
        takes_exact: whether `forward` takes the layer's own sliding window, soft cap and dropout as keywords.
        takes_half: whether it takes heads in half precision as they come; else they come in float32.
        takes_sink: whether it takes the layer's own learned sinks; an instance may say so for itself.
        splits: whether some of the heads alone get what they get among all, but for parameters of each head.
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
    splits: ClassVar[bool] = False
    backends: ClassVar[tuple[str, ...]] = ("auto", "torch")
    limit: ExactnessLimit = ExactnessLimit("none stated")
    citation: ClassVar[str] = ""

    reads_call: ClassVar[frozenset[str]] = frozenset()  # those of `HOOKS` that name an argument `call`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks = {name: getattr(cls, name) for name in HOOKS if hasattr(cls, name)}
        cls.reads_call = frozenset(x for x, hook in hooks.items() if "call" in inspect.signature(hook).parameters)

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
        self.backend = DEFAULT_BACKEND  # set by hf_linattn.backends, as are the next two
        self.causal_reader: Any = None  # calls causal_attention for it, in parts
        self.operations = NOTHING  # what long inputs are read by

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        state: Any = None,
        *,
        return_state: bool = True,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the output in the dtype of `value`, and the state after the last key (None if bidirectional).

        Args:
            query, key, value: as above, after position encoding. With Nk > Nq the queries are the last Nq positions,
                except in cross-attention, where each sees all keys; with a state, which has these, they are not read.
            key_padding_mask: [B, Nk], true for real keys; None if all are.
            sequence_ids: [B, Nk], equal inside a packed sequence; None if nothing is packed.
            state: what an earlier call returned, if this one continues it. `OperandError` where these do not fit.
            return_state: whether the state is of use; without it, what is returned in its place means nothing.
            sink: the layer's own learned sinks [H], where `takes_sink` says that these are read.
        """
        key_padding_mask, sequence_ids = fitting(self.layer, query, key, value, key_padding_mask, sequence_ids, state)
        self.count_call()
        require_recordable(self, query, key_padding_mask, sequence_ids)
        call = self.call_options(return_state, sink)
        with loaded(self), torch.autocast(query.device.type, enabled=False):
            query, key, wide_value = admitted(self.takes_half and not self.layer.cross, query, key, value)
            if self.layer.cross:
                if state is None:
                    state = self.run_hook(call, "cross_state", key, wide_value, key_padding_mask)
                output, state = self.run_hook(call, "cross_attention", query, state)
                return output.to(value.dtype), state
            earlier = key.shape[2] - query.shape[2]
            if earlier:  # keys that came without their queries, as from a prefix or another model's cache
                query = torch.cat([query.new_zeros(*query.shape[:2], earlier, query.shape[3]), query], dim=2)
            heads = (query, key, wide_value, key_padding_mask, sequence_ids)
            if self.layer.causal:
                output, state = (self.causal_reader or read_at_once)(self, *heads, state, call)
            else:
                output, state = self.run_hook(call, "bidirectional_attention", *heads), None
            return (output[:, :, earlier:] if earlier else output).to(value.dtype), state

    def call_options(self, return_state: bool, sink: Tensor | None) -> CallOptions:
        """Return what the methods of a call get; `UnsupportedModeError` for a sink that would be left out."""
        if sink is not None and not self.takes_sink:
            raise UnsupportedModeError(
                f"mechanism {self.config.mechanism!r} has no softmax denominator for a sink, got sink"
                f" {tuple(sink.shape)}; leave it out"
            )
        return CallOptions(return_state, sink)

    def run_hook(self, call: CallOptions, name: str, *operands: Any) -> Any:
        """Return what one of `HOOKS` returns, which gets the options of the call if it asks for them."""
        hook = getattr(self, name)
        return hook(*operands, call=call) if name in self.reads_call else hook(*operands)

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
        value: Tensor | None = None, *, sink: Tensor | None = None,
    ) -> Tensor:
        """Return the N x N weights [B, H, N, N] this mechanism implies, in the inputs' precision: for short inputs.

        `value` [B, Hkv, N, Dv] need only be given where they depend on it, which the error without it says. With the
        layer's own learned sinks, `sink` [H], rows sum up to less than one.
        """
        allowed = naive.allowed_pairs(
            query.shape[2], key.shape[2], self.layer.causal, key_padding_mask, sequence_ids, query.device
        )
        call = self.call_options(True, sink)
        if value is None:
            return self.run_hook(call, "weights", query, key, allowed)
        return self.run_hook(call, "weights_given", query, key, value, allowed)

    def weights_given(
        self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, call: CallOptions = PLAIN
    ) -> Tensor:
        """Return `weights`; for mechanisms whose weights depend on the values, too."""
        return self.run_hook(call, "weights", query, key, allowed)

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        """Return normalised weights [B, H, N, N] over the allowed pairs, by the formula itself."""
        raise UnsupportedModeError(f"mechanism {self.config.mechanism!r} has no attention matrix to show")

    @property
    def has_scores(self) -> bool:
        """Whether `scores` exist: every allowed pair then has a weight above zero."""
        return False

    def scores(self, pairs: Pairs) -> Tensor:
        """Return [B, H, C, N] whose softmax over the allowed keys, beside `log_sink`, are the weights, else any."""
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


def read_at_once(mechanism: Mechanism, *operands: Any) -> tuple[Tensor, Any]:
    """Return what `causal_attention` makes of all but the last operand, which is the options of the call."""
    return mechanism.run_hook(operands[-1], "causal_attention", *operands[:-1])


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
