"""What the delta rule is called with, whatever computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..dispatch import PYTORCH, Policy

FeatureMap = Callable[[Tensor], Tensor]


class DeltaCall(NamedTuple):
    """One call of the gated delta rule, as `interface.gated_delta_rule` describes it."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    log_gate: Tensor | None = None
    state: Tensor | None = None
    query_map: FeatureMap | None = None
    key_map: FeatureMap | None = None
    policy: Policy = PYTORCH

    @property
    def is_step(self) -> bool:
        """Whether this is one token of each row, as in decoding."""
        return self.key.shape[2] == 1

    def before(self, key: Tensor) -> Tensor:
        """Return the state before the first key, for keys with such features [B, Hkv, N, F]."""
        if self.state is not None:
            return self.state
        return self.value.new_zeros(*key.shape[:2], key.shape[3], self.value.shape[3])

    @property
    def grouped_query(self) -> Tensor:
        """The queries [B, Hkv, G, N, D], beside the keys that they share."""
        return self.query.unflatten(1, (self.key.shape[1], -1))
