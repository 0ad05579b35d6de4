"""Fitting what is new in a patched model to the attention it replaces: seconds, a few batches, no recipe."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from .architecture import root_model
from .config import require_count
from .errors import OptionError
from .lowering import lower
from .mechanisms import Mechanism
from .observation import AttentionCall, observed
from .patching import get_mechanisms
from .running import accepted, evaluation_mode, without_labels

logger = logging.getLogger(__name__)


def calibrate(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], *, steps: int = 20, progress: bool = False
) -> dict[str, list[float]]:
    """Fit each mechanism's own parameters to the softmax attention of its layer, and nothing else in the model.

    In each layer, for each batch, `steps` iterations of L-BFGS lower

        sum_i |o_i - o'_i|^2 / sum_i |o'_i|^2,   o: the mechanism's output, o': softmax attention's, i: real tokens

    on the queries, keys and values that the original model makes of the batch: every layer hands on o', so layers do
    not wait for each other, and no gradient runs through the model. Memory is that of one layer. Before that, and
    without parameters instead of it, a mechanism fits what has no gradient, such as a codebook, in its own way
    (`Mechanism.prepare`). A layer for which a step comes to what is not finite goes back to its last finite point; a
    warning names it and the batch.

    Args:
        model: a patched model.
        batches: what the model takes, such as `{"input_ids": ..., "attention_mask": ...}`; labels are ignored. A dozen
            batches of a few thousand tokens, of the text that the model is for.
        steps: L-BFGS iterations per layer and batch.
        progress: whether to show a progress bar over the batches.

    Returns:
        Path of the attention module -> the error above for each batch, before the layer was fitted to it: unseen text.
        Layers whose mechanism has nothing to fit are left out.

    Raises:
        PatchError: the model is not patched.
        OptionError: no batches, steps below 1, a layer whose error before its fit to a batch is not finite.
        After any of them, or another error, all parameters and buffers are as they were.

    >>> import torch, hf_linattn
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
    >>> model = hf_linattn.patch_model(model, "hedgehog")
    >>> errors = hf_linattn.calibrate(model, [{"input_ids": torch.randint(50, (2, 32))} for _ in range(3)], steps=5)
    >>> list(errors)
    ['transformer.h.0.attn']
    """
    require_count("steps", steps)
    mechanisms = get_mechanisms(model)
    fitted = what_is_fitted(mechanisms)
    fits = {path: _Fit(mechanisms[path], parameters, steps) for path, parameters in fitted.items()}
    parameters = [parameter for several in fitted.values() for parameter in several]
    tensors = [*parameters, *(buffer for path in fitted for buffer in mechanisms[path].buffers())]
    count, backbone = 0, root_model(model).base_model
    with ExitStack() as undo:
        undo.callback(_write, tensors, [tensor.detach().clone() for tensor in tensors])
        with evaluation_mode(model), _trainable(parameters), observed(mechanisms, fits), torch.no_grad():
            for count, batch in enumerate(tqdm(batches, desc="calibrate", disable=not progress), start=1):  # noqa: B007
                # predictions are not looked at
                backbone(**without_labels(batch), **accepted(backbone, use_cache=False))
        if not count:
            raise OptionError("batches must hold at least one batch, got none")
        undo.pop_all()
    return {path: fit.errors for path, fit in fits.items()}


class _Fit:
    """Fits one mechanism to every call of its layer, and answers as softmax does."""

    def __init__(self, mechanism: Mechanism, parameters: list[nn.Parameter], steps: int):
        self.mechanism, self.parameters, self.steps = mechanism, parameters, steps
        self.errors: list[float] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        target = call.by_softmax(self.mechanism)

        def measure() -> Tensor:
            errors, sizes = squared_errors(call.by(self.mechanism), target, call.real)
            return errors.sum() / sizes.sum()

        error = float(measure())
        if not math.isfinite(error):
            raise OptionError(
                f"layer {self.mechanism.layer.index} cannot be fitted to batch {len(self.errors) + 1}, of which its"
                f" error is {error}; leave out inputs that are extreme or not finite"
            )
        self.mechanism.prepare(*call[:4])
        if self.parameters:
            self._lower(measure)
        self.errors.append(error)
        return target

    def _lower(self, measure: Callable[[], Tensor]) -> None:
        """Lower an error by L-BFGS, as far as it is finite."""
        if not lower(self.parameters, measure, self.steps):
            logger.warning(
                "calibrate: in the fit of layer %d to batch %d a trial step was not finite; the layer is back at its"
                " last finite point, and the other layers keep their fits",
                self.mechanism.layer.index, len(self.errors) + 1,
            )  # fmt: skip


def squared_errors(output: Tensor, target: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return sum |output - target|^2 and sum |target|^2 over each row's real tokens [B], in float32 or wider.

    Both are [B, H, N, Dv]. real: [B, N], which tokens these are; None for all.
    """
    compute = torch.promote_types(target.dtype, torch.float32)
    output, target = output.to(compute), target.to(compute)
    if real is not None:
        output, target = (x * real[:, None, :, None] for x in (output, target))
    tiny = torch.finfo(compute).tiny
    return (output - target).square().sum((1, 2, 3)), target.square().sum((1, 2, 3)).clamp(min=tiny)


def own_parameters(mechanisms: Mapping[str, Mechanism]) -> dict[str, list[nn.Parameter]]:
    """Return path -> the parameters of its mechanism that no mechanism before has; none that has none is listed."""
    known: set[int] = set()
    owned: dict[str, list[nn.Parameter]] = {}
    for path, mechanism in mechanisms.items():
        parameters = [p for p in mechanism.parameters() if id(p) not in known]
        known.update(map(id, parameters))
        if parameters:
            owned[path] = parameters
    return owned


def what_is_fitted(mechanisms: Mapping[str, Mechanism]) -> dict[str, list[nn.Parameter]]:
    """Return path -> own parameters of each mechanism that `calibrate` fits: none where it only prepares itself."""
    owned = own_parameters(mechanisms)
    fitted: dict[str, list[nn.Parameter]] = {}
    for path, mechanism in mechanisms.items():
        wanted = set(mechanism.fitted_parameters())
        parameters = [parameter for parameter in owned.get(path, []) if parameter in wanted]
        if parameters or mechanism.prepares:
            fitted[path] = parameters
    return fitted


@torch.no_grad()
def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


@contextmanager
def _trainable(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """In float32 or wider and with gradients of their own for a while; flag, gradient and dtype come back."""
    before = [(p.requires_grad, p.grad, p.dtype) for p in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
            parameter.grad = None
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        yield
    finally:
        for parameter, (wanted, gradient, dtype) in zip(parameters, before, strict=True):
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(wanted)
            parameter.grad = gradient
