"""conv: softmax inside a sliding window over scores that are convolved along the keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config import require, require_count, require_known
from ..ops import reference
from ..ops.window.convolved import BandState, banded_attention, keep_ring
from .capabilities import ExactnessLimit
from .inputs import PLAIN, AttentionLayer, CallOptions
from .registration import register_mechanism
from .sequence import SequenceMechanism
from .softmax_type import SoftmaxTypeConfig, SoftmaxTypeMechanism

FORMS = ("softmax", "raw")


@dataclass
class ConvConfig(SoftmaxTypeConfig):
    """Options of `conv`."""

    window_size: int = field(default=64, metadata={"help": "a query sees keys less than `window_size` tokens away"})
    kernel_radius: int | None = field(
        default=None, metadata={"help": "taps to either side of a key; None: window_size - 1, as far as a query sees"}
    )
    form: str = field(
        default="softmax", metadata={"help": "softmax: over the window; raw: convolved scores are the weights"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("window_size")
        require_count("kernel_radius", self.kernel_radius, least=0, optional=True)
        inside = self.kernel_radius is None or self.kernel_radius < self.window_size
        require("kernel_radius", self.kernel_radius, inside, f"less than window_size, which is {self.window_size}")
        require_known("form", self.form, FORMS)
        none = self.sink_logit is None or self.form == "softmax"
        require("sink_logit", self.sink_logit, none, "None with form='raw', which has no denominator")


@register_mechanism("conv")
class ConvMechanism(SoftmaxTypeMechanism, SequenceMechanism):
    """o_i = sum_j softmax_j(s'_ij) v_j with s'_ij = sum_t w_t s_i,j+t, over the keys |i - j| < window_size.

    s_ij = scaling q_i . k_j for the keys that query i sees: those of its window, j <= i if causal; all other s_ij are
    0, so nothing of the future enters and no pad. A key is then judged by its neighbours, too. With form="raw" the
    s'_ij themselves are the weights, o_i = sum_j s'_ij v_j: of any sign, adding up to anything.

    w [H, 2 kernel_radius + 1] is trained, one kernel per query head, w_0 in the middle; it begins as w_0 = 1 and
    nothing else, and `conv` as `local`. Decoding keeps the last window_size - 1 keys and values.

    Deviations from Multi-Token Attention: scores of a window, taps over keys alone and not over queries and heads, and
    no group normalisation, for which a pretrained model has no weights.
    """

    config_class: ClassVar[type[SoftmaxTypeConfig]] = ConvConfig
    limit = ExactnessLimit("window_size >= length, taps untrained", equal=lambda length: {"window_size": length})
    citation = "Golovneva et al. 2025, Multi-Token Attention, arXiv 2504.00927"
    family = "sparse"

    config: ConvConfig

    def __init__(self, config: ConvConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        radius = self.reach if config.kernel_radius is None else config.kernel_radius
        kernel = torch.zeros(layer.num_heads, 2 * radius + 1, device="cpu")
        kernel[:, radius] = 1.0
        self.kernel = nn.Parameter(kernel)
        self.averages = self.takes_sink = config.form == "softmax"
        if not self.averages:
            self.limit = ExactnessLimit("attention with the convolved scores as weights", kernel=True)

    @property
    def reach(self) -> int:
        """How far a query sees."""
        return self.config.window_size - 1

    @property
    def num_rounds(self) -> int:
        """How often scores are convolved."""
        return 1

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: BandState | None,
        call: CallOptions,
    ) -> Tensor:
        return banded_attention(
            query,
            key,
            value,
            self.kernel.to(query),
            reach=self.reach,
            rounds=self.num_rounds,
            scaling=self.layer.scaling,
            causal=self.layer.causal,
            normalised=self.averages,
            lengths=lengths,
            state=state,
            sink=self.log_sink(query, call.sink),
        )

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: BandState | None,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, BandState | None]:
        output = self._attend(query, key, value, lengths, state, call)
        return output, keep_ring(key, value, self.reach, lengths, state) if call.keep_state else None

    def bidirectional_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, call: CallOptions = PLAIN
    ) -> Tensor:
        return self._attend(query, key, value, lengths, None, call)

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        """Scores in the order of the tokens of a sequence, pads left out, where neighbours are neighbours."""
        rank = reference.positions(allowed)
        distance = (rank[..., :, None] - rank[..., None, :]).abs()
        seen = allowed & (distance < self.config.window_size)
        scores = reference.products(query, key) * self.layer.scaling
        place = rank.clamp(min=0)[..., None, :].expand_as(scores)  # of pads and other sequences come zeros
        taps, length = self.kernel.to(scores), scores.shape[-1]
        radius = taps.shape[1] // 2
        for _ in range(self.num_rounds):
            ordered = torch.zeros_like(scores).scatter_add(-1, place, scores * seen)
            padded = nn.functional.pad(ordered, (radius, radius))
            convolved = torch.zeros_like(scores)
            for number in range(2 * radius + 1):
                convolved = convolved + taps[:, number, None, None] * padded[..., number : number + length]
            scores = convolved.gather(-1, place)
        if not self.averages:
            return scores * seen
        return reference.softmax(scores.masked_fill(~seen, float("-inf")), self.log_sink(query, call.sink))
