"""Small layers of odd sizes with grouped queries, and heads for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer, Mechanism
from hf_linattn.testing.counters import flops_of
from tests.helpers import assert_close

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 24, 20


def make_mechanism(name: str, causal: bool, **options: Any) -> Mechanism:
    """Return a mechanism for inference whose parameters are not those it begins with."""
    layer = AttentionLayer(
        index=0, num_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, causal=causal, scaling=DIM**-0.5,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    mechanism, generator = MECHANISMS.get(name)(make_config(name, options), layer), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return mechanism.eval()


def make_heads(batch: int, length: int) -> list[Tensor]:
    """Return query, key and value as models give them: [B, N, H, D] in memory."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, heads, dim) for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))]
    return [torch.randn(shape, generator=generator).transpose(1, 2) for shape in shapes]


def make_mask(length: int) -> Tensor:
    """Return rows that are padded on the left, on the right, and down to a single key [3, N]."""
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[0, : length // 7], mask[1, length * 3 // 5 :], mask[2, 1:] = False, False, False
    return mask


def share_of_products(mechanism: Mechanism, call: Callable[[], Any]) -> float:
    """Return the counted products of a call with the C over those of PyTorch's operations."""
    counts = []
    for backend in ("torch", "auto"):
        mechanism.backend = backend
        counts.append(flops_of(call))
    return counts[1] / counts[0]


def check_gradients(mechanism: Mechanism, heads: list[Tensor], tolerance: float) -> None:
    """Compare the gradients of the C with those of PyTorch's operations in float64, unmasked and with pads."""
    length = heads[0].shape[2]
    weight = torch.randn(3, HEADS, length, VALUE_DIM, generator=torch.Generator().manual_seed(2))
    for key_padding_mask in (None, make_mask(length)):
        real = 1 if key_padding_mask is None else key_padding_mask[:, None, :, None]
        gradients = []
        for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
            mechanism.to(dtype).backend = backend
            operands = [x.to(dtype).requires_grad_() for x in heads]
            output, _ = mechanism(*operands, key_padding_mask)
            gradients.append(torch.autograd.grad((output * weight * real).sum(), operands))
        for got, want in zip(*gradients, strict=True):
            assert_close(got.double(), want, tolerance)


@contextmanager
def kept_for_backward() -> Iterator[dict[int, int]]:
    """A context that fills a dict with what is kept for a backward pass: bytes of storages by their places."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept
