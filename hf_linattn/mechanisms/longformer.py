"""longformer: a sliding window and global tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from .local import WindowConfig, WindowMechanism
from .registration import register_mechanism


@dataclass
class LongformerConfig(WindowConfig):
    """Options of `longformer`."""

    num_global: int = field(default=1, metadata={"help": "first tokens: seen by all, seeing all if bidirectional"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_global", least=0)


@register_mechanism("longformer")
class LongformerMechanism(WindowMechanism):
    """Window and global tokens (Beltagy et al. 2020).

    Query i sees key j if |i - j| < window_size or j < num_global; in a bidirectional layer queries i < num_global see
    every key. A global key inside the window counts once. An `attention_window` W of the authors' is
    window_size = W / 2 + 1.

    Deviation: global tokens use the layer's own projections; the authors train separate ones, which pretrained models
    of other kinds do not have. Global are the first tokens ([CLS] in BERT).
    """

    config_class = LongformerConfig
    only_window = True
    citation = "Beltagy et al. 2020, Longformer: The Long-Document Transformer, arXiv 2004.05150"

    @property
    def num_global(self) -> int:
        return self.config.num_global
