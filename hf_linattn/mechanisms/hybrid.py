"""hybrid: exact softmax inside a window and on sinks, a linear mechanism beyond it, one joint denominator."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import MechanismConfig, make_config, require
from ..errors import UnsupportedModeError
from ..feature_maps import FEATURE_MAPS, FeatureMap
from ..ops import reference
from ..ops.common.numerics import LOWEST
from ..ops.common.precision import accum_dtype
from ..ops.hybrid.interface import HYBRID
from ..ops.hybrid.types import GATE_GAIN, HybridCall, HybridState, HybridWeights, gate_logit
from ..ops.linear.types import CHUNK_SIZE
from ..registry import MECHANISMS
from .base import Mechanism
from .capabilities import ExactnessLimit
from .composite import single_mechanisms
from .deltanet import DeltanetMechanism
from .gated_deltanet import GatedDeltanetMechanism
from .hard_keys import matrix_in_blocks
from .inputs import PLAIN, AttentionLayer, CallOptions, Pairs
from .linear import FeatureMapConfig, LinearMechanism, far_mechanisms, require_far
from .registration import register_mechanism
from .sequence import SequenceMechanism
from .softmax_type import SoftmaxTypeConfig, SoftmaxTypeMechanism

FIRST_SHARE = -2.197  # LoLCATs' start: sigmoid of it is 0.1
DELTA_RULES = (DeltanetMechanism, GatedDeltanetMechanism)  # by which keys enter the state


@dataclass
class HybridConfig(SoftmaxTypeConfig):
    """Options of `hybrid`."""

    linear: str = field(default="hedgehog", metadata={"help": "the mechanism beyond the window, on the linear base"})
    linear_options: dict[str, Any] | None = field(
        default=None, metadata={"help": "options of that mechanism; a learned map makes D features by default"}
    )
    window_size: int = field(
        default=256, metadata={"help": "exact weights for keys less than `window_size` tokens away, the own key too"}
    )
    num_sink_tokens: int = field(
        default=4, metadata={"help": "first tokens of a sequence whose weights are always exact"}
    )
    window_scale: str = field(
        default="exact",
        metadata={"help": "`exact`, or `maximum`: a query's exact weights over their largest, times a trained share"},
    )
    initial_share: float = field(
        default=1e-3,
        metadata={"help": "the most weight that keys beyond the window have at first, trained; 1: no limit, ever"},
    )
    num_hard_keys: int = field(
        default=0, metadata={"help": "keys beyond the window that stay exact: those that the state recalls worst"}
    )
    recall_error: str = field(
        default="relative", metadata={"help": "by which they are ranked: `relative` to the value's length, `absolute`"}
    )

    formerly: ClassVar[dict[str, Any]] = {"initial_share": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_far(self.linear, LinearMechanism, *DELTA_RULES)
        options = self.linear_options
        require("linear_options", options, options is None or isinstance(options, dict), "None or a dict of options")
        self.require_counts("window_size")
        self.require_counts("num_sink_tokens", "num_hard_keys", least=0)
        error = self.recall_error
        require("recall_error", error, error in ("relative", "absolute"), "'relative' or 'absolute'")
        scale = self.window_scale
        require("window_scale", scale, scale in ("exact", "maximum"), "'exact' or 'maximum'")
        share = self.initial_share
        number = isinstance(share, (int, float)) and not isinstance(share, bool)
        allowed = "a number from 1e-6 to 1 (a share of 0 would have no gradient)"
        require("initial_share", share, number and 1e-6 <= share <= 1, allowed)
        if self.by_delta_rule:  # which has no weights that could share a denominator: its answer gets a share
            require("window_scale", scale, scale == "exact", f"'exact' beside {self.linear!r}")
            require("initial_share", share, share < 1, f"below 1 beside {self.linear!r}, which is all there is at 1")
        given = self.linear_config()
        for name in ("self_weight", "ridge"):  # neither has weights that could share a denominator
            require("linear_options", options, getattr(given, name, None) is None, f"options without {name}")
        fixed = getattr(given, "decay", None) != "measured"  # by attention that looks at what is near, too
        require("linear_options", options, fixed, "options without decay='measured': 'learned' is the one here")

    @property
    def by_delta_rule(self) -> bool:
        """Whether what lies beyond the window is a state by the delta rule."""
        return issubclass(MECHANISMS.get(self.linear), DELTA_RULES)

    @property
    def exact_length(self) -> int:
        """The most tokens of a sequence on which this equals softmax; in blocks keys leave later than the window says.
        """
        if not (self.num_hard_keys or self.by_delta_rule):
            return self.window_size
        kept = self.num_hard_keys and (self.num_hard_keys + self.num_sink_tokens) // CHUNK_SIZE
        return CHUNK_SIZE * (1 + math.ceil((self.window_size - 1) / CHUNK_SIZE) + kept)

    def linear_config(self) -> MechanismConfig:
        """Return the config of the mechanism beyond the window; its seed is this one's unless it names its own."""
        return make_config(self.linear, {"seed": self.seed, **(self.linear_options or {})})


