"""Feature maps phi with phi(q) . phi(k) in place of exp(scaling q . k): a registry of small modules.

A map takes one side's heads [..., N, D] and returns `Features`: values [..., N, F] whose dot products are not negative
and, for exponential maps, a log scale per position, so that phi = values * exp(log_scale) never overflows and needs no
epsilon.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .ops.common.numerics import LN_2, LOG2_E, dense, fast_exp
from .ops.common.tracing import is_watched
from .ops.linear.types import FeatureMapSpec, Features
from .registry import Registry


class FeatureMap(nn.Module):
    """Base of all maps.

    Args:
        head_dim: D, width of the inputs.
        num_features: m, how many directions a random or learned map has; a fixed map ignores it.
        scaling: what the layer multiplies q . k by before its softmax.
        generator: source of everything random in the map.
        heads: leading dimensions of a learned map's weights, which those of its inputs [B, *heads, N, D] must match:
            (Hkv,) or (Hkv, G). Empty: one weight for all heads. Other maps treat all heads alike and ignore it.

    Class attributes:
        estimates_softmax: whether phi(q) . phi(k) is an unbiased estimate of exp(scaling q . k).
        learned: whether it has trained weights; queries and keys then have a map each.
        positive: whether phi(q) . phi(k) is above zero for all q and k.
        width: how many features it makes by default, in units of D; None where no other number is possible.
        copies: how many features it makes of one direction.
        spec_weights: where weight and bias of its `spec` form lie, if it has them.
        redraws: how often its random part was drawn anew.
    """

    estimates_softmax: ClassVar[bool] = False
    learned: ClassVar[bool] = False
    positive: ClassVar[bool] = True
    width: ClassVar[int | None] = None
    copies: ClassVar[int] = 1
    spec_weights: ClassVar[tuple[str, ...]] = ()
    redraws: int = 0

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        scaling: float,
        generator: torch.Generator,
        heads: tuple[int, ...] = (),
    ):
        super().__init__()
        self.head_dim, self.num_features, self.scaling, self.heads = head_dim, num_features, scaling, heads

    @classmethod
    def directions(cls, feature_dim: int | None, head_dim: int) -> int:
        """Return the `num_features` m that makes `feature_dim` features, or as many as is usual where it is None."""
        return (feature_dim or (cls.width or 1) * head_dim) // cls.copies

    @property
    def feature_dim(self) -> int:
        """F, width of the features."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Features:
        """Return the features of x [..., N, D]."""
        raise NotImplementedError

    def exact(self, x: Tensor) -> Tensor:
        """Return phi(x) itself [..., N, F], without log scales: the reference the stable form is tested against."""
        return self(x).values

    @cached_property
    def spec(self) -> FeatureMapSpec | None:
        """What kernels need to compute this map themselves, beside its weights; None where they cannot."""
        return None

    def redraw(self, generator: torch.Generator) -> None:
        """Draw the random part anew, in place; a map without one keeps as it is."""


FEATURE_MAPS: Registry[FeatureMap] = Registry("feature map")


@FEATURE_MAPS.register("elu")
class EluFeatureMap(FeatureMap):
    """phi(x) = elu(x) + 1, F = D (Katharopoulos et al. 2020, arXiv 2006.16236). The layer's scaling is not used."""

    @property
    def feature_dim(self) -> int:
        return self.head_dim

    def forward(self, x: Tensor) -> Features:
        if is_watched():
            return Features(F.relu(x) + x.clamp(max=0).exp())
        return Features(_EluPlusOne.apply(dense(x)))

    @cached_property
    def spec(self) -> FeatureMapSpec:
        return FeatureMapSpec("elu")


