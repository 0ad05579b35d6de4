"""Hybrid attention by Triton: a prompt, one token as in decoding, and what has gradients, as `fused` has it."""

from __future__ import annotations

from torch import Tensor

from ..block_softmax.triton import TRITON_BLOCKS, no_blocks
from ..linear.triton import SUMS, own_maps
from ..linear.triton_features import no_step
from ..linear.types import specs_of
from ..runtime.triton import no_kernels
from . import fused, triton_prompt
from .fused import Parts
from .triton_decode import step_attention
from .types import HybridCall, HybridState, in_blocks, window_alone

PARTS = Parts(TRITON_BLOCKS, SUMS, own_maps)


def unsupported(call: HybridCall) -> str | None:
    """Return why there are no kernels for a call."""
    if reason := in_blocks(call):
        return reason
    if call.state is None:
        reason = no_blocks(*call[:3])
        return reason if reason or triton_prompt.suits(call) else _not_in_parts(call)
    if call.key.shape[2] > 1:
        return "several tokens after a state"
    if not call.policy.inference:
        return "one token with gradients or in training"
    if reason := no_kernels(call.key):
        return reason
    return no_step(call.weights.query_map, call.weights.key_map)


def _not_in_parts(call: HybridCall) -> str | None:
    """Return why a prompt cannot be made of `PARTS`."""
    return "padded rows" if call.causal and call.lengths is not None else window_alone(call)


def run(call: HybridCall) -> tuple[Tensor, HybridState | None]:
    """Return the output [B, H, N, Dv], and the state after a causal call."""
    if call.state is None:
        return triton_prompt.attend(call) if triton_prompt.suits(call) else fused.attend(PARTS, call)
    maps = specs_of(call.weights.query_map, call.weights.key_map)
    output, after = step_attention(call.query, call.key, call.value, call.weights, maps, call.state, call.lengths)
    return output, HybridState(*after)
