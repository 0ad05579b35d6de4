"""learned_sparse: blocks weighted by a trained pattern."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import require
from ..errors import UnsupportedModeError
from ..ops.common.tracing import has_values, is_mapped, unrecorded
from .block_sparse import BlockSparseConfig, BlockSparseMechanism
from .capabilities import ExactnessLimit
from .inputs import AttentionLayer
from .registration import register_mechanism

NEAR, FAR = 4.0, 0.0  # the pattern starts with weights from sigma(4) = 0.98 for the own block to sigma(0) = 0.5


@dataclass
class LearnedSparseConfig(BlockSparseConfig):
    """Options of `learned_sparse`."""

    reach: int = field(default=8, metadata={"help": "blocks away from its own that a query can see on a side"})
    top_blocks: int | None = field(
        default=None, metadata={"help": "how many of the distances are kept, the own block among them; None: all"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("reach", least=0)
        if self.top_blocks is not None:
            self.require_counts("top_blocks")


@register_mechanism("learned_sparse")
class LearnedSparseMechanism(BlockSparseMechanism):
    """o_i = sum_j sigma(P_h[I - J]) exp(scaling q_i . k_j) v_j, normalised, for blocks |I - J| <= reach.

    The pattern P is trained: one number per head and distance in blocks (parameter `pattern` [H, distances], distances
    0 ... reach, or -reach ... reach if bidirectional). `harden(top_blocks)` keeps the distances with the largest P of
    each head, so that the others cost nothing; their weights stay sigma(P). Training can go on after it.

    All are divided by sigma(4), which cancels but beside a sink: there the own block weighs at first what it does in
    softmax.

    Deviation: P depends on the distance of two blocks and not on both places (Tay et al. 2020, Synthesizer, arXiv
    2005.00743, learns one number per pair of places), so that it holds at any length.
    """

    config_class = LearnedSparseConfig
    static_steps = False
    limit = ExactnessLimit("block_size >= length", equal=lambda length: {"block_size": length})
    num_kept: Tensor
    citation = "Tay et al. 2020, Efficient Transformers: A Survey, arXiv 2009.06732 (learnable patterns)"

    def __init__(self, config: LearnedSparseConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        distance = self.distances().abs() / max(config.reach, 1)
        self.pattern = nn.Parameter((NEAR + (FAR - NEAR) * distance).expand(layer.num_heads, -1).clone())
        # saved with the weights, as hardening comes after training
        num_kept = min(config.top_blocks or len(distance), len(distance))
        self.register_buffer("num_kept", torch.tensor(num_kept, device="cpu"))

    def distances(self) -> Tensor:
        """Return I - J for every column of `pattern`."""
        return torch.arange(0 if self.layer.causal else -self.config.reach, self.config.reach + 1, device="cpu")

    def harden(self, top_blocks: int) -> None:
        """Keep only the `top_blocks` distances that weigh most in each head, the own block among them."""
        valid = isinstance(top_blocks, int) and 1 <= top_blocks <= self.pattern.shape[1]
        require("top_blocks", top_blocks, valid, f"an integer from 1 to {self.pattern.shape[1]}")
        self.num_kept.fill_(top_blocks)

    @property
    def capacity(self) -> int:
        return (self.config.reach + 1) * self.block_size - 1

    def kept(self) -> Tensor:
        """Return which distances each head keeps: boolean [H, distances]."""
        own = (self.distances() == 0).to(self.pattern.device)
        heaviest_first = self.pattern.detach().float().masked_fill(own, float("inf"))
        order = heaviest_first.topk(self._count(), dim=1).indices
        return torch.zeros_like(self.pattern, dtype=torch.bool).scatter(1, order, True)

    def _count(self) -> int:
        """Return how many distances each head keeps."""
        if not has_values(self.num_kept):
            raise UnsupportedModeError(
                "learned_sparse sees the blocks that its weights choose, and these have no values on the device 'meta'"
                " or made under FakeTensorMode; load the model first, or use another mechanism"
            )
        return unrecorded(int, self.num_kept)

    def key_table(self, num_blocks: int, causal: bool) -> Tensor:
        blocks, distances = torch.arange(num_blocks, device="cpu")[:, None, None], self.distances()
        if not torch.compiler.is_exporting() and not is_mapped(self.num_kept):
            count = self._count()
            if count == len(distances):
                return blocks - distances
            if not is_mapped(self.pattern):
                order = self.kept().to("cpu", torch.uint8).argsort(dim=1, descending=True)[:, :count]
                return blocks - distances[order]
        raise UnsupportedModeError(
            "learned_sparse sees the blocks that its weights choose, which torch.export cannot record, nor"
            " torch.func.vmap map over; run it eagerly with one set of weights, or use another mechanism"
        )

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return self._look_up(self.kept(), query_position, key_position, False)

    def log_weight(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        pattern = self.pattern.to(torch.promote_types(self.pattern.dtype, torch.float32))
        log_weight = F.logsigmoid(pattern) - F.logsigmoid(pattern.new_tensor(NEAR))
        return self._look_up(log_weight, query_position, key_position, 0.0)

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        return position // self.block_size - key_position // self.block_size <= self.config.reach

    def _look_up(self, table: Tensor, query_position: Tensor, key_position: Tensor, outside: float) -> Tensor:
        """Return table[h, I - J] for every pair [B, H, Nq, Nk], and `outside` where it has no column."""
        first = 0 if self.layer.causal else -self.config.reach
        column = query_position // self.block_size - key_position // self.block_size - first
        inside = (column >= 0) & (column < table.shape[1])
        # gathered: the gradient of an index would be added up by several threads in an order of their own
        place = column.clamp(0, table.shape[1] - 1)
        place = place.expand(torch.broadcast_shapes(place.shape, (len(table), 1, 1)))
        found = table[:, None].expand(*place.shape[:-1], -1).gather(-1, place)
        return torch.where(inside, found, outside)
