"""The attention matrix of `hybrid` with hard keys or a state by the delta rule: by definition, for short inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import reference
from ..ops.hybrid.reference import Entered, Recall, kernel_recall, keys_in_state
from ..ops.hybrid.types import gate_logit
from .inputs import CallOptions


def matrix_in_blocks(
    hybrid: Any, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, call: CallOptions
) -> Tensor:
    """Return the weights [B, H, N, N] of a `HybridMechanism` whose keys leave the window in blocks."""
    config = hybrid.config
    allowed = allowed.expand(len(key), -1, -1, -1)
    position = reference.positions(allowed)[:, 0].clamp(min=0)
    if config.by_delta_rule:
        recall, changes = _delta_rule(hybrid, key, value, position)
    else:
        phi = hybrid.linear.maps[1].exact(key)
        recall = kernel_recall(phi, value, hybrid.linear.decay_rate(key), position)
    entered = keys_in_state(value, allowed, hybrid.pair_weights(key, call), recall)
    far = torch.zeros(*key.shape[:2], *allowed.shape[2:], dtype=torch.bool, device=key.device)
    for place, keys in entered.items():
        far[(*place, keys)] = True
    exact = ~far.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if not config.by_delta_rule:
        return hybrid.weights_beside(exact, query, key, allowed, call)
    near = hybrid.softmax_beside(exact & allowed, query, key, call)
    share = torch.sigmoid(gate_logit(hybrid.far_gate.to(key.dtype)))[:, None, None]
    share = share * far.any(-1, keepdim=True).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return torch.lerp(near, _delta_rows(hybrid, query, position, entered, changes, far), share)


def _delta_rule(hybrid: Any, key: Tensor, value: Tensor, position: Tensor) -> tuple[Recall, Any]:
    """Return the recall of the delta rule, and what gives the changes P of some keys of a row and head."""
    features, beta, log_gate = hybrid.linear.key_entries(key, position[:, None])
    known: dict[Any, Tensor] = {}

    def changes(row: int, head: int, entered: list[int]) -> Tensor:
        name = (torch.is_grad_enabled(), row, head, *entered)  # the choice of keys has no gradient
        if name not in known:
            kept = None if log_gate is None else log_gate[row, head, entered]
            written = features[row, head, entered], beta[row, head, entered], kept
            known[name] = [features[row, head, :0], *reference.delta_rule_changes(*written)][-1]
        return known[name]

    def recall(row: int, head: int, asked: list[int], entered: list[int]) -> Tensor:
        memory = changes(row, head, entered).mT @ value[row, head, entered]
        return features[row, head, asked] @ memory

    return recall, changes


def _delta_rows(hybrid: Any, query: Tensor, position: Tensor, entered: Entered, changes: Any, far: Tensor) -> Tensor:
    """Return what each query reads of each key's value: [B, H, N, N]."""
    queries = hybrid.linear.query_entries(query.unflatten(1, (far.shape[1], -1)), position)
    rows = {
        (row, head, i): queries[row, head, :, i] @ changes(row, head, keys).mT
        for (row, head, i), keys in entered.items()
    }
    matrix = queries.new_zeros(*queries.shape[:4], far.shape[3])
    index = [(*place, key) for place, keys in entered.items() for key in keys]
    if not index:
        return matrix.flatten(1, 2)
    b, h, i, j = torch.tensor(index, device=far.device).unbind(1)
    weights = torch.cat([x.mT for x in rows.values()])  # [keys, G], in the order of `index`
    return matrix.permute(0, 1, 3, 4, 2).index_put((b, h, i, j), weights).permute(0, 1, 4, 2, 3).flatten(1, 2)
