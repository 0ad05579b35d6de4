"""bigbird: neighbouring blocks, global tokens and random blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .random_blocks import RandomBlocksConfig, RandomBlocksMechanism
from .registration import register_mechanism


@dataclass
class BigBirdConfig(RandomBlocksConfig):
    """Options of `bigbird`."""

    window_blocks: int = field(default=1, metadata={"help": "neighbouring blocks seen on a side"})
    num_global: int = field(default=64, metadata={"help": "first tokens: seen by all, seeing all if bidirectional"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("window_blocks", "num_global", least=0)


@register_mechanism("bigbird")
class BigBirdMechanism(RandomBlocksMechanism):
    """Window, global tokens and random blocks (Zaheer et al. 2020).

    Query i of block I sees key j of block J if |I - J| <= window_blocks, if j < num_global, or if J is one of the
    blocks drawn for I (see `random_blocks`); in a bidirectional layer queries i < num_global see every key. A key
    found in several ways counts once.

    Deviation: the global tokens are the first ones; the authors' internal form has the last block too, which a causal
    layer cannot have. Causal: intersected with j <= i, random blocks from the past alone.
    """

    config_class = BigBirdConfig

    @property
    def num_global(self) -> int:
        return self.config.num_global

    def key_table(self, num_blocks: int, causal: bool) -> Tensor:
        chosen, width = super().key_table(num_blocks, causal), self.config.window_blocks
        window = torch.arange(num_blocks, device="cpu")[:, None, None] + torch.arange(-width, width + 1, device="cpu")
        return torch.cat([chosen, window.expand(-1, chosen.shape[1], -1)], dim=2)

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        distance = (query_position // self.block_size - key_position // self.block_size).abs()
        return super().sees(query_position, key_position) | (distance <= self.config.window_blocks)
