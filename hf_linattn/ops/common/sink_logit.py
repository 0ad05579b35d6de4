"""A sink in the denominator of a softmax: for every query one more key, which has the score b_h and no value.

    o_i = sum_j exp(s_ij) v_j / (exp(b_h) + sum_j exp(s_ij))

With b = 0 this is softmax1 (Miller 2023, Attention Is Off By One); gpt-oss (arXiv 2508.10925) trains b_h. A query that
finds nothing can give its weight to nothing, where softmax needs a token to give it to. Without any key o_i is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MULTIPLE = 8  # of which fast kernels want the width of heads to be one


def softmax_beside(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Return the weights of the keys [..., K] beside a sink of score `sink`, broadcast to [..., 1]; None: of no sink.

    >>> softmax_beside(torch.zeros(3), torch.zeros(1))
    tensor([0.2500, 0.2500, 0.2500])
    """
    if sink is None:
        return scores.softmax(-1)
    return torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def attenuate(output: Tensor, log: Tensor, sink: Tensor | None) -> Tensor:
    """Return softmax's output [..., Dv], whose weights add up to exp(log) [...], as it is beside a sink."""
    return output if sink is None else output * torch.sigmoid(log - sink)[..., None]


def with_sink_key(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return operands in which the sink is the first key, for kernels that know none; values stand in front of zeros.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, M, D]. value: [B, Hkv, M, Dv]. sink: b [H]. scaling: of q . k.

    The key is 0 but for two places behind all others, where queries have b / scaling: rounded, and what that left.
    """
    size, most = query.shape[-1], torch.finfo(query.dtype).max / 2
    width = -(-max(size + 2, value.shape[-1]) // MULTIPLE) * MULTIPLE
    # infinite numbers would be none beside the zeros of other keys
    exact = (sink.to(torch.promote_types(query.dtype, torch.float32)) / scaling).clamp(-most, most)
    rounded = exact.to(query.dtype)
    rest = (exact - rounded.to(exact.dtype)).to(query.dtype)
    places = torch.stack([rounded, rest], dim=-1)[:, None].expand(*query.shape[:3], 2)
    query = F.pad(torch.cat([query, places], dim=-1), (0, width - size - 2))
    row = F.pad(key.new_ones(*key.shape[:2], 1, 2), (size, width - size - 2))
    key = torch.cat([row, F.pad(key, (0, width - size))], dim=2)
    return query, key, F.pad(value, (0, width - value.shape[-1], 1, 0))
