"""linformer: softmax over k slots in place of N keys; causally, over slots of the past and the current block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..config import require, require_known
from ..errors import UnsupportedModelError
from ..ops import reference
from ..ops.common.grad_accumulator import GradAccumulator
from ..ops.common.precision import accum_dtype, widened
from ..ops.slots.bidirectional import pooled_block_attention
from ..ops.slots.interface import MemoryState, bounded_memory_attention, segment_size
from ..ops.slots.pooling import segment_sums, slot_attention
from ..ops.slots.segment_pool import products_with_rows
from .base import Mechanism
from .capabilities import ExactnessLimit
from .inputs import PLAIN, AttentionLayer, CallOptions
from .registration import register_mechanism
from .sequence import SequenceMechanism
from .softmax_type import SoftmaxTypeConfig, SoftmaxTypeMechanism

# name -> (whether all heads share E and F, whether E = F)
SHARING = {"none": (False, False), "heads": (True, False), "kv": (True, True), "layers": (True, True)}


class Slots(NamedTuple):
    """E K [B, Hkv, k, D], F V [B, Hkv, k, Dv], and how many tokens each slot stands for [B or 1, k]."""

    key: Tensor
    value: Tensor
    counts: Tensor


@dataclass
class LinformerConfig(SoftmaxTypeConfig):
    """Options of `linformer`."""

    num_slots: int = field(default=256, metadata={"help": "slots k; sequences of up to k tokens are exact"})
    sharing: str = field(
        default="heads",
        metadata={"help": "none: E, F per key/value head; heads: one E, one F; kv: E = F; layers: one for all"},
    )
    positions_per_slot: int = field(
        default=1, metadata={"help": "bidirectional: E has this many columns per slot, each a share of the length"}
    )
    block_size: int = field(default=64, metadata={"help": "tokens seen exactly at a time; a power of two"})
    exact_block: bool = field(
        default=False, metadata={"help": "bidirectional: see the own block exactly, as causal layers always do"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_slots", "positions_per_slot", "block_size")
        size = self.block_size
        require("block_size", size, size & (size - 1) == 0, "a power of two")
        require_known("sharing", self.sharing, SHARING)
        both = self.exact_block and self.positions_per_slot > 1
        require("positions_per_slot", self.positions_per_slot, not both, "1 with exact_block=True, which has no E")


@register_mechanism("linformer")
class LinformerMechanism(SoftmaxTypeMechanism, SequenceMechanism):
    """Linformer (Wang et al. 2020): o_i = softmax_s(scaling q_i . (E K)_s + log c_s) (F V)_s over k slots.

    Bidirectional: a sequence of any length n is cut into k segments, token j into segment floor(j k / n); c_s counts
    the tokens of segment s. (E K)_s = sum_j E[s, floor(j P / n)] k_j / c_s with E [k, P] over P relative positions
    (k times `positions_per_slot`), and F likewise. E and F begin as segment means: E[s, p] = 1 where
    floor(p k / P) = s, else 0. With P = n, E is the paper's. Time O(N k (D + Dv)).

    Causal: attention with bounded-memory control (Peng et al. 2021, arXiv 2110.02488): token i sees the tokens of its
    own block of `block_size` exactly and the T completed tokens before it through k slots, in one softmax. The slots
    are the segments floor(j / u) with u the smallest power of two for which k of them are enough; token j is written
    into its slot with the weight exp(e . k_j) for its key and exp(f . k_j) for its value, divided by the sum of these
    weights in the slot so far; e, f [D] are trained from zero on, where slots are segment means. See
    `hf_linattn.ops.slots.interface`. The decoding state has constant size, per key/value head.

    `sharing` as in the paper: `none` (one E and F per key/value head), `heads` (for all of them), `kv` (E = F too),
    `layers` (and one for all layers, which the first of them holds and saves); causally of e and f. Sequences of
    n <= k tokens (causally: up to k completed ones) have a slot for every token, whatever was trained: E is the
    identity and attention exact.

    With `exact_block=True` bidirectional layers do the same: token i sees the tokens of its own block exactly and all
    others, before and behind it, through the segments floor(j / u(n)), written with e and f. Long-Short Transformer
    (Zhu et al. 2021, arXiv 2107.02192) has a window beside its slots, too. See `hf_linattn.ops.slots.bidirectional`.

    In cross-attention the slots are those of the bidirectional form, made of the encoder's tokens once.

    Deviations: the paper's E is tied to one length and has no mask. Here its columns are relative positions, so that
    every length and every padded row is served. log c_s makes segments of unequal size weigh what their tokens do
    (it cancels where k divides n). Peng et al. write every token into all slots; here into one of them, chosen by its
    position, as averages over all of the past say little to a model that was pretrained with softmax.
    """

    config_class: ClassVar[type[SoftmaxTypeConfig]] = LinformerConfig
    modes = frozenset({"causal", "bidirectional", "cross"})
    takes_half = True
    backends = ("auto", "torch", "triton")
    limit = ExactnessLimit("softmax attention with num_slots >= n", equal=lambda length: {"num_slots": length})
    citation = "Wang et al. 2020, Linformer, arXiv 2006.04768; causal: Peng et al. 2021, ABC, arXiv 2110.02488"
    family = "compressed"

    config: LinformerConfig

    def __init__(self, config: LinformerConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        shared, equal = SHARING[config.sharing]
        heads = 1 if shared else layer.num_key_value_heads
        self.in_blocks = layer.causal or (config.exact_block and not layer.cross)
        # in blocks: every token weighs the same; else a slot adds up its own segment
        segments = torch.eye(config.num_slots, device="cpu").repeat_interleave(config.positions_per_slot, dim=1)
        initial = torch.zeros(layer.head_dim, device="cpu") if self.in_blocks else segments
        self.key_projection: Any = nn.Parameter(initial.repeat(heads, *[1] * initial.dim()))
        self.value_projection = None if equal else nn.Parameter(self.key_projection.detach().clone())
        self._holder: tuple[LinformerMechanism, ...] = ()  # in a tuple, so that it is no submodule and is saved once

    def join(self, earlier: Sequence[Mechanism]) -> None:
        if self.config.sharing != "layers":
            return
        own: Any = self._holder[0].key_projection if self._holder else self.key_projection
        for other in earlier:
            if not isinstance(other, LinformerMechanism) or other.config != self.config or other._holder:
                continue
            if other.projections(own)[0].shape == own.shape:
                self.key_projection, self._holder = None, (other,)
                return

    def borrowed(self) -> tuple[nn.Module, ...]:
        return self._holder

    def projections(self, like: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return E and F [Hkv or 1, k, P], in blocks e and f [Hkv or 1, D], where `like` is, in its dtype for None."""
        first: Any = self._holder[0].key_projection if self._holder else self.key_projection
        if self._holder and _in_pieces(first):
            raise UnsupportedModelError(
                f"sharing='layers' of 'linformer' has layer {self.layer.index} read weights of layer"
                f" {self._holder[0].layer.index}, of which FSDP or ZeRO-3 has left this process a piece by then; patch"
                " with sharing='kv' or 'heads', or train with DDP"
            )
        second = first if self.value_projection is None else self.value_projection
        dtype = dtype or like.dtype
        return first.to(like.device, dtype), second.to(like.device, dtype)

    def log_weights(self, key: GradAccumulator) -> tuple[Tensor, Tensor]:
        """Return e . k_j and f . k_j [B, Hkv, N]."""
        first, second = products_with_rows(torch.stack(self.projections(key.whole), dim=1), key).unbind(2)
        return first, second

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: MemoryState | None,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, MemoryState | None]:
        return bounded_memory_attention(
            query,
            key,
            value,
            self.log_weights,
            num_slots=self.config.num_slots,
            block_size=self.config.block_size,
            scaling=self.layer.scaling,
            lengths=lengths,
            state=state,
            keep_state=call.keep_state,
            sink=self.log_sink(query, call.sink, accum_dtype(query)),
            policy=self.policy,
        )

    def bidirectional_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, call: CallOptions = PLAIN
    ) -> Tensor:
        sink = self.log_sink(query, call.sink, accum_dtype(query))
        if self.in_blocks:
            query, key, value = widened(query, key, value)
            return pooled_block_attention(
                query, key, value, self.log_weights, num_slots=self.config.num_slots,
                block_size=self.config.block_size, scaling=self.layer.scaling, lengths=lengths, sink=sink,
            )  # fmt: skip
        slots = self._make_slots(key, value, lengths)
        alike = lengths is None and key.shape[2] % self.config.num_slots == 0 and sink is None
        return slot_attention(query, slots.key, slots.value, None if alike else slots.counts, self.layer.scaling, sink)

    def cross_sequences(self, key: Tensor, value: Tensor, lengths: Tensor | None) -> Slots:
        slots = self._make_slots(key, value, lengths)
        return slots._replace(counts=slots.counts.expand(len(key), -1))

    def cross_attention(self, query: Tensor, state: Slots, call: CallOptions = PLAIN) -> tuple[Tensor, Slots]:
        return slot_attention(query, *state, self.layer.scaling, self.log_sink(query, call.sink)), state

    def _make_slots(self, key: Tensor, value: Tensor, lengths: Tensor | None) -> Slots:
        slots, columns = self.config.num_slots, self.config.positions_per_slot
        counts, sums = segment_sums((key, value), slots * columns, lengths)
        counts = counts.unflatten(1, (slots, columns)).sum(-1)  # [B or 1, k]
        short = (counts.sum(1) <= slots)[:, None, None, None]  # E is the identity, which is what segments come to
        some_short = lengths is not None or key.shape[2] <= slots
        means = []
        projections = self.projections(key, accum_dtype(key))
        for x, projection in zip(widened(*sums), projections, strict=True):
            total = _project(projection, x)
            if some_short:
                total = torch.where(short, x.unflatten(2, (slots, columns)).sum(3), total)
            means.append(total / counts.clamp(min=1).to(x.dtype)[:, None, :, None])
        return Slots(means[0], means[1], counts)

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        """Queries that see the same keys at a time: softmax(scaling q (E K)^T + log c) F with E, F [slots, keys]."""
        groups = query.shape[1] // key.shape[1]
        matrices = []
        for q, k, pairs in zip(query, key, allowed.expand(query.shape[0], -1, -1, -1), strict=True):
            matrix, places, lines = q.new_zeros(*q.shape[:2], k.shape[1]), [], []
            views, view = pairs[0].unique(dim=0, return_inverse=True)
            for number in range(len(views)):
                seen, rows = views[number].nonzero()[:, 0], (view == number).nonzero()[:, 0]
                if not len(seen):
                    continue
                own = torch.searchsorted(seen, rows) // self.config.block_size
                for block in own.unique() if self.in_blocks else own[:1]:
                    chosen = rows[own == block] if self.in_blocks else rows
                    first, second, counts = self._slots_of(k[:, seen], int(block))
                    first, second, keys = (x.repeat_interleave(groups, 0) for x in (first, second, k[:, seen]))
                    scores = q[:, chosen] @ (first @ keys).mT * self.layer.scaling
                    weights = reference.softmax(scores + counts.log(), self.log_sink(query, call.sink)) @ second
                    places.append(chosen)
                    lines.append(matrix.new_zeros(*weights.shape[:2], k.shape[1]).index_copy(2, seen, weights))
            matrices.append(matrix.index_copy(1, torch.cat(places), torch.cat(lines, 1)) if lines else matrix)
        return torch.stack(matrices)

    def _slots_of(self, keys: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return E and F [Hkv, slots, n] of the n keys [Hkv, n, D] that a query of a block sees, and their counts."""
        heads, n, _ = keys.shape
        position = torch.arange(n, device=keys.device)
        k, size = self.config.num_slots, self.config.block_size
        if self.layer.causal:
            done = (n - 1) // size * size
            unit = segment_size(done, k)
            slot = torch.where(position < done, position // unit, -(-done // unit) + position - done)
        elif self.in_blocks:  # on which side of the block, in which segment, or which token
            side, unit = (position // size - block).sign(), segment_size(n, k)
            code = torch.where(side == 0, position, position // unit) * 3 + side + 1
            slot = code.unique(return_inverse=True)[1]
        else:
            slot = position if n <= k else position * k // n
        member = (slot == torch.arange(int(slot.max()) + 1, device=keys.device)[:, None]).to(keys.dtype)
        counts = member.sum(1)
        matrices = []
        for x in self.projections(keys):
            if self.in_blocks:
                scores = torch.einsum("hjd,hd->hj", keys, x.expand(heads, -1))[:, None]
                matrices.append(scores.masked_fill(member == 0, -torch.inf).softmax(-1))
            elif n <= k:
                matrices.append(member.expand(heads, -1, -1))
            else:
                matrices.append((x[:, :, position * x.shape[2] // n] / counts[:, None]).expand(heads, -1, -1))
        return matrices[0], matrices[1], counts


def _project(projection: Tensor, x: Tensor) -> Tensor:
    """Return projection [Hkv or 1, k, P] times x [B, Hkv, P, D]: one product for all heads where they share it."""
    if len(projection) > 1:
        return projection @ x
    return (projection @ x.transpose(1, 2).flatten(2)).unflatten(2, (x.shape[1], -1)).transpose(1, 2)


def _in_pieces(projection: Tensor) -> bool:
    """Whether other processes hold parts of it now, or did until it was read.

    FSDP2 shards it by name, FSDP1 leaves it flat. ZeRO-3 gathers what is read, but not again for its gradient.
    """
    placements: Any = getattr(projection, "placements", ())
    whole = projection.dim() > 1 and not hasattr(projection, "ds_status")
    return not whole or any(placement.is_shard() for placement in placements)
