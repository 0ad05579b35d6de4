"""random_blocks: the own block and a few random ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .block_sparse import BlockSparseConfig, BlockSparseMechanism
from .capabilities import ExactnessLimit
from .registration import register_mechanism


@dataclass
class RandomBlocksConfig(BlockSparseConfig):
    """Options of `random_blocks`."""

    num_random: int = field(default=3, metadata={"help": "random blocks for each query block and head"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_random")


@register_mechanism("random_blocks")
class RandomBlocksMechanism(BlockSparseMechanism):
    """Query block I sees itself and `num_random` blocks drawn from 0 ... I (causal) or 0 ... 2 I + 1 (bidirectional).

    Every layer and head draws its own. A draw is a hash of seed, layer, head and I: the same in training, prefill and
    decoding, at every length. Drawn blocks that lie behind the end do not exist. As any past block may still be drawn,
    decoding keeps all keys.
    """

    config_class = RandomBlocksConfig
    shifts = False
    splits = False  # every head draws blocks of its own
    whole_blocks = True
    constant_state = static_steps = False
    limit = ExactnessLimit("one block", equal=lambda length: {"block_size": length})
    citation = "Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences, arXiv 2007.14062"

    def key_table(self, num_blocks: int, causal: bool) -> Tensor:
        own = torch.arange(num_blocks, device="cpu")[None, None]
        drawn = self.drawn(own)[0]  # [H, num_blocks, num_random]
        return torch.cat([own.transpose(1, 2).expand(drawn.shape[0], -1, -1), drawn], dim=2).transpose(0, 1)

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        query_block, key_block = query_position // self.block_size, key_position // self.block_size
        return (query_block == key_block) | (self.drawn(query_block) == key_block[..., None]).any(-1)

    def drawn(self, block: Tensor) -> Tensor:
        """Return the blocks [B, H, ..., num_random] that query blocks [B, 1, ...] draw."""
        block = block.clamp(min=0)  # where there is padding
        heads = torch.arange(self.layer.num_heads, device=block.device).view(-1, *(1,) * (block.dim() - 2))
        numbers = torch.arange(self.config.num_random, device=block.device)
        first = (self.config.seed * 1_000_003 + self.layer.index) & 0xFFFFFFFF  # so that any seed fits into int64
        mixed = scramble(torch.full_like(block, first))
        mixed = scramble(mixed + heads)
        mixed = scramble(scramble(mixed + block)[..., None] + numbers)
        return mixed % (block + 1 if self.layer.causal else 2 * block + 2)[..., None]


def scramble(x: Tensor) -> Tensor:
    """Return 31-bit hashes of integers: the finaliser of MurmurHash3 in 32 bits."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0x7FFFFFFF
