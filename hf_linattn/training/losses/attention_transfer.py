"""Attention transfer: every mechanism learns what softmax does in its layer, while the model runs on softmax.

Layers do not wait for each other: each gets the queries, keys and values of the original model and hands on softmax's
output. So each has a loss of its own, whose gradient is taken as soon as the layer has run: memory is one layer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_linattn import get_mechanisms
from hf_linattn.architecture import output_projection, root_model
from hf_linattn.attention_call import AttentionCall, intercept_attention
from hf_linattn.calibration import own_parameters, squared_errors
from hf_linattn.chunked_sums import Prepared
from hf_linattn.config import require
from hf_linattn.errors import OptionError, UnsupportedModelError
from hf_linattn.inference import accepted
from hf_linattn.mechanisms import Mechanism, Pairs
from hf_linattn.mechanisms.forward import gather_parts
from hf_linattn.mechanisms.softmax import SoftmaxMechanism
from hf_linattn.ops.common.exact_softmax import in_window
from hf_linattn.ops.reference import repeat_heads
from hf_linattn.training.losses.loss_module import LossModule

BLOCK = 128  # queries whose attention weights are held at a time


class Transfer(LossModule):
    """The mechanisms of a patched model as one module, whose forward returns how far they are from softmax attention.

    It holds no parameters but the mechanisms' own; the model beside it must be on their device and stays in eval mode.
    The gradient is taken inside forward and handed out by backward, so that everything built on autograd (Trainer,
    accumulation, scaling, DDP) works as usual.

    Args:
        model: a patched model, of which at least one mechanism has parameters of its own.

    Raises:
        PatchError: the model is not patched.
        OptionError: nothing to train.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        mechanisms = get_mechanisms(model)
        owned = own_parameters(mechanisms)
        if not owned:
            names = sorted({mechanism.config.mechanism for mechanism in mechanisms.values()})
            raise OptionError(
                f"mechanism {'+'.join(names)} has no parameters of its own that attention transfer could train; leave"
                " it out, or give the mechanism some, as with decay='learned'"
            )
        self.mechanisms = nn.ModuleList(mechanisms[path] for path in owned)
        self.requires_grad_(True)
        self._model = (model.eval(),)

    def measure(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the `loss`, and what it is made of."""
        if "ds_id" in self.__dict__:  # ZeRO-3: a gradient is as large as the gathered weight
            gather_parts(self, self.mechanisms.modules())
        learning = torch.is_grad_enabled()
        gradients = {p: torch.zeros_like(p) for p in self.parameters() if learning and p.requires_grad}
        with torch.no_grad():
            found = self.compare(inputs, gradients)
        if learning:
            found["loss"] = Prepared.apply(found["loss"], list(gradients.values()), *gradients)
        return found

    def compare(self, inputs: dict[str, Tensor], gradients: dict[nn.Parameter, Tensor]) -> dict[str, Tensor]:
        """Run the model on softmax, add the gradient of the loss to `gradients`, if there are any, and return both."""
        raise NotImplementedError

    def run_backbone(self, inputs: dict[str, Tensor]) -> None:
        """Run the model but for its head: predictions are not looked at."""
        backbone = root_model(self._model[0]).base_model
        backbone(**inputs, **accepted(backbone, use_cache=False))


class AttentionTransfer(Transfer):
    """Every layer for itself: what its mechanism gives for the original's queries, keys and values, beside softmax.

    The mean over the layers, and over each time that one runs in a forward (ALBERT has one for all), of

        output_weight mean_b sum_i |o_i - o'_i|^2 / sum_i |o'_i|^2
        + weights_weight mean_i sum_j a'_ij log(a'_ij / a_ij),

    o, a: outputs and attention weights of the mechanism, o', a': of softmax, b: rows, i: real tokens. The second term,
    in nats per query, is the cross-entropy of both less the entropy of a'; it is computed for `BLOCK` queries at a
    time and only for mechanisms that have `scores`. If `projected`, outputs are compared behind the layer's output
    projection.

    Raises:
        PatchError: the model is not patched.
        OptionError: nothing to train, a negative weight, or both zero.
    """

    def __init__(
        self, model: nn.Module, output_weight: float = 1.0, weights_weight: float = 1.0, projected: bool = False
    ):
        super().__init__(model)
        for name, weight in {"output_weight": output_weight, "weights_weight": weights_weight}.items():
            require(name, weight, weight >= 0, "at least 0")
        some = bool(output_weight or weights_weight)
        require("output_weight", output_weight, some, "above 0 if weights_weight is 0")
        root = root_model(model)
        self._layers = {
            path: (mechanism, output_projection(root, path)[1] if projected else None)
            for path, mechanism in get_mechanisms(model).items()
            if not isinstance(mechanism, SoftmaxMechanism)
        }
        self._weights = (output_weight, weights_weight)

    def compare(self, inputs: dict[str, Tensor], gradients: dict[nn.Parameter, Tensor]) -> dict[str, Tensor]:
        """Return the `loss`, and `output_errors` and `divergences` of all layers that ran [L]; text runs no tower."""
        layers = {
            path: _Layer(mechanism, projection, self._weights, gradients, len(self._layers))
            for path, (mechanism, projection) in self._layers.items()
        }
        with intercept_attention(get_mechanisms(self._model[0]), layers):
            self.run_backbone(inputs)
        errors, error = over_runs([layer.errors for layer in layers.values()])
        divergences, divergence = over_runs([layer.divergences for layer in layers.values()])
        make_mean(gradients, len(layers), sum(len(layer.errors) for layer in layers.values()))
        loss = self._weights[0] * error + self._weights[1] * divergence
        return {"loss": loss, "output_errors": errors, "divergences": divergences}


@dataclass
class _Layer:
    """Answers for one layer as softmax does, and adds the gradient of its loss to the others' on the way."""

    mechanism: Mechanism
    projection: nn.Module | None
    weights: tuple[float, float]
    gradients: dict[nn.Parameter, Tensor]
    count: int
    errors: list[Tensor] = field(default_factory=list)  # one for each time that the layer runs
    divergences: list[Tensor] = field(default_factory=list)

    def __call__(self, call: AttentionCall) -> Tensor:
        target = call.run_softmax(self.mechanism)
        with torch.set_grad_enabled(bool(self.gradients)):
            error, divergence = self._compare(call, target)
            loss = (self.weights[0] * error + self.weights[1] * divergence) / self.count
        add_gradients(loss, self.gradients)
        self.errors.append(error.detach())
        self.divergences.append(divergence.detach())
        return target

    def _compare(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, Tensor]:
        error = divergence = target.new_zeros((), dtype=torch.promote_types(target.dtype, torch.float32))
        if self.weights[0]:
            got, want = (_projected(x, self.projection) for x in (call.run(self.mechanism), target))
            errors, sizes = squared_errors(got, want, call.real)
            error = (errors / sizes).mean()  # of rows, so that processes and accumulated batches add up
        if self.weights[1] and self.mechanism.has_scores:
            divergence = attention_divergence(self.mechanism, call)
        return error, divergence


