"""gated_deltanet: a state that forgets and corrects itself, S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import MechanismConfig, require, require_count
from ..errors import UnsupportedModeError, UnsupportedModelError
from ..ops import reference
from ..ops.common.numerics import bounded
from ..ops.common.precision import wide
from ..ops.common.tracing import scaled
from ..ops.delta_rule.interface import gated_delta_rule
from ..ops.delta_rule.types import FeatureMap
from ..ops.linear.torch import unit_length
from .capabilities import ExactnessLimit
from .gla import INITIAL_DECAY, SHUT
from .head_scores import HeadScores, inverse_softplus, look_back, matching_gain
from .inputs import PLAIN, AttentionLayer, CallOptions
from .registration import register_mechanism
from .sequence import SequenceMechanism

CHOICES = {"rotation": ("undone", "kept"), "normalisation": ("l2", "softmax", "silu"), "gate_input": ("key", "hidden")}
LEAST_DECAY = 1e-30  # of a token; float32 holds no number far below
SLOWER = 4  # by what each further memory of a head forgets more slowly than the one before
LEAST_SQUARE = 1e-6  # added to the mean square that an output is divided by


class GatedDeltaState(NamedTuple):
    """What is kept of the tokens read so far; float32 (float64 for float64 inputs), constant size.

    memory: S^T [B, M, F, Dv]. length: [B], how many they are. query_tail [B, Hkv, G, T - 1, D] and
    key_tail [B, Hkv, T - 1, D]: the last of them, which a convolution of T taps still reads.
    """

    memory: Tensor
    length: Tensor
    query_tail: Tensor
    key_tail: Tensor


@dataclass
class GatedDeltanetConfig(MechanismConfig):
    """Options of `gated_deltanet`."""

    rotation: str = field(
        default="undone",
        metadata={"help": "`undone`: keys and queries lose the turns of rotary positions, if there are any; `kept`"},
    )
    normalisation: str = field(
        default="l2",
        metadata={"help": "k / |k|; `softmax`: e^k / |e^k|; `silu`: silu(k) / |silu(k)|; queries the same way"},
    )
    gate_input: str = field(
        default="key", metadata={"help": "what both gates are made from: `key`, or `hidden`, the layer's input"}
    )
    output_gate: bool = field(default=False, metadata={"help": "outputs pass a gate made from the layer's input"})
    output_norm: bool = field(default=False, metadata={"help": "outputs are divided by their root mean square"})
    expand_key: int = field(default=1, metadata={"help": "features of a key, as a multiple of the head's width D"})
    expand_value: int = field(default=1, metadata={"help": "memories of a head, each with gates of its own"})
    beta_range: int = field(default=1, metadata={"help": "1, or 2: a key may also turn over what it stood for"})
    conv_size: int | None = field(
        default=None, metadata={"help": "tokens that a causal convolution of queries and keys reads; None: none"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in CHOICES.items():
            value = getattr(self, name)
            require(name, value, value in known, " or ".join(map(repr, known)))
        for name in ("output_gate", "output_norm"):
            require(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        self.require_counts("expand_key", "expand_value", "beta_range")
        require("beta_range", self.beta_range, self.beta_range <= 2, "1 or 2")
        require_count("conv_size", self.conv_size, optional=True)


@register_mechanism("gated_deltanet")
class GatedDeltanetMechanism(SequenceMechanism):
    """Gated DeltaNet (Yang et al. 2024): o_t = s S_t q_t with S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T.

    q, k and v are the layer's own queries, keys and values. Where the layer has rotary positions their turns are
    undone first (`rotation="undone"`): a state over turned keys cannot tell apart positions beyond the trained
    length. k and q are then divided by their length; `normalisation="softmax"` takes e^k and e^q instead of them,
    `"silu"` silu(k) and silu(q) as the paper does: trained on many pairs, a state of the same size holds more of them.
    So |k| = 1, and S [Dv, F] is one per key/value head, float32: all there is to the decoding state beside a count.

    * a_t = exp(-softplus(w . x_t + c)), per key/value head: what is left of the state when token t comes. b_t =
      sigmoid(w' . x_t + c'), times 2 with `beta_range=2`: how far its value replaces what the state said about its
      key. x_t is the key before normalisation, or with `gate_input="hidden"` the layer's input. `forget` and `write`
      hold w [M, width] and c [M]; w starts as zero, c where 2^(-1/177) of the state is left and b_t is 1/3.
    * `expand_key=n` makes F = n D features relu(x W) of a key before it is normalised (e^(x W) with "softmax", silu(x
      W) with "silu"), W trained per head, [I, -I, R, -R, ...] at first, R random rotations. But for silu,
      weights are then not negative at first, as softmax's are not, and a pretrained model keeps more: take 2 where
      there is room.
      `expand_value=n` gives a head n memories with gates of their own, the next one forgetting 4 times more slowly;
      `memory_mix` [H, n] weighs what they say.
    * `conv_size=T`: q_t and k_t become sum_i u_i q_{t-i} over the last T tokens, u [H or Hkv, T, D] trained, first
      the token itself alone. Its last T - 1 tokens are part of the state.
    * `output_norm`: o_t is divided by its root mean square. `output_scale` s [H] starts as 1. `output_gate`: o_t is
      multiplied by 2 sigmoid(w . x_t + c) per query head, x_t the layer's input, which is 1 at first.

    `calibrate` first lets a_t halve the state over as many tokens as the head's softmax looks back on average, and s
    make outputs as large as softmax's, where neither has been trained. A layer that is called without its input has no
    `gate_input="hidden"` and no `output_gate`, which the error names.

    Every token is one step of gradient descent on |S k_t - v_t|^2. Causal only: the rule has an order. Time is
    O(N (F + C) Dv) in chunks of C tokens, see `hf_linattn.ops.delta_rule.interface`.

    Deviations: b_t multiplies I - k k^T and the value as in the paper, but all gates have a bias that a pretrained
    layer's look-back sets; SiLU, of queries and keys alone, is an option, and there is one output gate per head (Qiu
    et al. 2025, arXiv 2505.06708) where the paper has one per channel, so that at first both do nothing; the norm
    comes before the gate.
    """

    config_class = GatedDeltanetConfig
    static_steps = True
    modes = frozenset({"causal"})
    averages = False
    prepares = True
    limit = ExactnessLimit(
        "the gated delta rule, computed token by token; orthonormal keys with a = b = 1 recall exactly", kernel=True
    )
    citation = "Yang et al. 2024, Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv 2412.06464"
    family = "linear"

    config: Any  # `GatedDeltanetConfig`

    def __init__(self, config: GatedDeltanetConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        self._require(layer)
        heads, shared, width = layer.num_heads, layer.num_key_value_heads, layer.head_dim
        hidden: Any = layer.hidden_size
        gate_width = hidden if config.gate_input == "hidden" else width
        count = shared * config.expand_value
        self.forget = HeadScores(gate_width, self._forget_bias(torch.full((shared,), INITIAL_DECAY, device="cpu")))
        self.write = HeadScores(gate_width, torch.full((count,), -math.log(3 * config.beta_range - 1), device="cpu"))
        self.output_scale = nn.Parameter(torch.ones(heads, device="cpu"))
        if config.output_gate:
            self.gate = HeadScores(hidden, torch.zeros(heads, device="cpu"))
        if config.expand_value > 1:
            mix = torch.full((heads, config.expand_value), 1 / config.expand_value, device="cpu")
            self.memory_mix = nn.Parameter(mix)
        self.query_directions = self.key_directions = None
        if config.expand_key > 1:
            first = self._directions(width)
            self.query_directions = nn.Parameter(first.repeat(shared, heads // shared, 1, 1))
            self.key_directions = nn.Parameter(first.repeat(shared, 1, 1))
        self.query_taps = self.key_taps = None
        if config.conv_size:
            first = F.one_hot(torch.zeros((), dtype=torch.long, device="cpu"), config.conv_size).float()
            self.query_taps, self.key_taps = (
                nn.Parameter(first[None, :, None].repeat(number, 1, width)) for number in (heads, shared)
            )

    def _require(self, layer: AttentionLayer) -> None:
        """Refuse options that the layer has nothing for."""
        config = self.config
        chosen = {"gate_input='hidden'": config.gate_input == "hidden", "output_gate=True": config.output_gate}
        self.reads_queries = (config.conv_size or 1) > 1
        self.reads_hidden = tuple(option for option, wanted in chosen.items() if wanted)
        if self.reads_hidden and layer.hidden_size is None:
            raise UnsupportedModelError(
                f"{' and '.join(self.reads_hidden)} reads the input of layer {layer.index}, whose width neither its"
                " projections nor its config say; leave it out"
            )
        rotation = layer.rotation if self.turned_back else None
        if rotation is not None and (obstacle := rotation.obstacle(layer.head_dim, layer.device)):
            raise UnsupportedModelError(
                f"rotation='undone' turns keys and queries back, which layer {layer.index} does not allow: {obstacle};"
                " use rotation='kept', of hybrid in linear_options"
            )

    @property
    def turned_back(self) -> bool:
        """Whether rotary turns are undone."""
        return self.layer.rotation is not None and self.config.rotation == "undone"

    def _directions(self, width: int) -> Tensor:
        """Return W [D, F] = [I, -I, R, -R, ...], R random rotations."""
        generator, parts = self.generator("directions"), [torch.eye(width, device="cpu")]
        while len(parts) < self.config.expand_key:
            if len(parts) % 2:
                parts.append(-parts[-1])
            else:
                drawn = torch.randn(width, width, generator=generator, device="cpu", dtype=torch.float64)
                parts.append(torch.linalg.qr(drawn).Q.float())
        return torch.cat(parts, dim=1)

    def _forget_bias(self, decay: Tensor) -> Tensor:
        """Return the bias [M] with which -log a is `decay` [Hkv] in the first memory of a head, less in the others."""
        slower = torch.arange(self.config.expand_value, device=decay.device, dtype=decay.dtype)
        return inverse_softplus((decay[:, None] * SLOWER**-slower).clamp(min=LEAST_DECAY)).flatten()

    def prepare(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, call: CallOptions = PLAIN
    ) -> None:
        """Let gates and gain that are as they were made begin as softmax attention looks and answers."""
        bias, heads = self.forget.bias, (query, key, value)
        first = self._forget_bias(bias.new_full((self.layer.num_key_value_heads,), INITIAL_DECAY, dtype=torch.float32))
        if not torch.allclose(bias.float(), first, rtol=1e-2) or not bool((self.output_scale == 1).all()):
            return
        with torch.no_grad():
            bias.copy_(self._forget_bias(look_back(self, query, key, key_padding_mask)))
            options = {"hidden_states": call.hidden_states} if self.reads_hidden else {}
            self.output_scale.copy_(matching_gain(self, heads, key_padding_mask, **options))

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: GatedDeltaState | None,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, GatedDeltaState]:
        count, steps = key.shape[2], torch.arange(key.shape[2], device=key.device)
        before = None if state is None else state.memory
        length, *tails = self._nothing_read(query, key) if state is None else state[1:]
        query, key = (self._plain(x, length[:, None] + steps) for x in (query, key))
        query, query_tail = _convolved(query, self.query_taps, tails[0].flatten(1, 2), lengths)
        key, key_tail = _convolved(key, self.key_taps, tails[1], lengths)
        real = None if lengths is None else (steps < lengths[:, None])[:, None]
        log_gate, beta = self._gates(key, call.hidden_states, real)
        copies, groups = self.config.expand_value, query.shape[1] // key.shape[1]
        query_tail = query_tail.unflatten(1, (-1, groups))
        if copies > 1:
            query = query.unflatten(1, (-1, groups)).repeat_interleave(copies, 1).flatten(1, 2)
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        maps = self._map(self.query_directions), self._map(self.key_directions)
        output, memory = gated_delta_rule(query, key, value, beta, log_gate, before, *maps, self.policy)
        length = length + (count if lengths is None else lengths)
        return self._scaled(output, call.hidden_states), GatedDeltaState(memory, length, query_tail, key_tail)

    @property
    def entries_obstacle(self) -> str | None:
        """Return the option for which keys do not enter the state one by one, each by itself; None if they do."""
        config = self.config
        found = {
            "conv_size": config.conv_size is not None, "expand_value": config.expand_value > 1,
            "output_norm": config.output_norm, **dict.fromkeys(self.reads_hidden, True),
        }  # fmt: skip
        return next((option for option, chosen in found.items() if chosen), None)

    def key_entries(self, key: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what keys [B, Hkv, N, D] at positions [B or 1, Hkv or 1, N] write: unit features, b and log a."""
        key = wide(key)
        position = position.clamp(min=0).expand(key.shape[:3])
        key = self._plain(key.flatten(0, 1)[:, None], position.flatten(0, 1)).view_as(key)
        log_gate, beta = self._gates(key, None, None)
        return unit_length(self._features(key, self.key_directions)), beta, log_gate

    def query_entries(self, query: Tensor, position: Tensor) -> Tensor:
        """Return what queries [B, Hkv, G, N, D] at positions [B or 1, N] read with: unit features times s."""
        query = wide(query)
        query = self._plain(query.flatten(1, 2), position.clamp(min=0)).view_as(query)
        scale = self._factor(query, None).view(query.shape[1], -1, 1, 1)
        return unit_length(self._features(query, self.query_directions)) * scale

    def _nothing_read(self, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        """Return what the state has beside the memory before the first token."""
        tail, grouped = (self.config.conv_size or 1) - 1, query.unflatten(1, (key.shape[1], -1))
        tails = (x.new_zeros(*x.shape[:-2], tail, x.shape[-1]) for x in (grouped, key))
        return key.new_zeros(key.shape[0], dtype=torch.long), *tails

    def _plain(self, heads: Tensor, position: Tensor) -> Tensor:
        """Return heads at `position` [B, N] with their rotary turn taken back, if that is wanted."""
        rotation = self.layer.rotation if self.turned_back else None
        return heads if rotation is None else rotation.back(bounded(heads), position)

    def _gates(self, key: Tensor, hidden: Tensor | None, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return log a and b [B, M, N], zero for pads; real: [B, 1, N], None if all are."""
        x = hidden if self.config.gate_input == "hidden" else key
        log_gate = -F.softplus(self.forget(x)).clamp(max=SHUT)
        beta = self.config.beta_range * torch.sigmoid(self.write(x))
        return (log_gate, beta) if real is None else (log_gate * real, beta * real)

    def _features(self, x: Tensor, directions: Tensor | None) -> Tensor:
        """Return the features of heads [..., N, D], before they are divided by their length: [..., N, F]."""
        kind = self.config.normalisation
        if directions is not None:
            x = x @ bounded(directions.to(x.dtype))
            x = x.relu_() if kind == "l2" else x  # of the product above alone
        if kind == "silu":
            return F.silu(x)
        return (x - x.amax(-1, keepdim=True).detach()).exp() if kind == "softmax" else x

    def _map(self, directions: Tensor | None) -> FeatureMap | None:
        """Return `_features` for the heads of every memory; None where it would return them as they are."""
        if directions is None and self.config.normalisation == "l2":
            return None
        if directions is not None and self.config.expand_value > 1:
            directions = directions.repeat_interleave(self.config.expand_value, 0)
        return functools.partial(self._features, directions=directions)

    def _scaled(self, output: Tensor, hidden: Tensor | None) -> Tensor:
        """Return the layer's output [B, H, N, Dv] from what all memories say [B, M G, N, Dv]."""
        if (copies := self.config.expand_value) > 1:
            mix = bounded(self.memory_mix.to(output.dtype)).unflatten(0, (self.layer.num_key_value_heads, -1))
            said = output.unflatten(1, (mix.shape[0], copies, mix.shape[1]))
            output = (said * mix.mT[..., None, None]).sum(2).flatten(1, 2)
        if self.config.output_norm:
            output = scaled(output, torch.rsqrt(output.square().mean(-1, keepdim=True) + LEAST_SQUARE))
        return scaled(output, self._factor(output, hidden))

    def _factor(self, like: Tensor, hidden: Tensor | None) -> Tensor:
        """Return what outputs are multiplied by in the end [B or 1, H, N or 1, 1]."""
        scale = bounded(self.output_scale.to(like.dtype))[None, :, None, None]
        return scale * (2 * torch.sigmoid(self.gate(hidden)))[..., None] if self.config.output_gate else scale

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        if self.config.output_norm:
            raise UnsupportedModeError(
                "output_norm=True divides outputs by their size, for which the attention matrix needs the values; pass"
                " value=... to attention_matrix"
            )
        matrix = self._matrix(query, key, allowed, call.hidden_states)
        return matrix * self._factor(key, call.hidden_states)

    def weights_given(
        self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, call: CallOptions = PLAIN
    ) -> Tensor:
        matrix = self._matrix(query, key, allowed, call.hidden_states)
        if self.config.output_norm:
            size = reference.attend(matrix, value).square().mean(-1, keepdim=True)
            matrix = matrix / (size + LEAST_SQUARE).sqrt()
        return matrix * self._factor(key, call.hidden_states)

    def _matrix(self, query: Tensor, key: Tensor, allowed: Tensor, hidden: Tensor | None) -> Tensor:
        """A_ij = q_i . p_j with p_j = b_j k_j, which loses a_l and b_l k_l (k_l . p_j) to every later token l."""
        position = reference.positions(allowed)[:, 0].clamp(min=0)
        query, key = (self._plain(x, position) for x in (query, key))
        query, key = (_mixed(x, u, allowed) for x, u in ((query, self.query_taps), (key, self.key_taps)))
        real = allowed[:, 0].diagonal(dim1=-2, dim2=-1)[:, None]
        log_gate, beta = self._gates(key, hidden, real)
        copies = self.config.expand_value
        queries = self._features(query.unflatten(1, (key.shape[1], -1)), self.query_directions)
        keys = self._features(key, self.key_directions)
        queries, keys = (unit_length(x).repeat_interleave(copies, 1) for x in (queries, keys))
        said = reference.delta_rule_matrix(queries, keys, beta, log_gate)  # [B, M, G, N, N]
        if copies > 1:
            mix = self.memory_mix.to(said.dtype).unflatten(0, (key.shape[1], -1)).mT
            said = (said.unflatten(1, (-1, copies)) * mix[..., None, None]).sum(2)
        return said.flatten(1, 2) * allowed


def _convolved(x: Tensor, taps: Tensor | None, tail: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return sum_i u_i x_{t-i} of x [B, H, N, D] behind `tail`, taps u [H, T, D], and the tail after it."""
    if taps is None or not tail.shape[2]:
        return (x, tail) if taps is None else (x * bounded(taps.to(x.dtype)), tail)
    longer, count = torch.cat([tail, x], dim=2), x.shape[2]
    weight = bounded(taps.to(x.dtype)).flip(1)
    parts = (longer[:, :, i : i + count] * weight[:, i, None] for i in range(weight.shape[1]))
    mixed = functools.reduce(torch.add, parts)
    if lengths is None:
        return mixed, longer[:, :, count:].clone()  # a view would keep all tokens of a prompt
    last = lengths[:, None] + torch.arange(tail.shape[2], device=x.device)
    return mixed, longer.gather(2, last[:, None, :, None].expand_as(tail))


def _mixed(x: Tensor, taps: Tensor | None, allowed: Tensor) -> Tensor:
    """`_convolved` by the pairs that see each other: a token's i-th last one is the one with i between them."""
    if taps is None:
        return x
    between = allowed.long().flip(-1).cumsum(-1).flip(-1) - 1  # visible keys behind each, up to the query
    steps = (((between == i) & allowed).to(x.dtype) @ x * taps[:, i, None].to(x.dtype) for i in range(taps.shape[1]))
    return torch.stack(list(steps)).sum(0)
