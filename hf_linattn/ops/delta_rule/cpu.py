"""The gated delta rule by csrc/delta_rule, chunk by chunk through the caches of a CPU.

The backward pass keeps the features, the gates, the state that was given, if any, and those before every `SEGMENT`
tokens but the first ones, and makes all else again. Of feature maps the C gets what they make, for some tokens at a
time.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ..common.derivatives import first_order
from ..common.numerics import bounded
from ..linear.cpu import few_sequences
from ..runtime.cpu import dense_rows, empty_like, empty_output, refusal
from .cpu_kernels import delta_rule, delta_rule_backward, delta_rule_step, places
from .types import DeltaCall, FeatureMap

MAPPED_SIZE = 512  # tokens whose features are made at a time, so that they stay in the cache until the C reads them


def unsupported(call: DeltaCall) -> str | None:
    """Return why the C cannot compute a call."""
    given = () if call.state is None else (call.state,)
    if reason := refusal(*call[:3], call.beta, *given):
        return reason
    if call.is_step:
        return None if call.policy.inference else "one token with gradients or in training"
    return few_sequences(call.key)


def run(call: DeltaCall) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, N, Dv] and the state after the last key."""
    length, mapped = call.key.shape[2], call.query_map is not None or call.key_map is not None
    size = MAPPED_SIZE if mapped else max(length, 1)
    whole = call.grouped_query, call.key, call.value, call.beta
    queries, *rest = whole[0].split(size, 3), *(x.split(size, 2) for x in whole[1:])
    gates = itertools.repeat(None) if call.log_gate is None else call.log_gate.split(size, 2)
    memory: Any = None if call.state is None else call.state.contiguous()
    outputs = []
    output = None if torch.is_grad_enabled() else empty_output(whole[0], call.value)
    rows = itertools.repeat(None) if output is None else output.split(size, 3)
    for query, key, value, beta, log_gate, room in zip(queries, *rest, gates, rows, strict=False):
        query, key = _mapped(query, call.query_map), _mapped(key, call.key_map)
        query, key, value = (dense_rows(x) for x in (query, key, value))
        memory = call.before(key) if call.is_step and memory is None else memory
        if room is None:
            part, memory = _DeltaRule.apply(query, key, value, beta, log_gate, memory)
        else:
            part, memory = _forward(query, key, value, beta, log_gate, memory, room, call.is_step)
        outputs.append(part)
    if output is None:
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)
    return output.flatten(1, 2), memory


def _mapped(x: Tensor, feature_map: FeatureMap | None) -> Tensor:
    return x if feature_map is None else feature_map(bounded(x))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_gate: Tensor | None, memory: Tensor | None,
    output: Tensor, step: bool = False, checkpoints: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write the output, and return it with the state after the last key."""
    after = value.new_empty(*key.shape[:2], key.shape[3], value.shape[3])
    operands = query, key, value, beta, log_gate, memory, output
    if step:
        delta_rule_step(*operands, after)
    else:
        delta_rule(*operands, after, checkpoints)
    return output, after


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_gate: Tensor | None,
        memory: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        checkpoints = value.new_empty(places(key.shape[2]), *key.shape[:2], key.shape[3], value.shape[3])
        room = empty_output(query, value)
        output = _forward(query, key, value, beta, log_gate, memory, room, checkpoints=checkpoints)
        ctx.save_for_backward(query, key, value, beta, log_gate, memory, checkpoints)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    @first_order()
    def backward(ctx: Any, d_output: Tensor | None, d_memory: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, beta, log_gate, memory, _ = saved = ctx.saved_tensors
        d_output = value.new_zeros(*query.shape[:4], value.shape[-1]) if d_output is None else dense_rows(d_output)
        d_memory = None if d_memory is None else d_memory.contiguous()
        heads = [empty_like(x) for x in (query, key, value)]
        d_beta = torch.empty_like(beta, memory_format=torch.contiguous_format)
        d_gate = None if log_gate is None else torch.empty_like(log_gate, memory_format=torch.contiguous_format)
        d_before = None if memory is None else torch.empty_like(memory)
        delta_rule_backward(*saved, d_output, d_memory, *heads, d_beta, d_gate, d_before)
        return *heads, d_beta, d_gate, d_before
