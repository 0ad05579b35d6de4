"""What attention to keys found by hashing is called with, whatever computes it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..dispatch import PYTORCH, Policy


class Lists(NamedTuple):
    """The keys of each round sorted by code.

    code: [R, B, Hkv, L], ascending. member: [R, B, Hkv, L], where each stands among all M keys.
    bounds: [R, B, Hkv, buckets + 1], where in the list each bucket begins, and the last one ends.
    """

    code: Tensor
    member: Tensor
    bounds: Tensor


class Earlier(NamedTuple):
    """All keys [B, Hkv, M, D] and values where a state has some, their codes [R, B, Hkv, M], and their lists."""

    key: Tensor
    value: Tensor
    key_code: Tensor
    lists: Lists


class Found(NamedTuple):
    """The keys [B, H, K, D] and values that one query finds in a state, and which of them are hidden [B, H, K]."""

    key: Tensor
    value: Tensor
    hidden: Tensor


class LshCall(NamedTuple):
    """One call: softmax over the keys that share a bucket with a query in some round, and over its own.

    query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv].
    query_bucket: [R, B, H, N]. key_bucket: [R, B, Hkv, N]; query_code, key_code: buckets and places, see `torch`.
    span: places of a code. num_buckets: of a round, pads' own included.
    behind, ahead: how many keys of its bucket a query sees in a round up to its own place, and after it.
    shared: whether a query sees its own key only where it sees no other; else it always does.
    earlier, found: what a state has, of several tokens or of one; both None where rows begin.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_bucket: Tensor
    key_bucket: Tensor
    query_code: Tensor
    key_code: Tensor
    span: int
    num_buckets: int
    behind: int
    ahead: int
    shared: bool
    scaling: float
    earlier: Earlier | None = None
    found: Found | None = None
    policy: Policy = PYTORCH
