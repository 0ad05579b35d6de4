"""linear: kernel attention with a feature map, o_i = phi(q_i) S_i / phi(q_i) . z_i."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..config import MechanismConfig, require, require_count
from ..errors import UnsupportedModeError
from ..feature_maps import FEATURE_MAPS, FeatureMap
from ..ops import reference
from ..ops.common.numerics import positive
from ..ops.common.precision import accum_dtype
from ..ops.linear.attention_distance import matching_decay_rate
from ..ops.linear.interface import LINEAR, read_state, sum_keys
from ..ops.linear.types import LinearCall, LinearState
from ..registry import MECHANISMS
from .base import Mechanism
from .capabilities import ExactnessLimit
from .inputs import AttentionLayer, Pairs
from .registration import register_mechanism
from .ridge import RidgeReading
from .self_weight import SelfWeight

SHORTEST, LONGEST = 0.5, 16.0  # tokens over which the weights of the fastest and the slowest head fall by a factor e

# what makes outputs: who reads a mechanism's maps, rates or entries and no more, as `hybrid` does, calls none of these
OUTPUTS = (
    "forward", "causal_attention", "bidirectional_attention", "causal_sequences", "causal_in_place",
    "bidirectional_sequences", "log_decay", "weights", "weights_given", "kernel_weights",
)  # fmt: skip


@dataclass
class KernelConfig(MechanismConfig):
    """Options of every mechanism on the linear base."""

    decay: str | None = field(
        default=None,
        metadata={
            "help": "`learned`: weights fall with the distance, at a rate per key/value head; `measured`: `calibrate`"
            " besides lets it begin where softmax attention looks as far"
        },
    )
    self_weight: str | None = field(
        default=None, metadata={"help": "`learned`: a query's own token gets a share that no other weight has to make"}
    )
    ridge: str | None = field(
        default=None,
        metadata={"help": "`learned`: a ridge regression of the values is read besides; bidirectional layers only"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        known = (None, "learned", "measured")
        require("decay", self.decay, self.decay in known, "None, 'learned' or 'measured'")
        for name in ("self_weight", "ridge"):
            value = getattr(self, name)
            require(name, value, value in (None, "learned"), "None or 'learned'")


@dataclass
class FeatureMapConfig(KernelConfig):
    """Options of mechanisms that are a feature map on the linear base; a subclass says which, in `feature_map`."""

    feature_map: ClassVar[str]  # name in hf_linattn.feature_maps

    feature_dim: int | None = field(
        default=None,
        metadata={"help": "features F of a learned or random map; None: 4 D if learned, D directions if random"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, count = FEATURE_MAPS.get(self.feature_map), self.feature_dim
        if count is None:
            return
        fixed = f"None, since the width of feature map {self.feature_map!r} is fixed"
        require("feature_dim", count, kind.width is not None, fixed)
        require_count("feature_dim", count, optional=True)
        several = f"None or a multiple of {kind.copies}, as feature map {self.feature_map!r} makes pairs"
        require("feature_dim", count, count % kind.copies == 0, several)


@dataclass
class LinearConfig(FeatureMapConfig):
    """Options of `linear`."""

    feature_map: str = field(  # type: ignore[misc]  # here it is an option
        default="elu", metadata={"help": "name in hf_linattn.feature_maps"}
    )


class FeatureMapMechanism(Mechanism):
    """Base of mechanisms with a feature map: `feature_map`, or `query_map` and `key_map` where it is learned."""

    static_steps = True
    config: Any  # of the subclass's own config class

    def __init__(self, config: KernelConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        kind, num_features = self.choose_feature_map()
        kv_heads = layer.num_key_value_heads

        def make(*heads: int) -> FeatureMap:
            return kind(layer.head_dim, num_features, layer.scaling, self.generator(), heads)

        if kind.learned:
            self.query_map, self.key_map = make(kv_heads, layer.num_heads // kv_heads), make(kv_heads)
        else:
            self.feature_map = make()

    def choose_feature_map(self) -> tuple[type[FeatureMap], int]:
        """Return the class of the map and how many directions it has; a subclass may choose another one."""
        kind = FEATURE_MAPS.get(self.config.feature_map)
        return kind, kind.directions(self.config.feature_dim, self.layer.head_dim)

    @property
    def maps(self) -> tuple[FeatureMap, FeatureMap]:
        """The maps of queries [B, Hkv, G, N, D] and of keys [B, Hkv, N, D]; one and the same unless learned."""
        if "feature_map" in self._modules:
            return self.feature_map, self.feature_map
        return self.query_map, self.key_map


@register_mechanism("linear")
class LinearMechanism(FeatureMapMechanism):
    """Linear attention (Katharopoulos et al. 2020): o_i = phi(q_i) S_i / (phi(q_i) . z_i).

    S_i = sum_j phi(k_j) v_j^T [F, Dv] and z_i = sum_j phi(k_j) [F] run over j <= i (causal) or over all keys. Time is
    O(N F Dv), the decoding state S, z has constant size, float32, one per key/value head.

    With `decay="learned"` the weights are phi(q_i) . phi(k_j) exp(-r |i - j|), r > 0 one trained number per key/value
    head (parameter `log_decay_rate`, from r = 2 to r = 1/16 over the heads): the state forgets, what is near counts
    more. Models that attended to neighbouring positions find them again with it; elu + 1 alone has too few features
    to tell positions apart (Sun et al. 2023, Retentive Network, arXiv 2307.08621, with fixed rates).

    With `decay="measured"` `calibrate` begins the rates where exp(-r |i - j|) alone looks as far as softmax attention
    does (`hf_linattn.ops.linear.attention_distance`), which gradients take long to come to from elsewhere.

    With `self_weight="learned"` o_i = g_i v_i + (1 - g_i) average_i, average the o above and g_i = sigmoid(a q_i . k_i
    + b) with one a and b per query head (the submodule `self_weight`). Softmax attention that gives half of its weight
    to a query's own token has a matrix of full rank, which no F < N features can have; what is beside the diagonal can
    be of low rank. RWKV has a bonus for the current token in that place (Peng et al. 2023, arXiv 2305.13048).

    With `ridge="learned"` bidirectional layers read, beside these averages, a ridge regression of the values on the
    keys' features, which averages with positive weights cannot imitate: the submodule `ridge`, a `RidgeReading`.

    A learned map has weights of its own for queries, one per query head, and for keys, one per key/value head
    (`query_map.weight` [Hkv, H / Hkv, D, m], `key_map.weight` [Hkv, D, m]), which start alike; any other map is one
    module for both, `feature_map`.

    In cross-attention S and z are sums over the encoder's tokens, made once and read by every query.

    Deviations: no epsilon in the denominator (a row without any key is zero); keys and queries are used as the model
    made them, rotary positions included.
    """

    config_class: ClassVar[type[MechanismConfig]] = LinearConfig
    modes = frozenset({"causal", "bidirectional", "cross"})
    backends = ("auto", "torch", "compile", "triton")
    limit = ExactnessLimit("attention with the kernel phi(q) . phi(k), computed naively", kernel=True)
    citation = "Katharopoulos et al. 2020, Transformers are RNNs, arXiv 2006.16236"
    family = "linear"
    takes_half = any_length = splits = True
    decays_by_distance: ClassVar[bool] = True  # or not at all: nothing but q, k, |i - j| makes a weight, in any method

    def __init__(self, config: KernelConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        for name in ("decay", "self_weight"):
            if getattr(config, name) and layer.cross:
                raise UnsupportedModeError(
                    f"{name}={getattr(config, name)!r} needs to know how far a query is from a key, which"
                    f" cross-attention layer {layer.index} does not; leave it out"
                )
        if config.decay:
            self.log_decay_rate = nn.Parameter(self._first_log_rates())
            self.prepares = config.decay == "measured"
        self.self_weight = SelfWeight(layer) if config.self_weight else None
        self.ridge = None
        if config.ridge:
            if layer.mode != "bidirectional":
                raise UnsupportedModeError(
                    f"ridge={config.ridge!r} solves for all keys of a sequence at once, which {layer.mode} layer"
                    f" {layer.index} has no form of; leave it out, or use deltanet, which goes there token by token"
                )
            self.ridge = RidgeReading(layer)
            self.averages = self.any_length = False  # what is solved for may have negative weights
            self.limit = RidgeReading.limit
        self.takes_half = self.takes_half and not (config.self_weight or config.ridge)  # which read the heads, too

    def _first_log_rates(self) -> Tensor:
        steps = torch.linspace(0, 1, self.layer.num_key_value_heads, dtype=torch.float32, device="cpu")
        return -math.log(SHORTEST) - steps * math.log(LONGEST / SHORTEST)

    @torch.no_grad()
    def prepare(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> None:
        """Let rates that are as they were made begin where `matching_decay_rate` says."""
        if not self.prepares:
            return
        first = self._first_log_rates().to(self.log_decay_rate)
        if not torch.allclose(self.log_decay_rate, first, rtol=1e-2, atol=1e-2):  # half precision rounds them
            return
        scaling, causal, itself = self.layer.scaling, self.layer.causal, self.self_weight is None
        rate = matching_decay_rate(query, key, scaling, causal, key_padding_mask, itself)
        self.log_decay_rate.copy_(rate.log())

    def causal_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        sequence_ids: Tensor | None,
        state: LinearState | None,
    ) -> tuple[Tensor, LinearState]:
        decay = self.log_decay(key, key_padding_mask)
        heads = (query, key, value, *self.maps, key_padding_mask, sequence_ids)
        output, state = LINEAR.run(LinearCall(*heads, state, decay, policy=self.policy))
        return self._beside_itself(output, query, key, value, key_padding_mask), state

    def bidirectional_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None
    ) -> Tensor:
        decay = self.log_decay(key, key_padding_mask)
        heads = (query, key, value, *self.maps, key_padding_mask, sequence_ids)
        output, _ = LINEAR.run(LinearCall(*heads, None, decay, causal=False, policy=self.policy))
        if self.ridge is not None:
            output = self.ridge(output, query, key, value, self.maps, key_padding_mask, sequence_ids)
        return self._beside_itself(output, query, key, value, key_padding_mask)

    def _beside_itself(self, average: Tensor, *heads: Any) -> Tensor:
        return average if self.self_weight is None else self.self_weight(average, *heads)

    def cross_state(self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> LinearState:
        return sum_keys(key, value, self.maps[1], key_padding_mask)

    def cross_attention(self, query: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        return read_state(query, state, self.maps[0]), state

    def decay_rate(self, like: Tensor, wide: bool = False) -> Tensor | None:
        """Return r [Hkv], device and dtype as `like`, or if `wide` in at least float32; None without decay."""
        if not self.config.decay:
            return None
        return positive(self.log_decay_rate.to(like.device, accum_dtype(like) if wide else like.dtype))

    def log_decay(self, key: Tensor, key_padding_mask: Tensor | None) -> Tensor | None:
        """Return the log decay of every token [B, Hkv, N], zero where masked; None without decay."""
        rate = self.decay_rate(key, wide=True)
        if rate is None:
            return None
        decay = -rate[None, :, None].expand(key.shape[:3])
        return decay if key_padding_mask is None else decay * key_padding_mask[:, None]

    @property
    def has_scores(self) -> bool:
        return self.ridge is None and self.maps[0].positive

    def scores(self, pairs: Pairs) -> Tensor:
        """log(phi(q_i) . phi(k_j)) - r |i - j|; with its own token's share, of the weights these make and that."""
        scores = self.kernel_scores(pairs)
        return scores if self.self_weight is None else self.self_weight.add_to_scores(scores, pairs)

    def kernel_scores(self, pairs: Pairs) -> Tensor:
        """Return `scores` without the share of a query's own token."""
        query_map, key_map = self.maps
        query, query_log = query_map(pairs.query.unflatten(1, (pairs.key.shape[1], -1)))
        key, key_log = key_map(pairs.key)
        kernel = query @ key[:, :, None].transpose(-1, -2)
        scores = kernel.clamp(min=torch.finfo(kernel.dtype).tiny).log()
        scores = scores if query_log is None else scores + query_log[..., None]
        scores = (scores if key_log is None else scores + key_log[:, :, None, None]).flatten(1, 2)
        rate = self.decay_rate(scores)
        if rate is None:
            return scores
        return scores - reference.repeat_heads(rate[None, :, None, None], scores) * pairs.distance

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        weights = self.kernel_weights(query, key, allowed)
        if self.ridge is not None:
            weights = self.ridge.weights(weights, query, key, self.maps, allowed)
        return weights if self.self_weight is None else self.self_weight.add_to_weights(weights, query, key, allowed)

    def kernel_weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        """Return `weights` without the share of a query's own token."""
        query_map, key_map = self.maps
        features = query_map.exact(query.unflatten(1, (key.shape[1], -1))).flatten(1, 2)
        return reference.kernel_matrix(features, key_map.exact(key), allowed, self.decay_rate(key))


