"""Fitting what is new in a patched model to the attention it replaces: seconds, a few batches, no recipe."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

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

HELD_BACK = 4  # of so many rows the second is held back


def calibrate(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], *, steps: int = 20, progress: bool = False
) -> Calibration:
    """Fit each mechanism's own parameters to the softmax attention of its layer, and nothing else in the model.

    In each layer, for each batch, `steps` iterations of L-BFGS lower

        sum_i |o_i - o'_i|^2 / sum_i |o'_i|^2,   o: the mechanism's output, o': softmax attention's, i: real tokens

    on the queries, keys and values that the original model makes of the batch: every layer hands on o', so layers do
    not wait for each other; memory is that of one layer. Before that a mechanism fits what has no gradient, such as a
    codebook (`Mechanism.prepare`). A layer whose step is not finite goes back to its last finite point and warns.

    Of every four rows the second is held back: nothing is fitted to it. In the end each layer's error on these rows is
    compared with the one before. Where it is not lower by more than the standard error of the difference, the layer
    keeps the parameters and buffers that it had, as a warning says. A single row can only be judged by itself.

    Args:
        model: a patched model.
        batches: what the model takes, such as `{"input_ids": ..., "attention_mask": ...}`; labels are ignored. A dozen
            batches of a few thousand tokens, of the text that the model is for.
        steps: L-BFGS iterations per layer and batch.
        progress: whether to show a progress bar over the batches.

    Returns:
        Path of the attention module -> the error above for each batch, before the layer was fitted to it; only layers
        with something to fit. Its `held_back` has the errors on the rows held back, and whether the fit was taken.

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
    >>> errors.held_back['transformer.h.0.attn'].taken
    True
    """
    require_count("steps", steps)
    return _fit_all(model, get_mechanisms(model), batches, steps, progress)


def _fit_all(
    model: nn.Module, mechanisms: Mapping[str, Mechanism], batches: Iterable[Mapping[str, Any]], steps: int,
    progress: bool,
) -> Calibration:  # fmt: skip
    """Fit the layers to the batches one after another, then keep the fits that serve the rows held back."""
    fitted = what_is_fitted(mechanisms)
    split = _Split()
    fits = {path: _Fit(mechanisms[path], parameters, steps, split) for path, parameters in fitted.items()}
    parameters = [parameter for several in fitted.values() for parameter in several]
    tensors = [*parameters, *(buffer for path in fitted for buffer in mechanisms[path].buffers())]
    backbone, read = root_model(model).base_model, list[Mapping[str, Any]]()

    def show(batch: Mapping[str, Any]) -> None:
        backbone(**without_labels(batch), **accepted(backbone, use_cache=False))  # predictions are not looked at
        split.next_batch()

    with ExitStack() as undo:
        undo.callback(_write, tensors, [tensor.detach().clone() for tensor in tensors])
        with evaluation_mode(model), _trainable(parameters), torch.no_grad():
            judges = {path: _Judge(mechanisms[path], own, split) for path, own in fitted.items()}
            with observed(mechanisms, fits):
                for batch in tqdm(batches, desc="calibrate", disable=not progress):
                    show(batch)
                    read.append(batch)
            if not read:
                raise OptionError("batches must hold at least one batch, got none")
            held_back = _take_the_better(judges, lambda: _show_again(show, mechanisms, judges, read, split))
        undo.pop_all()
    return Calibration({path: fit.errors for path, fit in fits.items()}, held_back)


class HeldBack(NamedTuple):
    """A layer's error on rows that nothing was fitted to, before and after the fit, and whether the fit was taken."""

    before: float
    after: float
    taken: bool


class Calibration(dict[str, list[float]]):
    """Path of an attention module -> its errors batch by batch, each before the fit to it.

    held_back: path -> its error on the rows held back.
    """

    def __init__(self, errors: Mapping[str, list[float]], held_back: Mapping[str, HeldBack]):
        super().__init__(errors)
        self.held_back = dict(held_back)


class _Split:
    """Which rows of the batch at hand are held back: of every four the second, counted over all batches."""

    def __init__(self) -> None:
        self.first = self.size = 0

    def restart(self) -> None:
        """Begin again with the first batch."""
        self.first = self.size = 0

    def next_batch(self) -> None:
        """Go on to the batch after the one that was read."""
        self.first, self.size = self.first + self.size, 0

    def rows(self, call: AttentionCall, held_back: bool) -> AttentionCall | None:
        """Return the call of the rows that are held back, or of the others; None if there are none."""
        self.size = len(call.query)
        chosen = [row for row in range(self.size) if ((self.first + row) % HELD_BACK == 1) == held_back]
        return call.rows(chosen) if chosen else None


