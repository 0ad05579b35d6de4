"""The delta rule in chunks: S_i = g_i (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T, read as o_i = S_i^T q_i.

Without decay S_i = S_{i-1} + k_i u_i^T with u_i = beta_i (v_i - S_{i-1}^T k_i): a key writes what the state is wrong
about. In a chunk of C tokens after the state S that is one triangular system for U [C, Dv],

    (I + diag(beta) tril(K K^T, -1)) U = diag(beta) (V - K S),

the UT form of the product of Householder-like factors (Yang et al. 2024, arXiv 2406.06484). Its inverse T is made for
several chunks at once; from chunk to chunk U = T (V - K S), the outputs Q S + tril(Q K^T) U and the next state
S + K^T U are products. With decays every pair (i, j) gets the factor g_{j+1} ... g_i (arXiv 2412.06464).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import bounded, running_sum
from ..linear.torch import chunks_at_once, unit_length
from ..linear.types import CHUNK_SIZE
from .types import DeltaCall, FeatureMap


def unsupported(call: DeltaCall) -> None:
    """PyTorch's operations can compute all calls."""


def run(call: DeltaCall) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, N, Dv] and the state after the last key."""
    grouped, key, value = call.grouped_query, call.key, call.value
    if call.is_step:
        units = _units(grouped, call.query_map), _units(key, call.key_map)
        return _single_token(*units, value, call.beta, call.log_gate, call.before(units[1]))
    size = chunks_at_once(grouped.shape[:3].numel(), key.device) * CHUNK_SIZE
    gates = itertools.repeat(None) if call.log_gate is None else call.log_gate.split(size, 2)
    parts = zip(grouped.split(size, 3), *(x.split(size, 2) for x in (key, value, call.beta)), gates, strict=False)
    memory: Any = call.state
    outputs = []
    for q, k, v, b, gate in parts:
        units = _units(q, call.query_map), _units(k, call.key_map)
        memory = call.before(units[1]) if memory is None else memory
        part, memory = _read_chunks(*units, v, b, gate, memory)
        outputs.append(part)
    return torch.cat(outputs, dim=3).flatten(1, 2), memory


def _units(x: Tensor, feature_map: FeatureMap | None) -> Tensor:
    """Return features of length 1."""
    x = bounded(x) if x.shape[-2] > 1 else x  # no 0 * inf where a chunk is solved
    return unit_length(x if feature_map is None else feature_map(x))


def _single_token(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_gate: Tensor | None, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row, as in decoding: what it changes in the state, which is then read."""
    memory = memory if log_gate is None else memory * log_gate.exp()[..., None]
    memory = memory + key.mT @ (beta[..., None] * (value - key @ memory))
    return (query.squeeze(3) @ memory).flatten(1, 2)[:, :, None], memory


def _read_chunks(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_gate: Tensor | None, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """`run` for some chunks after the feature maps, its output [B, Hkv, G, N, Dv]."""
    length, groups = key.shape[2], query.shape[2]
    size = min(length, CHUNK_SIZE)
    missing = -length % size
    # [B, Hkv, T, C, .], queries of a group below each other; what fills up the last chunk writes nothing
    query, key, value = (F.pad(x, (0, 0, 0, missing)).unflatten(-2, (-1, size)) for x in (query, key, value))
    query = query.movedim(2, 3).flatten(3, 4)
    beta = F.pad(beta, (0, missing)).unflatten(-1, (-1, size))
    own, seen = key @ key.mT, query @ key.mT
    read, write, left = torch.cat([key, query], dim=3), key, None
    if log_gate is not None:
        gates = F.pad(log_gate, (0, missing)).unflatten(-1, (-1, size))
        total = running_sum(gates)[..., None]  # since the chunk began
        passed = (total - total.mT).tril().exp()
        own, seen = own * passed, seen * passed.repeat(1, 1, 1, groups, 1)
        read, left = read * total.exp().repeat(1, 1, 1, 1 + groups, 1), total[..., -1:, :].exp()
        write = key * (total[..., -1:, :] - total).exp()
    # of the system only what stands below the diagonal is looked at
    inverse = torch.linalg.solve_triangular(beta[..., None] * own, beta.diag_embed(), upper=False, unitriangular=True)
    seen = seen.unflatten(3, (groups, size)).tril().flatten(3, 4)
    outputs = []
    for t in range(key.shape[2]):
        known, earlier = (read[:, :, t] @ memory).split([size, groups * size], 2)
        update = inverse[:, :, t] @ (value[:, :, t] - known)
        outputs.append(earlier + seen[:, :, t] @ update)
        memory = (memory if left is None else memory * left[:, :, t]) + write[:, :, t].mT @ update
    output = torch.stack(outputs, dim=2).unflatten(3, (groups, size)).movedim(3, 2)
    return output.flatten(3, 4)[:, :, :, :length], memory
