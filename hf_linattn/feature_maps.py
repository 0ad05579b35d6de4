"""Feature maps phi with phi(q) . phi(k) in place of exp(scaling q . k): a registry of small modules.

A map takes one side's heads [..., N, D] and returns `Features`: non-negative values [..., N, F] and, for exponential
maps, a log scale per position, so that phi = values * exp(log_scale) never overflows and needs no epsilon.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .ops.causal_linear import Features
from .registry import Registry


class FeatureMap(nn.Module):
    """Base of all maps.

    Args:
        head_dim: D, width of the inputs.
        num_features: how many features a random or learned map makes; a fixed map ignores it.
        scaling: what the layer multiplies q . k by before its softmax.
        generator: source of everything random in the map.
    """

    estimates_softmax: ClassVar[bool] = False  # whether phi(q) . phi(k) is an unbiased estimate of exp(scaling q . k)

    def __init__(self, head_dim: int, num_features: int, scaling: float, generator: torch.Generator):
        super().__init__()
        self.head_dim, self.num_features, self.scaling = head_dim, num_features, scaling

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
        return Features(F.elu(x) + 1)


@FEATURE_MAPS.register("relu")
class ReluFeatureMap(FeatureMap):
    """phi(x) = relu(x), F = D (Kasai et al. 2021, arXiv 2103.13076, without its learned weight)."""

    @property
    def feature_dim(self) -> int:
        return self.head_dim

    def forward(self, x: Tensor) -> Features:
        return Features(F.relu(x))


class RandomFeatureMap(FeatureMap):
    """Base of the maps over random directions w_1 ... w_m, the rows of a persistent buffer `projection` [m, D].

    Inputs are multiplied by sqrt(scaling) first, so that x . y stands for scaling q . k.
    """

    projection: Tensor

    def __init__(self, head_dim: int, num_features: int, scaling: float, generator: torch.Generator):
        super().__init__(head_dim, num_features, scaling, generator)
        self.register_buffer("projection", orthogonal_gaussian(num_features, head_dim, generator))

    @property
    def feature_dim(self) -> int:
        return self.num_features

    def redraw(self, generator: torch.Generator) -> None:
        drawn = orthogonal_gaussian(self.num_features, self.head_dim, generator)
        self.projection.copy_(drawn)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scaled inputs and their projections w . x [..., N, m]."""
        x = x * math.sqrt(self.scaling)
        return x, x @ self.projection.to(x.dtype).T


@FEATURE_MAPS.register("favor_softmax")
class FavorSoftmaxFeatureMap(RandomFeatureMap):
    """phi(x)_r = m^-1/2 exp(w_r . x - |x|^2 / 2): unbiased for exp(x . y), F = m.

    The largest exponent of a position goes to its log scale, where it cancels exactly for a query and is made up for
    by the running maximum for a key. No epsilon is added: it would change the kernel.
    """

    estimates_softmax = True

    def forward(self, x: Tensor) -> Features:
        x, projected = self.project(x)
        top = projected.detach().amax(-1)
        size = x.square().sum(-1) / 2 + math.log(self.feature_dim) / 2
        return Features((projected - top[..., None]).exp(), top - size)

    def exact(self, x: Tensor) -> Tensor:
        x, projected = self.project(x)
        return (projected - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(self.feature_dim)


@FEATURE_MAPS.register("favor_hyperbolic")
class FavorHyperbolicFeatureMap(FavorSoftmaxFeatureMap):
    """phi(x) = (2m)^-1/2 exp(-|x|^2 / 2) [exp(w_r . x), exp(-w_r . x)]: lower variance at twice the width, F = 2 m."""

    @property
    def feature_dim(self) -> int:
        return 2 * self.num_features

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, projected = super().project(x)
        return x, torch.cat([projected, -projected], dim=-1)


@FEATURE_MAPS.register("favor_relu")
class FavorReluFeatureMap(RandomFeatureMap):
    """phi(x)_r = m^-1/2 relu(w_r . x), the paper's generalised kernel, F = m.

    Deviation: the authors' code adds 1e-3 to every feature; here nothing is added and a row without weight is zero.
    """

    def forward(self, x: Tensor) -> Features:
        return Features(F.relu(self.project(x)[1]) / math.sqrt(self.feature_dim))


def orthogonal_gaussian(num_features: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Return random directions [num_features, head_dim], Haar-orthogonal in blocks of head_dim, of chi lengths.

    Each row alone is a standard Gaussian vector, so estimators stay unbiased; rows of one block are orthogonal, which
    lowers their variance. QR gives a Haar rotation only after its columns are multiplied by the signs of diag R.
    """
    # float64 on the CPU whatever the default device: the same seed gives the same directions everywhere
    def gaussian(rows: int) -> Tensor:
        return torch.randn(rows, head_dim, generator=generator, dtype=torch.float64, device="cpu")

    blocks = []
    for _ in range(math.ceil(num_features / head_dim)):
        rotation, upper = torch.linalg.qr(gaussian(head_dim))
        blocks.append((rotation * upper.diagonal().sign()).T)
    directions = torch.cat(blocks)[:num_features]
    lengths = gaussian(num_features).norm(dim=-1, keepdim=True)
    return (directions * lengths).to(torch.float32)