class _EluPlusOne(torch.autograd.Function):
    """elu(x) + 1 in less time than F.elu takes; its derivative is min(elu(x) + 1, 1), so that it alone is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        features = F.relu(x).add_(x.clamp(max=0).mul_(LOG2_E).exp2_())
        ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0].clamp(max=1).mul(gradient)


@FEATURE_MAPS.register("relu")
class ReluFeatureMap(FeatureMap):
    """phi(x) = relu(x), F = D (Kasai et al. 2021, arXiv 2103.13076, without its learned weight)."""

    positive = False

    @property
    def feature_dim(self) -> int:
        return self.head_dim

    def forward(self, x: Tensor) -> Features:
        return Features(F.relu(x))

    @cached_property
    def spec(self) -> FeatureMapSpec:
        return FeatureMapSpec("relu")


class RandomFeatureMap(FeatureMap):
    """Base of the maps over random directions w_1 ... w_m, the rows of a persistent buffer `projection` [m, D].

    Inputs are multiplied by sqrt(scaling) first, so that x . y stands for scaling q . k.
    """

    projection: Tensor

    width = 1
    spec_weights = ("projection.T",)

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        scaling: float,
        generator: torch.Generator,
        heads: tuple[int, ...] = (),
    ):
        super().__init__(head_dim, num_features, scaling, generator, heads)
        self.register_buffer("projection", orthogonal_gaussian(num_features, head_dim, generator))

    @property
    def feature_dim(self) -> int:
        return self.copies * self.num_features

    def redraw(self, generator: torch.Generator) -> None:
        drawn = orthogonal_gaussian(self.num_features, self.head_dim, generator)
        self.projection.copy_(drawn)
        self.redraws += 1

    def project(self, x: Tensor, unit: float = 1.0) -> Tensor:
        """Return the projections w . x [..., N, m] of the scaled inputs, in multiples of `unit`."""
        return x @ (self.weight().to(x.dtype) * (math.sqrt(self.scaling) / unit))

    def weight(self) -> Tensor:
        """Return what scaled inputs [..., N, D] are multiplied by to project them, [D, m]."""
        return self.projection.T


@FEATURE_MAPS.register("favor_softmax")
class FavorSoftmaxFeatureMap(RandomFeatureMap):
    """phi(x)_r = m^-1/2 exp(w_r . x - |x|^2 / 2): unbiased for exp(x . y), F = m.

    The largest exponent of a position goes to its log scale, where it cancels exactly for a query and is made up for
    by the running maximum for a key. No epsilon is added: it would change the kernel.
    """

    estimates_softmax = True

    def forward(self, x: Tensor) -> Features:
        powers = self.project(x, unit=LN_2)  # of two, see `fast_exp`
        top = powers.detach().amax(-1)
        size = x.square().sum(-1)
        log_scale = (top * LN_2 - math.log(self.feature_dim) / 2).sub(size, alpha=self.scaling / 2)
        return Features(powers.sub_(top[..., None]).exp2_(), log_scale)

    @cached_property
    def spec(self) -> FeatureMapSpec:
        scale, offset = math.sqrt(self.scaling), -math.log(self.feature_dim) / 2
        return FeatureMapSpec("exponential", scale=scale, quadratic=-self.scaling / 2, offset=offset)

    def exact(self, x: Tensor) -> Tensor:
        half = x.square().sum(-1, keepdim=True) * self.scaling / 2
        return (self.project(x) - half).exp() / math.sqrt(self.feature_dim)


@FEATURE_MAPS.register("favor_hyperbolic")
class FavorHyperbolicFeatureMap(FavorSoftmaxFeatureMap):
    """phi(x) = (2m)^-1/2 exp(-|x|^2 / 2) [exp(w_r . x), exp(-w_r . x)]: lower variance at twice the width, F = 2 m."""

    width = 2
    copies = 2

    spec_weights = ("both_signs",)

    @property
    def both_signs(self) -> Tensor:
        """`weight`."""
        return torch.cat([self.projection, -self.projection]).T

    def weight(self) -> Tensor:
        return self.both_signs


@FEATURE_MAPS.register("favor_relu")
class FavorReluFeatureMap(RandomFeatureMap):
    """phi(x)_r = m^-1/2 relu(w_r . x), the paper's generalised kernel, F = m.

    Deviation: the authors' code adds 1e-3 to every feature; here nothing is added and a row without weight is zero.
    """

    positive = False

    def forward(self, x: Tensor) -> Features:
        return Features(F.relu(self.project(x)) / math.sqrt(self.feature_dim))

    @cached_property
    def spec(self) -> FeatureMapSpec:
        return FeatureMapSpec("relu", scale=math.sqrt(self.scaling / self.feature_dim))


@FEATURE_MAPS.register("taylor")
class TaylorFeatureMap(FeatureMap):
    """phi(x) = [1, x, x_i^2 / sqrt 2, x_i x_j (i < j)], so that phi(x) . phi(y) = 1 + x . y + (x . y)^2 / 2 >= 1/2.

    The second-order Taylor expansion of exp(x . y) (Keles et al. 2022, arXiv 2209.04881; Arora et al. 2024, arXiv
    2402.18668) for x = sqrt(scaling) q, y = sqrt(scaling) k; F = 1 + D + D (D + 1) / 2, each product stored once.

    Features have signs, so a weight is a small difference of large numbers where |x| |y| is large: its rounding error
    is about 1e-7 (|x| |y|)^2 / 2 in float32.
    """

    @property
    def feature_dim(self) -> int:
        return 1 + self.head_dim + self.head_dim * (self.head_dim + 1) // 2

    def forward(self, x: Tensor) -> Features:
        x = x * math.sqrt(self.scaling)
        squares = x.square() / math.sqrt(2)
        products = [x[..., i : i + 1] * x[..., i + 1 :] for i in range(self.head_dim - 1)]
        return Features(torch.cat([torch.ones_like(x[..., :1]), x, squares, *products], dim=-1))


class LearnedFeatureMap(FeatureMap):
    """Base of the maps over trained directions: `weight` [*heads, D, m] and, where there is one, `bias` [*heads, m].

    W starts as the axes, then random rotations of them, times sqrt(scaling D): the directions and the mean length of
    random features for sqrt(scaling) q. Unless the map uses x W with both signs itself, every direction is followed by
    its opposite. b starts as zero. All query heads of a group start as their key/value head does.
    """

    learned = True
    width = 4
    spec_weights: ClassVar[tuple[str, ...]] = ("weight", "bias")
    has_bias: ClassVar[bool] = True

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        scaling: float,
        generator: torch.Generator,
        heads: tuple[int, ...] = (),
    ):
        super().__init__(head_dim, num_features, scaling, generator, heads)
        drawn = torch.stack([self.draw(generator).T for _ in range(math.prod(heads[:1]))])
        drawn = drawn.reshape(*heads[:1], *(1,) * len(heads[1:]), head_dim, num_features)
        self.weight = nn.Parameter(drawn.expand(*heads, -1, -1).clone())
        if self.has_bias:
            self.bias = nn.Parameter(torch.zeros(*heads, num_features, device="cpu"))

    @property
    def feature_dim(self) -> int:
        return self.copies * self.num_features

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return the directions [m, D] from which one head starts."""
        own = self.num_features if self.copies == 2 else math.ceil(self.num_features / 2)
        rotations = orthogonal_blocks(max(own - self.head_dim, 0), self.head_dim, generator)
        directions = torch.cat([torch.eye(self.head_dim, dtype=torch.float64, device="cpu"), rotations])[:own]
        both = torch.cat([directions, -directions])[: self.num_features]
        return both.to(torch.float32) * math.sqrt(self.scaling * self.head_dim)

    def project(self, x: Tensor) -> Tensor:
        """Return x W + b [..., N, m], in the precision of x whatever that of the weights."""
        projected = x @ self.weight.to(x.dtype)
        return projected + self.bias.to(x.dtype)[..., None, :] if self.has_bias else projected


