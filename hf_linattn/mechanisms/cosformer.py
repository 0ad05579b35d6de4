"""cosformer: kernel attention with a cosine of the distance, w_ij = relu(q_i) . relu(k_j) cos(pi / 2 (i - j) / M)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import MechanismConfig, require_count
from ..errors import OptionError
from ..ops import reference
from ..ops.common.tracing import ends_graph
from ..ops.linear.interface import Features, causal_linear_attention, linear_attention
from ..ops.linear.types import LinearState
from .capabilities import ExactnessLimit
from .inputs import AttentionLayer
from .registration import register_mechanism
from .sequence import SequenceMechanism

CAUSAL_LENGTH = 2**14  # M of causal layers by default


class CosformerState(NamedTuple):
    """The sums over the keys read so far, as in `LinearState`, and how many of them there were [B]."""

    kv: Tensor
    log_max: Tensor
    length: Tensor


@dataclass
class CosformerConfig(MechanismConfig):
    """Options of `cosformer`."""

    max_length: int | None = field(
        default=None,
        metadata={"help": "M, the longest sequence; None: its own length if bidirectional, 16,384 if causal"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("max_length", self.max_length, optional=True)


@register_mechanism("cosformer")
class CosformerMechanism(SequenceMechanism):
    """cosFormer (Qin et al. 2022): o_i = sum_j w_ij v_j / sum_j w_ij, w_ij = relu(q_i) . relu(k_j) cos(a (i - j)).

    With a = pi / (2 M) and cos(a (i - j)) = cos(a i) cos(a j) + sin(a i) sin(a j) it is linear attention with the
    F = 2 D features [relu(x_i) cos(a i), relu(x_i) sin(a i)]: none is negative as long as positions stay below M,
    and what is near weighs more. Positions count from the start of the sequence, pads left out. A query that shares no
    positive coordinate with a key it sees gets zero.

    M is as in the authors' code the length of the sequence, in bidirectional layers; it cannot be in causal ones,
    where it would tell the past how long the future is: there it is `max_length`, to be set to the longest sequence
    the model shall read. Further on cos is negative, so a longer sequence raises `OptionError`.

    Deviations: no epsilon in the denominator; there is nothing to train, and queries and keys are used as the model
    made them, rotary positions included.
    """

    config_class = CosformerConfig
    backends = ("auto", "torch", "triton")
    splits = True
    continuous = False  # where the last weight of a query vanishes it goes from the value to zero
    limit = ExactnessLimit("attention with the kernel relu(q) . relu(k) cos(pi / 2 (i - j) / M)", kernel=True)
    citation = "Qin et al. 2022, cosFormer: Rethinking Softmax in Attention, arXiv 2202.08791"
    family = "linear"

    config: CosformerConfig

    def __init__(self, config: CosformerConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        self.position_limit = config.max_length or (CAUSAL_LENGTH if layer.causal else None)

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: CosformerState | None
    ) -> tuple[Tensor, CosformerState]:
        batch, num_keys, steps = key.shape[0], key.shape[2], torch.arange(key.shape[2], device=key.device)
        before = steps.new_zeros(batch) if state is None else state.length
        after = before + (num_keys if lengths is None else lengths)
        longest = self.position_limit or CAUSAL_LENGTH
        if state is not None or num_keys > longest:
            self._require_length(after, longest)
        position = before[:, None] + steps
        query, key = (_turned(x, position, longest) for x in (query, key))
        mask = None if lengths is None else steps < lengths[:, None]
        sums = None if state is None else LinearState(state.kv, state.log_max)
        output, sums = causal_linear_attention(
            query, key, value, Features, Features, mask, None, sums, policy=self.policy
        )
        return output, CosformerState(*sums, after)

    def bidirectional_sequences(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None) -> Tensor:
        steps, longest = torch.arange(key.shape[2], device=key.device), self.position_limit
        sizes = steps.new_tensor([key.shape[2]]) if lengths is None else lengths
        if longest is not None and key.shape[2] > longest:
            self._require_length(sizes, longest)
        period = sizes.clamp(min=1)[:, None] if longest is None else longest
        query, key = (_turned(x, steps[None], period) for x in (query, key))
        mask = None if lengths is None else steps < lengths[:, None]
        return linear_attention(query, key, value, Features, Features, mask, policy=self.policy)

    @ends_graph  # how long sequences are is data
    def _require_length(self, sizes: Tensor, longest: int) -> None:
        """Raise `OptionError` if a sequence has more tokens than M."""
        size = int(sizes.max())
        if size > longest:
            raise OptionError(
                f"max_length of cosformer in layer {self.layer.index} is {longest}, but a sequence has {size} tokens:"
                f" patch the model with max_length={1 << (size - 1).bit_length()} or more"
            )

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        count = allowed.cumsum(-1)
        distance = reference.positions(allowed)[..., None] + 1 - count
        longest = self.position_limit or count[..., -1:].clamp(min=1)
        kernel = F.relu(query) @ reference.repeat_heads(F.relu(key), query).mT
        return reference.normalise(kernel * torch.cos(math.pi / 2 * distance.to(key.dtype) / longest) * allowed)


def _turned(x: Tensor, position: Tensor, longest: Tensor | int) -> Tensor:
    """Return [relu(x) cos(a i), relu(x) sin(a i)] [B, H, N, 2 D] for x at positions i [B or 1, N], a = pi / (2 M)."""
    angle = (math.pi / 2 * position.to(x.dtype) / longest)[:, None, :, None]
    features = F.relu(x)
    return torch.cat([features * angle.cos(), features * angle.sin()], dim=-1)
