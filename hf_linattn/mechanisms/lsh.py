"""lsh: softmax over the keys that share a bucket with the query in at least one round of angular hashing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import require
from ..ops import reference
from ..ops.common.numerics import LOWEST
from ..ops.common.sink_logit import attenuate
from ..ops.common.tracing import ends_graph, may_write
from ..ops.lsh.interface import LSH, Earlier, Found, Lists, LshCall
from ..ops.lsh.torch import hash_buckets, pick, sort_keys
from .capabilities import ExactnessLimit
from .inputs import PLAIN, AttentionLayer, CallOptions
from .registration import register_mechanism
from .sequence import SequenceMechanism
from .softmax_type import SoftmaxTypeConfig, SoftmaxTypeMechanism

EPSILON = 1e-6  # added to the mean square of a key that is brought to unit length, as in transformers


@dataclass
class LshConfig(SoftmaxTypeConfig):
    """Options of `lsh`."""

    num_rounds: int = field(default=4, metadata={"help": "rounds of hashing; a key found in any of them is seen"})
    bucket_size: int = field(default=64, metadata={"help": "keys a query sees in a round, before and again after it"})
    num_buckets: int = field(
        default=64, metadata={"help": "buckets of a round, 1 or even; short bidirectional inputs use fewer"}
    )
    shared_qk: bool = field(
        default=False, metadata={"help": "the Reformer's form: queries and keys are the same vectors"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_rounds", "bucket_size", "num_buckets")
        count = self.num_buckets
        require("num_buckets", count, count == 1 or count % 2 == 0, "1 or even")


class LshState(NamedTuple):
    """The last C keys of every bucket of every round; constant size, one per key/value head.

    keys: [B, Hkv, R, buckets, C, D], zero where there is none yet. values: [B, Hkv, R, buckets, C, Dv].
    positions: [B, Hkv, R, buckets, C], -1 where there is none yet.
    buckets: [B, Hkv, R, buckets, C, R], the buckets of each key in all rounds.
    length: [B], tokens read. largest: [B, Hkv], the largest norm of a key so far.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    buckets: Tensor
    length: Tensor
    largest: Tensor


class OwnedLshState(LshState):
    """An `LshState` of which nobody else has the memory, so that a token without gradients is written into it."""


