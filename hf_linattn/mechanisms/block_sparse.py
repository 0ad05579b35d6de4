"""What all mechanisms with a fixed pattern share: attention over the blocks it names, and the keys it keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops import reference
from ..ops.block_softmax.interface import (
    KeptKeys,
    attention_in_place,
    block_sparse_attention,
    continued_attention,
)
from ..ops.common.precision import accum_dtype
from .inputs import PLAIN, CallOptions
from .sequence import SequenceMechanism
from .softmax_type import SoftmaxTypeConfig, SoftmaxTypeMechanism


@dataclass
class BlockSparseConfig(SoftmaxTypeConfig):
    """Options of every mechanism on the block-sparse base."""

    block_size: int = field(default=64, metadata={"help": "tokens per block"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("block_size")


class BlockSparseMechanism(SoftmaxTypeMechanism, SequenceMechanism):
    """o_i = sum_j softmax_j(scaling q_i . k_j) v_j over the keys j that the mechanism's pattern shows to query i.

    A subclass is itself the pattern (see `ops.block_softmax.types.Pattern`): it writes `key_blocks` and `sees`,
    and for a state of constant size `capacity` and `needed`. Causal attention sees what the pattern shows and j <= i,
    token by token. Positions are counted from the start of each sequence, pads left out.
    """

    takes_half = True
    splits = True
    static_steps = True
    backends = ("auto", "torch", "triton")
    config: Any  # of the subclass's own config class
    family = "sparse"
    config_class: ClassVar[type[SoftmaxTypeConfig]] = BlockSparseConfig
    whole_blocks: bool = False  # whether `sees` is what the table says, so that it need not be asked
    shifts: bool = True  # whether a pair, both moved by a block, is seen as before: its mask is made once for many

    @property
    def num_global(self) -> int:
        """How many first tokens all see."""
        return 0

    @property
    def global_queries(self) -> bool:
        """Whether these see all keys themselves where attention is bidirectional."""
        return True

    @property
    def capacity(self) -> int | None:
        """How many past keys decoding must keep at most, beside the global ones; None: all of them."""
        return None

    @property
    def window(self) -> int | None:
        """W where a query sees the global keys and those less than W tokens away, and nothing else matters."""
        return None

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.config.block_size

    def key_blocks(self, block: int, num_blocks: int) -> Iterable[int]:
        """Return the blocks that queries of `block` may see, in any order; numbers of no block are passed over."""
        raise NotImplementedError

    def key_table(self, num_blocks: int, causal: bool) -> Tensor:
        """Return the blocks of all query blocks [num_blocks, 1, c]; patterns that differ by head have H for 1."""
        rows = []
        for block in range(num_blocks):
            limit = block + 1 if causal else num_blocks
            seen = sorted({x for x in self.key_blocks(block, limit) if 0 <= x < limit})
            rows.append(torch.tensor(seen, device="cpu"))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)[:, None]

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Return whether a query at [..., Nq, 1] sees a key at [..., 1, Nk]."""
        raise NotImplementedError

    def log_weight(self, query_position: Tensor, key_position: Tensor) -> Tensor | None:
        """Return what is added to the scores [B, H, Nq, Nk]; None for nothing."""
        return None

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        """Return whether a query at `position` or later may see this key."""
        return torch.ones_like(key_position, dtype=torch.bool)

    @property
    def learned(self) -> bool:
        """Whether parameters of the pattern are in training."""
        return self.training and any(name != "sink_logit" for name, _ in self.named_parameters())

    def _how(self, query: Tensor, call: CallOptions) -> dict[str, Any]:
        """What causal attention is computed with."""
        return {
            "scaling": self.layer.scaling, "sink": self.log_sink(query, call.sink, accum_dtype(query)),
            "learned": self.learned, "policy": self.policy,
        }  # fmt: skip

    def causal_in_place(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, starts: Tensor, call: CallOptions = PLAIN
    ) -> tuple[Tensor, KeptKeys] | None:
        return attention_in_place(query, key, value, self, lengths, starts, **self._how(query, call))

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: KeptKeys | None,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, KeptKeys | None]:
        how = self._how(query, call)
        if state is not None or call.keep_state:
            return continued_attention(query, key, value, self, state, lengths=lengths, **how)
        return block_sparse_attention(query, key, value, self, causal=True, **how), None

    def bidirectional_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, call: CallOptions = PLAIN
    ) -> Tensor:
        return block_sparse_attention(
            query, key, value, self, scaling=self.layer.scaling, causal=False, lengths=lengths,
            sink=self.log_sink(query, call.sink, accum_dtype(query)), learned=self.learned, policy=self.policy,
        )  # fmt: skip

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        rank = reference.positions(allowed)
        query_position, key_position = rank[..., :, None], rank[..., None, :]
        seen = self.sees(query_position, key_position) | (key_position < self.num_global)
        if not self.layer.causal and self.global_queries:
            seen = seen | (query_position < self.num_global)
        log_weight = self.log_weight(query_position, key_position)
        sink = self.log_sink(query, call.sink)
        return reference.softmax_matrix(query, key, self.layer.scaling, allowed & seen, log_weight, sink)


def blocks_around(block: int, window_size: int, block_size: int) -> range:
    """Return the blocks with keys less than `window_size` tokens away from some query of `block`."""
    distance = -(-(window_size - 1) // block_size)
    return range(block - distance, block + distance + 1)
