"""Mechanisms that count positions from the start of a sequence, whatever padding and packing there is."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..ops.common.exact_softmax import softmax_attention
from ..ops.common.padding import find_sequences, from_the_left
from ..ops.common.tracing import ends_graph, once
from .base import Mechanism
from .inputs import PLAIN, CallOptions


class SequenceMechanism(Mechanism):
    """Base of mechanisms that count positions from the start of a sequence: blocks, windows, sinks, slots.

    A subclass writes `causal_sequences` and `bidirectional_sequences`, which see rows that start at position 0 and are
    padded on the right only. Every padding and packing is brought into that form here and back again, so a sequence
    gets what it would get alone. The output at a pad is softmax's in a bidirectional layer whose model reads it
    (`AttentionLayer.reads_pads`), else zero. A state is a named tuple of tensors with the batch first.
    """

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: Any
    ) -> tuple[Tensor, Any]:
        """Return output and state for rows that continue `state` (None: that begin).

        `lengths` [B] counts the real tokens at the start of each row (maybe none); None if all are real, or no state
        is kept, as no query sees what stands behind it. What comes out behind them is dropped, and must not get into
        the state. An override with a parameter `call` gets the `CallOptions`; the state may be None unless
        `call.keep_state`.
        """
        raise self.unwritten("causal_sequences")

    def bidirectional_sequences(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the output when every query sees every key of its row up to `lengths`."""
        raise self.unwritten("bidirectional_sequences")

    def causal_in_place(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, starts: Tensor, call: CallOptions = PLAIN
    ) -> tuple[Tensor, Any] | None:
        """Return output and state for rows whose tokens stand from `starts` [B] on, side by side; None: it cannot.

        Such rows are then brought to position 0 first. What comes out for pads is zero.
        """
        return None

    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None,
        state: Any, call: CallOptions = PLAIN,
    ) -> tuple[Tensor, Any]:
        if key_padding_mask is None and sequence_ids is None:
            return self.run_hook(call, "causal_sequences", query, key, value, None, state)
        if sequence_ids is None and state is not None and key.shape[2] == 1:  # a step, of which some rows are pads
            real = cast(Tensor, key_padding_mask)[:, 0]
            output, state = self.run_hook(call, "causal_sequences", query, key, value, real.long(), state)
            return output * real[:, None, None, None], state
        return self._each_sequence(query, key, value, key_padding_mask, sequence_ids, state, call)

    def bidirectional_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None,
        call: CallOptions = PLAIN,
    ) -> Tensor:
        if key_padding_mask is None and sequence_ids is None:
            return self.run_hook(call, "bidirectional_sequences", query, key, value, None)
        return self._each_sequence(query, key, value, key_padding_mask, sequence_ids, None, call)[0]

    def cross_sequences(self, key: Tensor, value: Tensor, lengths: Tensor | None) -> Any:
        """Return `cross_state` of rows that start at position 0; `lengths` as in `causal_sequences`."""
        raise self.unwritten("cross_sequences")

    def cross_state(self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Any:
        return self.cross_sequences(*from_the_left(key, value, key_padding_mask))

    @ends_graph  # where the sequences lie is data
    def _each_sequence(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None,
        state: Any, call: CallOptions,
    ) -> tuple[Tensor, Any]:
        batch, _, length, _ = query.shape
        if sequence_ids is None and once(_all_real, key_padding_mask):
            key_padding_mask = None
            if self.layer.causal:
                return self.run_hook(call, "causal_sequences", query, key, value, None, state)
        hidden = call.hidden_states
        groups = once(find_sequences, batch, length, key_padding_mask, sequence_ids, query.device)
        lengths, starts = groups[0].lengths, groups[0].starts
        if self.layer.causal and state is None and len(groups) == 1 and starts is not None:
            if (found := self.run_hook(call, "causal_in_place", query, key, value, lengths, starts)) is not None:
                return found
        output = value.new_zeros(*query.shape[:3], value.shape[3])
        states: list[tuple[Tensor, Any]] = []
        for number, group in enumerate(groups):
            heads = [group.take(x) for x in (query, key, value)]
            own = call if hidden is None else call._replace(hidden_states=group.take(hidden[:, None])[:, 0])
            if self.layer.causal:
                # what stands behind a sequence cannot be seen in a causal output, and without a state nowhere
                lengths = group.lengths if call.keep_state else None
                rows, after = self.run_hook(own, "causal_sequences", *heads, lengths, None if number else state)
                if call.keep_state:
                    states.append((group.rows[group.last], select_rows(after, group.last)))
            else:
                rows = self.run_hook(own, "bidirectional_sequences", *heads, group.lengths)
            output = group.put(rows.to(output.dtype), output)
        if self.layer.reads_pads and not self.layer.causal and key_padding_mask is not None:
            exact = softmax_attention(
                query, key, value, scaling=self.layer.scaling, causal=False, key_padding_mask=key_padding_mask,
                sequence_ids=sequence_ids,
            )  # fmt: skip
            output = torch.where(key_padding_mask[:, None, :, None], output, exact)
        return output, merge_rows(states) if states else None


def _all_real(key_padding_mask: Tensor) -> bool:
    return bool(key_padding_mask.all())


def select_rows(state: Any, chosen: Tensor) -> Any:
    """Return the chosen rows of every tensor of a state."""
    return type(state)(*(x[chosen] for x in state))


def merge_rows(states: list[tuple[Tensor, Any]]) -> Any:
    """Put states, with the numbers of their rows, together to one batch; a shorter third dimension is zero-padded."""
    order = torch.cat([rows for rows, _ in states]).argsort()
    merged = []
    for parts in zip(*(state for _, state in states), strict=True):
        if parts[0].dim() > 2:
            longest = max(part.shape[2] for part in parts)
            parts = tuple(nn.functional.pad(x, (0, 0) * (x.dim() - 3) + (0, longest - x.shape[2])) for x in parts)
        merged.append(torch.cat(parts)[order])
    return type(states[0][1])(*merged)
