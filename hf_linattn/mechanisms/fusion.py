"""fusion: several mechanisms in one layer, whose outputs are mixed by attention pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import require
from ..errors import UnsupportedModeError, UnsupportedModelError
from ..ops import reference
from ..ops.common.numerics import bounded
from ..ops.common.precision import widened
from ..registry import MECHANISMS
from .capabilities import ExactnessLimit
from .composite import CompositeConfig, CompositeMechanism
from .inputs import PLAIN, AttentionLayer, CallOptions
from .registration import register_mechanism

DEFAULT: dict[str, dict[str, Any]] = {"local": {}, "linear": {}}


@dataclass
class FusionConfig(CompositeConfig):
    """Options of `fusion`."""

    members: dict[str, dict[str, Any]] | None = field(
        default=None, metadata={"help": "mechanism -> its options, for each that takes part; None: local and linear"}
    )
    shares: dict[str, float] | None = field(
        default=None, metadata={"help": "mechanism -> the weight it starts with and `calibrate` keeps; None: equal"}
    )
    pool_size: int = field(default=16, metadata={"help": "hidden units m that judge an output, per query head"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("pool_size")
        members: Any = DEFAULT if self.members is None else self.members
        valid = isinstance(members, dict) and all(isinstance(options, dict) for options in members.values())
        require("members", members, valid and members != {}, "a dict of mechanisms and their options: {'linear': {}}")
        self.members = {name: self.complete_options(name, options) for name, options in members.items()}
        for name in members:
            subquadratic = MECHANISMS.get(name).subquadratic
            require("a member of 'fusion'", name, subquadratic, "a mechanism that can stand for softmax")
        if (shares := self.shares) is not None:
            named = isinstance(shares, dict) and shares.keys() == members.keys()
            valid = named and all(_is_number(share) and 1e-6 <= share <= 1e6 for share in shares.values())
            require("shares", shares, valid, f"a dict with a number from 1e-6 to 1e6 for each of {', '.join(members)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@register_mechanism("fusion")
class FusionMechanism(CompositeMechanism):
    """o = sum_p beta_p h_p with beta_p = softmax_p(c . relu(W h_p + b) + d_p), h_p [Dv] the output of member p.

    For every token and query head; W [H, m, Dv], b, c [H, m] (the parameters `pool_weight`, `pool_bias`, `pool_score`)
    and d [P, H] (`member_bias`) differ by head. W starts random, b and c at zero and d at the log of `shares`, so that
    every token begins with the same mix. Training moves all of them. `calibrate` does, too, and leaves most weight to
    the member whose output is nearest to softmax's where one of them is; `shares` that are given it keeps.

    The pooling is that of Xiao et al. 2017 over interactions of features, here over answers to one query: unlike a
    gate on the query it sees what each member found. Each member is a mechanism of its own, with its own state and
    seed (the fusion's unless it names one). Their costs add up; one member alone is that mechanism.

    Deviations: d_p is added, so that a member can be preferred whatever it says. Since beta depends on values,
    `attention_matrix` needs `value`, too.
    """

    config_class = FusionConfig
    limit = ExactnessLimit(
        "softmax attention where every member is",
        equal=lambda length: {"members": {"local": {"window_size": length}}, "shares": None},
    )
    citation = "Xiao et al. 2017, Attentional Factorization Machines, arXiv 1708.04617 (the pooling)"
    family = "composite"

    config: FusionConfig

    def __init__(self, config: FusionConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        members = config.members or {}
        configs = {name: config.member_config(name, options) for name, options in members.items()}
        self.add_members(configs, dict.fromkeys(configs, layer))
        heads, size, width = layer.num_heads, config.pool_size, layer.value_dim or layer.head_dim
        shape, generator = (heads, size, width), self.generator("pool")
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        self.pool_weight = nn.Parameter(drawn / math.sqrt(width))
        self.pool_bias = nn.Parameter(torch.zeros(heads, size, device="cpu"))
        self.pool_score = nn.Parameter(torch.zeros(heads, size, device="cpu"))
        shares = torch.tensor([float((config.shares or {}).get(name, 1)) for name in self.members], device="cpu")
        self.member_bias = nn.Parameter(shares.log()[:, None].repeat(1, heads))

    def fitted_parameters(self) -> list[nn.Parameter]:
        return list((self if self.config.shares is None else self.members).parameters())

    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None,
        state: Any, call: CallOptions = PLAIN,
    ) -> tuple[Tensor, Any]:
        heads = self.heads_of_members(query, key, value)
        outputs, after = self.ask(heads, key_padding_mask, sequence_ids, state, call)
        wide = widened(*outputs)
        mixed = torch.zeros_like(wide[0])
        for share, output in zip(self.shares(wide), wide, strict=True):
            mixed = torch.addcmul(mixed, share[..., None], output)
        return mixed, after

    def bidirectional_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None,
        call: CallOptions = PLAIN,
    ) -> Tensor:
        return self.causal_attention(query, key, value, key_padding_mask, sequence_ids, None, call)[0]

    def shares(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return beta [P, B, H, N] for the members' outputs [B, H, N, Dv]."""
        like, width = outputs[0], self.pool_weight.shape[2]
        if like.shape[3] != width:
            raise UnsupportedModelError(
                f"layer {self.layer.index} has values of {like.shape[3]} numbers, fusion was made for {width}; leave"
                " the layer out with layers=..."
            )
        weight, bias, score, member_bias = (
            bounded(x.to(like)) for x in (self.pool_weight, self.pool_bias, self.pool_score, self.member_bias)
        )
        judged = [(F.relu(x @ weight.mT + bias[:, None]) @ score[..., None])[..., 0] for x in outputs]
        return torch.softmax(torch.stack(judged) + member_bias[:, None, :, None], dim=0)

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        raise UnsupportedModeError(
            f"mechanism {self.config.mechanism!r} weighs its members by their outputs, for which its attention matrix"
            " needs the values; pass value=... to attention_matrix"
        )

    def weights_given(
        self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, call: CallOptions = PLAIN
    ) -> Tensor:
        """sum_p beta_p A_p with A_p the matrix of member p and h_p = A_p V."""
        weight, bias, score, member_bias = (
            x.to(query.dtype) for x in (self.pool_weight, self.pool_bias, self.pool_score, self.member_bias)
        )
        total, mixed = query.new_zeros(()), query.new_zeros(())
        matrices = self.weights_of_members(self.heads_of_members(query, key, value), allowed, call)
        judged = []
        for matrix, preferred in zip(matrices, member_bias, strict=True):
            hidden = torch.einsum("hmd,bhnd->bhnm", weight, reference.attend(matrix, value)) + bias[None, :, None]
            judged.append(torch.einsum("hm,bhnm->bhn", score, hidden.clamp(min=0)) + preferred[None, :, None])
        top = torch.stack(judged).detach().amax(0)
        for matrix, logit in zip(matrices, judged, strict=True):
            factor = (logit - top).exp()[..., None]
            total, mixed = total + factor, mixed + factor * matrix
        return mixed / total
