"""Where each key stands for each query beside hard keys, by the definition of `hard_keys` and with no trick.

For tests and diagnostics, in the precision of the inputs: one row, one head and one block at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..linear.types import CHUNK_SIZE
from .types import ERROR_BITS, HybridWeights

Recall = Callable[[int, int, list[int], list[int]], Tensor]  # row, head, keys asked, keys in the state -> [K, Dv]
Entered = dict[tuple[int, int, int], list[int]]  # row, key/value head, query -> the keys in the state, as they entered


@torch.no_grad()
def keys_in_state(value: Tensor, allowed: Tensor, weights: HybridWeights, recall: Recall) -> Entered:
    """Return which keys each query finds in the state, in the order in which they entered it.

    value: [B, Hkv, N, Dv]. allowed: [B or 1, 1, N, N], causal. recall: what the state of some keys says about
    others.
    """
    found: Entered = {}
    batch, heads, length, _ = value.shape
    for row in range(batch):
        seen = allowed[row % len(allowed), 0]
        for query in range(length):
            tokens = seen[query].nonzero()[:, 0].tolist()  # of the query's own sequence, up to itself
            blocks = max(0, (len(tokens) - 1) // CHUNK_SIZE - math.ceil((weights.window_size - 1) / CHUNK_SIZE))
            for head in range(heads):
                found[row, head, query] = _enter(value[row, head], weights, row, head, tokens, blocks, recall)[1]
    return found


def _enter(
    value: Tensor, weights: HybridWeights, row: int, head: int, tokens: list[int], blocks: int, recall: Recall
) -> tuple[list[int], list[int]]:
    """Return the hard keys and those in the state after `blocks` blocks have left the window."""
    hard: list[int] = []
    entered: list[int] = []
    for block in range(blocks):
        candidates = hard + tokens[max(weights.num_sinks, block * CHUNK_SIZE) : (block + 1) * CHUNK_SIZE]
        said = recall(row, head, candidates, entered)
        errors, sizes = (x.norm(dim=-1).tolist() for x in (value[candidates] - said, value[candidates]))
        error = [_compared(*x, weights.relative_error) for x in zip(errors, sizes, strict=True)]
        worst = sorted(range(len(candidates)), key=lambda j: (-error[j], j))[: weights.num_hard_keys]
        hard = [candidates[j] for j in sorted(worst)]
        entered = entered + [x for x in candidates if x not in hard]
    return hard, entered


def _compared(error: float, size: float, relative: bool) -> float:
    """Return the error by which a key is ranked, to ERROR_BITS bits beside the size of its value."""
    if relative:
        return _to_bits(1 + (error / size if size else 0.0))
    return _to_bits(size + error) - _to_bits(size)


def _to_bits(x: float) -> float:
    if not math.isfinite(x):
        return x
    fraction, exponent = math.frexp(x)
    return math.ldexp(math.floor(fraction * 2**ERROR_BITS + 0.5), exponent - ERROR_BITS)


def kernel_recall(features: Tensor, value: Tensor, rate: Tensor | None, position: Tensor) -> Recall:
    """Return the recall of kernel attention.

    features: phi(k) [B, Hkv, N, F]. rate: r [Hkv] or None. position: [B or 1, N].
    """

    def recall(row: int, head: int, asked: list[int], entered: list[int]) -> Tensor:
        keys, values = features[row, head], value[row, head]
        weights = keys[asked] @ keys[entered].mT
        if rate is not None and entered:
            at = position[row % len(position), entered]
            weights = weights * torch.exp(rate[head] * (at - at.max()))
        total = weights.sum(-1, keepdim=True)
        return weights @ values[entered] / torch.where(total == 0, 1.0, total)

    return recall
