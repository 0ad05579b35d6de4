"""The contract every mechanism keeps; `forward.py` has what is done around each of their calls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import MechanismConfig
from ..errors import UnsupportedModeError
from ..ops import reference
from ..ops.dispatch import DEFAULT_BACKEND
from ..registry import MECHANISMS
from .forward import Forward, admitted, fitting_hidden, loaded, without_autocast
from .inputs import PLAIN, AttentionLayer, CallOptions, Pairs


class Mechanism(Forward):
    """Attention of one layer: q [B, H, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv] -> [B, H, Nq, Dv].

    A subclass sets the class attributes of `Capabilities`, builds its parameters in `__init__` and writes
    `causal_attention` and `bidirectional_attention`, and for mode "cross" `cross_state` and `cross_attention`, which
    all receive float32 (or float64) tensors, unless `takes_half`, with autocast off. It must keep the invariants of
    `hf_linattn.testing`. Any of these methods that names one more argument `call` gets the `CallOptions` of the call.

    Args:
        config: the options.
        layer: what is known of the layer.

    Raises:
        UnsupportedModeError: the mechanism has no form that the layer needs.
    """

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
        self.backend = DEFAULT_BACKEND  # set by hf_linattn.backends

    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None,
        state: Any,
    ) -> tuple[Tensor, Any]:
        """Return output and state for Nq = Nk positions that follow `state`."""
        raise self.unwritten("causal_attention")

    def bidirectional_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None
    ) -> Tensor:
        """Return the output when every query sees every key of its sequence."""
        raise self.unwritten("bidirectional_attention")

    def cross_state(self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Any:
        """Return what is kept of an encoder's tokens for all queries to come: a named tuple, batch first."""
        raise self.unwritten("cross_state")

    def cross_attention(self, query: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the output of queries that follow those that `state` has answered, and the state after them."""
        raise self.unwritten("cross_attention")

    def unwritten(self, method: str) -> NotImplementedError:
        """Return the error for a method that a layer needs and that its mechanism does not have."""
        return NotImplementedError(
            f"mechanism {self.config.mechanism!r}: {type(self).__name__} has no method {method}, which layer"
            f" {self.layer.index} calls; write it, or leave {self.layer.mode!r} out of its `modes`"
        )

    def fixed_state(self, state: Any, room: int) -> Any:
        """Return the state as a static cache keeps it: in its next steps no tensor of it has another size or place.

        The methods above then may write into it and return it. state: what these methods return, or a fixed state
        already. room: most tokens that the cache was made for.
        """
        return state

    def owned_state(self, state: Any) -> Any:
        """Return the state as a cache that is not static has it: alone, so that the next step may write into it."""
        return state

    def attention_matrix(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None = None, sequence_ids: Tensor | None = None,
        value: Tensor | None = None, *, sink: Tensor | None = None, hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Return the N x N weights [B, H, N, N] this mechanism implies, in the queries' dtype: for short inputs.

        Half precision is computed in float32, as in `forward`. `value` [B, Hkv, N, Dv] need only be given where the
        weights depend on it, which the error without it says. With the layer's own learned sinks, `sink` [H], rows sum
        up to less than one. `hidden_states` as in `forward`.
        """
        allowed = reference.allowed_pairs(
            query.shape[2], key.shape[2], self.layer.causal, key_padding_mask, sequence_ids, query.device
        )
        call = self.call_options(True, sink, fitting_hidden(self, query, key, hidden_states))
        heads = admitted(False, query, key, *(() if value is None else (value,)))
        with loaded(self), without_autocast(self, query.device):
            matrix: Tensor = self.run_hook(call, "weights" if value is None else "weights_given", *heads, allowed)
        return matrix.to(query.dtype)

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

    def log_sink(
        self, like: Tensor, given: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """Return the score [H] of the sink in every denominator, on the device of `like`; None without one.

        given: the layer's own. dtype: None for that of `like`. -inf where only other heads have one."""
        return None

    def join(self, earlier: Sequence[Mechanism]) -> None:
        """Called once the mechanisms of all layers are made, with those of the layers before: to share parameters."""

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> None:
        """Called by `calibrate` for each batch before parameters are fitted to it: to fit what gradients cannot.

        An override with a parameter `call` gets the `CallOptions`.
        """

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
