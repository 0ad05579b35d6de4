"""The operations of csrc/delta_rule: what each is called with, and what it costs."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..linear.types import LEAST_LENGTH
from ..runtime.cpu import Operand, call, flop_formula, operation, size_of

OPERANDS = ("query", "key", "value", "out", "beta", "log_gate")
STATES = {"state": "state", "state_after": "state_after", "kept_states": "checkpoints"}  # fields, and their operands
SIZES = ("batches", "heads", "groups", "length", "key_size", "value_size", "threads")
GRADIENTS = ("d_out", "d_query", "d_key", "d_value", "d_beta", "d_log_gate")
GROUPED = {"query", "out", "d_out", "d_query"}
CHUNK, SEGMENT = 32, 512  # tokens read at a time, and between two checkpoints, as in delta_rule.h


class DeltaArgs(ctypes.Structure):
    """`struct delta_args` of delta_rule.h."""

    _fields_ = (
        *((name, Operand) for name in OPERANDS),
        *((name, ctypes.c_void_p) for name in STATES),
        *((name, ctypes.c_int64) for name in SIZES),
        ("least_length", ctypes.c_float),
    )


class DeltaBackwardArgs(ctypes.Structure):
    """`struct delta_bwd_args` of delta_rule.h."""

    _fields_ = (
        ("forward", DeltaArgs),
        *((name, Operand) for name in GRADIENTS),
        ("d_state", ctypes.c_void_p),
        ("d_before", ctypes.c_void_p),
    )


def _describe(operands: dict[str, Tensor | None]) -> DeltaArgs:
    query: Any = operands["query"]
    value: Any = operands["value"]
    sizes = (*query.shape, value.shape[-1], torch.get_num_threads())
    return DeltaArgs(
        **{name: Operand.of(operands.get(name), name in GROUPED, False) for name in OPERANDS},
        **{field: _place(operands.get(name)) for field, name in STATES.items()},
        **dict(zip(SIZES, sizes, strict=True)),
        least_length=LEAST_LENGTH[torch.float32],
    )


def _place(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def places(length: int) -> int:
    """Return how many checkpoints a sequence has: none before its first tokens."""
    return max(length - 1, 0) // SEGMENT


@operation("out", "state_after", "checkpoints")
def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_gate: Tensor | None, state: Tensor | None,
    out: Tensor, state_after: Tensor, checkpoints: Tensor | None,
) -> None:  # fmt: skip
    """Work through one call of delta_rule_fwd.c.

    Args:
        query: [B, Hkv, G, N, F]. key: [B, Hkv, N, F]. value: [B, Hkv, N, Dv]. beta, log_gate: [B, Hkv, N].
        state, state_after: [B, Hkv, F, Dv], contiguous; state may be None, of zeros. out: [B, Hkv, G, N, Dv].
        checkpoints: [places, B, Hkv, F, Dv], the states before every `SEGMENT` tokens but the first ones; None: they
            are not kept.
    """
    operands = {
        "query": query, "key": key, "value": value, "beta": beta, "log_gate": log_gate, "state": state, "out": out,
        "state_after": state_after, "checkpoints": checkpoints,
    }  # fmt: skip
    call("delta_rule", operands, [("X", places(size_of(query, 3)))], lambda: _describe(operands))


@operation("out", "state_after")
def delta_rule_step(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_gate: Tensor | None, state: Tensor, out: Tensor,
    state_after: Tensor,
) -> None:  # fmt: skip
    """`delta_rule` of one token, as in decoding; arguments as there."""
    operands = {
        "query": query, "key": key, "value": value, "beta": beta, "log_gate": log_gate, "state": state, "out": out,
        "state_after": state_after,
    }  # fmt: skip
    call("delta_rule_step", operands, [("N", 1)], lambda: _describe(operands))


@operation(*GRADIENTS[1:], "d_before")
def delta_rule_backward(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_gate: Tensor | None, state: Tensor | None,
    checkpoints: Tensor, d_out: Tensor, d_state: Tensor | None, d_query: Tensor, d_key: Tensor, d_value: Tensor,
    d_beta: Tensor, d_log_gate: Tensor | None, d_before: Tensor | None,
) -> None:  # fmt: skip
    """Write the gradients of a call of `delta_rule`, each shaped as what it belongs to.

    Args:
        checkpoints: as it left them. d_out, d_state: gradients of the output and of the last state; None for none.
        d_before: of the first state, if there is one. The others as there.
    """
    forward: dict[str, Tensor | None] = {
        "query": query, "key": key, "value": value, "beta": beta, "log_gate": log_gate, "state": state,
        "checkpoints": checkpoints,
    }  # fmt: skip
    gradients = dict(zip(GRADIENTS, (d_out, d_query, d_key, d_value, d_beta, d_log_gate), strict=True))
    states = {"d_state": d_state, "d_before": d_before}

    def describe() -> DeltaBackwardArgs:
        return DeltaBackwardArgs(
            forward=_describe(forward),
            **{name: Operand.of(x, name in GROUPED, False) for name, x in gradients.items()},
            **{name: _place(x) for name, x in states.items()},
        )

    sizes = [("X", places(size_of(query, 3)))]
    call("delta_rule_backward", forward | gradients | states, sizes, describe)


def _products(query: Any, value: Any, of_key: tuple[int, int, int], of_query: tuple[int, int, int]) -> int:
    """FLOPs of chunks: how many products of C F, F Dv and C Dv a key has, and each of its queries."""
    (batch, heads, groups, length, features), width = query, value[-1]
    sizes = CHUNK * features, features * width, CHUNK * width
    each = sum((own + groups * asked) * size for own, asked, size in zip(of_key, of_query, sizes, strict=True))
    return batch * heads * length * each


@flop_formula(delta_rule)
def _flops(query: Any, value: Any, **_: Any) -> int:
    """Pairs of keys and of queries, half of which are multiplied; a state read for both, and written."""
    return _products(query, value, (2, 4, 1), (2, 2, 1))


@flop_formula(delta_rule_step)
def _step_flops(query: Any, value: Any, **_: Any) -> int:
    """A state read for the key and each query, and written."""
    return query[0] * query[1] * (4 + 2 * query[2]) * query[4] * value[-1]


@flop_formula(delta_rule_backward)
def _backward_flops(query: Any, value: Any, **_: Any) -> int:
    """The products of the forward pass without queries, and those of delta_rule_bwd.c."""
    return _products(query, value, (8, 12, 4), (6, 4, 4))
