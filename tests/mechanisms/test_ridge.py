"""What `ridge="learned"` adds to linear attention: a regression of the values on the keys' features."""

from __future__ import annotations

import pytest
import torch

from hf_linattn import OptionError, UnsupportedModeError, patch_model
from hf_linattn.config import make_config
from hf_linattn.ops.linear.interface import Features
from hf_linattn.ops.linear.ridge import ridge_attention
from hf_linattn.ops.linear.torch import unit_length
from hf_linattn.testing import Case, tiny_model


def features(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def raised(x: torch.Tensor) -> Features:
    return Features(torch.nn.functional.elu(x) + 1)


@pytest.mark.parametrize("length", [5, 37, 1030])  # fewer keys than features, more, and more than are read at a time
def test_it_is_the_least_squares_solution_with_a_penalty(length):
    """Least squares on the keys, and sqrt(penalty) times every axis, where the value is zero; with its gradients."""
    query, key = features(2, 4, length, 9), features(2, 2, length, 9, seed=1)
    value, penalty = torch.randn(2, 2, length, 3, dtype=torch.float64), torch.tensor([0.3, 2.0], dtype=torch.float64)
    operands = [x.requires_grad_() for x in (query, key, value, penalty)]
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :2] = mask[1, 3:] = False
    got, want = ridge_attention(query, key, value, Features, Features, penalty, mask), []
    for row in range(2):
        for head in range(4):
            shared = head // 2
            a, b = unit_length(query[row, head]), unit_length(key[row, shared][mask[row]])
            left = torch.cat([b, penalty[shared].sqrt() * torch.eye(9, dtype=torch.float64)])
            right = torch.cat([value[row, shared][mask[row]], torch.zeros(9, 3, dtype=torch.float64)])
            want.append((a @ torch.linalg.lstsq(left, right).solution) * mask[row][:, None])
    want = torch.stack(want).view_as(got)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(output.sin().sum(), operands) for output in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        assert torch.equal(ridge_attention(query, key, value, Features, Features, penalty, mask), got)


@pytest.mark.parametrize("length", [6, 128])
def test_a_small_penalty_has_the_gradients_of_float64(length):
    """What is added against rounding biased them by its share of the penalty: by a twentieth, at this one."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        heads = [torch.randn(1, 1, length, 32, generator=generator).to(dtype) for _ in range(3)]
        operands = [x.requires_grad_() for x in (*heads, torch.tensor([0.02], dtype=dtype))]
        output = ridge_attention(*operands[:3], raised, raised, operands[3])
        found[dtype] = [output.detach(), *torch.autograd.grad(output.square().sum(), operands)]
    for got, want in zip(*found.values(), strict=True):
        assert (got - want).abs().max() < 1e-3 * want.abs().max()


@pytest.mark.parametrize("length", [64, 65])  # as many keys as features: the sequences of a row at once, or each
def test_packed_sequences_are_what_they_are_alone(length):
    """Outputs and gradients, one of the sequences without a key, one of a single token."""
    case = Case("hedgehog", "llama", False, {"ridge": "learned", "feature_dim": 64})
    mechanism = case.make()
    heads = [x.requires_grad_() for x in case.heads(length)]
    ids = (torch.arange(length) >= torch.tensor([[3], [20], [length - 1]])).sum(0).expand(len(heads[0]), -1)
    mask = (torch.arange(length) >= 3).expand_as(ids)
    parts = [mechanism(*(x[:, :, ids[0] == i] for x in heads))[0] for i in range(1, 4)]
    want = torch.cat([torch.zeros_like(parts[0][:, :, :3]), *parts], dim=2)
    got, _ = mechanism(*heads, mask, ids)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    wanted = [*heads, *mechanism.parameters()]
    gradients = [torch.autograd.grad(output.sin().sum(), wanted) for output in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)


def test_it_finds_a_key_among_many_that_are_alike():
    """Where averages blur, as every weight is positive: 30 keys, all within 37 degrees of each other."""
    key, value = features(1, 1, 30, 40) + 0.5, torch.randn(1, 1, 30, 4, dtype=torch.float64)
    unit = unit_length(key[0, 0])
    assert (unit @ unit.T).min() > 0.8
    got = ridge_attention(key, key, value, Features, Features, torch.tensor([1e-6], dtype=torch.float64))
    average = torch.softmax((unit @ unit.T).log(), -1) @ value[0, 0]
    assert (got - value).abs().max() < 1e-3 < 1 < (average - value).abs().max()


@pytest.mark.parametrize(("penalty", "width"), [(0.0, 64), (1e-9, 64), (0.0, 16)])
def test_there_is_a_solution_for_many_keys_that_are_equal(penalty, width):
    """float32 rounds a sum of 20,000 equal keys by far more than such a penalty."""
    key = features(1, 1, 1, width, dtype=torch.float32).expand(1, 1, 20_000, width)
    value = torch.ones(1, 1, 20_000, 2)
    got = ridge_attention(key, key, value, Features, Features, torch.tensor([penalty]))
    torch.testing.assert_close(got, value, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["hedgehog", "performer", "retention"])
def test_the_average_beside_it_is_the_mechanism_without_it(name):
    cases = [Case(name, "llama", False, options) for options in ({}, {"ridge": "learned"})]
    plain, both = (case.make() for case in cases)
    heads = cases[0].heads(70)
    with torch.no_grad():
        both.ridge.average_scale.fill_(1)
        both.ridge.ridge_scale.zero_()
        torch.testing.assert_close(both(*heads)[0], plain(*heads)[0], rtol=0, atol=0)
        both.ridge.ridge_scale.fill_(1)
        assert (both(*heads)[0] - plain(*heads)[0]).abs().max() > 0.1


def test_every_parameter_of_it_learns():
    mechanism, case = Case("hedgehog", "llama", False, {"ridge": "learned"}).make(), Case("hedgehog", "llama", False)
    mechanism(*case.heads(70))[0].sin().sum().backward()
    for name, parameter in mechanism.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().min(0).values.max() > 0, name


@pytest.mark.parametrize("architecture", ["gpt2", "bart"])
def test_layers_that_may_not_see_all_keys_refuse_it(architecture):
    model = tiny_model(architecture, architecture == "gpt2")
    with pytest.raises(UnsupportedModeError, match=r"ridge='learned' .* causal layer \d+ .* deltanet"):
        patch_model(model, "hedgehog", ridge="learned")


@pytest.mark.parametrize("name", ["hybrid", "mixed_chunk"])
def test_mechanisms_with_a_joint_denominator_refuse_it(name):
    with pytest.raises(OptionError, match=r"linear_options must be options without ridge, got \{'ridge'"):
        make_config(name, {"linear_options": {"ridge": "learned"}})


def test_bad_values_are_named():
    with pytest.raises(OptionError, match=r"ridge must be None or 'learned', got 0\.1"):
        make_config("hedgehog", {"ridge": 0.1})