@FEATURE_MAPS.register("hedgehog")
class HedgehogFeatureMap(LearnedFeatureMap):
    """phi(x) = [softmax(x W), softmax(-x W)], two softmaxes over m features each, F = 2 m (arXiv 2402.04347).

    Zhang et al. 2024, whose W starts as the identity; here the start is the D^1/4-fold of it, for the usual scaling.
    """

    copies = 2
    spec_weights = ("weight",)
    has_bias = False

    def forward(self, x: Tensor) -> Features:
        projected = self.project(x)
        return Features(torch.cat([projected.softmax(-1), (-projected).softmax(-1)], dim=-1))

    @cached_property
    def spec(self) -> FeatureMapSpec:
        return FeatureMapSpec("softmax_pair")


@FEATURE_MAPS.register("t2r")
class T2RFeatureMap(LearnedFeatureMap):
    """phi(x) = relu(x W + b), F = m (Kasai et al. 2021, arXiv 2103.13076). A row without weight is zero."""

    positive = False

    def forward(self, x: Tensor) -> Features:
        return Features(F.relu(self.project(x)))

    @cached_property
    def spec(self) -> FeatureMapSpec:
        return FeatureMapSpec("relu")


@FEATURE_MAPS.register("learned_exp")
class LearnedExpFeatureMap(LearnedFeatureMap):
    """phi(x) = exp(x W + b), F = m: positive random features (Choromanski et al. 2021) with trained directions.

    As W starts, phi(q) . phi(k) resembles exp(scaling q . k) up to exp(scaling |q|^2 / 2), which cancels, and the same
    factor of each key, which does not. The largest exponent of a position goes to its log scale.
    """

    def forward(self, x: Tensor) -> Features:
        projected = self.project(x)
        top = projected.detach().amax(-1)
        return Features(fast_exp(projected.sub_(top[..., None])), top)

    @cached_property
    def spec(self) -> FeatureMapSpec:
        return FeatureMapSpec("exponential")

    def exact(self, x: Tensor) -> Tensor:
        return self.project(x).exp()


def orthogonal_blocks(num_rows: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Return unit vectors [num_rows, head_dim] in float64, Haar-orthogonal in blocks of head_dim.

    QR gives a Haar rotation only after its columns are multiplied by the signs of diag R.
    """
    blocks = [torch.empty(0, head_dim, dtype=torch.float64, device="cpu")]
    for _ in range(math.ceil(num_rows / head_dim)):
        rotation, upper = torch.linalg.qr(_gaussian(head_dim, head_dim, generator))
        blocks.append((rotation * upper.diagonal().sign()).T)
    return torch.cat(blocks)[:num_rows]


def orthogonal_gaussian(num_features: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Return random directions [num_features, head_dim], Haar-orthogonal in blocks of head_dim, of chi lengths.

    Each row alone is a standard Gaussian vector, so estimators stay unbiased; rows of one block are orthogonal, which
    lowers their variance.
    """
    directions = orthogonal_blocks(num_features, head_dim, generator)
    lengths = _gaussian(num_features, head_dim, generator).norm(dim=-1, keepdim=True)
    return (directions * lengths).to(torch.float32)


def _gaussian(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    # float64 on the CPU whatever the default device: the same seed gives the same directions everywhere
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu")
