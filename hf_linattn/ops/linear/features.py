"""Kernel attention by kernels that get features: the C where it does not know the map, and Triton always."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LOWEST
from ..common.precision import accum_dtype
from ..runtime.cpu import dense_rows, output_for
from .autograd import join
from .torch import joined, split
from .types import FeatureMap, Features, LinearCall, LinearState, masked


def make_keys(
    key_map: FeatureMap, key: Tensor, mask: Tensor | None, scaled: bool = False
) -> tuple[Features, bool]:  # fmt: skip
    """`FeatureKernels.keys`, by PyTorch's operations."""
    made = key_map(key)
    return masked(made, mask, scaled), made.log_scale is not None


class FeatureKernels(NamedTuple):
    """What attends to keys by features.

    attend: called with (sequence_ids, output, query, key, value, log_scale, log_decay, state, weighed), returns the
        output, the log of its weights if `weighed`, and the state after the last key.
    kinds: returns the dtypes that features may have, which are then rounded to that of the values.
    keys: called with (key_map, key, mask, scaled), returns the features of keys as `types.masked` has them, and
        whether the map itself makes log scales.
    """

    attend: Callable[..., tuple[Tensor, Tensor | None, LinearState]]
    kinds: Callable[[], Sequence[torch.dtype]]
    keys: Callable[..., tuple[Features, bool]] = make_keys

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return them in a dtype that sums are formed of, dense."""
        kind = value.dtype if value.dtype in self.kinds() else accum_dtype(value)
        return dense_rows(query.to(kind)), dense_rows(key.to(kind)), dense_rows(value.to(kind))

    def weighed(
        self, query: Tensor, key: Tensor, log_scale: Tensor | None, value: Tensor, log_decay: Tensor | None,
        sequence_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, LinearState]:  # fmt: skip
        """Return the attention of rows that begin [B, Hkv, G, N, Dv], the log of its weights, and the state after.

        Args:
            query: [B, Hkv, G, N, F]. key: [B, Hkv, N, F], also masked. log_scale, log_decay: [B, Hkv, N].
            value: [B, Hkv, N, Dv]. sequence_ids: [B, N], with log scales.
        """
        heads = self.heads(query, key, value)
        output, log, after = self.attend(sequence_ids, None, *heads, log_scale, log_decay, None, True)
        return output, cast(Tensor, log), after

    def causal(self, call: LinearCall, size: int) -> tuple[Tensor, LinearState]:
        """Return output and state of a causal call, whose features are made of `size` tokens at a time."""
        output, parts, last = output_for(call.query, call.value), [], None
        ids = None if call.sequence_ids is None else call.sequence_ids.expand(call.query.shape[0], -1)
        operands = (
            (call.grouped_query, 3), (call.key, 2), (call.value, 2), (call.key_padding_mask, 1), (ids, 1),
            (call.log_decay, 2), (output, 3),
        )  # fmt: skip
        state: Any = call.state
        for query, key, value, mask, own, decay, place in split(size, *operands):
            if last is not None and own is not None:  # a sequence may end where a part does
                state = _kept(state, last == own[:, 0])
            (keys, log_scale), scaled = self.keys(call.key_map, key, mask, decay is not None or own is not None)
            heads = self.heads(call.query_map(query).values, keys, value)
            part, _, state = self.attend(own, place, *heads, log_scale, decay, state, False)
            if log_scale is not None and not scaled and decay is None:  # which no scale is, even in a row without keys
                state = state._replace(log_max=torch.zeros_like(state.log_max))
            last = None if own is None else own[:, -1]
            parts.append(part)
        return joined(parts, output).flatten(1, 2), state

    def two_way(self, call: LinearCall) -> Tensor:
        """Return the bidirectional output of weights that decay: see `cpu.two_way_attention`."""
        log_decay = cast(Tensor, call.log_decay)
        ids = None if call.sequence_ids is None else call.sequence_ids.expand(call.key.shape[0], -1)
        query, value = call.query_map(call.grouped_query).values, call.value
        (key, scale), _ = self.keys(call.key_map, call.key, call.key_padding_mask, True)
        log_scale = cast(Tensor, scale)
        output, log, _ = self.weighed(query, key, log_scale, value, log_decay, ids)
        if key.shape[2] > 1:
            log_scale = log_scale[:, :, 1:]
            if ids is not None:  # beside the last query of a sequence lies the first key of the next one
                log_scale = log_scale.masked_fill((ids[:, 1:] != ids[:, :-1])[:, None], LOWEST)
                ids = ids[:, :-1].flip(1)
            later = query[..., :-1, :], key[:, :, 1:], log_scale[..., None], value[:, :, 1:]
            query, key, log_scale, value = (x.flip(-2) for x in later)
            decay = F.pad(log_decay[:, :, 2:].flip(2), (1, 0))
            after, after_log, _ = self.weighed(query, key, log_scale.squeeze(-1), value, decay, ids)
            output, _ = join(output, log, after.flip(3), after_log.flip(3) + log_decay[:, :, None, 1:])
        return output.flatten(1, 2)


def _kept(state: LinearState, kept: Tensor) -> LinearState:
    """The state of the rows [B] that keep theirs, an empty one in the others."""
    kept = kept[:, None]
    return LinearState(state.kv * kept[..., None, None], state.log_max.masked_fill(~kept, LOWEST / 2))
