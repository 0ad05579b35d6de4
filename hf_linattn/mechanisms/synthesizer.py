"""synthesizer: scores that no key has a say in, made from the query or from positions alone, mixed into softmax's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import require, require_known
from ..errors import UnsupportedModeError
from ..ops import reference
from ..ops.common.grad_accumulator import GradAccumulator
from ..ops.common.numerics import LOWEST
from ..ops.common.padding import take
from ..ops.common.sink_logit import softmax_beside
from .capabilities import ExactnessLimit
from .inputs import PLAIN, AttentionLayer, CallOptions, Pairs
from .registration import register_mechanism
from .sequence import SequenceMechanism
from .softmax_type import SoftmaxTypeConfig, SoftmaxTypeMechanism

AT_ONCE = {"cpu": 1 << 22}  # scores of all rows and heads for some queries: 16 MiB in float32
AT_ONCE_ELSEWHERE = 1 << 28

# scores [B or 1, H, W, K] of queries [B, H, W, D] at positions [B or 1, W] with the first K keys
ScoreBlocks = Callable[[Tensor, Tensor, int], Tensor]


@dataclass
class SynthesizerConfig(SoftmaxTypeConfig):
    """Options of `synthesizer`."""

    form: str = field(
        default="dense",
        metadata={"help": "scores from queries: `dense`, `factorised_dense`; from positions: `random`, `factorised`"},
    )
    max_length: int = field(
        default=2048, metadata={"help": "L, tokens of the longest sequence; `random` has L^2 numbers per head"}
    )
    rank: int = field(default=8, metadata={"help": "columns of both factors in the form `factorised`"})
    mix: bool = field(default=True, metadata={"help": "mix them with softmax's scores; else they are all there is"})
    initial_mix: float = field(
        default=0.01, metadata={"help": "share of the synthetic scores as training begins; 0: none, for good"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known("form", self.form, FORMS)
        self.require_counts("max_length", "rank")
        share = self.initial_mix
        number = isinstance(share, (int, float)) and not isinstance(share, bool)
        require("initial_mix", share, number and 0 <= share < 1, "a number from 0 to less than 1")


class SynthesizerState(NamedTuple):
    """All keys and values [B, Hkv, K, D or Dv], of each row the first `length` [B], zero behind them."""

    key: Tensor
    value: Tensor
    length: Tensor


class SyntheticScores(nn.Module):
    """Base of what makes scores s_ij without keys; every query head has its own."""

    def __init__(self, config: SynthesizerConfig, layer: AttentionLayer, generator: torch.Generator):
        super().__init__()

    def reader(self, dtype: torch.dtype) -> ScoreBlocks:
        """Return what makes the scores of a call, block of queries by block."""
        raise NotImplementedError

    def pairs(self, query: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Return s [B, H, C, K] of any pairs, one by one: positions [B or 1, C] and [B or 1, C or 1, K]."""
        raise NotImplementedError


