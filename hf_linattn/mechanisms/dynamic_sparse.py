"""dynamic_sparse: the own block, and the blocks whose mean key suits the query best."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import MechanismConfig
from ..ops import reference
from ..ops.common.grad_accumulator import GradAccumulator
from .block_sparse import BlockSparseConfig
from .capabilities import ExactnessLimit
from .inputs import PLAIN, CallOptions
from .registration import register_mechanism
from .sequence import SequenceMechanism
from .softmax_type import SoftmaxTypeMechanism


@dataclass
class DynamicSparseConfig(BlockSparseConfig):
    """Options of `dynamic_sparse`."""

    num_blocks: int = field(default=4, metadata={"help": "blocks each query and head chooses beside its own"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_blocks")


class PastKeys(NamedTuple):
    """All keys and values read so far, every row from its first place on: [B, Hkv, M, D or Dv]; length: [B]."""

    key: Tensor
    value: Tensor
    length: Tensor


@register_mechanism("dynamic_sparse")
class DynamicSparseMechanism(SoftmaxTypeMechanism, SequenceMechanism):
    """Mixture of block attention (Lu et al. 2025): softmax over the own block and the best `num_blocks` others.

    Block J's gate for query i is q_i . mean(k_j, j in J). Causal: only blocks completed before the query's own can be
    chosen, so no mean holds a key the query may not see. The own block is seen up to the query itself. Every query
    and head chooses for itself. The choice passes no gradient; what is chosen does.

    The gates cost N^2 / block_size products, which is little beside the attention below some hundred thousand tokens.
    Any past block may be chosen again, so decoding keeps all keys.

    Deviation: `num_blocks` does not count the own block. There is no generator network.
    """

    config: Any  # of config_class
    config_class: ClassVar[type[MechanismConfig]] = DynamicSparseConfig
    constant_state = False
    splits = True
    continuous = False
    growth = 3.7  # with blocks of 8 tokens the gates, N^2 / 8, cost most; with the default 64, 2.1
    limit = ExactnessLimit("num_blocks * block_size >= length", equal=lambda length: {"num_blocks": length})
    citation = "Lu et al. 2025, MoBA: Mixture of Block Attention for Long-Context LLMs, arXiv 2502.13189"
    family = "sparse"

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: PastKeys | None,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, PastKeys]:
        past = _extend(state, key, value, lengths)
        start = torch.zeros_like(past.length) if state is None else state.length
        return self._attend(query, past.key, past.value, past.length, start, call), past

    def bidirectional_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, call: CallOptions = PLAIN
    ) -> Tensor:
        count = torch.full(key.shape[:1], key.shape[2], device=key.device) if lengths is None else lengths
        return self._attend(query, key, value, count, torch.zeros_like(count), call)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, start: Tensor, call: CallOptions
    ) -> Tensor:
        """Attention of queries at `start` [B] and later over keys of which each row has `lengths` [B]."""
        size = self.config.block_size
        missing = -key.shape[2] % size
        present = torch.arange(key.shape[2] + missing, device=key.device) < lengths[:, None]
        present = present.unflatten(1, (-1, size))[:, None]  # [B, 1, blocks, size]
        blocks = [F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, size)) for x in (key, value)]
        total = (blocks[0] * present[..., None]).sum(3)
        means = (total / present.sum(3).clamp(min=1)[..., None]).detach()
        sources = [GradAccumulator(x) for x in blocks]
        outputs, first = [], 0
        for part in query.split(size, dim=2):
            position = start[:, None] + torch.arange(first, first + part.shape[2], device=query.device)
            outputs.append(self._attend_chosen(part, position, means, sources, present, call))
            first += size
        return torch.cat(outputs, dim=2)

    def _attend_chosen(
        self, query: Tensor, position: Tensor, means: Tensor, blocks: list[GradAccumulator], present: Tensor,
        call: CallOptions,
    ) -> Tensor:
        """Choose blocks for queries [B, H, T, D] at `position` [B, T], and attend to what is in them."""
        batch, heads, _, _ = query.shape
        size, shared = self.config.block_size, means.shape[1]
        chosen, open_gate = self._choose(query, position, means, present.any(-1))
        owner = torch.arange(heads, device=query.device) // (heads // shared)
        row = torch.arange(batch, device=query.device)[:, None, None, None]
        index = ((row * shared + owner[:, None, None]) * means.shape[2] + chosen).flatten()
        keys, values = (  # [B, H, T, chosen * size, D]
            x.index_select(0, 2, index).unflatten(0, chosen.shape).flatten(3, 4) for x in blocks
        )
        there = present[row, 0, chosen] & open_gate[..., None]
        place = chosen[..., None] * size + torch.arange(size, device=query.device)
        if self.layer.causal:
            there = there & (place <= position[:, None, :, None, None])
        scores = (keys @ query[..., None]).squeeze(-1) * self.layer.scaling
        scores = scores.masked_fill(~there.flatten(3), float("-inf"))
        weights = reference.softmax(scores, self.log_sink(query, call.sink))
        return (weights[..., None, :] @ values).squeeze(-2)

    def _choose(
        self, query: Tensor, position: Tensor, means: Tensor, exists: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return block numbers [B, H, T, c] and which of them are open to the query; the own block is always there.

        `exists` [B, 1, blocks] says which blocks hold any token.
        """
        batch, heads, rows, width = query.shape
        count = means.shape[2]
        folded = query.detach().reshape(batch, means.shape[1], -1, width)
        gates = (folded @ means.transpose(-1, -2)).view(batch, heads, rows, count)
        gates = gates.masked_fill(~exists[:, :, None], float("-inf"))
        number = torch.arange(count, device=query.device)
        own = (position // self.config.block_size)[:, None, :, None]
        if self.layer.causal:
            gates = gates.masked_fill(number > own, float("-inf"))
        gates = gates.masked_fill(number == own, float("inf"))
        best = gates.topk(min(self.config.num_blocks + 1, count), dim=-1)
        return best.indices, best.values != float("-inf")  # what is no number stays open, and shows

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        size, rank = self.config.block_size, reference.positions(allowed)
        block = rank // size
        # which real tokens share key j's block and sequence: all a query may see, had it the sequence to itself
        together = allowed | allowed.transpose(-1, -2)
        same = together & (block[..., :, None] == block[..., None, :])
        real = same.diagonal(dim1=-2, dim2=-1)
        own = same & real[..., None] & real[..., None, :]
        means = reference.attend(reference.normalise(own.to(key.dtype)).expand(-1, key.shape[1], -1, -1), key)
        gates = reference.products(query, means)
        other = allowed & ~own
        if self.layer.causal:
            other = other & (block[..., None, :] < block[..., :, None])
        gates = gates.masked_fill(~other, float("-inf"))
        best = self._best_blocks(gates, block[..., None, :].expand_as(other))
        sink = self.log_sink(query, call.sink)
        return reference.softmax_matrix(query, key, self.layer.scaling, allowed & (own | best), sink=sink)

    def _best_blocks(self, gates: Tensor, block: Tensor) -> Tensor:
        """Mark the keys whose gate [B, H, N, N] is among those of the best `num_blocks` different blocks."""
        marked = torch.zeros_like(gates, dtype=torch.bool)
        for _ in range(self.config.num_blocks):
            rest = gates.masked_fill(marked, float("-inf"))
            best = rest.max(-1, keepdim=True)
            number = block.expand_as(gates).gather(-1, best.indices)
            marked = marked | ((block == number) & (best.values > float("-inf")) & (gates > float("-inf")))
            if not bool((gates.masked_fill(marked, float("-inf")) > float("-inf")).any()):
                break
        return marked


def _extend(state: PastKeys | None, key: Tensor, value: Tensor, lengths: Tensor | None) -> PastKeys:
    """Put the new keys behind those each row has."""
    batch, _, count, _ = key.shape
    new = torch.full((batch,), count, device=key.device) if lengths is None else lengths
    if state is None:  # a state is never a view of what it was made from
        return PastKeys(key.clone(), value.clone(), new)
    length = state.length + new
    room = max(int(length.max()), 1)
    steps = torch.arange(count, device=key.device)
    # what is no token goes behind the last place, and is cut off
    place = torch.where(steps < new[:, None], state.length[:, None] + steps, room)

    def put(old: Tensor, added: Tensor) -> Tensor:
        grown = F.pad(old, (0, 0, 0, room + 1 - old.shape[2]))
        index = place[:, None, :, None].expand_as(added)
        return grown.scatter(2, index, added)[:, :, :room]

    return PastKeys(put(state.key, key), put(state.value, value), length)
