"""What mechanisms with one softmax denominator share: a sink in it, of the layer's own or by option."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..config import MechanismConfig, require
from ..errors import OptionError
from ..ops.common.numerics import LARGEST, bounded
from .base import Mechanism
from .inputs import AttentionLayer

SINK_LOGITS = ("one", "learned")


@dataclass
class SoftmaxTypeConfig(MechanismConfig):
    """Options of every mechanism whose weights have one softmax denominator."""

    sink_logit: str | None = field(
        default=None,
        metadata={"help": "exp(b) in every denominator: `one`, b = 0 (softmax1); `learned`, b trained for each head"},
    )
    initial_sink: float = field(default=-4.0, metadata={"help": "b where a learned sink begins"})

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = self.sink_logit
        require("sink_logit", kind, kind is None or kind in SINK_LOGITS, "None, 'one' or 'learned'")
        start = self.initial_sink
        number = isinstance(start, (int, float)) and not isinstance(start, bool)
        require("initial_sink", start, number and -100 <= start <= 100, "a number from -100 to 100")


class SoftmaxTypeMechanism(Mechanism):
    """Base of mechanisms with one softmax denominator: o_i = sum_j w_ij v_j / (exp(b_h) + sum_j w_ij) with a sink.

    b_h is what the model's own layer has (gpt-oss), if any; else 0 with `sink_logit="one"`, and with `"learned"`
    the trained parameter `sink_logit` [H], first `initial_sink`; without a sink the term is absent. It begins far
    below the scores of a pretrained model, since that gave all of its weight to keys.
    """

    takes_sink = True

    config: Any  # of the subclass's own config class

    def __init__(self, config: SoftmaxTypeConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        if config.sink_logit is not None and layer.has_sinks:
            raise OptionError(
                f"sink_logit must be None for layer {layer.index}, which has learned sinks of its own that every"
                f" mechanism with a softmax denominator keeps, got {config.sink_logit!r}"
            )
        if config.sink_logit == "learned":
            self.sink_logit = nn.Parameter(torch.full((layer.num_heads,), float(config.initial_sink), device="cpu"))

    def log_sink(
        self, like: Tensor, given: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        dtype = dtype or like.dtype
        if given is not None:
            return given.to(like.device, dtype).clamp(-LARGEST, LARGEST)
        if self.config.sink_logit == "learned":
            logit = self.sink_logit.to(like.device, dtype)
            return bounded(logit).masked_fill(logit == -math.inf, -math.inf)  # of a head that has none
        return like.new_zeros(self.layer.num_heads, dtype=dtype) if self.config.sink_logit == "one" else None
