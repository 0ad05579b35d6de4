"""nystrom: every query reads landmarks, the means of segments, and every landmark reads every key."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import MechanismConfig, require
from ..ops import reference
from ..ops.common.exact_softmax import softmax_attention
from ..ops.common.numerics import LOWEST
from ..ops.common.padding import take
from ..ops.slots.nystrom import NystromState, Rule, at_once, causal_nystrom_attention, pseudo_inverse
from ..ops.slots.pooling import segment_sums
from ..ops.slots.segment_pool import segment_size
from .capabilities import ExactnessLimit
from .inputs import PLAIN, AttentionLayer, CallOptions
from .registration import register_mechanism
from .sequence import SequenceMechanism


@dataclass
class NystromConfig(MechanismConfig):
    """Options of `nystrom`."""

    num_landmarks: int = field(default=64, metadata={"help": "landmarks m; sequences of up to m tokens are exact"})
    num_iterations: int = field(
        default=6, metadata={"help": "steps of the pseudo-inverse; few of them keep small singular values small"}
    )
    kernel_size: int = field(
        default=33, metadata={"help": "taps of the trained convolution of the values, odd; 0: no convolution"}
    )
    block_size: int = field(default=128, metadata={"help": "causal: tokens seen exactly at a time; a power of two"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_landmarks", "num_iterations", "block_size")
        self.require_counts("kernel_size", least=0)
        taps, size = self.kernel_size, self.block_size
        require("kernel_size", taps, taps % 2 == 1 or taps == 0, "odd, or 0 for no convolution")
        require("block_size", size, size & (size - 1) == 0, "a power of two")


@register_mechanism("nystrom")
class NystromMechanism(SequenceMechanism):
    """Nystromformer (Xiong et al. 2021): O = softmax(s Q Lk^T) pinv(softmax(s Lq Lk^T)) softmax(s Lq K^T) V + conv(V).

    Bidirectional: a sequence of any length n is cut into m segments, token j into segment floor(j m / n); Lq [m, D]
    are their mean queries, per query head, Lk [m, D] their mean keys, per key/value head. In the first two softmaxes
    landmark r has + log c_r, c_r the tokens of its segment. pinv is the paper's iteration (`ops.slots.nystrom`).
    Sequences of n <= m tokens have a landmark for every token, with which the formula is softmax(s Q K^T) V + conv(V):
    that is what they get. Time O(N m (D + Dv) + m^3).

    conv(V)_i = sum_t taps[h, t] v_{i + t - kernel_size // 2} with the trained parameter `taps` [H, kernel_size], zero
    at first; what lies outside of the sequence counts as zero.

    Causal: token i sees its own block of `block_size` exactly and the T tokens of the completed blocks through m
    slots, in one softmax with weights exp(s q . k) c for slots of c tokens. The slots are the segments floor(j / u)
    with u the smallest power of two for which m of them are enough. Completed segments are landmarks: their key is the
    mean key, their value the row of pinv(softmax(s Lq Lk^T)) softmax(s Lq K^T) V over the tokens of all of them. A
    segment that is still open, as one can be where u > `block_size`, has its mean key and mean value. With T <= m
    every token is a slot of its own and attention exact. conv reads i - kernel_size + 1 to i. Time O(N (m +
    block_size) (D + Dv)) and at most a pseudo-inverse per block, ever fewer from m `block_size` tokens on. New
    landmarks read all keys, so the decoding state keeps them; a token reads m slots and its own block.

    Deviations: the paper has one length, no padding and no causal form. Means over real tokens serve every length, and
    log c makes segments of unequal size weigh what their tokens do (it cancels where m divides n). The iteration
    starts from a norm of each matrix, where the original and transformers take one maximum over batch and heads, so
    that a row depends on its neighbours. `taps` begin at zero: a pretrained model knows nothing of them.
    """

    config_class = NystromConfig
    constant_state = False
    reads_queries = True
    averages = False  # what is solved for may have negative weights
    limit = ExactnessLimit("softmax attention with num_landmarks >= n", equal=lambda length: {"num_landmarks": length})
    citation = "Xiong et al. 2021, Nystromformer, arXiv 2102.03902"
    family = "compressed"

    config: NystromConfig

    def __init__(self, config: NystromConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        if config.kernel_size:
            self.taps = nn.Parameter(torch.zeros(layer.num_heads, config.kernel_size, device="cpu"))

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: NystromState | None,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, NystromState | None]:
        config, size = self.config, self.config.kernel_size
        rule = Rule(config.num_landmarks, config.num_iterations, self.layer.scaling, config.block_size)
        output, after = causal_nystrom_attention(query, key, value, rule, lengths, state, call.keep_state)
        if not size:
            return output, after
        recent = value.new_zeros(*value.shape[:2], size - 1, value.shape[3]) if state is None else state.recent
        values = torch.cat([recent, value], 2)
        output = output + self.convolve(values)
        if after is None:
            return output, None
        if lengths is None:
            return output, after._replace(recent=values[:, :, value.shape[2] :].clone())
        last = lengths[:, None] + torch.arange(size - 1, device=value.device)
        return output, after._replace(recent=take(values, last))

    def bidirectional_sequences(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None) -> Tensor:
        size, length = self.config.kernel_size, key.shape[2]
        real = None if lengths is None else torch.arange(length, device=key.device) < lengths[:, None]
        if length <= self.config.num_landmarks:
            scaling = self.layer.scaling
            output = softmax_attention(query, key, value, scaling=scaling, causal=False, key_padding_mask=real)
        else:
            output = self._by_landmarks(query, key, value, lengths, real)
        if not size:
            return output
        value = value if real is None else value * real[:, None, :, None]
        return output + self.convolve(F.pad(value, (0, 0, size // 2, size // 2)))

    def _by_landmarks(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, real: Tensor | None
    ) -> Tensor:
        """Attention, rows of n <= m tokens among others included; real: [B, N]."""
        heads, kv_heads, count, scaling = query.shape[1], key.shape[1], self.config.num_landmarks, self.layer.scaling
        counts, sums = segment_sums((query, key, value), count, lengths)
        tokens = counts.clamp(min=1).to(key.dtype)
        slot_query, slot_key, slot_value = (x / tokens[:, None, :, None] for x in sums)
        bias = tokens.log().masked_fill(counts == 0, LOWEST)[:, None, None]
        slot_key = slot_key.mT * scaling

        def among(rows: Tensor) -> Tensor:
            """Return softmax over the landmarks [B, H, C, m] of rows [B, H, C, D]."""
            grouped = rows.unflatten(1, (kv_heads, -1)).flatten(2, 3)
            return (grouped @ slot_key + bias).softmax(-1).reshape(*rows.shape[:3], count)

        read = softmax_attention(slot_query, key, value, scaling=scaling, causal=False, key_padding_mask=real)
        values = pseudo_inverse(among(slot_query), self.config.num_iterations) @ read
        if lengths is not None:
            short = (lengths <= count)[:, None, None, None]
            values = torch.where(short, reference.repeat_heads(slot_value, query), values)
        step = at_once(len(query) * heads * count, key.device)
        return torch.cat([among(part) @ values for part in query.split(step, 2)], 2)

    def convolve(self, value: Tensor) -> Tensor:
        """Return sum_t taps[h, t] v_{i + t}: [B, H, N, Dv] of value [B, Hkv, N + kernel_size - 1, Dv]."""
        taps = self.taps.to(value)
        if value.shape[2] == taps.shape[1]:  # one token
            return (taps.unflatten(0, (value.shape[1], -1)) @ value).flatten(1, 2)[:, :, None]
        return F.conv2d(value, taps[:, None, :, None], groups=value.shape[1])

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        """Queries with one past at a time: softmax over its slots and the keys behind it, times what slots read."""
        key, causal, taps = reference.repeat_heads(key, query), self.layer.causal, self.config.kernel_size
        matrices = []
        for q, k, pairs in zip(query, key, allowed.expand(query.shape[0], -1, -1, -1)[:, 0], strict=True):
            rank = pairs.long().cumsum(-1) - 1  # of keys in the sequence of each query
            place = rank.diagonal()[:, None]
            past = pairs & (rank < place // self.config.block_size * self.config.block_size) if causal else pairs
            matrix = q.new_zeros(len(q), *pairs.shape)
            views, view = past.unique(dim=0, return_inverse=True)
            for number in range(len(views)):
                rows = (view == number).nonzero()[:, 0]
                keys, tokens, reads = self._slots_of(q, k, views[number].nonzero()[:, 0])
                to_slots = q[:, rows] @ keys.mT * self.layer.scaling + tokens.log()
                own = (q[:, rows] @ k.mT * self.layer.scaling).masked_fill(past[rows] | ~pairs[rows], float("-inf"))
                scores = torch.cat([to_slots, own], -1)
                top = scores.detach().amax(-1, keepdim=True)
                shares = reference.normalise((scores - top.masked_fill(top.isinf(), 0.0)).exp())
                line = shares[..., : len(tokens)] @ reads + shares[..., len(tokens) :]
                matrix = matrix.index_copy(1, rows, line)
            if taps:
                number = rank - place + (taps - 1 if causal else taps // 2)
                inside = pairs & (number >= 0) & (number < taps)
                matrix = matrix + self.taps.to(q)[:, number.clamp(0, taps - 1)] * inside
            matrices.append(matrix)
        return torch.stack(matrices)

    def _slots_of(self, query: Tensor, key: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys [H, S, D], tokens [S] and reads [H, S, N] of the slots of the tokens `seen` [n] of a row."""
        count, n = self.config.num_landmarks, len(seen)
        position = torch.arange(n, device=key.device)
        unit = segment_size(n, count)
        slot = position // unit if self.layer.causal or n <= count else position * count // n
        full = n // unit * unit if self.layer.causal else n  # tokens in completed segments
        member = (slot == slot.unique()[:, None]).to(key.dtype)
        mean = torch.zeros(len(member), key.shape[1], dtype=key.dtype, device=key.device)
        mean = mean.index_copy(1, seen, member / member.sum(1, keepdim=True))
        reads = mean.expand(len(key), -1, -1)
        if n > count and full:
            solved, within = int(slot[full - 1]) + 1, seen[:full]
            queries, keys = (mean[:solved] @ x for x in (query, key))
            a = (queries @ keys.mT * self.layer.scaling + member[:solved].sum(1).log()).softmax(-1)
            b = (queries @ key[:, within].mT * self.layer.scaling).softmax(-1)
            z = a.mT / a.sum(-2).amax(-1)[:, None, None]
            one = torch.eye(solved, dtype=key.dtype, device=key.device)
            for _ in range(self.config.num_iterations):
                rest = one - a @ z
                z = z @ (one + rest + rest @ rest + rest @ rest @ rest / 4)
            landmarks = torch.zeros_like(reads[:, :solved]).index_copy(2, within, z @ b)
            reads = torch.cat([landmarks, reads[:, solved:]], 1)
        return mean @ key, member.sum(1), reads
