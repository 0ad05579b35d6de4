"""vq: softmax over the keys near a query and, in place of all others, over the codes they are quantised to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from ..config import require
from ..errors import UnsupportedModeError
from ..ops import reference
from ..ops.common.tracing import is_made_again, is_recorded, is_watched
from ..ops.slots.vq import NONE, CodeState, causal_code_attention, code_attention, code_means, fit_codes, nearest_codes
from .capabilities import ExactnessLimit
from .inputs import PLAIN, AttentionLayer, CallOptions, Pairs
from .registration import register_mechanism
from .sequence import SequenceMechanism
from .softmax_type import SoftmaxTypeConfig, SoftmaxTypeMechanism

ITERATIONS = 10  # of Lloyd's algorithm for each batch


@dataclass
class VqConfig(SoftmaxTypeConfig):
    """Options of `vq`."""

    num_codes: int = field(default=128, metadata={"help": "codes S per key/value head, which stand for far keys"})
    block_size: int = field(
        default=64, metadata={"help": "tokens per block; a query sees its own and the neighbouring blocks exactly"}
    )
    ema_decay: float = field(
        default=0.99, metadata={"help": "what a training forward leaves of the codes' running sums; 1: codes stay"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_codes", "block_size")
        decay = self.ema_decay
        number = isinstance(decay, int | float) and not isinstance(decay, bool)
        require("ema_decay", decay, number and 0 <= decay <= 1, "a number from 0 to 1")


@register_mechanism("vq")
class VqMechanism(SoftmaxTypeMechanism, SequenceMechanism):
    """Transformer-VQ (Lingle 2023): o_i = sum_j w_ij v_j, w_i = softmax_j(scaling q_i . k'_j).

    k'_j = k_j for tokens in the query's block of `block_size` and in the one before it (bidirectional: also in the one
    behind it); all others have k'_j = c_s, the code nearest to k_j of the S = `num_codes` codes of their head. Tokens
    of one code have one score, so the n_s of them are summed up as one, with the score scaling q_i . c_s + log n_s and
    the mean of their values; codes and near tokens share one softmax. Beside the quantisation itself nothing is
    approximate. Time O(N (S + block_size) (D + Dv)). The decoding state has constant size, per key/value head: counts
    and means of the codes, keys and values of the last two blocks.

    The buffer `codebook` [Hkv, S, D] begins with normals from `seed` and the layer, smaller than keys are, so that far
    tokens weigh nearly alike; it gets no gradient. `hf_linattn.calibrate` fits it by k-means. In training it follows
    the keys: if n_s keys of a forward, with the mean m_s, have the code s, and d = `ema_decay`, the running number
    `counts` becomes N_s <- d N_s + (1 - d) n_s and the code c_s <- c_s + (1 - d) (n_s / N_s) (m_s - c_s), which is the
    paper's ratio of running sums; pads do not count and codes without keys stay. This happens before the next training
    forward of the whole model, from `last_counts` and `last_means`, which each forward overwrites. Codes wait while
    the gradients of an earlier forward are still to come, as gradient checkpointing then makes it again: it sees the
    same codes. Evaluation changes nothing. All these are
    buffers and no parameters: an optimizer would move codes away from the means that they are. Processes that
    train together sum up their keys first, so that all have the same codes, however the model is wrapped: each has
    to take part in every training forward. `DistributedDataParallel` gives all of them the keys of the first.
    They are saved, so that a resumed run goes on as an unbroken one. In a model in half precision they stay in
    float32: a step of a hundredth of the way is less than a rounding there.

    Deviations: near keys are not quantised (in the paper all are), as a pretrained model was not trained for it. Keys
    are taken as they are, without normalisation; no gradient goes straight through the quantisation, and there is no
    commitment loss: a key learns from the queries near it. No position bias, no gate. Keys with rotary positions come
    rotated: the same content at another position needs another code, so far scores are coarser there.
    """

    codebook: Tensor
    counts: Tensor
    last_counts: Tensor
    last_means: Tensor

    config_class = VqConfig
    continuous = False
    prepares = True
    limit = ExactnessLimit(
        "softmax attention with 2 block_size >= n, or with every far key among the codes",
        equal=lambda length: {"block_size": -(-length // 2)},
    )
    citation = "Lingle 2023, Transformer-VQ: Linear-Time Transformers via Vector Quantization, arXiv 2309.16354"
    family = "compressed"

    config: VqConfig

    def __init__(self, config: VqConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        shape = layer.num_key_value_heads, config.num_codes, layer.head_dim
        # about as long as the mean of those of many standard normal vectors that are nearest to one of S directions
        size = math.sqrt(2 * math.log(config.num_codes) / layer.head_dim)
        exact: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        self.register_buffer("codebook", torch.randn(shape, generator=self.generator(), **exact) * size)
        self.register_buffer("counts", torch.zeros(shape[:2], **exact))
        self.register_buffer("last_counts", torch.zeros(shape[:2], **exact))
        self.register_buffer("last_means", torch.zeros(shape, **exact))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> VqMechanism:
        """Follow the model to any device and dtype, but leave codes and counts in float32 where that is half."""
        exact: dict[str, Any] = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in exact.items():
            after = self.get_buffer(name)
            if after.dtype != torch.promote_types(after.dtype, torch.float32):
                self._buffers[name] = before.to(after.device)
        return self

    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None,
        state: CodeState | None, call: CallOptions = PLAIN,
    ) -> tuple[Tensor, CodeState | None]:
        if state is None:
            self._remember(key, key_padding_mask)
        return super().causal_attention(query, key, value, key_padding_mask, sequence_ids, state, call)

    def bidirectional_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None,
        call: CallOptions = PLAIN,
    ) -> Tensor:
        self._remember(key, key_padding_mask)
        return super().bidirectional_attention(query, key, value, key_padding_mask, sequence_ids, call)

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: CodeState | None,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, CodeState | None]:
        return causal_code_attention(
            query, key, value, self.codebook.to(key.dtype), block_size=self.config.block_size,
            scaling=self.layer.scaling, lengths=lengths, state=state, keep_state=call.keep_state,
            sink=self.log_sink(query, call.sink),
        )  # fmt: skip

    def bidirectional_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, call: CallOptions = PLAIN
    ) -> Tensor:
        codebook, size = self.codebook.to(key.dtype), self.config.block_size
        return code_attention(
            query, key, value, codebook, block_size=size, scaling=self.layer.scaling, lengths=lengths,
            sink=self.log_sink(query, call.sink),
        )  # fmt: skip

    # -- the codebook -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _remember(self, key: Tensor, key_padding_mask: Tensor | None) -> None:
        """Overwrite the statistics of the last training forward with those of keys [B, Hkv, N, D]."""
        if not self.training or self.config.ema_decay == 1 or is_made_again():
            return
        if is_watched() and not is_recorded():
            raise UnsupportedModeError(
                f"ema_decay={self.config.ema_decay} writes down what keys layer {self.layer.index} saw in training,"
                " and a function of torch.func must not write; call model.eval(), or use ema_decay=1"
            )
        code = nearest_codes(key, self.codebook.to(key.dtype))
        if key_padding_mask is not None:
            pad = ~key_padding_mask[:, None]
            code, key = code.masked_fill(pad, NONE), key.masked_fill(pad[..., None], 0.0)
        means, counts = code_means(_by_head(code), _by_head(key), self.config.num_codes)
        self.last_means.copy_(means)
        self.last_counts.copy_(counts)

    @torch.no_grad()
    def before_forward(self) -> None:
        if not self.training or self.config.ema_decay == 1:
            return
        decay, before = self.config.ema_decay, self.counts
        new, means = _over_processes(self.last_counts, self.last_means)
        counts = decay * before + (1 - decay) * new
        self.codebook.lerp_(means, torch.where(new > 0, (1 - decay) * new / counts, 0.0)[..., None])
        # without a training forward since, nothing is forgotten
        self.counts.copy_(torch.where(new.any(), counts, before))
        self.last_counts.zero_()

    @torch.no_grad()
    def prepare(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> None:
        """Fit the codes by k-means to these keys and to those that `counts` says they stand for already."""
        with torch.autocast(key.device.type, enabled=False):
            points = _by_head(key.to(torch.promote_types(key.dtype, torch.float32)))
            if key_padding_mask is not None:
                points = points[:, key_padding_mask.expand(len(key), -1).flatten()]
            if not points.shape[1]:
                return
            codebook, counts = (x.to(points.dtype) for x in (self.codebook, self.counts))
            codebook, counts = fit_codes(points, codebook, counts, self.generator("k-means"), ITERATIONS)
        self.codebook.copy_(codebook)
        self.counts.copy_(counts)
        self.last_counts.zero_()  # of codes that are no longer there

    # -- what the weights are -----------------------------------------------------------------------------------------

    @property
    def has_scores(self) -> bool:
        return True

    def scores(self, pairs: Pairs) -> Tensor:
        """scaling q_i . k_j near, scaling q_i . c_s elsewhere, s the code of k_j."""
        codebook = self.codebook.to(pairs.key.dtype)
        code = nearest_codes(pairs.key, codebook)
        coded = codebook[torch.arange(len(codebook), device=code.device)[:, None], code]
        exact, far = (pairs.query @ reference.repeat_heads(x, pairs.query).mT for x in (pairs.key, coded))
        near = self._near(pairs.query_position[:, None, :, None], pairs.key_position[:, None, None])
        return torch.where(near, exact, far) * self.layer.scaling

    def _near(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        size = self.config.block_size
        return (query_position // size - key_position // size).abs() <= 1

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        """softmax_j(scaling q_i . k'_j)."""
        codebook, rank = self.codebook.to(key.dtype), reference.positions(allowed)
        distance = (key.detach()[:, :, :, None] - codebook[:, None]).square().sum(-1)
        coded = F.one_hot(distance.argmin(-1), len(codebook[0])).to(key.dtype) @ codebook
        near = self._near(rank[..., :, None], rank[..., None, :])
        whole = reference.repeat_heads(key, query), reference.repeat_heads(coded, query)
        exact, far = (torch.einsum("bhid,bhjd->bhij", query, x) for x in whole)
        scores = (torch.where(near, exact, far) * self.layer.scaling).masked_fill(~allowed, float("-inf"))
        return reference.softmax(scores, self.log_sink(query, call.sink))


def _by_head(x: Tensor) -> Tensor:
    """Return [Hkv, B N, ...] of x [B, Hkv, N, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def _over_processes(counts: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers of keys [Hkv, S] and their means [Hkv, S, D] in all processes that train together."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return counts, means
    sums = torch.cat([means * counts[..., None], counts[..., None]], dim=-1)
    distributed.all_reduce(sums)
    counts = sums[..., -1]
    return counts, sums[..., :-1] / counts.clamp(min=1)[..., None]

