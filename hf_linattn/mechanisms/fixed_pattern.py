"""fixed_pattern: groups of tokens, and the last tokens of the groups around."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ..config import require
from .block_sparse import BlockSparseConfig, BlockSparseMechanism
from .capabilities import ExactnessLimit
from .registration import register_mechanism


@dataclass
class FixedPatternConfig(BlockSparseConfig):
    """Options of `fixed_pattern`."""

    group_size: int = field(default=256, metadata={"help": "tokens per group, all seen inside it"})
    num_summary: int = field(default=64, metadata={"help": "last tokens of a group, which other groups see too"})
    num_groups: int = field(default=4, metadata={"help": "how many groups away they are seen"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("group_size", "num_summary", "num_groups")
        fits = self.num_summary <= self.group_size
        require("num_summary", self.num_summary, fits, f"at most group_size={self.group_size}")


@register_mechanism("fixed_pattern")
class FixedPatternMechanism(BlockSparseMechanism):
    """Fixed pattern of the Sparse Transformer (Child et al. 2019).

    Query i of group g = i // group_size sees key j of group h if g = h, or if |g - h| <= num_groups and j is one of
    the last `num_summary` tokens of its group.

    Deviation: only the summaries of `num_groups` groups are seen and not those of all, so that the cost is linear.
    """

    config_class = FixedPatternConfig
    shifts = False
    limit = ExactnessLimit("group_size >= length", equal=lambda length: {"group_size": max(length, 64)})
    citation = "Child et al. 2019, Generating Long Sequences with Sparse Transformers, arXiv 1904.10509"

    @property
    def capacity(self) -> int:
        return self.config.group_size - 1 + self.config.num_groups * self.config.num_summary

    def key_blocks(self, block: int, num_blocks: int) -> Iterable[int]:
        group_size, size = self.config.group_size, self.block_size
        first, last = block * size // group_size, ((block + 1) * size - 1) // group_size
        for group in range(max(0, first - self.config.num_groups), last + self.config.num_groups + 1):
            end = (group + 1) * group_size
            start = group * group_size if first <= group <= last else end - self.config.num_summary
            yield from range(start // size, -(-end // size))

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        distance = (query_position // self.config.group_size - key_position // self.config.group_size).abs()
        return (distance == 0) | (self._is_summary(key_position) & (distance <= self.config.num_groups))

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        return self.sees(position, key_position)

    def _is_summary(self, key_position: Tensor) -> Tensor:
        return key_position % self.config.group_size >= self.config.group_size - self.config.num_summary
