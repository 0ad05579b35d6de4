"""The maps against their formulas and the random ones against what they estimate."""

from __future__ import annotations

import math

import pytest
import torch

from hf_linattn.feature_maps import FEATURE_MAPS, LearnedFeatureMap, orthogonal_gaussian


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_directions_of_a_block_are_orthogonal_and_lengths_are_chi():
    drawn = orthogonal_gaussian(2048, 16, generator(0)).double()
    block = drawn[:16] / drawn[:16].norm(dim=1, keepdim=True)
    torch.testing.assert_close(block @ block.T, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-6)
    squared = drawn.square().sum(1)  # chi-square with 16 degrees: mean 16, variance 32
    assert squared.mean().item() == pytest.approx(16, abs=4 * math.sqrt(32 / 2048))
    assert squared.var().item() == pytest.approx(32, rel=0.25)


def test_rotation_is_haar():
    """The first column of Q alone: without the sign fix its first entry would always be on one side."""
    firsts = torch.stack([orthogonal_gaussian(8, 8, generator(seed))[0] for seed in range(200)])
    share = (firsts > 0).double().mean(0)
    assert ((share - 0.5).abs() < 4 * 0.5 / math.sqrt(200)).all()


def test_number_of_features_need_not_be_a_multiple_of_the_head_dimension():
    assert orthogonal_gaussian(19, 8, generator(0)).shape == (19, 8)


@pytest.mark.parametrize("name", ["favor_softmax", "favor_hyperbolic"])
def test_features_estimate_the_softmax_kernel_without_bias(name):
    x, y = torch.randn(2, 6, generator=generator(1), dtype=torch.float64)
    scaling, draws = 0.4, 200
    estimates = []
    for seed in range(draws):
        phi = FEATURE_MAPS.get(name)(6, 12, scaling, generator(seed)).double()
        estimates.append((phi.exact(x[None]) @ phi.exact(y[None]).T).item())
    estimates = torch.tensor(estimates, dtype=torch.float64)
    error = (estimates.mean() - (scaling * x @ y).exp()).abs().item()
    assert error < 4 * estimates.std().item() / math.sqrt(draws)


def test_hyperbolic_features_have_the_lower_variance():
    """At equal m; by the paper's lemma the ratio of the variances is (1 - exp(-|x + y|^2)) / 2."""
    x, y = 0.3 * torch.randn(2, 6, generator=generator(2), dtype=torch.float64)

    def variance(name: str) -> float:
        maps = [FEATURE_MAPS.get(name)(6, 6, 1.0, generator(seed)).double() for seed in range(150)]
        return torch.tensor([(m.exact(x[None]) @ m.exact(y[None]).T).item() for m in maps]).var().item()

    assert variance("favor_hyperbolic") < 0.8 * variance("favor_softmax")


@pytest.mark.parametrize("name", FEATURE_MAPS.names())
def test_stable_form_is_the_exact_one(name):
    phi = FEATURE_MAPS.get(name)(6, 12, 0.4, generator(0)).double()
    x = torch.randn(3, 5, 6, generator=generator(3), dtype=torch.float64)
    features = phi(x)
    scale = 1.0 if features.log_scale is None else features.log_scale.exp()[..., None]
    exact = phi.exact(x)
    ratio = (features.values * scale) / exact.where(exact != 0, 1.0)
    ratio = ratio[exact != 0]
    torch.testing.assert_close(ratio, ratio[0].expand_as(ratio))  # one constant factor, which cancels in attention
    assert features.values.shape[-1] == phi.feature_dim
    assert (features.values >= 0).all() or name == "taylor"
    assert (exact.flatten(0, 1) @ exact.flatten(0, 1).T >= 0).all()


def test_same_seed_same_directions_other_seed_others():
    first, again, other = (orthogonal_gaussian(16, 8, generator(s)) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


LEARNED = [name for name in FEATURE_MAPS.names() if FEATURE_MAPS.get(name).learned]
FORMULAS = {  # of one vector x [D] with W [D, m] and b [m]
    "hedgehog": lambda x, w, _: [
        math.exp(sign * x @ w[:, r]) / sum(math.exp(sign * x @ w[:, s]) for s in range(w.shape[1]))
        for sign in (1, -1)
        for r in range(w.shape[1])
    ],
    "t2r": lambda x, w, b: [max(0.0, x @ w[:, r] + b[r]) for r in range(w.shape[1])],
    "learned_exp": lambda x, w, b: [math.exp(x @ w[:, r] + b[r]) for r in range(w.shape[1])],
}


def make_learned(name: str, heads: tuple[int, ...], seed: int = 0) -> LearnedFeatureMap:
    """Return a map that has moved away from its start, differently for every head."""
    phi = FEATURE_MAPS.get(name)(4, 5, 0.5, generator(seed), heads).double()
    with torch.no_grad():
        for parameter in phi.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator(seed + 1), dtype=torch.float64)
    return phi


