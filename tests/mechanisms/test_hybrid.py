"""What is particular to the hybrid: its linear part, where its mix starts, and one denominator for both."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_linattn import OptionError, UnknownNameError, get_mechanisms, list_mechanisms, patch_model, register_mechanism
from hf_linattn.config import make_config
from hf_linattn.evaluation.fidelity import linear_share
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.deltanet import DeltanetMechanism
from hf_linattn.mechanisms.gated_deltanet import GatedDeltanetMechanism
from hf_linattn.mechanisms.linear import LinearMechanism
from hf_linattn.ops import reference
from hf_linattn.ops.hybrid.types import gate_logit
from hf_linattn.testing import Case, random_tokens, tiny_model

PERFORMER = {"linear": "performer", "linear_options": {"num_features": 16, "decay": "learned"}, "window_size": 9}
OPEN = {"initial_share": 1}


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
            near = ((i - j).abs() < config.window_size) | (j < config.num_sink_tokens)
            exact = (layer.scaling * (q * k).sum(-1)).exp()
            kernel = (phi(q) * phi(k)).sum(-1) * (mechanism.log_mix[h] - rates[shared] * (i - j).abs()).exp()
            shares = []
            for weights in (torch.where(near, exact, 0.0), torch.where(near, exact, kernel)):
                shares.append(weights / weights.sum(-1, keepdim=True))
            gate = 1.0 if mechanism.far_gate is None else torch.sigmoid(10 * mechanism.far_gate[h])
            weights = torch.lerp(*shares, torch.as_tensor(gate, dtype=query.dtype))
            output[:, h, i] = (weights[..., None] * value[:, shared, j]).sum(1)
    return output


@pytest.mark.parametrize("share", [1, 0.4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [0.5, 4.0])
def test_equals_the_formula(causal, size, share):
    """At size 4 logits and log scales reach into the hundreds; which part has the maximum changes by query."""
    case = Case("hybrid", "llama", causal, {**PERFORMER, "initial_share": share})
    query, key, value = case.heads(80, size=size)
    mechanism = case.make()
    with torch.no_grad():
        mechanism.log_mix.copy_(torch.tensor([-2.0, 0.0, 1.0, 60.0]))
        got, want = mechanism(query, key, value)[0], by_query(mechanism, query, key, value)
        matrix = reference.attend(mechanism.attention_matrix(query, key), value)
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
    case = Case("hybrid", "llama", True, {"linear": linear, "linear_options": options, "window_size": 3, **OPEN})
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
        assert {x.dtype for x in state[:4]} == {torch.bfloat16} and {x.dtype for x in state[4:6]} == {torch.float32}
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
        ({"num_sink_tokens": -1}, OptionError, "num_sink_tokens must be an integer >= 0, got -1"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make_config("hybrid", options)


def own_kind(base: type, **attributes) -> type:
    """Return a subclass with a config class of its own."""
    config = dataclass(type("OwnConfig", (base.config_class,), {}))
    return type("Own", (base,), {"config_class": config, **attributes})


@pytest.mark.parametrize(
    ("mechanism", "base"),
    [
        ("hybrid", LinearMechanism), ("hybrid", DeltanetMechanism), ("hybrid", GatedDeltanetMechanism),
        ("mixed_chunk", LinearMechanism),
    ],
)
@pytest.mark.parametrize("method", ["causal_attention", "causal_sequences", "log_decay", "weights"])
def test_a_far_part_with_outputs_of_its_own_is_refused_as_they_would_be_ignored(monkeypatch, mechanism, base, method):
    monkeypatch.setattr(MECHANISMS, "_entries", {name: MECHANISMS.get(name) for name in list_mechanisms()})
    register_mechanism("own")(own_kind(base, **{method: lambda self: None}))
    with pytest.raises(OptionError, match=f"one of .*linear.*; its own {method} would never be called, got 'own'"):
        make_config(mechanism, {"linear": "own"})
    assert make_config(mechanism, {}).linear == "hedgehog"


@pytest.mark.parametrize("attributes", [{}, {"weights": LinearMechanism.kernel_weights, "decays_by_distance": True}])
@pytest.mark.parametrize("mechanism", ["hybrid", "mixed_chunk"])
def test_a_far_part_that_inherits_its_outputs_or_says_they_are_the_same_is_taken(monkeypatch, mechanism, attributes):
    monkeypatch.setattr(MECHANISMS, "_entries", {name: MECHANISMS.get(name) for name in list_mechanisms()})
    kind = own_kind(LinearMechanism, **attributes)
    register_mechanism("own")(kind)
    assert type(Case(mechanism, "gpt2", True, {"linear": "own"}).make().linear) is kind


def test_every_linear_mechanism_can_be_the_far_part():
    kinds = {name: MECHANISMS.get(name) for name in list_mechanisms()}
    names = [n for n, kind in kinds.items() if issubclass(kind, LinearMechanism) and kind.decays_by_distance]
    for name in names:
        case = Case("hybrid", "llama", True, {"linear": name, "window_size": 5})
        query, key, value = case.heads(50)
        mechanism = case.make()
        want = reference.attend(mechanism.attention_matrix(query, key), value)
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


@pytest.mark.covering(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", ["exact", "maximum"])
@pytest.mark.parametrize("linear", ["linear", "performer", "hedgehog", "learned_exp", "t2r"])
def test_starts_as_its_window_whatever_the_features_make_of_large_heads(linear, scale, causal):
    """At size 6 features of some maps outweigh every exact weight: the far keys still have a thousandth at most."""
    window = {"window_size": 9, "num_sink_tokens": 2}
    case = Case("hybrid", "llama", causal, {**window, "linear": linear, "window_scale": scale})
    query, key, value = case.heads(80, size=6.0)
    mechanism = case.make()
    with torch.no_grad():
        got, alone = (m(query, key, value)[0] for m in (mechanism, Case("streaming", "llama", causal, window).make()))
        shares = (mechanism.attention_matrix(query, key) * far_pairs(80, **window)).sum(-1)
    assert 0 < shares.max() <= 1.0001e-3
    assert (got - alone).abs().max() <= 2.001e-3 * value.abs().max()


def far_pairs(length: int, window_size: int, num_sink_tokens: int) -> torch.Tensor:
    steps = torch.arange(length)
    return ((steps[:, None] - steps).abs() >= window_size) & (steps >= num_sink_tokens)


def test_training_opens_the_far_part_where_it_is_needed():
    """Recall of a token that only the far part can see: a share of a thousandth becomes more than a tenth."""
    model = patch_model(tiny_model("llama", True, torch.float32), "hybrid", window_size=2, num_sink_tokens=0)
    vocabulary = model.config.vocab_size

    def batch(seed: int) -> torch.Tensor:
        ids = random_tokens(32, 8, seed=seed).clamp(max=vocabulary - 2)
        ids[:, 1:-1], ids[:, -1] = vocabulary - 1, ids[:, 0]  # one token, nothing new, and the token again
        return ids

    before = linear_share(model, batch(-1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for step in range(100):
        ids = batch(step)
        loss = torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits[:, -2], ids[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before < 1e-3 and linear_share(model, batch(-1)) > 0.1
    assert loss < 0.5


@pytest.mark.parametrize("share", [0, 1e-7, 1.5, -1.0, math.nan, "half", True])
def test_a_share_that_could_not_open_is_refused(share):
    with pytest.raises(OptionError, match="initial_share must be a number from 1e-6 to 1"):
        make_config("hybrid", {"initial_share": share})


@pytest.mark.parametrize(
    ("mechanism", "options", "place"),
    [
        ("hybrid", {"window_size": 5, **OPEN}, ()),
        ("fusion", {"members": {"hybrid": {"window_size": 5, **OPEN}, "linear": {}}}, ("members", "hybrid")),
        ("by_head", {"plan": {"hybrid": {"heads": 0, "window_size": 5, **OPEN}}}, ("plan", "hybrid")),
    ],
    ids=["hybrid", "fusion", "by_head"],
)
def test_a_model_saved_before_there_was_a_gate_computes_what_it_did(tmp_path, mechanism, options, place):
    """Its options name none, and its weights have no parameter of it."""
    model = patch_model(tiny_model("llama", True, torch.float32), mechanism, **options)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    saved = config["hf_linattn"]["groups"][0]["options"]
    for name in place:
        saved = saved[name]
    del saved["initial_share"]
    file.write_text(json.dumps(config))
    again, tokens = AutoModelForCausalLM.from_pretrained(tmp_path), random_tokens(2, 30)
    assert not [name for name, _ in again.named_parameters() if "far_gate" in name]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_gate_that_was_opened_or_shut_too_far_goes_back():
    gate = torch.tensor([-3e38, -5.0, 0.0, 5.0, 3e38], requires_grad=True)
    share = torch.sigmoid(gate_logit(gate))
    (slope,) = torch.autograd.grad(share.sum(), gate)
    assert (slope > 1e-6).all() and (share > 0).all() and (share < 1).all()
    assert share[1] == share[0] and share[4] == share[3] > 0.999


@pytest.mark.parametrize("sink", [{}, {"sink_logit": "learned", "initial_sink": 0.5}])
@pytest.mark.parametrize("causal", [True, False])
def test_the_gradient_goes_through_the_maximum_that_the_window_is_measured_by(causal, sink):
    """Of rows longer than the window: within it the maximum cancels."""
    options = {"window_scale": "maximum", "window_size": 2, "num_sink_tokens": 0, "initial_share": 1, **sink}
    case = Case("hybrid", "llama" if causal else "bert", causal, options)
    mechanism, heads = case.make(), [x.requires_grad_() for x in case.heads(6, batch=1, size=0.5)]
    assert torch.autograd.gradcheck(lambda *heads: mechanism(*heads)[0], heads)
