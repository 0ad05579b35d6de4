"""radial: blocks that become rarer with the distance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .block_sparse import BlockSparseConfig, BlockSparseMechanism
from .capabilities import ExactnessLimit
from .registration import register_mechanism

LEVELS = 24  # doublings of the distance for which decoding has room: more blocks than any sequence has


@dataclass
class RadialConfig(BlockSparseConfig):
    """Options of `radial`."""

    window_blocks: int = field(default=4, metadata={"help": "distance in blocks below which every block is seen"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("window_blocks")


@register_mechanism("radial")
class RadialMechanism(BlockSparseMechanism):
    """Density that halves whenever the distance doubles: O(N log N).

    With d = |I - J| the distance of two blocks, all blocks with d < w = window_blocks are seen; of those with
    w 2^l <= d < w 2^(l + 1) only every 2^(l + 1)-th, those whose number is a multiple of it. A block that is passed
    over is never seen again, so decoding keeps O(log N) blocks, in a state with room for 2^24 window widths.

    Deviation from Radial Attention: one dimension, and blocks in place of a video's tokens and frames.
    """

    config_class = RadialConfig
    shifts = False
    whole_blocks = True
    growth = 2.4  # O(N log N): near 2 only for long sequences
    limit = ExactnessLimit(
        "(window_blocks - 1) * block_size >= length", equal=lambda length: {"window_blocks": length + 1}
    )
    citation = "Li et al. 2025, Radial Attention, arXiv 2506.19852"

    @property
    def capacity(self) -> int:
        width = self.config.window_blocks
        return (width + 1 + LEVELS * (width // 2 + 1)) * self.block_size

    def key_blocks(self, block: int, num_blocks: int) -> Iterable[int]:
        width = self.config.window_blocks
        yield from range(block - width + 1, block + width)
        while width < num_blocks:
            step = 2 * width // self.config.window_blocks
            for low, high in ((block - 2 * width + 1, block - width), (block + width, block + 2 * width - 1)):
                yield from range(-(-low // step) * step, min(high, num_blocks) + 1, step)
            width *= 2

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        key_block = key_position // self.block_size
        distance = (query_position // self.block_size - key_block).abs()
        # the exponent of the float nearest to d / w is its binary logarithm rounded down: exact below 2^24
        level = torch.frexp((distance // self.config.window_blocks).float()).exponent
        return key_block % torch.pow(2, level.long()) == 0

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        return self.sees(position, key_position)
