"""Exact attention with the masks of this library: what the layers that stay softmax compute."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..reference import allowed_pairs
from .fused_attention import fused_attention
from .numerics import bounded
from .precision import wide
from .sink_logit import softmax_beside, with_sink_key
from .tracing import is_open

BLOCK = 1024  # queries for which a mask is held at a time


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sink: Tensor | None = None,
    pair_mask: Tensor | None = None,
) -> Tensor:
    """Return softmax(scaling q k^T) v over the allowed keys, by PyTorch's scaled_dot_product_attention.

    A mask is built only where padding, packing, a window or earlier keys need one, and for `BLOCK` queries at a time.
    Rows without an allowed key are zero.

    Args:
        query: [B, H, Nq, D]. key: [B, Hkv, Nk, D]. value: [B, Hkv, Nk, Dv]; Hkv divides H, Nk >= Nq if causal.
        key_padding_mask: [B, Nk], true for real keys. sequence_ids: [B, Nk], equal inside a packed sequence.
        sliding_window: a query sees itself and at most `sliding_window - 1` keys before it (and after it, if
            bidirectional).
        softcap: scores become softcap * tanh(score / softcap), as in Gemma 2.
        dropout: probability of dropping an attention weight.
        sink: [H], the score of one more key without value (`hf_linattn.ops.common.sink_logit`), which no mask hides.
        pair_mask: [B or 1, H or 1, Nq or 1, Nk], which pairs see each other, instead of the order of tokens, of
            padding, packing and window; a float mask is added to the scores. Packing holds beside one row for all.

    Returns:
        [B, H, Nq, Dv] in the dtype of `value`.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    if pair_mask is not None:
        if sequence_ids is None or pair_mask.shape[2] == num_queries:
            return masked_attention(query, key, value, pair_mask, scaling, softcap, dropout, sink)
        causal, key_padding_mask, sliding_window = False, None, None
    window = sliding_window
    if window is not None and not is_open(query) and window >= num_keys:  # a program for other lengths keeps it
        window = None
    plain = key_padding_mask is None and sequence_ids is None and window is None
    if plain and softcap is None and (not causal or num_queries in (1, num_keys)):
        return _unmasked(query, key, value, causal and bool(num_queries > 1), scaling, dropout, sink)
    outputs = []
    # a program for other lengths has one block: a loop would be one over the blocks of its example
    for start in (0,) if is_open(query) else range(0, num_queries, BLOCK):
        rows = query if is_open(query) else query[:, :, start : start + BLOCK]
        first = num_keys - num_queries + start
        allowed = allowed_pairs(
            rows.shape[2], num_keys, causal, key_padding_mask, sequence_ids, query.device, first
        )
        if window is not None:
            allowed = allowed & in_window(rows.shape[2], num_keys, window, first, query.device)
        if pair_mask is not None:
            allowed = _narrowed(pair_mask, allowed)
        outputs.append(masked_attention(rows, key, value, allowed, scaling, softcap, dropout, sink))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def in_window(num_queries: int, num_keys: int, window: int, first: int, device: torch.device) -> Tensor:
    """Return the pairs [Nq, Nk] of queries from position `first` on and keys less than `window` positions away."""
    distance = torch.arange(first, first + num_queries, device=device)[:, None] - torch.arange(num_keys, device=device)
    return distance.abs() < window


def _narrowed(pair_mask: Tensor, allowed: Tensor) -> Tensor:
    """Return a mask of pairs, or what is added to their scores, with these pairs alone."""
    if pair_mask.dtype == torch.bool:
        return pair_mask & allowed
    return torch.where(allowed, pair_mask, torch.finfo(pair_mask.dtype).min)


def _unmasked(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float, dropout: float, sink: Tensor | None
) -> Tensor:
    width = value.shape[3]
    if sink is not None:
        query, key, value = with_sink_key(query, key, value, sink, scaling)
        query = F.pad(query, (0, 0, 1, 0)) if causal else query  # the first query stands beside the sink
    output = fused_attention(
        query, key, value, scale=scaling, dropout_p=dropout, is_causal=causal, enable_gqa=True
    )
    return output if sink is None else output[:, :, int(causal) :, :width]


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scaling: float, softcap: float | None = None,
    dropout: float = 0.0, sink: Tensor | None = None,
) -> Tensor:
    """Return `softmax_attention` over the allowed pairs [B or 1, 1, Nq, Nk]; rows without one are zero.

    Numbers instead of true and false are added to the scores.
    """
    if softcap is not None:
        return _softcapped(query, key, value, allowed, scaling, softcap, dropout, sink)
    width = value.shape[3]
    if sink is not None:
        query, key, value = with_sink_key(query, key, value, sink, scaling)
        allowed = F.pad(allowed, (1, 0), value=allowed.dtype == torch.bool)  # seen, or with nothing added
    if query.shape[2] > 1:  # the kernels add to scores what hides a pair; a single token has none to come
        query, key = bounded(query), bounded(key)
    if allowed.dtype != torch.bool:
        added = allowed.to(query.dtype)
        output = fused_attention(
            query, key, value, attn_mask=added, scale=scaling, dropout_p=dropout, enable_gqa=True
        )
        return output[..., :width]
    some = allowed.any(-1, keepdim=True)  # the kernels differ on rows without a key: let those see all, then zero them
    output = fused_attention(
        query, key, value, attn_mask=allowed | ~some, scale=scaling, dropout_p=dropout, enable_gqa=True
    )
    return (output * some)[..., :width]


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scaling: float, softcap: float, dropout: float,
    sink: Tensor | None,
) -> Tensor:
    """Exact attention with capped scores, which the fused kernels do not offer."""
    shared = key.shape[1], query.shape[1] // key.shape[1]
    rows = query.unflatten(1, shared).flatten(2, 3)  # heads that share keys: more queries of these
    products = (rows @ key.mT).view(*query.shape[:3], key.shape[2])
    scores = wide(softcap * torch.tanh(products * scaling / softcap))
    lowest = torch.finfo(scores.dtype).min
    if allowed.dtype != torch.bool:
        scores, allowed = scores + allowed, torch.ones_like(allowed, dtype=torch.bool)
    scores = scores.masked_fill(~allowed, lowest)
    beside = None if sink is None else sink.to(scores.dtype)[:, None, None]
    weights = F.dropout(softmax_beside(scores, beside) * allowed, dropout)
    weights = weights.to(value.dtype).unflatten(1, shared).flatten(2, 3)
    return (weights @ value).view(*query.shape[:3], value.shape[3])
