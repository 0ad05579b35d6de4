"""evo: softmax inside a sliding window over scores that evolve by one convolution along the keys, again and again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .conv import ConvConfig, ConvMechanism
from .registration import register_mechanism
from .softmax_type import SoftmaxTypeConfig


@dataclass
class EvoConfig(ConvConfig):
    """Options of `evo`."""

    num_rounds: int = field(default=2, metadata={"help": "how often scores are convolved"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_rounds")


@register_mechanism("evo")
class EvoMechanism(ConvMechanism):
    """The convolution of `conv` num_rounds times: s_ij becomes sum_t w_t m_i,j+t s_i,j+t, again and again.

    m_ij is 1 for the keys that query i sees and 0 for all others, which each round would give a score: without it all
    rounds would come to one convolution with a longer kernel. They share w [H, 2 kernel_radius + 1], which begins as
    the identity, and `evo` as `local`; with num_rounds = 1 it is `conv`.

    Deviation from Evolving Attention: there the convolved maps of a layer go on to the next one, with kernels over
    queries, keys and heads; here they evolve inside a layer and a window, along the keys.
    """

    config_class: ClassVar[type[SoftmaxTypeConfig]] = EvoConfig
    citation = "after Wang et al. 2021, Evolving Attention with Residual Convolutions, arXiv 2102.12895"

    config: EvoConfig

    @property
    def num_rounds(self) -> int:
        return self.config.num_rounds
