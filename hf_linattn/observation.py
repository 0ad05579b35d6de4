"""Standing between a model and its mechanisms: what an attention layer was asked, answered by someone else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from .mechanisms import Mechanism
from .ops.softmax import softmax_attention


class AttentionCall(NamedTuple):
    """One call of one layer, as its mechanism would get it.

    query [B, H, N, D], key [B, Hkv, N, D], value [B, Hkv, N, Dv], key_padding_mask [B, N] or None, sequence_ids [B, N]
    or None. exact: the sliding window, the soft cap and the dropout of the model's own attention.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None
    sequence_ids: Tensor | None
    exact: dict[str, Any]

    def by(self, mechanism: Mechanism) -> Tensor:
        """Return the mechanism's answer [B, H, N, Dv]."""
        return mechanism(*self[:5])[0]

    def by_softmax(self, mechanism: Mechanism) -> Tensor:
        """Return the answer of the attention that the mechanism replaced [B, H, N, Dv]."""
        layer = mechanism.layer
        return softmax_attention(
            self.query, self.key, self.value, scaling=layer.scaling, causal=layer.causal,
            key_padding_mask=self.key_padding_mask, sequence_ids=self.sequence_ids, **self.exact,
        )  # fmt: skip


Observer = Callable[[AttentionCall], Tensor]


@contextmanager
def observed(mechanisms: Mapping[str, Mechanism], observers: Mapping[str, Observer] | None = None) -> Iterator[None]:
    """Let each layer that `observers` names be answered by its observer for a while, all others by softmax.

    Without a cache. With no observers the model is the original, also on packed rows of a bidirectional model.
    """
    try:
        for path, mechanism in mechanisms.items():
            mechanism.observer = (observers or {}).get(path, partial(AttentionCall.by_softmax, mechanism=mechanism))
        yield
    finally:
        for mechanism in mechanisms.values():
            mechanism.observer = None
