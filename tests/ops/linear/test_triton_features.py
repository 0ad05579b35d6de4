"""Feature maps by Triton against the maps themselves in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hf_linattn.feature_maps import FEATURE_MAPS
from hf_linattn.ops.linear import triton_features as features
from hf_linattn.ops.linear.triton_features import make_features
from hf_linattn.ops.linear.types import FeatureMapSpec, masked, spec_of

BATCH, KV_HEADS, GROUPS, LENGTH, HEAD_DIM = 2, 2, 2, 37, 20


def make_map(name: str, heads: tuple[int, ...]) -> torch.nn.Module:
    """A map with 22 directions whose weights are not those it starts with."""
    generator = torch.Generator().manual_seed(0)
    feature_map = FEATURE_MAPS.get(name)(HEAD_DIM, 22, 0.3, generator, heads)
    with torch.no_grad():
        for parameter in feature_map.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return feature_map


KNOWN = [name for name in FEATURE_MAPS.names() if spec_of(make_map(name, ()))]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}  # the interpreter has no bfloat16


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch):
    monkeypatch.setattr(features, "INPUT_BYTES", {False: 32})
    monkeypatch.setattr(features, "MOST_ROWS", 16)
    monkeypatch.setattr(features, "TILES", 2)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(KV_HEADS,), (KV_HEADS, GROUPS)], ids=["key", "query"])
@pytest.mark.parametrize("name", KNOWN)
def test_features_and_gradients(name, shape, kind):
    """Of heads that lie in memory as a model leaves them, at an odd length; log scales stay float32."""
    exact = make_map(name, shape).double()
    own = make_map(name, shape)
    given = torch.randn(BATCH, LENGTH, *shape, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    given = given.to(kind).permute(0, *range(2, given.dim() - 1), 1, given.dim() - 1)
    results = []
    for feature_map, dtype in ((exact, torch.float64), (own, kind)):
        x = given.detach().to(dtype).requires_grad_()
        made = feature_map(x) if dtype == torch.float64 else make_features(x, spec_of(feature_map))
        assert made.values.dtype == dtype
        loss = (made.values * torch.arange(made.values.numel()).sin().view_as(made.values)).sum()
        if made.log_scale is not None:
            assert made.log_scale.dtype == torch.promote_types(dtype, torch.float32)
            # times what a gradient of the largest exponent would bring, which attention cancels
            loss = loss + (made.values.detach().sum(-1) * made.log_scale).sum()
        wanted = [x, *feature_map.parameters()]
        results.append([*(y for y in made if y is not None), *torch.autograd.grad(loss, wanted)])
    assert len(results[0]) == len(results[1])
    for want, got in zip(*results, strict=True):
        assert got.shape == want.shape
        assert (got.double() - want).norm() < TOLERANCES[kind] * want.norm()


def stored(*shape: int, kind: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of some shape that lie in memory turned and with gaps between them."""
    numbers = torch.randn(*shape[::-1], 3, generator=torch.Generator().manual_seed(seed)).to(kind)
    return numbers[..., 1].permute(*range(len(shape) - 1, -1, -1))


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(KV_HEADS,), (KV_HEADS, GROUPS)], ids=["key", "query"])
@pytest.mark.parametrize("own", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_weights_are_read_as_they_are_stored(monkeypatch, own, shape, kind):
    """In a dtype and an order of their own, with all digits, as log scales show; of inputs in one part or several."""
    weight, bias = stored(*shape, HEAD_DIM, 22, kind=own, seed=0), stored(*shape, 22, kind=own, seed=1)
    spec = FeatureMapSpec("exponential", weight, bias, scale=0.6, quadratic=-0.3, offset=0.7)
    x = torch.randn(BATCH, *shape, LENGTH, HEAD_DIM, generator=torch.Generator().manual_seed(2)).to(kind)
    z = 0.6 * torch.einsum("b...nd,...dm->b...nm", x.double(), weight.double()) + bias.double()[..., None, :]
    top = z.amax(-1)
    want, log_scale = (z - top[..., None]).exp(), top - 0.3 * x.double().square().sum(-1) + 0.7
    for size in (32, 128):
        monkeypatch.setattr(features, "INPUT_BYTES", {False: size})
        made = make_features(x, spec)
        assert made.values.dtype == kind
        assert (made.values.double() - want).norm() < TOLERANCES[kind] * want.norm()
        torch.testing.assert_close(made.log_scale.double(), log_scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in KNOWN if make_map(name, ()).spec.activation == "exponential"])
def test_exponents_neither_overflow_nor_vanish(name):
    """Heads a hundred times as large: the largest feature of a token is one, the rest is in the log scale."""
    feature_map, x = make_map(name, ()), 100 * torch.randn(1, 2, 19, HEAD_DIM)
    made, want = make_features(x, spec_of(feature_map)), feature_map.double()(x.double())
    assert torch.equal(made.values.amax(-1), torch.ones(1, 2, 19))
    torch.testing.assert_close(made.log_scale.double(), want.log_scale, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", KNOWN)
@torch.no_grad()
def test_masked_keys_are_hidden_as_their_features_are_made(name):
    """With log scales where these are asked for, too."""
    spec, x = spec_of(make_map(name, ())), torch.randn(2, 2, 19, HEAD_DIM)
    mask = torch.rand(2, 19, generator=torch.Generator().manual_seed(3)) > 0.5
    for scaled in (False, True):
        want = masked(make_features(x, spec), mask, scaled)
        for got, known in zip(make_features(x, spec, mask, scaled), want, strict=True):
            assert (got is None and known is None) or torch.equal(got, known)


@pytest.mark.parametrize("name", KNOWN)
@torch.no_grad()
def test_zeros_may_stand_behind_the_last_token(name):
    spec, x = spec_of(make_map(name, ())), torch.randn(2, 2, 5, 19, HEAD_DIM)[:, :, :, :-3]
    want = make_features(F.pad(x, (0, 0, 0, 1)), spec)
    for got, known in zip(features.read(x, spec, count=17), want, strict=True):
        assert (got is None and known is None) or torch.equal(got, known)


@pytest.mark.parametrize("name", KNOWN)
def test_an_infinite_loss_elsewhere_stays_there(name):
    """A token without a gradient gets none, whatever the others' are."""
    feature_map = make_map(name, ())
    x = torch.randn(1, 2, 21, HEAD_DIM, requires_grad=True)
    made = make_features(x, spec_of(feature_map)).values
    (gradient,) = torch.autograd.grad(made[:, :, 3].square().sum() * 1e30, x)
    assert gradient[:, :, 3].any() and not gradient[:, :, 4:].any() and not gradient[:, :, :3].any()


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_no_number_shows_where_the_map_itself_shows_it(name):
    """And in its gradient, where the slope depends on it; that of relu, as PyTorch's, hands on what it is given."""
    feature_map, x = make_map(name, ()), torch.randn(1, 2, 19, HEAD_DIM)
    x[:, :, 3, 1] = torch.nan
    spec, x = spec_of(feature_map), x.requires_grad_()
    made = make_features(x, spec).values
    assert torch.equal(made.isnan(), feature_map(x).values.isnan())
    given = torch.where(made.isnan(), torch.nan if spec.activation == "relu" else 1.0, 1.0)
    (gradient,) = torch.autograd.grad(made, x, given)
    assert gradient[:, :, 3, 1].isnan().all() and not gradient[:, :, :3].isnan().any()
