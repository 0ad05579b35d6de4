"""sparse_transformer: a sliding window and every `stride`-th block before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from .block_sparse import blocks_around
from .local import WindowConfig, WindowMechanism
from .registration import register_mechanism


@dataclass
class SparseTransformerConfig(WindowConfig):
    """Options of `sparse_transformer`."""

    window_size: int = field(default=128, metadata={"help": "a query sees keys less than `window_size` tokens away"})
    stride: int = field(default=4, metadata={"help": "blocks from one strided block to the next"})
    num_strides: int = field(default=4, metadata={"help": "strided blocks a query sees on a side"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("stride", "num_strides")


@register_mechanism("sparse_transformer")
class SparseTransformerMechanism(WindowMechanism):
    """Strided pattern of the Sparse Transformer (Child et al. 2019), over blocks.

    Query i of block I sees key j of block J if |i - j| < window_size, or if I - J is a multiple of `stride` and
    |I - J| <= stride * num_strides.

    Deviations: whole blocks are strided and not single tokens, and only `num_strides` of them are seen, so that the
    cost is linear and the decoding state constant; the paper's stride grows with the square root of the length.
    """

    config_class = SparseTransformerConfig

    @property
    def reach(self) -> int:
        """The furthest distance of a strided block, in blocks."""
        return self.config.stride * self.config.num_strides

    @property
    def capacity(self) -> int:
        return max(self.config.window_size - 1, (self.reach + 1) * self.block_size - 1)

    def key_blocks(self, block: int, num_blocks: int) -> Iterable[int]:
        strided = range(block - self.reach, block + self.reach + 1, self.config.stride)
        return chain(strided, blocks_around(block, self.config.window_size, self.block_size))

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        distance = (query_position // self.block_size - key_position // self.block_size).abs()
        strided = (distance % self.config.stride == 0) & (distance <= self.reach)
        return super().sees(query_position, key_position) | strided

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        within = position // self.block_size - key_position // self.block_size <= self.reach
        return super().needed(key_position, position) | within