class _Judge:
    """Measures a layer with what it had before its fit and with what it has now, on rows held back from it."""

    def __init__(self, mechanism: Mechanism, parameters: list[nn.Parameter], split: _Split):
        self.mechanism, self.split = mechanism, split
        self.tensors: list[Tensor] = [*parameters, *mechanism.buffers()]
        self.before = [tensor.detach().clone() for tensor in self.tensors]
        self.alone = False  # whether there is one row in all
        self.errors, self.size = (list[Tensor](), list[Tensor]()), 0.0

    def __call__(self, call: AttentionCall) -> Tensor:
        target, judged = call.by_softmax(self.mechanism), self.split.rows(call, held_back=not self.alone)
        if judged is not None:
            wanted = judged.by_softmax(self.mechanism)
            after = [tensor.detach().clone() for tensor in self.tensors]
            for found, values in zip(self.errors, (self.before, after), strict=True):
                _write(self.tensors, values)
                errors, sizes = squared_errors(judged.by(self.mechanism), wanted, judged.real)
                found.append(errors.double())
            self.size += float(sizes.sum())
        return target

    def decide(self) -> HeldBack:
        """Go back to what was before unless the error is lower now, by more than chance; return both."""
        before, after = (torch.cat(errors) for errors in self.errors)
        gains = before - after
        doubt = gains.std() * math.sqrt(len(gains)) if len(gains) > 1 else gains.new_zeros(())
        taken = bool(gains.sum() > doubt)  # not where it is not a number
        if not taken:
            _write(self.tensors, self.before)
        return HeldBack(float(before.sum()) / self.size, float(after.sum()) / self.size, taken)


def _show_again(
    show: Callable[[Mapping[str, Any]], None], mechanisms: Mapping[str, Mechanism], judges: Mapping[str, _Judge],
    batches: Sequence[Mapping[str, Any]], split: _Split,
) -> None:  # fmt: skip
    """Show the judges every batch once more."""
    alone = split.first == 1
    split.restart()
    for judge in judges.values():
        judge.alone = alone
    with observed(mechanisms, judges):
        for batch in batches:
            show(batch)


def _take_the_better(judges: Mapping[str, _Judge], measure: Callable[[], None]) -> dict[str, HeldBack]:
    """Measure every layer on the rows held back, and undo the fit of those that it did not serve."""
    if not judges:
        return {}
    measure()
    found = {path: judge.decide() for path, judge in judges.items()}
    if kept := [path for path, result in found.items() if not result.taken]:
        logger.warning(
            "calibrate: the fit of %s was no better on rows held back from it (%s), and what was before it is kept",
            ", ".join(kept),
            ", ".join(f"error {found[path].before:.4g} before, {found[path].after:.4g} after" for path in kept),
        )
    return found


class _Fit:
    """Fits one mechanism to every call of its layer, and answers as softmax does."""

    def __init__(self, mechanism: Mechanism, parameters: list[nn.Parameter], steps: int, split: _Split):
        self.mechanism, self.parameters, self.steps, self.split = mechanism, parameters, steps, split
        self.errors: list[float] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        target = call.by_softmax(self.mechanism)
        error = float(relative_error(call, self.mechanism, target))
        if not math.isfinite(error):
            raise OptionError(
                f"layer {self.mechanism.layer.index} cannot be fitted to batch {len(self.errors) + 1}, of which its"
                f" error is {error}; leave out inputs that are extreme or not finite"
            )
        if (given := self.split.rows(call, held_back=False)) is not None:
            wanted = target if given is call else given.by_softmax(self.mechanism)
            self.mechanism.prepare(*given[:4])
            if self.parameters:
                self._lower(lambda: relative_error(given, self.mechanism, wanted))
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


def relative_error(call: AttentionCall, mechanism: Mechanism, target: Tensor) -> Tensor:
    """Return sum |o - o'|^2 / sum |o'|^2 over the real tokens of a call, o' the target [B, H, N, Dv]."""
    errors, sizes = squared_errors(call.by(mechanism), target, call.real)
    return errors.sum() / sizes.sum()


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
