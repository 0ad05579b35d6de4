"""sinks: a sliding window and the first tokens of the sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from .base import register_mechanism
from .local import LocalConfig, LocalMechanism


@dataclass
class SinksConfig(LocalConfig):
    """Options of `sinks`."""

    num_sinks: int = field(default=4, metadata={"help": "first tokens of a sequence, which every query sees"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_sinks", least=0)


@register_mechanism("sinks")
class SinksMechanism(LocalMechanism):
    """Window and attention sinks (Xiao et al. 2023): query i sees key j if |i - j| < window_size or j < num_sinks.

    Trained models put the attention they do not need on the first tokens; a window alone takes these away.

    Deviation: the authors number positions inside the cache, so that a sink is never further away than the cache is
    long. Here keys keep the positions the model gave them, as keys arrive with their rotation.
    """

    config_class = SinksConfig
    citation = "Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453"

    @property
    def num_global(self) -> int:
        return self.config.num_sinks

    @property
    def global_queries(self) -> bool:
        return False
