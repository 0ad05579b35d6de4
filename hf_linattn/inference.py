"""Inference without side effects: evaluation mode, or a device left, for a while; options that a forward accepts.

And global generators that are left as they were, and progress bars.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from . import architecture
from .config import require
from .errors import OptionError

MADE_AS = "give batches made with return_tensors='pt'"
OF_IDS = (torch.int64, torch.int32)  # which the table of embeddings takes
OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"}  # pictures have ids of their own


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode for a while; afterwards every module has the mode it had before.

    Args:
        model: any module.

    Examples:
        >>> from torch import nn
        >>> from hf_linattn.evaluation import evaluation_mode
        >>> model = nn.Dropout()
        >>> with evaluation_mode(model):
        ...     model.training
        False
        >>> model.training
        True
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def kept_flags(model: nn.Module) -> Iterator[None]:
    """Give the parameters of a model their `requires_grad` back after a while, each by its name.

    Offloading puts other tensors in their place in every forward, which have the flag of that moment.
    """
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before.get(name, parameter.requires_grad))


def require_gradients(what: str, tensors: Iterable[Tensor]) -> None:
    """Raise `OptionError` where one of the tensors can take part in no gradient; what: how the message calls them."""
    if any(tensor.is_inference() for tensor in tensors):
        raise OptionError(
            f"{what} were made inside torch.inference_mode(), and can have no gradients; load the model outside of it"
        )


def device_of(model: nn.Module) -> torch.device:
    """Return where a model takes its inputs: of weights that accelerate keeps elsewhere, where it runs them.

    >>> device_of(nn.Linear(2, 2))
    device(type='cpu')
    """
    weight = next(chain(model.parameters(), model.buffers()), None)
    device = torch.device("cpu") if weight is None else weight.device
    if device.type != "meta":
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    found = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((x for x in found if x is not None), device))


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Keep a model in the memory of the CPU for a while, so that its device has room for another one."""
    device = device_of(model)
    model.to("cpu")
    try:
        yield
    finally:
        model.to(device)


def kept_generators(device: torch.device) -> AbstractContextManager[None]:
    """Give the global generators of the CPU and of a device, of whatever kind, the states back that they had."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def progress_bar(items: Iterable[Any] | None = None, *, progress: bool | None, **options: Any) -> Any:
    """Return items with tqdm's bar; `progress` says whether it is shown, None: where standard error is a terminal."""
    return tqdm(items, disable=None if progress is None else not progress, **options)


def accepted(model: nn.Module, **options: Any) -> dict[str, Any]:
    """Keep the options that the model's forward names."""
    parameters = inspect.signature(architecture.root_model(model).forward).parameters
    return {name: value for name, value in options.items() if name in parameters}


def require_batches(batches: Any, remedy: str = MADE_AS) -> None:
    """Raise `OptionError`, which ends in a remedy, unless there is something to take batches from."""
    if not isinstance(batches, Iterable):
        raise OptionError(f"batches must hold dicts of tensors, got {batches!r}; {remedy}")


def require_tensors(model: nn.Module, batch: Any, remedy: str = MADE_AS) -> None:
    """Raise `OptionError`, which ends in a remedy, unless a batch is what a model takes, in rows of its tokens."""
    if not isinstance(batch, Mapping):
        raise OptionError(f"batches must hold dicts of tensors, got {type(batch).__name__}; {remedy}")
    for name, value in batch.items():
        if isinstance(value, (list, np.ndarray)):
            kind = "a list" if isinstance(value, list) else "an array of numpy"
            raise OptionError(f"batches must hold dicts of tensors, got {name!r} as {kind}; {remedy}")
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, Tensor):
        return
    shape = list(ids.shape)
    require("input_ids of batches", shape, len(shape) > 1 and ids.numel() > 0, "[rows, tokens], at least one of each")
    if isinstance(mask, Tensor) and mask.dim() == ids.dim():
        require("attention_mask of batches", list(mask.shape), mask.shape == ids.shape, f"{shape}, as input_ids are")
    require("input_ids of batches", ids.dtype, ids.dtype in OF_IDS, "int64 or int32")
    size = getattr(architecture.root_model(model).config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int) or not batch.keys() <= OF_TEXT:
        return
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0:
        raise OptionError(
            f"batches hold token {smallest}, and tokens begin at 0; fill rows with the pad token of the tokenizer, as"
            " -100 is of labels alone"
        )
    if largest >= size:
        raise OptionError(
            f"batches hold token {largest}, which is beyond the {size} of the model; make them with its own tokenizer"
        )


def require_weights(model: nn.Module) -> None:
    """Raise `OptionError` where a model has no numbers to measure."""
    if device_of(model).type == "meta":
        raise OptionError(
            f"{type(architecture.root_model(model)).__name__} is on the meta device, where nothing can be measured;"
            " load it with its weights, as by from_pretrained"
        )


def shared_by(model: nn.Module, copies: bool = True) -> str | None:
    """Return the class of what shares a model among processes, or None: FSDP and, with `copies`, DDP of several."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    copied = copies and torch.distributed.get_world_size() > 1
    kinds = FSDPModule, FullyShardedDataParallel, *((nn.parallel.DistributedDataParallel,) if copied else ())
    return next((type(module).__name__ for module in model.modules() if isinstance(module, kinds)), None)


def padding_token(model: nn.Module, tokenizer: Any) -> int:
    """Return what rows are filled with where a mask hides it: the tokenizer's pad token, 0 if the model lacks that."""
    pad = tokenizer.pad_token_id
    size = getattr(architecture.root_model(model).config.get_text_config(), "vocab_size", math.inf)
    return pad if pad is not None and pad < size else 0


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model needs of a batch to predict, without what would have it compute a loss.

    What was made inside `torch.inference_mode()` is copied, as gradients could not be computed from it.
    """
    kept = {name: value for name, value in batch.items() if name != "labels"}
    made_inside = {name for name, value in kept.items() if isinstance(value, Tensor) and value.is_inference()}
    return {name: value.clone() if name in made_inside else value for name, value in kept.items()}


def prediction_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return `without_labels`, and of a decoder behind an encoder what that reads and which of it is real.

    Where there are no `decoder_input_ids` they are the labels, one place later, as in training. Where these have no
    mask, the pads behind the last token of a row are masked.

    Raises:
        OptionError: the model has no method that makes these ids of labels.
    """
    inputs, root = without_labels(batch), architecture.root_model(model)
    if not getattr(root.config, "is_encoder_decoder", False):
        return inputs
    labels, given = batch.get("labels"), {"decoder_input_ids", "decoder_inputs_embeds"} & inputs.keys()
    if isinstance(labels, Tensor) and labels.dim() == 2 and not given and root.can_generate():
        shifted = getattr(root, "prepare_decoder_input_ids_from_labels", None)
        if shifted is None:
            raise OptionError(
                f"batches have labels and no decoder_input_ids, which {type(root).__name__} makes of them in training"
                " alone; give decoder_input_ids: the token that starts its decoder, then the labels without the last"
            )
        inputs["decoder_input_ids"] = shifted(labels=labels)
    ids, pad = inputs.get("decoder_input_ids"), getattr(root.config, "pad_token_id", None)
    if isinstance(ids, Tensor) and pad is not None and inputs.get("decoder_attention_mask") is None:
        real = ids != pad
        real[:, 0] = True  # a decoder may begin with its pad token
        mask = real.long().flip(1).cummax(1).values.flip(1)
        inputs |= {} if mask.all() else accepted(model, decoder_attention_mask=mask)
    return inputs