@register_mechanism("hybrid")
class HybridMechanism(SoftmaxTypeMechanism, SequenceMechanism):
    """Softmax near, linear far: o_i = (1 - c_h) n_i + c_h sum_j w_ij v_j / sum_j w_ij with one denominator for both.

    w_ij = exp(scaling q_i . k_j) for keys less than `window_size` tokens away (on both sides if bidirectional) and for
    the first `num_sink_tokens` tokens; w_ij = exp(g_h) phi(q_i) . phi(k_j) exp(-r |i - j|) for all others. phi and,
    with `linear_options={"decay": "learned"}`, r come from the linear mechanism, the submodule `linear`; g_h is the
    trained parameter `log_mix` [H]. n_i is the same sum over the near keys and the first ones alone: `streaming`. Far
    keys have at most the share c_h = sigmoid(10 a_h), with the trained parameter `far_gate` a [H], held in [-1.5,
    0.7], beyond which its gradient is that at the end. c_h starts as `initial_share`, nearly closed, so that a patched
    model is as good as its window whatever phi makes of its heads, and `calibrate` or training opens it. With
    `initial_share=1` c_h is 1 and there is no such parameter. Sinks follow Xiao et al. 2024 (arXiv 2309.17453).

    Time is O(N (window_size + F) Dv). The decoding state has constant size, per key/value head: the last
    window_size - 1 keys and values and the sinks, in the model's dtype, and the sums over all that have left the
    window, in float32.

    With `num_hard_keys` M (after McDermott et al. 2025, LoLA, arXiv 2505.23666), causal layers only, up to M keys per
    key/value head that have left the window stay exact, and count as near ones above: those that the state recalls
    worst. Then the window counts in blocks of 64 tokens, from the row's first real one: it is a query's own block and
    the w = ceil((`window_size` - 1) / 64) before it. The keys of the block that leaves it, sinks aside, and the hard
    keys there are, are ranked by |v - S k| / |v|, S k the normalised read-out at phi(k) of the state before. With
    `recall_error="absolute"` it is by |v - S k|, as in the paper, which keeps fewer keys of small values. The M
    with the largest errors to 12 bits, the first among equals, are the hard keys from there on; the others enter the
    state, where their distance is that of their positions. So the queries of a block see one state and one set of
    hard keys. Prefill, steps, padding and packing make the same choices, which have no gradient; the definition in
    full is that of `hf_linattn.ops.hybrid.hard_keys`. The state has the last 64 (w + 1) tokens, and M keys with
    values and positions.

    With `linear="deltanet"` or `"gated_deltanet"` the state is that of the delta rule, written in the order in which
    keys leave, in the same blocks, with or without hard keys. It has no weights and no g_h: o_i = (1 - c_h) n_i +
    c_h s_h S^T q_i, c_h zero as long as no key is in the state.

    g_h starts where two zero vectors have the weight exp(0) = 1 that softmax gives them: 0 for performer, minus the
    log of the width for elu + 1; it stays 0 where the map of a zero vector is zero. The size of a query's features
    and their log scales count here, as they do not cancel against the exact weights.

    Deviations from LoLCATs: its window has weight exp(scores minus their own maximum), rescaled for each query against
    the linear part; here one factor is taken out of both. `window_scale="maximum"` has its formula: near and sink
    weights are sigmoid(s_h) exp(scaling q_i . k_j - m_i), m_i their largest exponent, s_h the trained parameter
    `window_share` [H], first -2.197 (a share of 0.1); the other weights have no g_h. The window slides token by token
    in prefill and decoding alike, where theirs is terraced in one and sliding in the other. State per key/value head,
    not per query head. From LoLA: the window is the blocks themselves, and errors are relative unless it is said.
    """

    config_class = HybridConfig
    static_steps = True
    takes_half = True
    backends = ("auto", "torch", "compile", "triton")
    limit = ExactnessLimit(
        "softmax attention if window_size is at least the length",
        equal=lambda length: {"window_size": length},
        length=lambda config: config.exact_length,
    )
    citation = "Zhang et al. 2024, LoLCATs: On Low-Rank Linearizing of Large Language Models, arXiv 2410.10254"
    family = "window and linear"

    config: HybridConfig
    linear: Any  # a LinearMechanism

    def __init__(self, config: HybridConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        if layer.mode not in MECHANISMS.get(config.linear).modes:
            fitting = [name for name, own in far_mechanisms(LinearMechanism, *DELTA_RULES).items() if not own]
            able = [name for name in fitting if layer.mode in MECHANISMS.get(name).modes]
            raise UnsupportedModeError(
                f"linear={config.linear!r} of hybrid has no {layer.mode} form, which layer {layer.index} needs; use"
                f" one of {', '.join(able)}"
            )
        linear = config.linear_config()
        if isinstance(linear, FeatureMapConfig) and linear.feature_dim is None:
            kind = FEATURE_MAPS.get(linear.feature_map)
            if kind.learned:
                linear = replace(linear, feature_dim=-(-layer.head_dim // kind.copies) * kind.copies)
        self.linear = MECHANISMS.get(config.linear)(linear, layer)
        if obstacle := getattr(self.linear, "entries_obstacle", None):
            raise UnsupportedModeError(
                f"linear_options of hybrid has {obstacle}, with which {config.linear!r} does not take keys in one"
                f" by one in layer {layer.index}; leave it out"
            )
        if config.num_hard_keys and not layer.causal:
            raise UnsupportedModeError(
                f"num_hard_keys={config.num_hard_keys} are chosen as a sequence goes on, which {layer.mode} layer"
                f" {layer.index} does not do; leave it out"
            )
        self.by_delta_rule = config.by_delta_rule
        self.in_blocks = config.num_hard_keys > 0 or self.by_delta_rule  # how keys leave the window
        self.continuous = not config.num_hard_keys
        self.averages = self.linear.averages
        self.prepares, self.scheduled = self.linear.prepares, self.linear.scheduled
        if config.window_scale == "maximum":
            self.window_share = nn.Parameter(torch.full((layer.num_heads,), FIRST_SHARE, device="cpu"))
        elif not self.by_delta_rule:
            self.log_mix = nn.Parameter(self._matching_mix())
        self.far_gate = None
        if config.initial_share < 1:
            start = math.log(config.initial_share / (1 - config.initial_share)) / GATE_GAIN
            self.far_gate = nn.Parameter(torch.full((layer.num_heads,), start, device="cpu"))
        self.window_shut = False  # in training a query then sees exactly what it sees with window_size=1
        self.far_shut = False  # for measuring what the far part is worth: its weights are then zero

    @torch.no_grad()
    def _matching_mix(self) -> Tensor:
        """Return g with exp(g_h) phi(0) . phi(0) = 1, or 0 where that cannot be: [H]."""
        layer, (query_map, key_map) = self.layer, self._maps()
        heads = layer.num_key_value_heads
        groups = layer.num_heads // heads
        query = query_map.exact(torch.zeros(1, heads, groups, 1, layer.head_dim, device="cpu"))
        key = key_map.exact(torch.zeros(1, heads, 1, layer.head_dim, device="cpu"))
        weight = (query * key[:, :, None]).sum(-1).flatten()
        return torch.where(weight > 0, -torch.where(weight > 0, weight, 1.0).log(), 0.0)

    def _maps(self) -> tuple[FeatureMap, FeatureMap]:
        """The maps of queries [B, Hkv, G, N, D] and of keys [B, Hkv, N, D]."""
        return self.linear.maps

    def _logs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return g [H], as it is stored, and the log of the window's share [H] or None."""
        log_mix: Tensor
        if self.by_delta_rule:
            log_mix, window_log = self.linear.output_scale.new_zeros(self.layer.num_heads), None
        elif self.config.window_scale == "exact":
            log_mix, window_log = self.log_mix, None
        else:
            share = self.window_share.to(dtype)
            log_mix, window_log = torch.zeros_like(share), F.logsigmoid(share)
        return torch.full_like(log_mix, LOWEST, dtype=dtype) if self.far_shut else log_mix, window_log

    def is_exact(self, pairs: Pairs) -> Tensor:
        """Return the pairs in the window or with a sink [B or 1, 1, C, N]."""
        sink = (pairs.key_position < self.config.num_sink_tokens)[:, None, None]
        return (pairs.distance < self.config.window_size) | sink

    def pair_weights(self, like: Tensor, call: CallOptions) -> HybridWeights:
        config, layer = self.config, self.layer
        dtype = accum_dtype(like)
        log_mix, window_log = self._logs(dtype)
        delta = self.by_delta_rule
        maps: Any = (self.linear.query_entries, self.linear.key_entries) if delta else self._maps()
        return HybridWeights(
            1 if self.window_shut and self.training else config.window_size,
            config.num_sink_tokens,
            layer.scaling,
            maps[0],
            maps[1],
            log_mix,
            None if delta else self.linear.decay_rate(like, wide=True),
            window_log,
            self.log_sink(like, call.sink, dtype),
            self.far_gate,
            config.num_hard_keys,
            delta,
            config.recall_error == "relative",
        )

    def causal_in_place(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, starts: Tensor, call: CallOptions = PLAIN
    ) -> tuple[Tensor, Any] | None:
        if self.in_blocks:
            return None
        weights = self.pair_weights(key, call)
        return HYBRID.run_kernels(HybridCall(query, key, value, weights, lengths, policy=self.policy, starts=starts))

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: HybridState | None,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, HybridState]:
        weights = self.pair_weights(key, call)
        return HYBRID.run(HybridCall(query, key, value, weights, lengths, state, policy=self.policy))

    def bidirectional_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, call: CallOptions = PLAIN
    ) -> Tensor:
        weights = self.pair_weights(key, call)
        return HYBRID.run(HybridCall(query, key, value, weights, lengths, causal=False, policy=self.policy))[0]

    @property
    def has_scores(self) -> bool:
        return self.linear.has_scores and not self.in_blocks

    def scores(self, pairs: Pairs) -> Tensor:
        """scaling q_i . k_j near and on sinks, g_h + log(phi(q_i) . phi(k_j)) - r |i - j| elsewhere.

        With a share s_h for the window m_i - log sigmoid(s_h) is added elsewhere, which comes to the same, and with a
        gate log(c_h / (1 + (1 - c_h) A_i / N_i)), where A_i and N_i are the sums of a query's far and exact weights,
        the sink's among these.
        """
        near = pairs.query @ reference.repeat_heads(pairs.key, pairs.query).transpose(-1, -2) * self.layer.scaling
        log_mix, window_log = self._logs(near.dtype)
        far = self.linear.scores(pairs) + log_mix.to(near.dtype)[:, None, None]
        exact, sink = self.is_exact(pairs), self.log_sink(near, pairs.sink)
        if window_log is not None:
            far = far + _largest(near, exact & pairs.allowed, sink) - window_log[:, None, None]
        if self.far_gate is not None:
            far = far + self._log_gate(near, far, exact, pairs.allowed, sink)
        return torch.where(exact, near, far)

    def softmax_beside(self, exact: Tensor, query: Tensor, key: Tensor, call: CallOptions) -> Tensor:
        """Return the softmax over `exact` [B, H, N, N] pairs alone."""
        sink = self.log_sink(key, call.sink)
        return reference.softmax_matrix(query, key, self.layer.scaling, exact, sink=sink)

    def _log_gate(
        self, near: Tensor, far: Tensor, exact: Tensor, allowed: Tensor, sink: Tensor | None
    ) -> Tensor:
        """Return what the gate takes from the scores of a query's far keys: [B, H, C, 1]."""
        if self.far_gate is None:
            return near.new_zeros(())
        lowest = torch.finfo(near.dtype).min / 4
        own = near.masked_fill(~(exact & allowed), lowest).logsumexp(-1, keepdim=True)
        own = own if sink is None else torch.logaddexp(own, sink[:, None, None])
        others = far.masked_fill(exact | ~allowed, lowest).logsumexp(-1, keepdim=True)
        logit = gate_logit(self.far_gate.to(near.dtype))[:, None, None]
        return F.logsigmoid(logit) - F.softplus(F.logsigmoid(-logit) + others - own)

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        if self.config.num_hard_keys:
            raise UnsupportedModeError(
                f"mechanism {self.config.mechanism!r} chooses its hard keys by their values, for which its attention"
                " matrix needs these; pass value=... to attention_matrix"
            )
        return self.weights_given(query, key, key, allowed, call)  # nothing is ranked by any values

    def weights_given(
        self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, call: CallOptions = PLAIN
    ) -> Tensor:
        if self.in_blocks:
            return matrix_in_blocks(self, query, key, value, allowed, call)
        sinks = allowed.long().cumsum(-1) <= self.config.num_sink_tokens
        exact = (reference.distances(allowed) < self.config.window_size) | sinks
        return self.weights_beside(exact, query, key, allowed, call)

    def weights_beside(
        self, exact: Tensor, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN
    ) -> Tensor:
        """Return the weights whose `exact` [B or 1, H or 1, N, N] pairs are those of softmax."""
        groups = query.shape[1] // key.shape[1]
        scores = reference.products(query, key) * self.layer.scaling
        log_mix, window_log = self._logs(key.dtype)
        query_map, key_map = self._maps()
        features = query_map.exact(query.unflatten(1, (-1, groups))).flatten(1, 2)
        kernel = reference.products(features, key_map.exact(key))
        rate = self.linear.decay_rate(key)
        log_factor = log_mix.to(kernel.dtype)[:, None, None].expand_as(kernel)
        if rate is not None:
            log_factor = log_factor - rate.repeat_interleave(groups)[:, None, None] * reference.distances(allowed)
        sink = self.log_sink(key, call.sink)
        if window_log is not None:  # for the exact weights to be divided by their largest and multiplied by a share
            log_factor = log_factor + _largest(scores, exact & allowed, sink) - window_log[:, None, None]

        size = torch.where(exact, scores, log_factor + kernel.log()).detach().masked_fill(~allowed, -math.inf)
        top = size.amax(-1, keepdim=True)
        top = torch.where(top.isinf(), 0.0, top)
        beside: Tensor | float = 0.0
        if sink is not None:
            top = torch.maximum(top, sink.detach()[:, None, None])
            beside = (sink[:, None, None] - top).exp()
        near = (scores - top).masked_fill(~exact, -math.inf).exp()
        far = kernel * (log_factor - top).masked_fill(exact | ~allowed, -math.inf).exp()
        joint = reference.normalise((near + far) * allowed, beside)
        if self.far_gate is None:
            return joint
        gate = torch.sigmoid(gate_logit(self.far_gate.to(key.dtype)))[:, None, None]
        near_alone = reference.softmax(scores.masked_fill(~(exact & allowed), -math.inf), sink)
        return torch.lerp(near_alone, joint, gate)

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> None:
        self.linear.prepare(query, key, value, key_padding_mask)

    def before_forward(self) -> None:
        self.linear.before_forward()


def hybrids_of(mechanisms: Iterable[Mechanism]) -> list[HybridMechanism]:
    """Return those that are hybrids, members of others too."""
    return [x for x in single_mechanisms(mechanisms) if isinstance(x, HybridMechanism)]


def _largest(scores: Tensor, among: Tensor, sink: Tensor | None) -> Tensor:
    """Return each row's largest score [..., 1] of some keys and the sink, zero where there are none."""
    top = scores.masked_fill(~among, -math.inf).amax(-1, keepdim=True)
    top = top if sink is None else torch.maximum(top, sink[:, None, None])
    return top.masked_fill(top.isinf(), 0.0)
