"""performer: FAVOR+, random features whose dot product estimates exp(scaling q . k) without bias."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import require_count, require_known
from ..feature_maps import FEATURE_MAPS, FeatureMap
from .capabilities import ExactnessLimit
from .inputs import AttentionLayer
from .linear import KernelConfig, LinearMechanism
from .registration import register_mechanism

KERNELS = {"softmax": "favor_softmax", "relu": "favor_relu", "hyperbolic": "favor_hyperbolic"}


@dataclass
class PerformerConfig(KernelConfig):
    """Options of `performer`."""

    num_features: int = field(default=256, metadata={"help": "random directions m; the error falls as m^-1/2"})
    kernel: str = field(default="softmax", metadata={"help": f"one of {', '.join(KERNELS)}"})
    redraw_interval: int | None = field(
        default=None, metadata={"help": "training forwards between new draws of the directions; None keeps the first"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_features")
        require_count("redraw_interval", self.redraw_interval, optional=True)
        require_known("kernel", self.kernel, KERNELS)


@register_mechanism("performer")
class PerformerMechanism(LinearMechanism):
    """FAVOR+ (Choromanski et al. 2021): linear attention with phi(x)_r = m^-1/2 exp(w_r . x - |x|^2 / 2).

    With x = sqrt(scaling) q and y = sqrt(scaling) k, E[phi(x) . phi(y)] = exp(x . y): the softmax kernel. The w_r are
    Haar-orthogonal in blocks of the head dimension with chi-distributed lengths, drawn once from `seed` and the layer,
    kept in the persistent buffer `feature_map.projection` [m, D]. `kernel="hyperbolic"` adds exp(-w_r . x) (lower
    variance, 2 m features), `kernel="relu"` takes relu(w_r . x).

    Deviations from the authors' code: no epsilon in the features, which would change the kernel; the keys' stabiliser
    is a running maximum with the state rescaled, not a maximum over all positions, which would let the future in; new
    directions (`redraw_interval`) are drawn in training only, before a forward of the whole model that continues no
    other; a cache with states of the directions before is refused then. A forward that begins while the gradients of
    an earlier one are still to come draws none and does not count. So a forward and its recomputation by gradient
    checkpointing see the same directions.
    """

    forwards: Tensor

    config_class = PerformerConfig
    limit = ExactnessLimit(
        "softmax attention as num_features grows; the error falls as num_features^-1/2",
        converging=("num_features", (64, 1024), 0.5),
    )
    citation = "Choromanski et al. 2021, Rethinking Attention with Performers, arXiv 2009.14794"

    def __init__(self, config: PerformerConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        if self.ridge is None and (config.decay or config.self_weight or not self.feature_map.estimates_softmax):
            self.limit = LinearMechanism.limit
        self.scheduled = config.redraw_interval is not None
        if self.scheduled:
            # training forwards made so far; saved, so that a resumed run draws what an unbroken one would
            self.register_buffer("forwards", torch.zeros((), dtype=torch.int64, device="cpu"))

    def choose_feature_map(self) -> tuple[type[FeatureMap], int]:
        return FEATURE_MAPS.get(KERNELS[self.config.kernel]), self.config.num_features

    @torch.no_grad()
    def before_forward(self) -> None:
        interval = self.config.redraw_interval
        if interval is None or not self.training:
            return
        count = int(self.forwards)
        if count and count % interval == 0:
            self.feature_map.redraw(self.generator(f"redraw {count // interval}"))
        self.forwards += 1
