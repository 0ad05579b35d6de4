"""checkerboard: every second block of a window, as black sees black and white sees white."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .capabilities import ExactnessLimit
from .local import WindowConfig, WindowMechanism
from .registration import register_mechanism


class CheckerboardConfig(WindowConfig):
    """Options of `checkerboard`: those of `local`."""


@register_mechanism("checkerboard")
class CheckerboardMechanism(WindowMechanism):
    """Query i of block I sees key j of block J if |i - j| < window_size and I + J is even.

    The same window costs half of `local`; blocks of different colour never meet, so it belongs beside other patterns
    in a plan. The window keeps the cost linear.
    """

    config_class = CheckerboardConfig
    limit = ExactnessLimit(
        "one block, and window_size >= length", equal=lambda length: {"window_size": length, "block_size": length}
    )

    def key_blocks(self, block: int, num_blocks: int) -> Iterable[int]:
        return (other for other in super().key_blocks(block, num_blocks) if (block - other) % 2 == 0)

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        distance = query_position // self.block_size - key_position // self.block_size
        return super().sees(query_position, key_position) & (distance % 2 == 0)
