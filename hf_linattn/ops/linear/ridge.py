"""Attention that solves for what the keys' features say about the values: a ridge regression per sequence and head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..common.padding import find_sequences
from ..common.tracing import ends_graph
from .torch import SEGMENT_SIZE, inverse_length

if TYPE_CHECKING:
    from ...feature_maps import FeatureMap

ROUNDING = 32  # of equal keys: 3 to 10 eps of the trace where products add up 512 terms one by one, less elsewhere


def ridge_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_map: FeatureMap,
    key_map: FeatureMap,
    penalty: Tensor,
    key_padding_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Return o_i = W^T a_i [B, H, Nq, Dv], W [F, Dv] the least of sum_j |W^T b_j - v_j|^2 + penalty |W|^2.

    a_i and b_j are the features of query i [B, H, Nq, D] and of key j [B, Hkv, Nk, D] divided by their length, and
    W = (sum_j b_j b_j^T + penalty I)^-1 sum_j b_j v_j^T, j over the keys of the query's sequence; zero for pads.
    `penalty` [Hkv] is above zero: `penalty` keys that are like the query give half of their value. To one below the
    rounding error of the sums, 32 eps times the number of keys, that is added, so that there always is a solution; one
    step of refinement takes most of it out again.
    Time O(N F (F + Dv) + S F^3) for S sequences, N in place of one F where that is less.

    >>> from hf_linattn.ops.linear.interface import Features
    >>> key, value = torch.eye(3).expand(1, 1, 3, 3), torch.arange(6.0).view(1, 1, 3, 2)
    >>> ridge_attention(key, key, value, Features, Features, torch.tensor([1.0]))[0, 0].round(decimals=3).tolist()
    [[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]]
    """
    if sequence_ids is not None:
        width = key_map(key[:, :, :1]).values.shape[-1]
        read = _all_sequences if key.shape[2] <= min(width, SEGMENT_SIZE) else _each_sequence
        return read(query, key, value, query_map, key_map, penalty, key_padding_mask, sequence_ids)
    solution = _solve(key, value, key_map, penalty, key_padding_mask)[:, :, None]
    groups = query.unflatten(1, (key.shape[1], -1))
    features = (query_map(part).values for part in groups.split(SEGMENT_SIZE, dim=3))
    output = torch.cat([(part @ solution) * inverse_length(part) for part in features], dim=3).flatten(1, 2)
    return output if key_padding_mask is None else output * key_padding_mask[:, None, :, None]


def _solve(
    key: Tensor, value: Tensor, key_map: FeatureMap, penalty: Tensor, key_padding_mask: Tensor | None
) -> Tensor:
    """Return W [B, Hkv, F, Dv], found without gradients and then refined by a step that has those of the solution."""
    mask = value.new_ones(1, key.shape[2]) if key_padding_mask is None else key_padding_mask.to(value)
    split = [x.split(SEGMENT_SIZE, dim=2) for x in (key, value, mask[:, None, :, None])]

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for keys, values, real in zip(*split, strict=True):
            features = key_map(keys).values
            yield features * (inverse_length(features) * real), values

    # of many keys only what autograd keeps
    kept = list(parts()) if torch.is_grad_enabled() or len(split[0]) == 1 else None
    if kept and key.shape[2] < min(kept[0][0].shape[-1], SEGMENT_SIZE):
        features, values = kept[0]
        return features.mT @ _solve_for_keys(features, values, penalty)
    gram = moment = value.new_zeros(())
    with torch.no_grad():
        for features, values in kept or parts():
            gram, moment = gram + features.mT @ features, moment + features.mT @ values
        factor = _factor(gram, penalty)
        solution = torch.cholesky_solve(moment, factor)
    left = -penalty[:, None, None] * solution
    for features, values in kept or parts():
        left = left + features.mT @ (values - features @ solution)
    return solution + torch.cholesky_solve(left, factor)


def _solve_for_keys(features: Tensor, value: Tensor, penalty: Tensor, together: Tensor | None = None) -> Tensor:
    """Return (B B^T + penalty I)^-1 V, with which B^T gives the same W: less where there are fewer keys than features.

    `together` [B, 1, N, N]: the pairs of B B^T that there are; None for all.
    """
    pairs = None if together is None else (features @ features.mT) * together
    with torch.no_grad():
        factor = _factor(features @ features.mT if pairs is None else pairs.clone(), penalty, together)
        added = torch.cholesky_solve(value, factor)
    said = features @ (features.mT @ added) if pairs is None else pairs @ added
    left = value - penalty[:, None, None] * added - said
    return added + torch.cholesky_solve(left, factor)


def _factor(gram: Tensor, penalty: Tensor, together: Tensor | None = None) -> Tensor:
    """Return the Cholesky factor of gram + penalty I; gram [B, Hkv, F, F] is no less than 0 but for rounding."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    trace = diagonal.sum(-1, keepdim=True)
    if together is not None:  # that of each sequence, for its own keys
        trace = (together.to(gram) @ diagonal[..., None]).squeeze(-1)
    rounding = ROUNDING * torch.finfo(gram.dtype).eps * trace
    diagonal += torch.where(penalty[:, None] < rounding, penalty[:, None] + rounding, penalty[:, None])
    return torch.linalg.cholesky(gram)


def _all_sequences(
    query: Tensor, key: Tensor, value: Tensor, query_map: FeatureMap, key_map: FeatureMap, penalty: Tensor,
    key_padding_mask: Tensor | None, sequence_ids: Tensor,
) -> Tensor:  # fmt: skip
    """All at once, by the pairs of tokens, no more than a token has features: a block of them for each sequence."""
    together = (sequence_ids[:, :, None] == sequence_ids[:, None, :])[:, None]
    real = 1.0 if key_padding_mask is None else key_padding_mask.to(value)[:, None, :, None]
    features = key_map(key).values
    features = features * (inverse_length(features) * real)
    solution = _solve_for_keys(features, value, penalty, together)
    queries = query_map(query.unflatten(1, (key.shape[1], -1))).values
    pairs = (queries @ features.mT[:, :, None]) * (inverse_length(queries) * together[:, :, None])
    return (pairs @ solution[:, :, None]).flatten(1, 2) * real


@ends_graph  # where the sequences lie is data
def _each_sequence(
    query: Tensor, key: Tensor, value: Tensor, query_map: FeatureMap, key_map: FeatureMap, penalty: Tensor,
    key_padding_mask: Tensor | None, sequence_ids: Tensor,
) -> Tensor:  # fmt: skip
    output = value.new_zeros(*query.shape[:3], value.shape[3])
    for group in find_sequences(query.shape[0], query.shape[2], key_padding_mask, sequence_ids, query.device):
        heads = group.take(query), group.take(key), group.take(value)
        output = group.put(ridge_attention(*heads, query_map, key_map, penalty, group.present), output)
    return output
