"""What is particular to FAVOR+: its options, its layers' own directions, and when they are drawn anew."""

from __future__ import annotations

import pytest
import torch

from hf_linattn import OptionError, UnknownNameError, patch_model
from hf_linattn.backends import use_backend
from hf_linattn.config import make_config
from hf_linattn.ops import reference
from hf_linattn.testing import Case, random_tokens, tiny_model
from tests.helpers import directions_of


def test_layers_and_seeds_have_their_own_directions():
    first = directions_of(patch_model(tiny_model("gpt2", True), "performer"))
    other = directions_of(patch_model(tiny_model("gpt2", True), "performer", seed=1))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_weights_estimate_the_softmax_kernel_without_bias():
    """The estimate of a single weight is unbiased: its mean over seeds stays within the error of the mean."""
    case = Case("performer", "llama", True)
    query, key, _ = case.heads(11, size=0.6)
    scores = torch.einsum("bhid,bhjd->bhij", query, key.repeat_interleave(2, 1)) * 8**-0.5
    estimates = []
    for seed in range(100):
        phi = case.make(seed=seed, num_features=16).feature_map
        estimates.append(torch.einsum("bhif,bhjf->bhij", phi.exact(query), phi.exact(key).repeat_interleave(2, 1)))
    stacked = torch.stack(estimates)
    deviation = (stacked.mean(0) - scores.exp()) / (stacked.std(0) / 100**0.5)
    assert deviation.square().mean().sqrt().item() < 1.5  # standard errors; a biased kernel is tens away


@pytest.mark.parametrize("causal", [True, False])
def test_the_error_falls_as_the_root_of_num_features_and_is_almost_all_variance(causal):
    """Over 200 seeds: four times the features halve the RMS error, and the mean output is far closer than a draw."""
    case, count = Case("performer", "llama", causal), 200
    query, key, value = case.heads(23, size=0.3)
    allowed = reference.allowed_pairs(23, 23, causal)
    want = reference.attend(reference.softmax_matrix(query, key, case.make().layer.scaling, allowed), value)

    def errors(num_features: int) -> torch.Tensor:
        made = (case.make(seed=seed, num_features=num_features) for seed in range(count))
        return torch.stack([one(query, key, value)[0] - want for one in made])

    few, many = errors(64), errors(256)
    rms = [draws.square().mean().sqrt().item() for draws in (few, many)]
    assert rms[0] / rms[1] == pytest.approx(2, rel=0.15)
    # the mean of n unbiased draws is n^1/2 = 14 times closer; the ratio of two estimates has a bias of order 1 / m
    for draws, error in zip((few, many), rms, strict=True):
        assert draws.mean(0).square().mean().sqrt().item() < error / 8


def test_directions_are_redrawn_in_training_only_and_never_between_prefill_and_decoding():
    model = patch_model(tiny_model("gpt2", True, torch.float32), "performer", redraw_interval=2)
    tokens, first = random_tokens(1, 9), directions_of(model)
    model.eval()
    for _ in range(5):
        model(tokens)
    assert all(torch.equal(a, b) for a, b in zip(first, directions_of(model), strict=True))
    model.train()
    for _ in range(2):
        model(tokens)
    assert torch.equal(first[0], directions_of(model)[0])
    model(tokens)
    second = directions_of(model)
    assert not torch.equal(first[0], second[0])
    model.eval()
    model.generate(tokens, max_new_tokens=5, do_sample=False)
    assert torch.equal(second[0], directions_of(model)[0])


def test_a_resumed_run_draws_what_an_unbroken_one_would():
    tokens = random_tokens(1, 9)
    unbroken, broken = (
        patch_model(tiny_model("gpt2", True, torch.float32), "performer", redraw_interval=2).train() for _ in range(2)
    )
    for _ in range(3):
        unbroken(tokens), broken(tokens)
    resumed = patch_model(tiny_model("gpt2", True, torch.float32), "performer", redraw_interval=2).train()
    resumed.load_state_dict(broken.state_dict())
    for _ in range(4):
        unbroken(tokens), resumed(tokens)
    assert all(torch.equal(a, b) for a, b in zip(directions_of(unbroken), directions_of(resumed), strict=True))


def test_checkpointed_recomputation_sees_the_directions_of_its_forward():
    """With a draw before every forward, gradients under checkpointing still equal those without."""
    tokens = random_tokens(2, 33)
    gradients = []
    for checkpointing in (False, True):
        model = patch_model(tiny_model("llama", True), "performer", redraw_interval=1).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for _ in range(3):
            model.zero_grad()
            model(tokens, use_cache=False).logits.sin().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_gradients_are_of_the_directions_that_were_read(backend):
    """New ones may be drawn between a forward and its backward, by another forward."""
    case = Case("performer", "llama", True, {"num_features": 16})
    mechanism, heads = case.make(), [x.float().requires_grad_() for x in case.heads(11)]
    use_backend(mechanism.float(), backend)
    loss = mechanism(*heads)[0].sin().sum()
    want = torch.autograd.grad(loss, heads, retain_graph=True)
    mechanism.feature_map.redraw(torch.Generator().manual_seed(1))
    assert all(map(torch.equal, torch.autograd.grad(loss, heads), want))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_features": 0}, OptionError, "num_features must be an integer >= 1, got 0"),
        ({"num_features": 2.5}, OptionError, "num_features must be an integer >= 1, got 2.5"),
        ({"redraw_interval": -1}, OptionError, "redraw_interval must be None or an integer >= 1, got -1"),
        ({"kernel": "sofmax"}, UnknownNameError, "did you mean softmax"),
        ({"seed": -1}, OptionError, "seed must be an integer from 0 to 9223372036854775807, got -1"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make_config("performer", options)
