"""PyTorch's scaled_dot_product_attention; who asks for the second derivatives its fused kernels lack gets an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import DerivativeError
from .tracing import is_open, is_recorded, is_watched

NO_SECOND = (
    "create_graph=True asks for the derivative of a gradient, and PyTorch's fused scaled_dot_product_attention has"
    " none; run the forward inside torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return `scaled_dot_product_attention`, of the same arguments.

    The query heads of a single token that share keys [B, Hkv, M, D] are handed over as several queries of these,
    which are then read once for all.

    Raises (the backward):
        DerivativeError: `create_graph=True` behind a fused kernel.
    """
    if options.get("enable_gqa") and not is_open(query) and query.shape[2] == 1 and query.shape[1] > key.shape[1]:
        mask, shared = options.get("attn_mask"), (key.shape[1], query.shape[1] // key.shape[1])
        if mask is not None and mask.shape[1] > 1:
            options["attn_mask"] = mask.unflatten(1, shared).squeeze(3)
        rows = fused_attention(query.unflatten(1, shared).squeeze(3), key, value, **options)
        return rows.flatten(1, 2)[:, :, None]
    if is_watched() and not is_recorded():  # of torch.func the fused kernels know less than it wants
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, **options)
    output = F.scaled_dot_product_attention(query, key, value, **options)
    node = output.grad_fn
    if node is not None and node.name().startswith("ScaledDotProduct") and not is_watched():
        output.register_hook(_refuse_second)
    return output


def _refuse_second(_: Tensor) -> None:
    if torch.is_grad_enabled():
        raise DerivativeError(NO_SECOND)
