"""Kernel attention with gradients, by the kernels of a backend: the one `autograd.Function` that all of them share.

The backward pass keeps nothing of the size of the pairs: with the values v_j = [v_j, 1], the gradients
g_i = [dL/do_i, -dL/do_i . o_i] and w_i, the sum of the weights of query i,

    dL/dphi(q_i) = 1 / w_i sum_{j <= i} (g_i . v_j) phi(k_j)    dL/dphi(k_j) = sum_{i >= j} (v_j . g_i) phi(q_i) / w_i
    dL/dv_j      = sum_{i >= j} (phi(k_j) . phi(q_i)) g_i / w_i

are sums over earlier or later tokens again, which the kernels form; the gradient of a decay follows from them here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.derivatives import first_order
from ..common.numerics import running_sum
from ..runtime.cpu import dense_rows
from .types import LinearState, log_weight


class Operands(NamedTuple):
    """What kernels read.

    query: [B, Hkv, G, N, F]. key: [B, Hkv, N, F]. value: [B, Hkv, N, Dv]. log_scale, log_decay: [B, Hkv, N] or None,
    of the keys. kv, log_max: a `LinearState`, or None where nothing was read before.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_scale: Tensor | None
    log_decay: Tensor | None
    kv: Tensor | None = None
    log_max: Tensor | None = None


class Sums(NamedTuple):
    """What kernels write.

    output: [B, Hkv, G, N, Dv]. factor: [B, Hkv, G, N], exp(top) / sum of the weights. top: [B, Hkv, G, N], the largest
    log scale that a query saw, None where it was not asked for, or where there are none. kv, log_max: the state after
    the last key. kept: what else the backward pass needs. log: of the weights, where kernels write it.
    """

    output: Tensor
    factor: Tensor
    top: Tensor | None
    kv: Tensor
    log_max: Tensor
    kept: tuple[Tensor | None, ...] = ()
    log: Tensor | None = None

    @property
    def log_weight(self) -> Tensor:
        """The log of what the weights of each query add up to, `LOWEST` where that is nothing."""
        return log_weight(self.factor, self.top) if self.log is None else self.log


class Gradients(NamedTuple):
    """What the backward pass of kernels returns, shaped as what each belongs to.

    scale: of log scales of the keys [B, Hkv, N], whether there were any or not, None if nothing needs it. before: of
    `Operands.kv`. parameters: of what else the kernels read, such as the weights of feature maps.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor | None
    before: Tensor | None
    parameters: tuple[Tensor | None, ...] = ()


class Kernels(NamedTuple):
    """Kernels of a backend, each called with what `attend` gets as `how` and `parameters`.

    forward: called with (how, operands, parameters, output, weighed, keep), returns `Sums`; `weighed` asks for `top`,
        `keep` for what `backward` needs.
    backward: called with (how, operands, parameters, sums, d_output, d_log, d_kv, needed), returns `Gradients`.
        d_log: of the log of the weights, d_kv: of the last state, None for none. needed: which parameters need one.
    """

    forward: Callable[..., Sums]
    backward: Callable[..., Gradients]


def attend(
    kernels: Kernels, how: Any, operands: Operands, parameters: tuple[Tensor | None, ...] = (),
    output: Tensor | None = None, weighed: bool = False, reverse: bool = False,
) -> tuple[Tensor, Tensor | None, LinearState]:  # fmt: skip
    """Return the output [B, Hkv, G, N, Dv], the log of its weights if `weighed`, and the state after the last key.

    Args:
        how: what these kernels need to know besides.
        output: where to write it, if no gradients are needed.
        weighed: whether to return the log of what the weights of each query add up to [B, Hkv, G, N], `LOWEST` where
            that is nothing.
        reverse: whether tokens are read from the last to the first.
    """
    if torch.is_grad_enabled():
        attended, log, *after = _LinearAttention.apply(kernels, how, weighed, reverse, *operands, *parameters)
        return attended, log, LinearState(*after)
    sums = kernels.forward(how, operands, parameters, output, weighed, False)
    return sums.output, sums.log_weight if weighed else None, LinearState(sums.kv, sums.log_max)


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, how: Any, weighed: bool, reverse: bool, *tensors: Any
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        count = len(Operands._fields)
        operands, parameters = Operands(*tensors[:count]), tensors[count:]
        sums = kernels.forward(how, operands, parameters, None, True, True)
        ctx.save_for_backward(*tensors, *sums[: sums._fields.index("kept")], *sums.kept)
        ctx.kernels, ctx.how, ctx.reverse, ctx.count = kernels, how, reverse, len(parameters)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sums.log_max)
        log = sums.log_weight if weighed else None
        return sums.output.to(operands.value.dtype), log, sums.kv, sums.log_max

    @staticmethod
    @first_order()
    def backward(
        ctx: Any, d_output: Tensor | None, d_log: Tensor | None, d_kv: Tensor | None, _: Any
    ) -> tuple[Tensor | None, ...]:
        count = len(Operands._fields)
        saved = ctx.saved_tensors  # once: what is recomputed for it is given away
        operands, saved = Operands(*saved[:count]), saved[count:]
        parameters, saved = saved[: ctx.count], saved[ctx.count :]
        known = Sums._fields.index("kept")
        sums = Sums(*saved[:known])._replace(kept=saved[known:])
        d_output = torch.zeros_like(sums.output, dtype=operands.value.dtype) if d_output is None else d_output
        needed = ctx.needs_input_grad[4 + count :]
        d_kv = None if d_kv is None else d_kv.contiguous()
        made = ctx.kernels.backward(ctx.how, operands, parameters, sums, dense_rows(d_output), d_log, d_kv, needed)
        d_decay = None
        if ctx.needs_input_grad[4 + operands._fields.index("log_decay")]:
            d_decay = _decay_gradient(made.scale, d_log, sums.factor, sums.kv, d_kv, ctx.reverse)
        d_scale = None if operands.log_scale is None else made.scale
        heads = made.query, made.key, made.value, d_scale, d_decay, made.before, None
        return None, None, None, None, *heads, *made.parameters


def _decay_gradient(
    d_scale: Any, d_log: Tensor | None, factor: Tensor, kv_after: Tensor, d_kv: Tensor | None, reverse: bool
) -> Tensor:
    """Return the gradient of log_decay [B, Hkv, N] from those of the keys' log scales, of the log and of the state.

    A decay multiplies all weights of earlier keys in later queries, whose gradients add up to that of the query's log,
    and in the last state; without those of the keys that come no earlier. Those of a packed sequence that leaves no
    state add up to zero, so that the ones before it do not notice.
    """
    gradient = d_scale.double()
    if d_log is not None:
        gradient = gradient - torch.where(factor > 0, d_log, 0.0).double().sum(2)
    later = -(running_sum(gradient) if reverse else running_sum(gradient.flip(-1)).flip(-1))
    of_state = 0.0 if d_kv is None else (kv_after * d_kv).double().sum((-1, -2))[..., None]
    return (later + of_state).to(d_scale.dtype)


def join(output: Tensor, log: Tensor, other: Tensor, other_log: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention to both sets of keys and its log, from that to each; the last queries may lack the other."""
    last = other.shape[3]
    own = log[..., :last]
    share = torch.sigmoid(other_log - own)[..., None].to(output.dtype)
    joint = torch.lerp(output[:, :, :, :last], other.to(output.dtype), share)
    logs = torch.cat([torch.logaddexp(own, other_log), log[..., last:]], dim=3)
    return torch.cat([joint, output[:, :, :, last:]], dim=3), logs
