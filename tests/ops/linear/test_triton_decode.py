"""One token by Triton against PyTorch in float64, which `test_torch.py` checks against the formula."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from hf_linattn.backends import use_backend
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.linear import LinearMechanism
from hf_linattn.ops.linear import triton as linear_triton
from hf_linattn.ops.linear import triton_decode as causal_step
from hf_linattn.ops.linear import triton_features as features
from hf_linattn.ops.linear.types import FeatureMapSpec, LinearState
from tests.ops.triton_cases import ON_TRITON, make_mechanism

MADE = [  # features that Triton makes
    name for name in ON_TRITON
    if issubclass(MECHANISMS.get(name), LinearMechanism) and make_mechanism(name).maps[0].spec
]  # fmt: skip
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3}


@pytest.fixture
def steps(monkeypatch):
    """Small tiles, and the number of groups and tokens of every step."""
    monkeypatch.setattr(causal_step, "MOST_VALUES", 4)
    found, step = [], linear_triton.step_attention
    counted = lambda query, *rest, **how: found.append(query.shape[2:4]) or step(query, *rest, **how)  # noqa: E731
    monkeypatch.setattr(linear_triton, "step_attention", counted)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_steps_are_what_pytorch_makes_of_them(steps, name, kind):
    """From nothing, then with a token of one row hidden, then with what earlier steps left; of grouped queries."""
    given = [torch.randn(2, h, 4, 8, generator=torch.Generator().manual_seed(h)).to(kind) for h in (2, 1, 1)]
    hidden = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", kind)):
        mechanism = make_mechanism(name).to(torch.promote_types(dtype, torch.float32)).eval()
        use_backend(mechanism, backend)
        state, outputs = None, []
        for token in range(4):
            before = None if state is None else [x.clone() for x in state]
            last, heads = state, [x[:, :, token : token + 1].to(dtype) for x in given]
            output, state = mechanism(*heads, hidden[:, token : token + 1], state=state)
            assert output.dtype == dtype and state.kv.dtype == torch.promote_types(dtype, torch.float32)
            assert before is None or all(map(torch.equal, before, last))  # another beam may go on from it
            outputs.append(output)
        total = state.kv.double() * state.log_max.double().exp()[..., None, None]
        results.append([torch.cat(outputs, dim=2), total])
    for want, got in zip(*results, strict=True):
        assert (got.double() - want).norm() < TOLERANCES[kind] * want.norm()
    assert steps == [(2, 1)] * 4


@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_what_is_not_finite_shows_in_its_step_and_in_later_ones(steps, name):
    mechanism = make_mechanism(name).eval()
    use_backend(mechanism, "triton")
    for part, number in itertools.product(range(3), (torch.nan, torch.inf)):
        tokens = [torch.randn(3, 1, h, 1, 8, generator=torch.Generator().manual_seed(h)) for h in (2, 1, 1)]
        tokens[part][1] = number
        state, finite = None, []
        for heads in zip(*tokens, strict=True):
            output, state = mechanism(*heads, state=state)
            finite.append(output.isfinite().any().item())
        assert finite == [True, False, part == 0], (part, number)
    assert steps == [(2, 1)] * 18


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("activation", ["elu", "exponential", "softmax_pair"])
def test_values_decays_and_masks_lie_as_they_come(monkeypatch, activation, decayed, masked):
    """As slices of a fused projection and expanded, beside sizes that are no powers of two, against the formula."""
    monkeypatch.setattr(causal_step, "MOST_VALUES", 4)
    monkeypatch.setattr(features, "ROW_NUMBERS", 64)
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))  # noqa: E731
    query, key = draw(2, 1, 3, 2, 20)[..., :17].movedim(1, 3), draw(2, 1, 3, 18)[..., 1:].transpose(1, 2)
    value = draw(2, 1, 3, 10)[..., 4:9].transpose(1, 2)
    weights = draw(3, 2, 11, 17).mT / 4, draw(3, 11, 17).mT / 4
    maps = [FeatureMapSpec(activation, x, x[..., 0, :] / 2, 0.7, -0.3, 0.2) for x in weights]
    if activation == "softmax_pair":
        maps = [x._replace(bias=None) for x in maps]
    scaled, width = activation == "exponential", maps[0].width(17)
    state = LinearState(draw(2, 3, width, 6).abs(), draw(2, 3) * (scaled or decayed))
    mask = torch.tensor([[True, False], [False, True]])[:, 1:] if masked else None
    real = torch.ones(2, 1) if mask is None else mask
    if scaled:  # a hidden key has no say in the largest exponent
        key = torch.where(real[:, :, None, None] > 0, key, 200.0)
    log_decay = draw(3).abs().neg()[None, :, None].expand(2, 3, 1) if decayed else None
    output, after = causal_step.step_attention(
        query, key, value, maps, key_padding_mask=mask, log_decay=log_decay, state=state
    )
    asked, own = (exact_features(x, spec) for x, spec in zip((query, key), maps, strict=True))
    values = torch.cat([value, torch.ones(2, 3, 1, 1)], dim=-1).double()
    passed = torch.zeros(2, 3, 1) if log_decay is None else log_decay.double()
    total = state.kv.double() * (state.log_max[..., None] + passed).double().exp()[..., None]
    total += torch.where(real[:, :, None, None] > 0, own, 0.0).mT * values
    want = asked @ total[:, :, None]
    torch.testing.assert_close(output.double(), want[..., :-1] / want[..., -1:], rtol=1e-5, atol=1e-5)
    got = after.kv.double() * after.log_max.double().exp()[..., None, None]
    torch.testing.assert_close(got, total, rtol=1e-5, atol=1e-5)


def exact_features(x: torch.Tensor, spec: FeatureMapSpec) -> torch.Tensor:
    """The features of x [B, *heads, 1, D] by their formula, in float64, with log scales multiplied in."""
    x = x.double()
    z = 0.7 * x @ spec.weight.double() + (0.0 if spec.bias is None else spec.bias.double()[..., None, :])
    if spec.activation == "softmax_pair":
        return torch.cat([z.softmax(-1), (-z).softmax(-1)], dim=-1)
    if spec.activation == "elu":
        return F.elu(z) + 1
    return (z - 0.3 * x.square().sum(-1, keepdim=True) + 0.2).exp()


@torch.no_grad()
def test_a_row_without_keys_is_zero(steps):
    mechanism = make_mechanism("performer").eval()
    use_backend(mechanism, "triton")
    output, state = mechanism(*(torch.randn(1, h, 1, 8) for h in (2, 1, 1)), torch.zeros(1, 1, dtype=torch.bool))
    assert steps and not output.any() and not state.kv.any()
