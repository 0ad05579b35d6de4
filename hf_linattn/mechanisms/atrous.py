"""atrous: a sliding window with holes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from .block_sparse import BlockSparseConfig, BlockSparseMechanism, blocks_around
from .capabilities import ExactnessLimit
from .registration import register_mechanism


@dataclass
class AtrousConfig(BlockSparseConfig):
    """Options of `atrous`."""

    window_size: int = field(default=64, metadata={"help": "how many keys a query sees on a side, itself included"})
    dilation: int = field(default=4, metadata={"help": "tokens from one of these keys to the next"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("window_size", "dilation")


@register_mechanism("atrous")
class AtrousMechanism(BlockSparseMechanism):
    """Dilated window: query i sees key j if i - j is a multiple of `dilation` and |i - j| < window_size * dilation.

    Its reach is `dilation` times that of a window with as many keys. Tokens of different remainders never meet, so it
    belongs beside other patterns in a plan. The blocks within reach are computed whole and masked.
    """

    config_class = AtrousConfig
    limit = ExactnessLimit(
        "dilation 1 and window_size >= length", equal=lambda length: {"window_size": length, "dilation": 1}
    )
    citation = "Beltagy et al. 2020, Longformer: The Long-Document Transformer, arXiv 2004.05150"

    @property
    def reach(self) -> int:
        """First distance at which nothing is seen."""
        return self.config.window_size * self.config.dilation

    @property
    def capacity(self) -> int:
        return self.reach - 1

    def key_blocks(self, block: int, num_blocks: int) -> Iterable[int]:
        return blocks_around(block, self.reach, self.block_size)

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        distance = (query_position - key_position).abs()
        return (distance < self.reach) & (distance % self.config.dilation == 0)

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        return position - key_position < self.reach
