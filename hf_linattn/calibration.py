"""Fitting what is new in a patched model to the attention it replaces: seconds, a few batches, no recipe."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from .architecture import root_model
from .attention_call import AttentionCall, intercept_attention
from .config import require, require_count
from .dtypes import in_fast_dtype
from .errors import OptionError
from .held_out import Calibration, Judge, Split, squared_errors, take_the_better, write
from .inference import (
    accepted,
    evaluation_mode,
    prediction_inputs,
    progress_bar,
    require_batches,
    require_gradients,
    require_tensors,
    shared_by,
)
from .lowering import lower
from .mechanisms import Mechanism
from .patching import get_mechanisms
from .whole_model import take_together

logger = logging.getLogger(__name__)

OR_TEXTS = "give texts with tokenizer=..., or batches made with return_tensors='pt'"


def calibrate(
    model: nn.Module, batches: Iterable[Mapping[str, Any]] | Sequence[str], *,
    tokenizer: PreTrainedTokenizerBase | None = None, steps: int = 20, progress: bool | None = None,
) -> Calibration:  # fmt: skip
    """Fit each mechanism's own parameters to the softmax attention of its layer, and nothing else in the model.

    In each layer, for each batch, `steps` iterations of L-BFGS lower

        sum_i |o_i - o'_i|^2 / sum_i |o'_i|^2,   o: the mechanism's output, o': softmax attention's, i: real tokens

    on the queries, keys and values that the original model makes of the batch: every layer hands on o', so layers do
    not wait for each other, and no gradient runs through the model. Memory is that of one layer. What has no gradient,
    such as a codebook, is fitted before (`Mechanism.prepare`). A layer takes back steps that are not finite.

    Nothing is fitted to the second of every four rows. Where a layer's error on these is not lower in the end, by more
    than the standard error of the difference, the layer keeps what it had, as a warning says. So do the first layers,
    or all, where the model's last hidden states are closer to softmax's without their fits; a causal model reads four
    of the rows end to end, too. A single row is judged by itself.

    Args:
        model: a patched model.
        batches: what the model takes, such as `{"input_ids": ...}`; labels only for a decoder with nothing else to
            read. A dozen of a few thousand tokens, of the text that the model is for. With a tokenizer: texts, of
            which 8,192 tokens from all over are taken, in rows of 512 or as many as the model has positions for.
        tokenizer: the model's own, where `batches` are texts.
        steps: L-BFGS iterations per layer and batch.
        progress: show a progress bar over the batches; None: where standard error is a terminal.

    Returns:
        Path of each module that has something to fit -> the error above for each batch before the fit to it. Its
        `held_out` has errors on rows held out, before and after, and whether a fit was taken; `whole` the model's.

    Raises:
        PatchError: the model is not patched.
        OptionError: nothing but pads, no tensors, steps below 1, an error that is not finite, offloaded weights, DDP.
        DataError: too short a text, or one string. After an error all parameters and buffers are as they were.

    Examples:
        >>> import torch, hf_linattn
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
        >>> model = hf_linattn.patch_model(gpt2, "hedgehog")
        >>> batches = [{"input_ids": torch.randint(50, (2, 32))} for _ in range(3)]
        >>> errors = hf_linattn.calibrate(model, batches, steps=5)
        >>> len(errors["transformer.h.0.attn"]), errors.held_out["transformer.h.0.attn"]._fields
        (3, ('before', 'after', 'taken'))
    """
    require_count("steps", steps)
    require_batches(batches, OR_TEXTS)
    mechanisms = get_mechanisms(model)
    batches = batches if tokenizer is None else _rows_of(model, tokenizer, batches)
    fitted = what_is_fitted(mechanisms)
    parameters = [parameter for several in fitted.values() for parameter in several]
    tensors = _own(model, [*parameters, *(buffer for path in fitted for buffer in mechanisms[path].buffers())])
    with torch.inference_mode(False), in_fast_dtype(model), ExitStack() as undo:
        undo.callback(write, tensors, [tensor.detach().clone() for tensor in tensors])
        with evaluation_mode(model), _trainable(parameters), torch.no_grad():
            found = _fit(model, mechanisms, fitted, steps, progress_bar(batches, desc="calibrate", progress=progress))
        undo.pop_all()
    return found


def _own(model: nn.Module, tensors: list[Tensor]) -> list[Tensor]:
    """Return what is fitted, or raise `OptionError` where it is not this process's own, whole and in memory."""
    require_gradients("the model's mechanisms", tensors)
    if any(tensor.is_meta for tensor in tensors):
        raise OptionError(
            "the mechanisms' parameters are on the meta device between calls, as accelerate offloads them, where"
            " nothing can be fitted; load the model whole, or patch it after it was dispatched"
        )
    if wrapper := shared_by(model):
        raise OptionError(
            f"the model is a {wrapper}, of which each process would fit its own copy or part to its own batches; call"
            " calibrate before the model is wrapped"
        )
    return tensors


