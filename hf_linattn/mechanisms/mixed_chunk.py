"""mixed_chunk: mixed chunk attention, exact weights inside blocks of tokens and linear attention across them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..config import require, require_known
from ..ops import reference
from ..ops.common.numerics import bounded
from ..ops.hybrid.mixed_chunk import MixedState, MixedWeights, causal_mixed_attention, mixed_attention
from .capabilities import ExactnessLimit
from .hybrid import HybridConfig, HybridMechanism
from .inputs import PLAIN, AttentionLayer, CallOptions, Pairs
from .linear import LinearMechanism, require_far
from .registration import register_mechanism
from .sequence import SequenceMechanism
from .softmax_type import SoftmaxTypeConfig, SoftmaxTypeMechanism

INSIDE = ("softmax", "relu2")


@dataclass
class MixedChunkConfig(SoftmaxTypeConfig):
    """Options of `mixed_chunk`."""

    block_size: int = field(default=64, metadata={"help": "tokens per chunk, which see each other exactly"})
    inside: str = field(
        default="softmax", metadata={"help": "weights inside a chunk: softmax's, or `relu2`, the paper's squared relu"}
    )
    linear: str = field(default="hedgehog", metadata={"help": "the mechanism across chunks, on the linear base"})
    linear_options: dict[str, Any] | None = field(
        default=None, metadata={"help": "options of that mechanism; a learned map makes D features by default"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("block_size")
        require_known("inside", self.inside, INSIDE)
        none = self.sink_logit is None or self.inside == "softmax"
        require("sink_logit", self.sink_logit, none, "None with inside='relu2', whose denominator is another")
        require_far(self.linear, LinearMechanism)
        self.far_config()

    def far_config(self) -> HybridConfig:
        """Return the config of a hybrid that has the same linear mechanism for what is far."""
        return HybridConfig(seed=self.seed, linear=self.linear, linear_options=self.linear_options)


@register_mechanism("mixed_chunk")
class MixedChunkMechanism(SoftmaxTypeMechanism, SequenceMechanism):
    """Mixed chunk attention (Hua et al. 2022): quadratic inside chunks of C = `block_size` tokens, linear across them.

    o_i = sum_j w_ij v_j / sum_j w_ij with w_ij = exp(scaling q_i . k_j) for keys of the query's own chunk, causally
    those up to itself, and w_ij = exp(g_h) phi(q_i) . phi(k_j) exp(-r |i - j|) for keys of other chunks, causally of
    the chunks before. Chunks are cut from the start of each sequence. phi and, with `linear_options={"decay":
    "learned"}`, r come from the linear mechanism, the submodule `linear`; g_h is the trained parameter `log_mix` [H],
    which starts where `hybrid` has it: two zero vectors have the weight 1 that softmax gives them.

    `inside="relu2"`: w_ij = relu(scaling q_i . k_j / 2 + b_h)^2 inside a chunk, the paper's squared relu, and
    o_i = sum_j w_ij v_j / max(n_i, sum_j w_ij) with n_i the number of keys that query i sees; b is the trained
    parameter `bias` [H]. It starts as 1, as (1 + x / 2)^2 is e^x to first order.

    Time O(N (C + F) Dv). The decoding state has constant size, float32, per key/value head: the open chunk's keys and
    values, and the sums over all completed chunks.

    Deviations: the gate of the paper's unit needs the layer's input, which a mechanism does not get; the layer's own
    heads take the place of one head whose queries and keys are scaled copies of one projection. The linear part has
    feature maps, where the paper takes q . k itself, whose signs leave nothing to weigh against. Softmax inside chunks
    and its joint denominator are not the paper's, but what pretrained queries and keys mean. With `relu2` b_h stands
    for its relative position bias, and 1 / n_i, its 1 / n, is bounded by the weights: pretrained q . k have squares of
    hundreds. Bidirectional linear sums leave a query's own chunk out, whose keys count once.
    """

    config_class = MixedChunkConfig
    limit = ExactnessLimit(
        "softmax attention if block_size is at least the length", equal=lambda length: {"block_size": length}
    )
    citation = "Hua et al. 2022, Transformer Quality in Linear Time, arXiv 2202.10447"
    family = "window and linear"

    config: MixedChunkConfig
    linear: Any  # a LinearMechanism

    def __init__(self, config: MixedChunkConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        far = HybridMechanism(config.far_config(), layer)
        self.linear, self.log_mix, self.scheduled = far.linear, far.log_mix, far.scheduled
        self.bias = None
        if config.inside == "relu2":
            self.bias = nn.Parameter(torch.ones(layer.num_heads, device="cpu"))
            self.averages = False  # its weights may sum up to less than one
            self.takes_sink = False
            self.limit = ExactnessLimit("attention with the weights it states, computed naively", kernel=True)

    def _pair_weights(self, like: Tensor, call: CallOptions) -> MixedWeights:
        query_map, key_map = self.linear.maps
        return MixedWeights(
            self.config.block_size,
            self.layer.scaling,
            query_map,
            key_map,
            self.log_mix.to(like.dtype),
            self.linear.decay_rate(like),
            None if self.bias is None else bounded(self.bias.to(like.dtype)),
            self.log_sink(like, call.sink),
        )

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: MixedState | None,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, MixedState | None]:
        weights = self._pair_weights(key, call)
        return causal_mixed_attention(query, key, value, weights, lengths, state, call.keep_state)

    def bidirectional_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, call: CallOptions = PLAIN
    ) -> Tensor:
        return mixed_attention(query, key, value, self._pair_weights(key, call), lengths)

    @property
    def has_scores(self) -> bool:
        return self.bias is None and self.linear.has_scores

    def scores(self, pairs: Pairs) -> Tensor:
        """scaling q_i . k_j inside a chunk, g_h + log(phi(q_i) . phi(k_j)) - r |i - j| elsewhere."""
        near = pairs.query @ reference.repeat_heads(pairs.key, pairs.query).transpose(-1, -2) * self.layer.scaling
        far = self.linear.scores(pairs) + self.log_mix.to(near.dtype)[:, None, None]
        own, other = (x // self.config.block_size for x in (pairs.query_position, pairs.key_position))
        return torch.where((own[:, :, None] == other[:, None])[:, None], near, far)

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        count = allowed.long().cumsum(-1)  # a key's number among those of its sequence, from 1
        own = count.diagonal(dim1=-2, dim2=-1)[..., None]
        inside = (count - 1) // self.config.block_size == (own - 1) // self.config.block_size
        scores = reference.products(query, key) * self.layer.scaling
        query_map, key_map = self.linear.maps
        features = query_map.exact(query.unflatten(1, (-1, groups))).flatten(1, 2)
        kernel = reference.products(features, key_map.exact(key))
        kernel = kernel * self.log_mix.to(key.dtype).exp()[:, None, None]
        rate = self.linear.decay_rate(key)
        if rate is not None:
            kernel = kernel * torch.exp(-rate.repeat_interleave(groups)[:, None, None] * reference.distances(allowed))

        if self.bias is not None:
            squares = torch.relu(scores / 2 + self.bias.to(key.dtype)[:, None, None]) ** 2
            weights = torch.where(inside, squares, kernel) * allowed
            bound = torch.maximum(weights.sum(-1, keepdim=True), allowed.sum(-1, keepdim=True).to(weights))
            return weights / torch.where(bound == 0, 1.0, bound)
        # a factor per query keeps exponentials finite, and cancels
        top = scores.detach().masked_fill(~(inside & allowed), -math.inf).amax(-1, keepdim=True)
        top = top.masked_fill(top.isinf(), 0.0)
        sink = self.log_sink(key, call.sink)
        beside: Tensor | float = 0.0
        if sink is not None:
            top = torch.maximum(top, sink.detach()[:, None, None])
            beside = (sink[:, None, None] - top).exp()
        exact = (scores - top).masked_fill(~(inside & allowed), -math.inf).exp()
        return reference.normalise(exact + (kernel * torch.exp(-top)).masked_fill(inside | ~allowed, 0.0), beside)

    def before_forward(self) -> None:
        self.linear.before_forward()
