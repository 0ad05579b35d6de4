"""Dtypes in which a device computes fast, and models that compute in another one than they were saved in."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

logger = logging.getLogger(__name__)


def is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products of a dtype take a device no longer than those of float32.

    An x86 processor without AVX512-BF16 or AMX takes nine times as long for those of bfloat16, and fifty in training;
    one without AVX512-FP16 or AMX as much for float16. Where PyTorch cannot say, the answer is yes.
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return True
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype not in supported or supported[dtype]()


def to_fast_dtype(model: nn.Module) -> dict[str, torch.dtype]:
    """Cast what a model has in a slow dtype to float32, in place, and say so in the log.

    Returns:
        The dtype that each such parameter or buffer had, by name. A quantised model stays as it is.
    """
    if getattr(model, "is_quantized", False):
        return {}
    slow = {name: tensor.dtype for name, tensor in _tensors(model) if not is_fast(tensor.dtype, tensor.device)}
    if slow:
        kinds = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in slow.values()}))
        logger.warning("%s: float32 is taken, as this processor has no instructions for products of it", kinds)
    _cast(model, dict.fromkeys(slow, torch.float32))
    return slow


@contextmanager
def in_fast_dtype(model: nn.Module) -> Iterator[None]:
    """As `to_fast_dtype`, for a while: every tensor of the model has its own dtype again afterwards."""
    slow = to_fast_dtype(model)
    try:
        yield
    finally:
        _cast(model, slow)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _cast(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give the tensors that are named these dtypes."""
    for name, tensor in _tensors(model):
        if name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])