def _fit(
    model: nn.Module, mechanisms: Mapping[str, Mechanism], fitted: Mapping[str, list[nn.Parameter]], steps: int,
    batches: Iterable[Any],
) -> Calibration:  # fmt: skip
    """Fit the layers to every batch, then judge the fits on the rows held out from all of them."""
    backbone, split, read = root_model(model).base_model, Split(), list[Mapping[str, Any]]()
    fits = {path: _Fit(mechanisms[path], parameters, steps, split) for path, parameters in fitted.items()}
    judges = {path: Judge(mechanisms[path], parameters, split) for path, parameters in fitted.items()}

    def show(batch: Mapping[str, Any]) -> None:
        backbone(**{**batch, **accepted(backbone, use_cache=False)})  # predictions are not looked at
        split.next_batch()
        for fit in fits.values():
            fit.end_batch()

    with intercept_attention(mechanisms, fits):
        for batch in batches:
            require_tensors(model, batch, OR_TEXTS)
            read.append(prediction_inputs(model, batch))
            show(read[-1])
    if not read:
        raise OptionError("batches must hold at least one batch, got none")
    if all(isinstance(mask := batch.get("attention_mask"), Tensor) and not mask.any() for batch in read):
        raise OptionError("batches must hold at least one batch with real tokens, got attention masks of zeros")

    def show_again() -> None:
        split.restart()
        with intercept_attention(mechanisms, judges):
            for batch in read:
                show(batch)

    found, whole = take_together(model, mechanisms, judges, take_the_better(judges, show_again), read, split)
    return Calibration({path: fit.errors for path, fit in fits.items()}, found, whole)


def _rows_of(model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Any) -> list[dict[str, Tensor]]:
    """Return texts as batches; what that needs is imported where texts are given alone."""
    from .calibration_rows import calibration_batches

    require("tokenizer", tokenizer, callable(tokenizer), "the model's, which reads texts")
    return calibration_batches(root_model(model), tokenizer, texts)


class _Fit:
    """Fits one mechanism to every call of its layer, and answers as softmax does."""

    def __init__(self, mechanism: Mechanism, parameters: list[nn.Parameter], steps: int, split: Split):
        self.mechanism, self.parameters, self.steps, self.split = mechanism, parameters, steps, split
        self.errors: list[float] = []  # of the batches
        self.runs: list[float] = []  # of the batch at hand: a layer may run several times, as ALBERT's does

    def __call__(self, call: AttentionCall) -> Tensor:
        target = call.run_softmax(self.mechanism)
        error = float(relative_error(call, self.mechanism, target))
        if not math.isfinite(error):
            raise OptionError(
                f"layer {self.mechanism.layer.index} cannot be fitted to batch {len(self.errors) + 1}, of which its"
                f" error is {error}; leave out inputs that are extreme or not finite"
            )
        if (given := self.split.rows(call, held_out=False)) is not None:
            wanted = target if given is call else given.run_softmax(self.mechanism)
            given.prepare(self.mechanism)
            if self.parameters:
                self._lower(lambda: relative_error(given, self.mechanism, wanted))
        self.runs.append(error)
        return target

    def end_batch(self) -> None:
        """Have the mean over the runs of a layer stand for the batch."""
        if self.runs:
            self.errors.append(sum(self.runs) / len(self.runs))
        self.runs.clear()

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
    errors, sizes = squared_errors(call.run(mechanism), target, call.real)
    return errors.sum() / sizes.sum()


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