class RandomScores(SyntheticScores):
    """s_ij = R_ij, `table` [H, L, L], first of unit variance."""

    def __init__(self, config: SynthesizerConfig, layer: AttentionLayer, generator: torch.Generator):
        super().__init__(config, layer, generator)
        self.table = _gaussian((layer.num_heads, config.max_length, config.max_length), 1.0, generator)

    def reader(self, dtype: torch.dtype) -> ScoreBlocks:
        table = GradAccumulator(self.table)

        def read(query: Tensor, position: Tensor, num_keys: int) -> Tensor:
            rows = table.index_select(1, 1, position.flatten()).unflatten(1, position.shape)
            return rows[..., :num_keys].to(dtype).transpose(0, 1)

        return read

    def pairs(self, query: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        return self.table.to(query.dtype)[:, query_position[..., None], key_position].transpose(0, 1)


class FactorisedScores(SyntheticScores):
    """s_ij = (R1)_i . (R2)_j, `left` and `right` [H, L, rank], first with products of unit variance."""

    def __init__(self, config: SynthesizerConfig, layer: AttentionLayer, generator: torch.Generator):
        super().__init__(config, layer, generator)
        shape, size = (layer.num_heads, config.max_length, config.rank), config.rank**-0.25
        self.left, self.right = _gaussian(shape, size, generator), _gaussian(shape, size, generator)

    def reader(self, dtype: torch.dtype) -> ScoreBlocks:
        left, right = GradAccumulator(self.left.to(dtype)), self.right.to(dtype).mT

        def read(query: Tensor, position: Tensor, num_keys: int) -> Tensor:
            rows = left.index_select(1, 1, position.flatten())
            return (rows @ right[..., :num_keys]).unflatten(1, position.shape).transpose(0, 1)

        return read

    def pairs(self, query: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        left, right = (x.to(query.dtype) for x in (self.left, self.right))
        return (left[:, query_position][..., None, :] @ right[:, key_position].mT).squeeze(-2).transpose(0, 1)


class TwoLayers(nn.Module):
    """x -> relu(x W1 + b1) W2 + b2 [B, H, N, width] for x [B, H, N, D], each head with D hidden units of its own."""

    def __init__(self, layer: AttentionLayer, width: int, generator: torch.Generator):
        super().__init__()
        heads, dim = layer.num_heads, layer.head_dim
        self.weight1 = _gaussian((heads, dim, dim), dim**-0.5, generator)
        self.bias1 = nn.Parameter(torch.zeros(heads, dim, device="cpu"))
        self.weight2 = _gaussian((heads, dim, width), dim**-0.5, generator)
        self.bias2 = nn.Parameter(torch.zeros(heads, width, device="cpu"))

    def forward(self, x: Tensor, width: int | None = None) -> Tensor:
        """Return the first `width` outputs; None: all."""
        weight1, bias1, weight2, bias2 = (
            p.to(x.dtype) for p in (self.weight1, self.bias1, self.weight2[..., :width], self.bias2[..., :width])
        )
        return F.relu(x @ weight1 + bias1[:, None]) @ weight2 + bias2[:, None]


class DenseScores(SyntheticScores):
    """s_ij = (relu(q_i W1 + b1) W2 + b2)_j."""

    def __init__(self, config: SynthesizerConfig, layer: AttentionLayer, generator: torch.Generator):
        super().__init__(config, layer, generator)
        self.layers = TwoLayers(layer, config.max_length, generator)

    def reader(self, dtype: torch.dtype) -> ScoreBlocks:
        return lambda query, position, num_keys: self.layers(query, num_keys)

    def pairs(self, query: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        table = self.layers(query)
        return table.gather(-1, key_position[:, None].expand(*table.shape[:3], -1))


class FactorisedDenseScores(SyntheticScores):
    """s_ij = a(q_i)_(j div w) b(q_i)_(j mod w) with w = ceil(sqrt L), a and b of two layers each."""

    def __init__(self, config: SynthesizerConfig, layer: AttentionLayer, generator: torch.Generator):
        super().__init__(config, layer, generator)
        self.width = math.isqrt(config.max_length - 1) + 1
        self.coarse = TwoLayers(layer, -(-config.max_length // self.width), generator)
        self.fine = TwoLayers(layer, self.width, generator)

    def reader(self, dtype: torch.dtype) -> ScoreBlocks:
        def read(query: Tensor, position: Tensor, num_keys: int) -> Tensor:
            coarse = self.coarse(query, -(-num_keys // self.width))
            return (coarse[..., None] * self.fine(query)[..., None, :]).flatten(-2)[..., :num_keys]

        return read

    def pairs(self, query: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        coarse, fine = self.coarse(query), self.fine(query)
        index = key_position[:, None].expand(*query.shape[:3], -1)
        return coarse.gather(-1, index // self.width) * fine.gather(-1, index % self.width)


FORMS: dict[str, type[SyntheticScores]] = {
    "dense": DenseScores,
    "factorised_dense": FactorisedDenseScores,
    "random": RandomScores,
    "factorised": FactorisedScores,
}


@register_mechanism("synthesizer")
class SynthesizerMechanism(SoftmaxTypeMechanism, SequenceMechanism):
    """Mixture of synthesizers (Tay et al. 2021): o_i = sum_j softmax_j((1 - a_h) scaling q_i . k_j + a_h s_ij) v_j.

    s_ij is made by the submodule `synthetic` from the query and the key's position (`dense`: a network of two layers
    with one output per position; `factorised_dense`: the products of the outputs of two such, sqrt(L) each) or from
    both positions alone (`random`: a trained matrix; `factorised`: one of rank `rank`), for positions up to
    L = `max_length`, counted from the start of each sequence. Longer ones raise `UnsupportedModeError`.

    a_h = sigmoid of the trained parameter `mix_logit` [H], at first `initial_mix`. `mix=False` is the synthesizer
    proper, a = 1: keys then count by their position only, and the model must be trained to be of any use.

    It is as quadratic as softmax attention, and its decoding state holds all keys and values. Scores are made for a
    few queries at a time; none are kept unless gradients are needed.

    Deviations: the paper's networks read the layer's input, which a mechanism does not get: here the pretrained query
    of each head, rotary position included. A share per head in place of one for all. Mixtures start with equal parts
    there; a pretrained model would lose what it knows.
    """

    config_class = SynthesizerConfig
    constant_state = False
    subquadratic = False
    growth = 4.0
    limit = ExactnessLimit(
        "softmax attention with initial_mix = 0; its scores are as far off as initial_mix is",
        equal=lambda length: {"initial_mix": 0.0},
    )
    citation = "Tay et al. 2021, Synthesizer: Rethinking Self-Attention for Transformer Models, arXiv 2005.00743"
    family = "compressed"

    config: Any

    def __init__(self, config: SynthesizerConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        self.position_limit = config.max_length
        self.synthetic = FORMS[config.form](config, layer, self.generator())
        if config.mix:
            share = torch.full((layer.num_heads,), config.initial_mix, dtype=torch.float64, device="cpu")
            self.mix_logit = nn.Parameter(share.logit().to(torch.float32))
        else:
            self.limit = ExactnessLimit("attention with its synthetic scores, computed naively", kernel=True)

    def share(self, like: Tensor) -> Tensor:
        """Return a [H, 1, 1], in the dtype and place of `like`."""
        if not self.config.mix:
            return like.new_ones(self.layer.num_heads, 1, 1)
        return self.mix_logit.to(like).sigmoid()[:, None, None]

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: SynthesizerState | None,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, SynthesizerState | None]:
        length, device = key.shape[2], key.device
        position = torch.arange(length, device=device)[None]
        end = torch.full(key.shape[:1], length, device=device) if lengths is None else lengths
        if state is not None:
            position, end = position + state.length[:, None], state.length + end
            key, value = (
                _append(old, new, state.length, end) for old, new in zip(state[:2], (key, value), strict=True)
            )
        output = self._attend(query, key, value, position, call, begins=state is None)
        if not call.keep_state:
            return output, None
        if state is None:  # a state is never a view of what it was made from
            key, value = key.clone(), value.clone()
        return output, SynthesizerState(key, value, end)

    def bidirectional_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, call: CallOptions = PLAIN
    ) -> Tensor:
        length = key.shape[2]
        end = torch.full((1,), length, device=key.device) if lengths is None else lengths
        return self._attend(query, key, value, torch.arange(length, device=key.device)[None], call, end)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, call: CallOptions,
        end: Tensor | None = None, *, begins: bool = False,
    ) -> Tensor:
        """Return attention of queries at `position` [B or 1, N] to keys before `end` [B or 1], or up to their own.

        begins: whether query i stands at key i and sees none behind it, so that later keys need not be read.
        """
        (batch, heads, _, _), kv_heads, num_keys = query.shape, *key.shape[1:3]
        self._check_length(num_keys)
        share, read = self.share(query), self.synthetic.reader(query.dtype)
        position = position.clamp(max=num_keys - 1)  # behind the end of a row
        keys, values, place = GradAccumulator(key), GradAccumulator(value), torch.arange(num_keys, device=key.device)
        sink = self.log_sink(query, call.sink)
        sink = None if sink is None else sink[:, None, None]
        step = max(AT_ONCE.get(key.device.type, AT_ONCE_ELSEWHERE) // (batch * heads * num_keys), 1)
        parts: list[Tensor] = []
        first = 0
        for rows, at in zip(query.split(step, 2), position.split(step, 1), strict=True):
            first += rows.shape[2]
            seen = first if begins else num_keys
            hidden = place[:seen] > at[..., None] if end is None else (place >= end[:, None])[:, None]
            grouped = (rows * ((1 - share) * self.layer.scaling)).reshape(batch, kv_heads, -1, rows.shape[3])
            # no fused kernel: those with and those without gradients for the scores differ in the last bits
            scores = (grouped @ keys.narrow(2, 0, seen).mT).view(batch, heads, -1, seen)
            scores = torch.addcmul(scores, share, read(rows, at, seen)).masked_fill_(hidden[:, None], LOWEST)
            shares = softmax_beside(scores, sink).reshape(batch, kv_heads, -1, seen)
            output = shares @ values.narrow(2, 0, seen)
            parts.append(output.view(batch, heads, -1, value.shape[3]))
        return torch.cat(parts, dim=2)

    def _check_length(self, length: int) -> None:
        limit = self.config.max_length
        if length > limit:
            raise UnsupportedModeError(
                f"mechanism {self.config.mechanism!r} has scores for max_length={limit} positions, got a sequence of"
                f" {length} tokens; shorten it, or patch the model with max_length={length} or more"
            )

    @property
    def has_scores(self) -> bool:
        return True

    def scores(self, pairs: Pairs) -> Tensor:
        """(1 - a_h) scaling q_i . k_j + a_h s_ij."""
        query_position, key_position = pairs.query_position.clamp(min=0), pairs.key_position.clamp(min=0)
        self._check_length(int(key_position.max()) + 1)
        own = pairs.query @ reference.repeat_heads(pairs.key, pairs.query).mT * self.layer.scaling
        share = self.share(own)
        return (1 - share) * own + share * self.synthetic.pairs(pairs.query, query_position, key_position[:, None])

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        key_position = (allowed.long().cumsum(-1) - 1).clamp(min=0)[:, 0]
        query_position = key_position.diagonal(dim1=-2, dim2=-1)
        self._check_length(int(key_position.max()) + 1)
        share = self.share(query)
        synthetic = share * self.synthetic.pairs(query, query_position, key_position)
        heads = query * (1 - share), key
        sink = self.log_sink(query, call.sink)
        return reference.softmax_matrix(*heads, self.layer.scaling, allowed, synthetic, sink)


def _gaussian(shape: tuple[int, ...], size: float, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * size)


def _append(old: Tensor, new: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Put the first `end - begin` [B] of new keys behind the first `begin` [B] of the old ones; zero behind them.

    At least one is returned, as where rows have read pads alone.
    """
    joined, num_old = torch.cat([old, new], dim=2), old.shape[2]
    if bool((begin == num_old).all() & (end == joined.shape[2]).all()):
        return joined
    place = torch.arange(max(int(end.max()), 1), device=new.device)
    index = torch.where(place < begin[:, None], place, num_old + place - begin[:, None])
    kept = take(joined, index.clamp(max=joined.shape[2] - 1))
    return kept.masked_fill((place >= end[:, None])[:, None, :, None], 0.0)