def own_outputs(kind: type[Mechanism], base: type[Mechanism]) -> list[str]:
    """Return the methods that make outputs in another way than the base's; none if a class says they make the same.

    It says so by stating `decays_by_distance` itself.
    """
    if "decays_by_distance" in vars(kind):
        return []
    return [name for name in OUTPUTS if getattr(kind, name, None) is not getattr(base, name, None)]


def far_mechanisms(*bases: type[Mechanism]) -> dict[str, list[str]]:
    """Return, for each mechanism on these bases, its own methods for outputs; with none it fits beside a window."""
    kinds = {name: MECHANISMS.get(name) for name in MECHANISMS.names()}
    return {
        name: own_outputs(kind, base)
        for name, kind in kinds.items()
        for base in bases
        if issubclass(kind, base) and getattr(kind, "decays_by_distance", True)
    }


def require_far(linear: object, *bases: type[Mechanism]) -> None:
    """Raise `OptionError` unless a mechanism is on one of these bases and makes outputs as that does."""
    own = far_mechanisms(*bases)
    fitting = [name for name, methods in own.items() if not methods]
    why = [f"; its own {' and '.join(own[name])} would never be called" for name in own if name == linear]
    require("linear", linear, linear in fitting, f"one of {', '.join(fitting)}{''.join(why)}")
