"""Small layers of odd sizes with grouped queries, and heads for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer, Mechanism

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


@contextmanager
def kept_for_backward() -> Iterator[dict[int, int]]:
    """A context that fills a dict with what is kept for a backward pass: bytes of storages by their places."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept
