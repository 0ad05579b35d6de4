"""Inference without side effects: evaluation mode, or a device left, for a while; options that a forward accepts.

And global generators that are left as they were.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import architecture


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode for a while; afterwards every module has the mode it had before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Keep a model in the memory of the CPU for a while, so that its device has room for another one."""
    device = architecture.root_model(model).device
    model.to("cpu")
    try:
        yield
    finally:
        model.to(device)


def kept_generators(device: torch.device) -> AbstractContextManager[None]:
    """Give the global generators of the CPU and of a device, of whatever kind, the states back that they had."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def accepted(model: nn.Module, **options: Any) -> dict[str, Any]:
    """Keep the options that the model's forward names."""
    parameters = inspect.signature(architecture.root_model(model).forward).parameters
    return {name: value for name, value in options.items() if name in parameters}


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
