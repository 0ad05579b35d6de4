"""sinks: a sliding window and the first tokens of the sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from .base import register_mechanism
from .block_sparse import blocks_around
from .local import LocalConfig, LocalMechanism


@dataclass
class SinksConfig(LocalConfig):
    """Options of `sinks`."""

    num_sinks: int = field(default=4, metadata={"help": "first tokens of a sequence, which every query sees"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_sinks", least=0)


@register_mechanism("sinks")
class SinksMechanism(LocalMechanism):
    """Window and attention sinks (Xiao et al. 2023): query i sees key j if |i - j| < window_size or j < num_sinks.

    Trained models put the attention they do not need on the first tokens; a window alone takes these away.

    Deviation: the authors number positions inside the cache, so that a sink is never further away than the cache is
    long. Here keys keep the positions the model gave them, as keys arrive with their rotation.
    """

    config_class = SinksConfig
    citation = "Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453"

    @property
    def capacity(self) -> int:
        return self.config.window_size - 1 + self.config.num_sinks

    def key_blocks(self, block: int, num_blocks: int) -> Iterable[int]:
        sinks = range(-(-self.config.num_sinks // self.block_size))
        return chain(sinks, blocks_around(block, self.config.window_size, self.block_size))

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return super().sees(query_position, key_position) | (key_position < self.config.num_sinks)

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        return super().needed(key_position, position) | (key_position < self.config.num_sinks)
