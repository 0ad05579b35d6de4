"""What hybrid attention is called with, whatever computes it: its weights, its state, the call itself."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..common.precision import accum_dtype, wide
from ..dispatch import PYTORCH, Policy
from ..linear.types import CHUNK_SIZE, FeatureMap

ERROR_BITS = 12  # to which recall errors are compared, as in csrc/hybrid/hard_keys.c
GATE_GAIN = 10.0  # so that the usual learning rates open a gate in a few hundred steps
GATE_RANGE = (-1.5, 0.7)  # where a gate is all but shut and all but open: at 0 or 1 it would have no gradient


def gate_logit(far_gate: Tensor) -> Tensor:
    """Return GATE_GAIN a with a held in GATE_RANGE; beyond it the gradient is that at its end.

    The sigmoid of it is how much a head lets in of what lies beyond its window.
    """
    return GATE_GAIN * (far_gate.detach().clamp(*GATE_RANGE) + (far_gate - far_gate.detach()))


class HybridWeights(NamedTuple):
    """What decides the weight of a pair, see `ops.hybrid`.

    log_mix: [H], g there, as it is stored. decay_rate: [Hkv], r there; None is no decay. query_map sees
    [B, Hkv, G, N, D] and key_map [B, Hkv, N, D]; their log scales count. window_log [H]: the exact weights of a query
    are divided by their largest and multiplied by exp(window_log); None leaves them as they are. sink: [H], the score
    of one more exact weight, of no value (`ops.common.sink_logit`). far_gate: a [H], as it is stored, where c =
    sigmoid(`gate_logit`), the `gate`, says how much of the output is that of all weights, as against that of the exact
    ones alone; None is all of it. num_hard_keys: M, see `hard_keys`. delta_rule: whether the state is one by the delta
    rule; `memory.DeltaMemory` says what the maps then make. With either the window counts in `blocks`.
    relative_error: whether keys are ranked by |v - r| / |v|, and not by |v - r|.
    """

    window_size: int
    num_sinks: int
    scaling: float
    query_map: FeatureMap
    key_map: FeatureMap
    log_mix: Tensor
    decay_rate: Tensor | None = None
    window_log: Tensor | None = None
    sink: Tensor | None = None
    far_gate: Tensor | None = None
    num_hard_keys: int = 0
    delta_rule: bool = False
    relative_error: bool = True

    @property
    def blocks(self) -> bool:
        """Whether keys leave the window in blocks of `CHUNK_SIZE`, which `hard_keys` computes."""
        return self.num_hard_keys > 0 or self.delta_rule

    @property
    def blocks_back(self) -> int:
        """How many blocks before a query's own its window has, if it counts in `blocks`."""
        return -(-self.reach // CHUNK_SIZE)

    @property
    def kept(self) -> int:
        """How many of the last tokens are remembered."""
        return CHUNK_SIZE * (self.blocks_back + 1) if self.blocks else self.reach

    @property
    def gate(self) -> Tensor:
        """c [H], in [0, 1], in at least float32, where there is a `far_gate`."""
        return torch.sigmoid(gate_logit(wide(cast(Tensor, self.far_gate))))

    def gate_of(self, key: Tensor) -> Tensor | None:
        """`gate` as [Hkv, G], for keys [B, Hkv, N, D]; None where there is no `far_gate`."""
        return None if self.far_gate is None else self.gate.view(key.shape[1], -1)

    @property
    def reach(self) -> int:
        """How far the window goes beyond the query itself, to one side."""
        return self.window_size - 1

    def beside(self, key: Tensor) -> HybridWeights:
        """These, with g in the dtype of sums over such keys."""
        return self._replace(log_mix=self.log_mix.to(accum_dtype(key)))


class HybridState(NamedTuple):
    """All that is remembered; constant size, per key/value head.

    Tokens are kept in the dtype in which they came, sums in float32 (float64 for float64 inputs).

    ring_key, ring_value: [B, Hkv, window_size - 1, D or Dv], the last tokens, the newest last; zero before the first.
    sink_key, sink_value: [B, Hkv, num_sinks, D or Dv]. kv [B, Hkv, F, Dv + 1] and log_max [B, Hkv]: the sums over keys
    that have left the window, as in `LinearState`. length: [B], tokens read.
    """

    ring_key: Tensor
    ring_value: Tensor
    sink_key: Tensor
    sink_value: Tensor
    kv: Tensor
    log_max: Tensor
    length: Tensor


class HardKeyState(NamedTuple):
    """`HybridState` where the window counts in blocks of C, and the hard keys, each head's in the order of the row.

    ring_key, ring_value: [B, Hkv, C (blocks_back + 1), D or Dv]. kv: by the delta rule [B, Hkv, F, Dv], log_max then
    zero. hard_key, hard_value: [B, Hkv, M, D or Dv], in the dtype in which they came. hard_position: [B, Hkv, M], -1
    where there is none, in front.
    """

    ring_key: Tensor
    ring_value: Tensor
    sink_key: Tensor
    sink_value: Tensor
    kv: Tensor
    log_max: Tensor
    length: Tensor
    hard_key: Tensor
    hard_value: Tensor
    hard_position: Tensor


class HybridCall(NamedTuple):
    """One call of hybrid attention, as `interface.causal_hybrid_attention` describes it.

    causal: whether a query sees no later key; the state after it is then always returned. starts: [B], the places
    where rows of `lengths` tokens begin, which only kernels of a prompt read, and not in `blocks`; None is place 0.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weights: HybridWeights
    lengths: Tensor | None = None
    state: Any = None  # a `HybridState`, or a `HardKeyState` where the window counts in blocks
    causal: bool = True
    chunk_size: int = CHUNK_SIZE
    policy: Policy = PYTORCH
    starts: Tensor | None = None


def in_blocks(call: HybridCall) -> str | None:
    """Return why only PyTorch's operations compute a call, None if others can."""
    if call.weights.num_hard_keys:
        return "hard keys"
    return "a state by the delta rule" if call.weights.delta_rule else None


def window_alone(call: HybridCall) -> str | None:
    """Return why rows from their start cannot be made of far keys and a window on top of them, None if they can."""
    weights, length = call.weights, call.key.shape[2]
    if weights.window_log is not None:
        return "window_scale='maximum'"
    beyond = length > weights.window_size + weights.num_sinks and weights.window_size >= weights.num_sinks
    return None if beyond else "no keys beyond the window"
