"""Reference formulas, written naively with the N x N matrix. For tests and diagnostics only.

Every function works in the precision of its inputs; give float64 to get a reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F


def allowed_pairs(
    num_queries: int,
    num_keys: int,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    device: torch.device | str | None = None,
    first: int | None = None,
) -> Tensor:
    """Return the boolean matrix [B or 1, 1, Nq, Nk] of pairs (i, j) in which query i may see key j.

    The first query stands at the position of key `first`; None: the last query stands at that of the last key.
    """
    first = num_keys - num_queries if first is None else first
    query_position = torch.arange(first, first + num_queries, device=device)[:, None]
    key_position = torch.arange(num_keys, device=device)[None, :]
    allowed = (key_position <= query_position) if causal else torch.ones_like(key_position <= query_position)
    allowed = allowed[None, None]
    if key_padding_mask is not None:
        allowed = allowed & key_padding_mask[:, None, None, :].bool()
    if sequence_ids is not None:
        same = sequence_ids[:, first : first + num_queries, None] == sequence_ids[:, None, :]
        allowed = allowed & same[:, None]
    return allowed


def positions(allowed: Tensor) -> Tensor:
    """Return each real token's position in its own sequence, pads left out: [..., N] from `allowed` [..., N, N]."""
    return allowed.long().cumsum(-1).diagonal(dim1=-2, dim2=-1) - 1


def distances(allowed: Tensor) -> Tensor:
    """Return |i - j| for every query and key of its sequence, pads not counted: [..., N, N]."""
    count = allowed.long().cumsum(-1)
    return (positions(allowed)[..., None] + 1 - count).abs()


def products(query: Tensor, key: Tensor) -> Tensor:
    """Return q_i . k_j [B, H, Nq, Nk] of queries [B, H, Nq, F] and keys [B, Hkv, Nk, F]."""
    return torch.einsum("bhif,bhjf->bhij", query, repeat_heads(key, query))


def normalise(weights: Tensor, beside: Tensor | float = 0.0) -> Tensor:
    """Divide non-negative weights [..., Nk] by their sum and what stands `beside` them; without any they stay zero."""
    total = weights.sum(-1, keepdim=True) + beside
    return weights / torch.where(total == 0, 1.0, total)


def softmax_matrix(
    query: Tensor, key: Tensor, scaling: float, allowed: Tensor, log_weight: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return softmax_j(scaling q_i . k_j + log_weight_ij) over the allowed keys [B, H, Nq, Nk]; an empty row is 0.

    With `sink` [H] the sum of exponentials that it is divided by has exp(sink_h), too.
    """
    scores = products(query, key) * scaling
    scores = scores if log_weight is None else scores + log_weight
    return softmax(scores.masked_fill(~allowed, float("-inf")), sink)


def softmax(scores: Tensor, sink: Tensor | None = None) -> Tensor:
    """Return softmax over scores [B, H, Nq, Nk], -inf where there is no key, and beside them sink [H]."""
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top.isinf(), 0.0, top)
    if sink is None:
        return normalise(torch.exp(scores - top))
    beside = sink[:, None, None]
    top = torch.maximum(top, beside.detach())
    return normalise(torch.exp(scores - top), torch.exp(beside - top))


def kernel_matrix(
    query_features: Tensor, key_features: Tensor, allowed: Tensor, decay_rate: Tensor | None = None
) -> Tensor:
    """Return w_ij / sum_l w_il over the allowed keys: [B, H, Nq, Nk], with w_ij = phi(q_i) . phi(k_j).

    With `decay_rate` [Hkv] (for Nq = Nk) w_ij is multiplied by exp(-decay_rate |i - j|), pads not counted.
    """
    weights = products(query_features, key_features)
    if decay_rate is not None:
        weights = weights * torch.exp(-repeat_heads(decay_rate[None, :, None, None], weights) * distances(allowed))
    return normalise(weights * allowed)


def delta_rule_changes(key: Tensor, beta: Tensor, log_gate: Tensor | None) -> Iterator[Tensor]:
    """Yield P [..., i + 1, F] after each key i: the state of the gated delta rule is S_i = P^T V [F, Dv].

    S_i = g_i (I - b_i k_i k_i^T) S_{i-1} + b_i k_i v_i^T with key k [..., N, F], beta b [..., N] and log g [..., N] or
    None: row j of P is b_j k_j, which lost g_l and b_l k_l (k_l . p_j) to every later key l.
    """
    changes = key[..., :0, :]
    for i, k in enumerate(key.unbind(-2)):
        written = (beta[..., i, None] * k)[..., None, :]
        changes = changes - (changes @ k[..., None]) * written
        changes = changes if log_gate is None else changes * log_gate[..., i, None, None].exp()
        changes = torch.cat([changes, written], dim=-2)
        yield changes


def delta_rule_matrix(query: Tensor, key: Tensor, beta: Tensor, log_gate: Tensor | None) -> Tensor:
    """Return A_ij = q_i . p_j [B, Hkv, G, N, N], p_j as in `delta_rule_changes`, of queries [B, Hkv, G, N, F]."""
    size, rows = key.shape[2], []
    for i, changes in enumerate(delta_rule_changes(key, beta, log_gate)):
        rows.append(F.pad(query[:, :, :, i] @ changes.mT, (0, size - i - 1)))
    return torch.stack(rows, dim=3)


def attend(matrix: Tensor, value: Tensor) -> Tensor:
    """Return sum_j matrix_ij v_j: [B, H, Nq, Dv]."""
    return torch.einsum("bhij,bhjd->bhid", matrix, repeat_heads(value, matrix))


def repeat_heads(shared: Tensor, query: Tensor) -> Tensor:
    """Repeat key/value heads so that there is one for every query head."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1)
