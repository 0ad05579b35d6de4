"""What is particular to the hybrid: its linear part, where its mix starts, and one denominator for both."""

from __future__ import annotations

import pytest
import torch

from hf_linattn import OptionError, UnknownNameError, get_mechanisms, list_mechanisms, patch_model
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.linear import LinearMechanism
from hf_linattn.ops import naive
from hf_linattn.testing import Case, random_tokens, tiny_model

PERFORMER = {"linear": "performer", "linear_options": {"num_features": 16, "decay": "learned"}, "window_size": 9}


def by_query(mechanism, query, key, value) -> torch.Tensor:
    """The formula for one query of one head at a time, in float64, with nothing taken out of the exponentials."""
    config, layer, phi = mechanism.config, mechanism.layer, mechanism.linear.feature_map.exact
    rates = mechanism.linear.log_decay_rate.exp()
    output = torch.zeros_like(query)
    for h in range(query.shape[1]):
        shared = h // (query.shape[1] // key.shape[1])
        for i in range(query.shape[2]):
            j = torch.arange(i + 1 if layer.causal else key.shape[2])
            q, k = query[:, h, i, None], key[:, shared, j]
            near = ((i - j).abs() < config.window_size) | (j < config.num_sinks)
            exact = (layer.scaling * (q * k).sum(-1)).exp()
            kernel = (phi(q) * phi(k)).sum(-1) * (mechanism.log_mix[h] - rates[shared] * (i - j).abs()).exp()
            weights = torch.where(near, exact, kernel)
            output[:, h, i] = ((weights / weights.sum(-1, keepdim=True))[..., None] * value[:, shared, j]).sum(1)
    return output


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [0.5, 4.0])
def test_equals_the_formula(causal, size):
    """At size 4 logits and log scales reach into the hundreds; which part has the maximum changes by query."""
    case = Case("hybrid", "llama", causal, PERFORMER)
    query, key, value = case.heads(80, size=size)
    mechanism = case.make()
    with torch.no_grad():
        mechanism.log_mix.copy_(torch.tensor([-2.0, 0.0, 1.0, 60.0]))
        got, want = mechanism(query, key, value)[0], by_query(mechanism, query, key, value)
        matrix = naive.attend(mechanism.attention_matrix(query, key), value)
        single = case.make(torch.float32)
        single.log_mix.copy_(mechanism.log_mix)
        rough, _ = single(query.float(), key.float(), value.float())
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(matrix, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rough.double(), want, rtol=1e-3, atol=1e-3)


def test_a_window_of_the_whole_length_is_softmax_attention():
    case = Case("hybrid", "llama", True, {**PERFORMER, "window_size": 70})
    query, key, value = case.heads(70)
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(case.make()(query, key, value)[0], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("linear", "options"), [("linear", {}), ("performer", {}), ("performer", {"kernel": "hyperbolic"})]
)
def test_zero_vectors_start_with_the_weight_softmax_gives_them(linear, options):
    """So keys of zero get equal weights, whether near or far: the output is their mean."""
    case = Case("hybrid", "llama", True, {"linear": linear, "linear_options": options, "window_size": 3})
    query, key, value = case.heads(40, size=0.0)
    output, _ = case.make()(query, key, value)
    mean = value.repeat_interleave(2, 1).cumsum(2) / torch.arange(1, 41)[:, None]
    torch.testing.assert_close(output, mean, rtol=1e-6, atol=1e-6)  # the mix is made in float32


def test_a_map_without_weight_at_zero_starts_unmixed():
    mechanism = Case("hybrid", "gpt2", True, {"linear_options": {"feature_map": "relu"}, "linear": "linear"}).make()
    assert mechanism.log_mix.tolist() == [0.0] * 4


def test_the_state_is_constant_and_per_key_value_head():
    mechanism = Case("hybrid", "llama", True, PERFORMER).make(torch.float32)
    case = Case("hybrid", "llama", True, PERFORMER)
    shapes = []
    for length in (1, 40, 300):
        _, state = mechanism(*case.heads(length, dtype=torch.bfloat16))
        shapes.append([tuple(x.shape) for x in state])
        assert {x.dtype for x in state} == {torch.float32, torch.int64}
    assert shapes == [[(2, 2, 8, 8)] * 2 + [(2, 2, 4, 8)] * 2 + [(2, 2, 16, 9), (2, 2), (2,)]] * 3


def test_directions_are_redrawn_as_performer_redraws_them():
    options = {"linear": "performer", "linear_options": {"num_features": 16, "redraw_interval": 1}}
    model = patch_model(tiny_model("gpt2", True, torch.float32), "hybrid", **options).train()
    projection = next(iter(get_mechanisms(model).values())).linear.feature_map.projection
    model(random_tokens(1, 9))
    first = projection.clone()
    model(random_tokens(1, 9))
    assert not torch.equal(first, projection)


def test_the_seed_reaches_the_linear_part():
    def projection(**options):
        return Case("hybrid", "gpt2", True, {**PERFORMER, **options}).make().linear.feature_map.projection

    assert torch.equal(projection(seed=3), projection(seed=3))
    assert not torch.equal(projection(), projection(seed=3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"linear": "softmax"}, OptionError, "linear must be one of .*linear.*performer.*, got 'softmax'"),
        ({"linear": "hybrid"}, OptionError, "linear must be one of .*linear.*performer.*, got 'hybrid'"),
        ({"linear": "perfomer"}, OptionError, "linear must be one of .*performer.*, got 'perfomer'"),
        ({"linear_options": 3}, OptionError, "linear_options must be None or a dict of options, got 3"),
        ({"linear": "performer", "linear_options": {"num_feature": 3}}, OptionError, "did you mean num_features"),
        ({"linear": "performer", "linear_options": {"kernel": "sofmax"}}, UnknownNameError, "did you mean softmax"),
        ({"window_size": 0}, OptionError, "window_size must be an integer >= 1, got 0"),
        ({"window_size": True}, OptionError, "window_size must be an integer >= 1, got True"),
        ({"num_sinks": -1}, OptionError, "num_sinks must be an integer >= 0, got -1"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make_config("hybrid", options)


def test_every_linear_mechanism_can_be_the_far_part():
    kinds = {name: MECHANISMS.get(name) for name in list_mechanisms()}
    names = [n for n, kind in kinds.items() if issubclass(kind, LinearMechanism) and kind.decays_by_distance]
    for name in names:
        case = Case("hybrid", "llama", True, {"linear": name, "window_size": 5})
        query, key, value = case.heads(50)
        mechanism = case.make()
        want = naive.attend(mechanism.attention_matrix(query, key), value)
        torch.testing.assert_close(mechanism(query, key, value)[0], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({}, 8),
        ({"linear": "learned_exp"}, 8),
        ({"linear_options": {"feature_dim": 12}}, 12),
        ({"linear": "performer", "linear_options": {"num_features": 20}}, 20),
    ],
)
def test_a_learned_map_beside_a_window_makes_head_dim_features_unless_told(options, width):
    mechanism = Case("hybrid", "llama", True, options).make()
    assert mechanism.layer.head_dim == 8
    _, state = mechanism(*Case("hybrid", "llama", True).heads(5))
    assert state.kv.shape[2] == width