def add_gradients(loss: Tensor, gradients: dict[nn.Parameter, Tensor]) -> None:
    """Add the gradient of a part of the loss to those of the others; nothing if nothing is to be learnt."""
    if not loss.requires_grad:
        return
    own = list(gradients)
    for parameter, gradient in zip(own, torch.autograd.grad(loss, own, allow_unused=True), strict=True):
        if gradient is not None:
            gradients[parameter] += gradient


def over_runs(found: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Return what was found of each part that ran [L], the mean over its runs, and the mean over all runs."""
    if not any(found):
        raise UnsupportedModelError(
            "no converted layer ran in a forward of the training texts, from which it would learn; convert layers that"
            " read text (layers=), or leave transfer_tokens out"
        )
    return torch.stack([torch.stack(runs).mean() for runs in found if runs]), torch.stack([*chain(*found)]).mean()


def make_mean(gradients: dict[nn.Parameter, Tensor], parts: int, runs: int) -> None:
    """Make gradients of a sum over runs, divided by the parts that ran, those of the mean over the runs."""
    if runs != parts:
        for gradient in gradients.values():
            gradient.mul_(parts / runs)


def _projected(heads: Tensor, projection: nn.Module | None) -> Tensor:
    """Return [B, 1, N, width] behind the output projection without its bias; the heads themselves without one."""
    if projection is None:
        return heads
    rows = heads.transpose(1, 2).flatten(2)
    return (projection(rows) - projection(torch.zeros_like(rows[:1, :1])))[:, None]


def attention_divergence(mechanism: Mechanism, call: AttentionCall, block_size: int = BLOCK) -> Tensor:
    """Return mean_i sum_j a'_ij log(a'_ij / a_ij) over real tokens and heads, in nats: softmax's weights are a'.

    Weights of `block_size` queries are held at a time, also for the backward pass, which computes them anew.
    """
    total, count = call.query.new_zeros((), dtype=torch.float32), 0
    for pairs in call.pairs(mechanism.layer.causal, block_size):
        total = total + checkpoint(_divergence, mechanism, call.exact, pairs, use_reentrant=False)
        count += int(pairs.real.expand(len(call.query), -1, -1, -1).sum())
    return total / (count * call.query.shape[1])


def _with_column(scores: Tensor, sink: Tensor) -> Tensor:
    """Return scores [B, H, C, N + 1] with a sink [H] behind them."""
    return torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)


def _divergence(mechanism: Mechanism, exact: Mapping[str, Any], pairs: Pairs) -> Tensor:
    """Sum the divergences of some queries."""
    lowest, allowed = torch.finfo(pairs.query.dtype).min, pairs.allowed
    wanted = pairs.query @ repeat_heads(pairs.key, pairs.query).transpose(-1, -2) * mechanism.layer.scaling
    if (cap := exact["softcap"]) is not None:
        wanted = cap * torch.tanh(wanted / cap)
    visible = allowed
    if (window := exact["sliding_window"]) is not None:
        visible = allowed & in_window(allowed.shape[2], allowed.shape[3], window, pairs.first, allowed.device)
    got, wanted = mechanism.scores(pairs).masked_fill(~allowed, lowest), wanted.masked_fill(~visible, lowest)
    sink, target = mechanism.log_sink(wanted, exact["sink"]), exact["sink"]
    if sink is not None:  # one more key; where the mechanism has none, keys are compared among themselves
        sink = sink.clamp(min=lowest)
        target = torch.full_like(sink, lowest) if target is None else target.to(sink).where(sink > lowest, lowest)
        got, wanted = (_with_column(x, score) for x, score in ((got, sink), (wanted, target)))
        visible = F.pad(visible, (0, 1), value=True)
    wanted, got = wanted.log_softmax(-1), got.log_softmax(-1)
    return (wanted.exp() * (wanted - got).masked_fill(~(visible & pairs.real), 0.0)).sum()
