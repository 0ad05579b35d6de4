"""local: softmax inside a sliding window."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from .base import ExactnessLimit, register_mechanism
from .block_sparse import BlockSparseConfig, BlockSparseMechanism, blocks_around


@dataclass
class LocalConfig(BlockSparseConfig):
    """Options of `local`."""

    window_size: int = field(default=256, metadata={"help": "a query sees keys less than so many tokens away"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("window_size")


@register_mechanism("local")
class LocalMechanism(BlockSparseMechanism):
    """Sliding-window attention: query i sees key j if |i - j| < window_size (and j <= i if causal).

    The same rule as `sliding_window` in transformers. Decoding keeps the last window_size - 1 keys. Information from
    further away can only travel from layer to layer.
    """

    config_class = LocalConfig
    limit = ExactnessLimit("window_size >= length", equal=lambda length: {"window_size": length})
    citation = "Child et al. 2019, Generating Long Sequences with Sparse Transformers, arXiv 1904.10509"

    @property
    def capacity(self) -> int:
        return self.config.window_size - 1

    def key_blocks(self, block: int, num_blocks: int) -> Iterable[int]:
        return blocks_around(block, self.config.window_size, self.block_size)

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return (query_position - key_position).abs() < self.config.window_size

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        return position - key_position < self.config.window_size
