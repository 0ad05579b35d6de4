"""local: softmax inside a sliding window; across, inside one that moves over the encoder's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..config import require
from ..ops import reference
from ..ops.block_softmax.interface import KeptKeys, in_ring
from ..ops.window.cross_attention import EncoderTokens, moving_window_attention, window_centre
from .block_sparse import BlockSparseConfig, BlockSparseMechanism, blocks_around
from .capabilities import ExactnessLimit
from .inputs import PLAIN, CallOptions
from .registration import register_mechanism


@dataclass
class WindowConfig(BlockSparseConfig):
    """Options of every mechanism with a sliding window."""

    window_size: int = field(default=256, metadata={"help": "a query sees keys less than `window_size` tokens away"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("window_size")


class WindowMechanism(BlockSparseMechanism):
    """Query i sees key j if |i - j| < window_size, and what a subclass adds to that."""

    limit = ExactnessLimit("window_size >= length", equal=lambda length: {"window_size": length})
    citation = "Child et al. 2019, Generating Long Sequences with Sparse Transformers, arXiv 1904.10509"

    only_window: ClassVar[bool] = False  # whether a query sees its window and the global keys, nothing else

    @property
    def window(self) -> int | None:
        return self.config.window_size if self.only_window else None

    @property
    def capacity(self) -> int:
        return self.config.window_size - 1

    def key_blocks(self, block: int, num_blocks: int) -> Iterable[int]:
        return blocks_around(block, self.config.window_size, self.block_size)

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return (query_position - key_position).abs() < self.config.window_size

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        return position - key_position < self.config.window_size

    def fixed_state(self, state: Any, room: int) -> KeptKeys:
        return state if self.window is None else in_ring(state, self)


@dataclass
class LocalConfig(WindowConfig):
    """Options of `local`."""

    keys_per_query: float = field(
        default=1.0, metadata={"help": "cross-attention: how many encoder tokens the window moves on with each query"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.keys_per_query
        number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        require("keys_per_query", rate, number and 0 < rate <= 1000, "above 0 and at most 1000")


@register_mechanism("local")
class LocalMechanism(WindowMechanism):
    """Sliding-window attention: query i sees key j if |i - j| < window_size (and j <= i if causal).

    The same rule as `sliding_window` in transformers. Decoding keeps the last window_size - 1 keys. Information from
    further away can only travel from layer to layer.

    In cross-attention the window moves over the encoder's tokens: query i, counted from the start of the decoder's
    row, sees key j if |j - c_i| < window_size with c_i = min(floor(i keys_per_query), n - 1) and n the row's real
    tokens. `keys_per_query` is the length of the source over that of the target: about 1 in translation, several
    frames a token in speech. Decoding keeps all of the encoder's tokens and reads a window of them.
    """

    config_class = LocalConfig
    only_window = True
    modes = frozenset({"causal", "bidirectional", "cross"})

    def cross_sequences(self, key: Tensor, value: Tensor, lengths: Tensor | None) -> EncoderTokens:
        position = torch.zeros(len(key), dtype=torch.long, device=key.device)
        return EncoderTokens(key, value, position + key.shape[2] if lengths is None else lengths, position)

    def cross_attention(
        self, query: Tensor, state: EncoderTokens, call: CallOptions = PLAIN
    ) -> tuple[Tensor, EncoderTokens]:
        if call.first_query is not None:  # the decoder's cache may have been cut, or begun anew
            state = state._replace(position=torch.zeros_like(state.position) + call.first_query)
        return moving_window_attention(
            query, state, window_size=self.config.window_size, keys_per_query=self.config.keys_per_query,
            scaling=self.layer.scaling, sink=self.log_sink(query, call.sink),
        )  # fmt: skip

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        if not self.layer.cross:
            return super().weights(query, key, allowed, call)
        length, rank = allowed.long().sum(-1), allowed.long().cumsum(-1) - 1  # [B or 1, 1, Nq], [B or 1, 1, Nq, Nk]
        centre = window_centre(torch.arange(query.shape[2], device=query.device), length, self.config.keys_per_query)
        seen = (rank - centre[..., None]).abs() < self.config.window_size
        sink = self.log_sink(query, call.sink)
        return reference.softmax_matrix(query, key, self.layer.scaling, allowed & seen, sink=sink)