@register_mechanism("lsh")
class LshMechanism(SoftmaxTypeMechanism, SequenceMechanism):
    """LSH attention (Kitaev et al. 2020): o_i = sum_j w_ij v_j, w_i = softmax_j(scaling q_i . k_j) over j in S_i.

    Round r puts x into the bucket h_r(x) = argmax [x R_r, -x R_r]; R_r is drawn once from `seed` and the layer and
    kept in the buffer `rotations`. S_i has i itself and, of every round, the keys of the query's bucket: of those not
    after i the last C = `bucket_size`, of those after it (bidirectional) the first C. A key that several rounds find
    counts once. Time O(N rounds C D).

    Queries and keys are hashed for their inner product and not for their angle, as queries [q, 0] and keys
    [k, sqrt(M^2 - |k|^2)] with M the largest |k| (Neyshabur and Srebro 2015, arXiv 1410.5518): of all keys or, causal,
    of the keys up to this one.

    `shared_qk=True` is the Reformer's form, for models whose queries and keys are the same vectors; where they are
    not, x = (q + k) / 2 is taken for both. The key is x scaled to length sqrt(D) (the mean over a group's query heads
    first), so that with scaling = 1 / sqrt(D) the score is x_i . x_j / |x_j|, the temperature of transformers and trax
    (reformer-pytorch divides by another sqrt(D)). A query sees itself only if it sees nothing else.

    Deviations: keys are chosen by their distance in the sorted bucket and never across buckets, in place of chunks of
    a sort whose borders move with every later token. So the causal choice does not depend on the future, and the
    decoding state, the last C keys of each bucket, gives what a full forward gives. Bidirectional rows of n tokens use
    at most n / C buckets; one of up to C tokens is exact. Without shared_qk a query always sees itself, so that no
    early query is left without a key.
    """

    rotations: Tensor

    config_class = LshConfig
    splits = True
    continuous = False
    limit = ExactnessLimit(
        "softmax attention with one bucket and bucket_size >= n",
        equal=lambda length: {"num_buckets": 1, "bucket_size": length},
    )
    citation = "Kitaev et al. 2020, Reformer: The Efficient Transformer, arXiv 2001.04451"
    family = "sparse"

    config: Any

    def __init__(self, config: LshConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        if config.shared_qk:
            self.limit = ExactnessLimit("attention over the keys it selects, computed naively", kernel=True)
        shape = config.num_rounds, layer.head_dim + (not config.shared_qk), config.num_buckets // 2
        drawn = torch.randn(shape, generator=self.generator(), dtype=torch.float32, device="cpu")
        self.register_buffer("rotations", drawn)

    @ends_graph  # which keys are seen is data
    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: LshState | None,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, LshState | None]:
        query, key = self.operands(query, key)
        norms = key.detach().norm(dim=-1)
        begin = norms.new_zeros(len(key), dtype=torch.long) if state is None else state.length
        earlier = norms.new_zeros(norms.shape[:2]) if state is None else state.largest
        largest = torch.cat([earlier[..., None], norms], -1).cummax(-1).values
        new = self._hash(query, key, value, largest[..., 1:], self.config.num_buckets, begin, lengths)
        if state is not None and lengths is None and key.shape[2] == 1:
            after = self._insert(state, new)
            output = self._beside_sink(*self._read(after, new), new, call)
        else:
            output, after = self._many(new, state, 0, call)
        if after is None:
            return output, None
        count = torch.full_like(begin, key.shape[2]) if lengths is None else lengths
        last = largest.gather(-1, count[:, None, None].expand(*norms.shape[:2], 1))[..., 0]
        return output, after._replace(length=begin + count, largest=last)

    @ends_graph
    def bidirectional_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, call: CallOptions = PLAIN
    ) -> Tensor:
        query, key = self.operands(query, key)
        norms = key.detach().norm(dim=-1)
        count: Any = self.bucket_count(key.shape[2])
        if lengths is not None:
            norms = norms.masked_fill(_behind(lengths, key.shape[2])[:, None], 0.0)
            count = self.bucket_count(lengths)[:, None, None].expand(-1, 1, key.shape[2])
        largest = norms.amax(-1, keepdim=True)
        new = self._hash(query, key, value, largest, count, norms.new_zeros(len(key), dtype=torch.long), lengths)
        return self._many(new, None, self.config.bucket_size, call)[0]

    def owned_state(self, state: LshState) -> LshState:
        return state if isinstance(state, OwnedLshState) else OwnedLshState(*state)

    def operands(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [B, H, N, D] and keys [B, Hkv, N, D] as the scores and the hash take them."""
        if not self.config.shared_qk:
            return query, key
        groups = query.shape[1] // key.shape[1]
        query = (query + key.repeat_interleave(groups, 1)) / 2
        key = query.unflatten(1, (-1, groups)).mean(2)
        return query, key * torch.rsqrt(key.square().mean(-1, keepdim=True) + EPSILON)

    def bucket_count(self, length: Any) -> Any:
        """Return how many buckets bidirectional rows of this length, an integer or a tensor of them, use."""
        count = torch.as_tensor(length, device=getattr(length, "device", "cpu"))
        count = count.add(self.config.bucket_size - 1) // self.config.bucket_size
        count = (count + count % 2 * (count > 1)).clamp(1, self.config.num_buckets)
        return count if isinstance(length, Tensor) else int(count)

    def buckets(self, query: Tensor, key: Tensor, largest: Tensor, count: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return the buckets of queries [R, B, H, N] and keys [R, B, Hkv, N]; `largest` is the M of each key."""
        rotations = self.rotations.to(query.dtype)
        if self.config.shared_qk:
            return hash_buckets(query, rotations, count), hash_buckets(key, rotations, count)
        key = key.detach()
        norms = key.norm(dim=-1)
        # in factors: exactly zero for the largest key, where the root would magnify a rounding error
        missing = ((largest - norms).clamp(min=0) * (largest + norms)).sqrt()
        key = torch.cat([key, missing[..., None]], -1)
        return hash_buckets(query, rotations[:, :-1], count), hash_buckets(key, rotations, count)

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        size, causal = self.config.bucket_size, self.layer.causal
        query, key = self.operands(query, key)
        groups = query.shape[1] // key.shape[1]
        largest = key.detach().norm(dim=-1)[:, :, None].masked_fill(~allowed, 0.0).amax(-1)
        count = self.config.num_buckets if causal else self.bucket_count(allowed.sum(-1))
        chosen = torch.zeros((), dtype=torch.bool, device=key.device)
        for of_query, of_key in zip(*self.buckets(query, key, largest, count), strict=True):
            same = (of_query[..., :, None] == of_key.repeat_interleave(groups, 1)[..., None, :]) & allowed
            rank = same.cumsum(-1)
            here = rank.diagonal(dim1=-2, dim2=-1)[..., None]
            chosen = chosen | same & (rank > here - size) & (rank <= here + (0 if causal else size))
        itself = torch.eye(allowed.shape[-1], dtype=torch.bool, device=key.device)
        if self.config.shared_qk:
            chosen = chosen & ~itself
            itself = itself & ~chosen.any(-1, keepdim=True)
        seen = (chosen | itself) & allowed
        return reference.softmax_matrix(query, key, self.layer.scaling, seen, sink=self.log_sink(query, call.sink))

    def _hash(
        self, query: Tensor, key: Tensor, value: Tensor, largest: Tensor, count: int | Tensor, begin: Tensor,
        lengths: Tensor | None,
    ) -> _Tokens:  # fmt: skip
        of_query, of_key = self.buckets(query, key, largest, count)
        if lengths is not None:  # pads have a bucket of their own, the last one
            behind = _behind(lengths, key.shape[2])[None, :, None]
            of_query, of_key = (x.masked_fill(behind, self.config.num_buckets) for x in (of_query, of_key))
        position = begin[:, None] + torch.arange(key.shape[2], device=key.device)
        return _Tokens(query, key, value, of_query, of_key, position)

    def _many(self, new: _Tokens, state: LshState | None, ahead: int, call: CallOptions) -> tuple[Tensor, Any]:
        """Return output and state of all tokens: None if bidirectional, else still without `length` and `largest`."""
        buckets, size, kept = self.config.num_buckets, self.config.bucket_size, call.keep_state and not ahead
        # of the buckets' codes the positions take this much room; not read off the data where it is known
        span = new.key.shape[2] if state is None else int(new.position.max()) + 1
        place = new.position[:, None]
        query_code, key_code = (x * span + place for x in (new.query_bucket, new.key_bucket))
        key, value, earlier = new.key, new.value, None
        if state is not None:
            key, value = (
                torch.cat([x.flatten(2, 4), y], 2) for x, y in zip(state[:2], (key, value), strict=True)
            )
            lists, all_codes = self._lists_with(state, key_code, span)
            earlier = Earlier(key, value, all_codes, lists)
        codes, choice = (query_code, key_code, span), (buckets + 1, size, ahead)
        asked = self._call(new, *codes, *choice)._replace(earlier=earlier)
        output, log_sum, made = LSH.run(asked)
        key_code = key_code if earlier is None else earlier.key_code
        return self._beside_sink(output, log_sum, new, call), self._last(key, value, key_code, made, span, kept)

    def _call(self, new: _Tokens, *codes: Any) -> LshCall:
        """Return the call of some tokens, given their codes, and how many buckets and keys in each there are."""
        shared, scaling = self.config.shared_qk, self.layer.scaling
        operands: tuple[Any, ...] = (*new[:5], *codes, shared, scaling)
        return LshCall(*operands)._replace(policy=self.policy)

    def _lists_with(self, state: LshState, key_code: Tensor, span: int) -> tuple[Lists, Tensor]:
        """Return the sorted keys of state and call, and the codes of all: those of every round's buckets, then new."""
        rounds, buckets = self.config.num_rounds, self.config.num_buckets
        missing = (state.positions < 0)[None]
        codes = state.buckets.movedim(-1, 0) * span + state.positions
        codes = codes.masked_fill(missing, (buckets + 1) * span)  # [R, B, Hkv, R, buckets, C]
        own = codes.diagonal(dim1=0, dim2=3).movedim(-1, 0).flatten(3)  # a round lists what its own buckets hold
        lists = sort_keys(torch.cat([own, key_code], -1), buckets + 1, span)
        num_own = own.shape[-1]
        first = torch.arange(rounds, device=key_code.device).view(-1, 1, 1, 1) * num_own
        member = lists.member + torch.where(lists.member < num_own, first, (rounds - 1) * num_own)
        return lists._replace(member=member), torch.cat([codes.flatten(3), key_code], -1)

    def _last(self, key: Tensor, value: Tensor, key_code: Tensor, lists: Any, span: int, kept: bool) -> Any:
        """Return the last keys of every bucket as a state without `length` and `largest`; None if none is kept."""
        if not kept:
            return None
        buckets, size = self.config.num_buckets, self.config.bucket_size
        first, end = lists.bounds[..., :buckets, None], lists.bounds[..., 1 : buckets + 1, None]
        place = end - 1 - torch.arange(size, device=key.device)
        shape = place.shape[1:3] + place.shape[:1] + place.shape[3:]  # [B, Hkv, R, buckets, C]
        missing = (place < first).movedim(0, 2)
        place = place.clamp_(min=0).flatten(3)
        take = lambda x: x.gather(-1, place).movedim(0, 2).reshape(shape)  # noqa: E731
        index, position = take(lists.member), take(lists.code) % span
        rows = index.flatten(2)
        heads = torch.arange(len(rows) * rows.shape[1], device=key.device).view(*rows.shape[:2], 1) * key.shape[2]
        keys, values = (
            pick(x.flatten(0, 2), rows + heads).view(*shape, -1).masked_fill_(missing[..., None], 0.0)
            for x in (key, value)
        )
        codes = key_code.gather(-1, rows.expand(len(key_code), -1, -1, -1)).unflatten(-1, shape[2:])
        return LshState(
            keys,
            values,
            position.masked_fill(missing, -1),
            (codes // span).movedim(0, -1).masked_fill(missing[..., None], 0),
            position.new_zeros(len(key)),
            key.new_zeros(key.shape[:2]),
        )

    def _insert(self, state: LshState, new: _Tokens) -> LshState:
        """Put one token into its bucket of every round, in place of the oldest one there."""
        size = self.config.bucket_size
        bucket = new.key_bucket.movedim(0, 2)  # [B, Hkv, R, 1]
        positions = state.positions.gather(3, bucket[..., None].expand(*bucket.shape, size))
        slot = bucket * size + positions.argmin(-1)
        in_place = isinstance(state, OwnedLshState) and may_write(*state)

        def put(old: Tensor, row: Tensor) -> Tensor:
            """Return `old` [B, Hkv, R, buckets, C, ...] with `row`, of the same shape but for buckets and C, in it."""
            index = slot.view(*slot.shape, *[1] * (row.dim() - 3)).expand(*slot.shape, *row.shape[3:])
            places, row = old.view(*old.shape[:3], -1, *old.shape[5:]), row[:, :, :, None]
            if in_place:
                places.scatter_(3, index, row)
                return old
            return places.scatter(3, index, row).view_as(old)

        rounds = self.config.num_rounds
        each = lambda x: x[:, :, None].expand(-1, -1, rounds, *x.shape[2:])  # noqa: E731
        return state._replace(
            keys=put(state.keys, each(new.key[:, :, 0])),
            values=put(state.values, each(new.value[:, :, 0])),
            positions=put(state.positions, new.position[:, None].expand(*bucket.shape[:3])),
            buckets=put(state.buckets, each(bucket[..., 0])),
        )

    def _read(self, state: LshState, new: _Tokens) -> tuple[Tensor, Tensor]:
        """Return the output of one query, and its log denominator, over the buckets that hold it."""
        batch, heads = new.query.shape[:2]
        device, rounds = new.key.device, self.config.num_rounds
        row = torch.arange(batch, device=device)[:, None, None]
        shared = torch.arange(heads, device=device)[:, None] // (heads // new.key.shape[1])
        own = new.query_bucket[..., 0].movedim(0, -1)  # [B, H, R]
        at = row, shared, torch.arange(rounds, device=device), own
        keys, values, positions, buckets = (x[at] for x in state[:4])  # [B, H, R, C, ...]
        # a round has all keys of its bucket from the oldest one on that it has, so what another round finds tells it
        has = (buckets == own[:, :, None, None]) & (positions[..., None] >= positions.amin(-1)[:, :, None, None])
        earlier = torch.ones(rounds, rounds, dtype=torch.bool, device=device).tril(-1)[:, None]
        keys, values, positions, again = (x.flatten(2, 3) for x in (keys, values, positions, (has & earlier).any(-1)))
        hidden = again | (positions < 0)
        if self.config.shared_qk:
            hidden = hidden | (positions == new.position[:, None])
        found = Found(keys, values, hidden)
        return LSH.run(self._call(new, *new[3:5], 1, self.config.num_buckets, 0, 0)._replace(found=found))[:2]

    def _beside_sink(self, output: Tensor, log_sum: Tensor, new: _Tokens, call: CallOptions) -> Tensor:
        """Return the output as it is beside a sink; `log_sum` is `LOWEST` for a query that sees its own key alone."""
        sink = self.log_sink(output, call.sink)
        if sink is None:
            return output
        if self.config.shared_qk:
            own = (new.query * reference.repeat_heads(new.key, new.query)).sum(-1) * self.layer.scaling
            log_sum = torch.where(log_sum == LOWEST, own, log_sum)
        return attenuate(output, log_sum, sink[:, None])


class _Tokens(NamedTuple):
    """The tokens of one call: operands, buckets [R, B, H or Hkv, N], positions [B, N]."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_bucket: Tensor
    key_bucket: Tensor
    position: Tensor


def _behind(lengths: Tensor, length: int) -> Tensor:
    """[B, N], true behind the end of each row."""
    return torch.arange(length, device=lengths.device) >= lengths[:, None]