@pytest.mark.parametrize("heads", [(), (2,), (2, 3)])
@pytest.mark.parametrize("name", LEARNED)
def test_learned_maps_are_their_formulas_per_head(name, heads):
    phi = make_learned(name, heads)
    x = torch.randn(2, *heads, 3, 4, generator=generator(3), dtype=torch.float64)
    got = phi.exact(x)
    assert got.shape == (2, *heads, 3, phi.feature_dim)
    for index in torch.cartesian_prod(*map(torch.arange, (2, *heads, 3))).tolist():
        row, *head, position = index
        w = phi.weight[tuple(head)].detach()
        b = phi.bias[tuple(head)].detach() if phi.has_bias else None
        want = FORMULAS[name](x[(row, *head, position)], w, b)
        torch.testing.assert_close(got[tuple(index)], torch.tensor(want, dtype=torch.float64))


def test_the_two_softmaxes_of_hedgehog_are_normalised_apart():
    features = make_learned("hedgehog", (2,))(torch.randn(1, 2, 7, 4, generator=generator(4)).double()).values
    ones = torch.ones(1, 2, 7, dtype=torch.float64)
    torch.testing.assert_close(features[..., :5].sum(-1), ones)
    torch.testing.assert_close(features[..., 5:].sum(-1), ones)


@pytest.mark.parametrize("name", LEARNED)
def test_learned_maps_start_as_the_axes_and_rotations_of_them_with_opposites(name):
    pairs = FEATURE_MAPS.get(name).copies == 1
    weight = FEATURE_MAPS.get(name)(4, 20 if pairs else 10, 0.25, generator(0), (3,)).weight.detach()
    for head in weight:
        assert torch.equal(head[:, :4], torch.eye(4))  # sqrt(scaling D) = 1
        torch.testing.assert_close(head[:, 4:8].T @ head[:, 4:8], torch.eye(4))
        assert (head[:, 4:8].abs() - torch.eye(4)).abs().max() > 0.1  # a rotation, not one more identity
        assert not pairs or torch.equal(head[:, 10:], -head[:, :10])
    assert torch.equal(FEATURE_MAPS.get("hedgehog")(4, 3, 4.0, generator(0)).weight, 4 * torch.eye(4)[:, :3])
    odd = torch.cat([torch.eye(4)[:, :3], -torch.eye(4)[:, :2]], dim=1)
    assert torch.equal(FEATURE_MAPS.get("t2r")(4, 5, 0.25, generator(0)).weight, odd)


def test_elu_features_and_their_gradients_are_those_of_elu_even_at_zero():
    x = torch.tensor([[-100.0, -2.0, -1e-3, 0.0, 1e-3, 2.0, 100.0]], dtype=torch.float64, requires_grad=True)
    got = FEATURE_MAPS.get("elu")(7, 7, 1.0, generator(0))(x).values
    want = torch.nn.functional.elu(x) + 1
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(output.sum(), x)[0] for output in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_taylor_features_make_the_second_order_expansion_of_exp():
    x, y = torch.randn(2, 50, 6, generator=generator(5), dtype=torch.float64)
    phi = FEATURE_MAPS.get("taylor")(6, 1, 0.4, generator(0))
    s = 0.4 * x @ y.T
    weights = phi.exact(x) @ phi.exact(y).T
    torch.testing.assert_close(weights, 1 + s + s**2 / 2)
    assert weights.min().item() >= 0.5 > s.min().item() + 1  # also where 1 + s alone would be negative
    assert phi.exact(x).shape[-1] == phi.feature_dim == 1 + 6 + 21


@pytest.mark.parametrize("name", LEARNED)
def test_learned_maps_start_alike_for_the_queries_of_a_group_and_differ_between_heads_and_seeds(name):
    kind = FEATURE_MAPS.get(name)
    key, query, other = (kind(4, 12, 0.5, generator(s), h).weight for s, h in ((0, (2,)), (0, (2, 3)), (1, (2,))))
    assert torch.equal(query, key[:, None].expand_as(query))
    assert not torch.equal(key[0], key[1])
    assert not torch.equal(key, other)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_serve_inputs_in_float32(name, dtype):
    phi = make_learned(name, (2,)).to(dtype)
    x = torch.randn(1, 2, 3, 4, generator=generator(6))
    got = phi.exact(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, phi.float().exact(x))
