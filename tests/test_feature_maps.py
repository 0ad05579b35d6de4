"""The random features against what they estimate."""

from __future__ import annotations

import math

import pytest
import torch

from hf_linattn.feature_maps import FEATURE_MAPS, orthogonal_gaussian


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
    assert (features.values >= 0).all()


def test_same_seed_same_directions_other_seed_others():
    first, again, other = (orthogonal_gaussian(16, 8, generator(s)) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
