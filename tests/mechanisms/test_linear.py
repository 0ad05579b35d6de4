"""What is particular to linear attention: the state it keeps and the maps it takes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from hf_linattn import OptionError, UnknownNameError, get_mechanisms, patch_model
from hf_linattn.cache import state_bytes
from hf_linattn.config import make_config
from hf_linattn.ops.linear.attention_distance import matching_decay_rate
from hf_linattn.testing import Case, random_tokens, tiny_model


def test_recurrent_form_is_the_papers_recurrence():
    """S_i = S_{i-1} + phi(k_i) v_i^T, z_i = z_{i-1} + phi(k_i), o_i = phi(q_i) S_i / (phi(q_i) . z_i)."""
    case = Case("linear", "llama", True)
    mechanism = case.make()
    query, key, value = case.heads(9, batch=1)
    s, z, state = torch.zeros(2, 8, 8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.float64), None
    for i in range(9):
        here = slice(i, i + 1)
        got, state = mechanism(query[:, :, here], key[:, :, here], value[:, :, here], None, None, state)
        k, v = F.elu(key[0, :, i]) + 1, value[0, :, i]
        s, z = s + k[:, :, None] * v[:, None, :], z + k
        for head in range(4):
            q = F.elu(query[0, head, i]) + 1
            torch.testing.assert_close(got[0, head, 0], q @ s[head // 2] / (q @ z[head // 2]))
        torch.testing.assert_close(state.kv[0], torch.cat([s, z[..., None]], -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("architecture", "kv_heads"), [("gpt2", 4), ("llama", 2)])
def test_state_is_float32_per_key_value_head_and_of_constant_size(architecture, kv_heads, dtype):
    model = patch_model(tiny_model(architecture, True, dtype), "linear")
    sizes = []
    for length in (3, 300):
        cache = DynamicCache()
        with torch.no_grad():
            model(random_tokens(2, length), past_key_values=cache, use_cache=True)
        assert cache.layers[0].state.kv.shape == (2, kv_heads, 8, 9)
        assert all(t.dtype == torch.float32 for t in cache.layers[0].state)
        sizes.append(state_bytes(cache))
    assert sizes[0] == sizes[1] == 2 * 4 * (2 * kv_heads * 8 * 9 + 2 * kv_heads)  # layers, bytes, S and z, maxima


def test_unknown_feature_map_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean elu"):
        make_config("linear", {"feature_map": "eluu"})


LEARNED = ["hedgehog", "learned_exp", "t2r"]


@pytest.mark.parametrize("decay", [None, "learned"])
@pytest.mark.parametrize("name", LEARNED)
def test_learned_maps_get_the_gradients_of_the_naive_form(name, decay):
    """Queries and keys have weights of their own, per head, and every one of them learns."""
    for causal in (False, True):
        case = Case(name, "llama", causal, {"decay": decay, "feature_dim": 12})
        mechanism, heads = case.make(), case.heads(70)
        named = dict(mechanism.named_parameters())
        assert named["query_map.weight"].shape[:3] == (2, 2, 8) and named["key_map.weight"].shape[:2] == (2, 8)
        got = torch.autograd.grad(mechanism(*heads)[0].sin().sum(), list(named.values()))
        value = heads[2].repeat_interleave(2, 1)
        naive = mechanism.attention_matrix(*heads[:2]) @ value
        want = torch.autograd.grad(naive.sin().sum(), list(named.values()))
        for key, a, b in zip(named, got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
            assert a.abs().flatten(-1 if a.dim() == 1 else -2).sum(-1).min() > 0, key


@pytest.mark.parametrize("name", LEARNED)
def test_mechanism_is_its_feature_map_on_the_linear_base(name):
    tokens = random_tokens(2, 40)
    models = [
        patch_model(tiny_model("llama", True), *arguments, **options)
        for arguments, options in (
            ((name,), {"feature_dim": 10}),
            (("linear",), {"feature_map": name, "feature_dim": 10}),
        )
    ]
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    with torch.no_grad():
        assert torch.equal(models[0](tokens).logits, models[1](tokens).logits)


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({"feature_map": "hedgehog"}, 32),
        ({"feature_map": "t2r"}, 32),
        ({"feature_map": "learned_exp", "feature_dim": 5}, 5),
        ({"feature_map": "hedgehog", "feature_dim": 6}, 6),
        ({"feature_map": "favor_relu"}, 8),
        ({"feature_map": "favor_hyperbolic"}, 16),
        ({"feature_map": "favor_hyperbolic", "feature_dim": 40}, 40),
        ({"feature_map": "taylor"}, 45),
    ],
)
def test_feature_dim_is_the_width_of_the_state(options, width):
    case = Case("linear", "llama", True, options)
    _, state = case.make()(*case.heads(3))
    assert state.kv.shape == (2, 2, width, 9)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linear", {"feature_dim": 8}, "feature_dim must be None, .* feature map 'elu' is fixed, got 8"),
        (
            "linear",
            {"feature_map": "taylor", "feature_dim": 8},
            "feature_dim must be None, .*'taylor' is fixed, got 8",
        ),
        ("taylor", {"feature_dim": 8}, "mechanism 'taylor' has no option 'feature_dim'"),
        ("hedgehog", {"feature_dim": 7}, "feature_dim must be None or a multiple of 2, .* got 7"),
        ("hedgehog", {"feature_dim": 0}, "feature_dim must be None or an integer >= 1, got 0"),
        ("t2r", {"feature_dim": 0}, "feature_dim must be None or an integer >= 1, got 0"),
        ("t2r", {"feature_dim": 8.0}, "feature_dim must be None or an integer >= 1, got 8.0"),
        ("learned_exp", {"feature_dim": True}, "feature_dim must be None or an integer >= 1, got True"),
        ("hedgehog", {"decay": "fixed"}, "decay must be None, 'learned' or 'measured', got 'fixed'"),
        ("linear", {"self_weight": True}, "self_weight must be None or 'learned', got True"),
        ("deltanet", {"self_weight": "learned"}, "mechanism 'deltanet' has no option 'self_weight'"),
        ("hybrid", {"linear_options": {"self_weight": "learned"}}, "options without self_weight"),
        ("hybrid", {"linear_options": {"decay": "measured"}}, "options without decay='measured'"),
        ("mixed_chunk", {"linear_options": {"self_weight": "learned"}}, "options without self_weight"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(OptionError, match=message):
        make_config(name, options)


def test_fixed_maps_are_one_module_for_queries_and_keys():
    mechanism = next(iter(get_mechanisms(patch_model(tiny_model("llama", True), "linear")).values()))
    assert mechanism.maps == (mechanism.feature_map, mechanism.feature_map)


@pytest.mark.parametrize("name", LEARNED)
def test_queries_start_with_the_weights_of_their_keys_and_layers_with_their_own(name):
    options = {"feature_dim": 6 * 8}
    first, second = get_mechanisms(patch_model(tiny_model("llama", True), name, **options)).values()
    for query_weight, key_weight in zip(first.query_map.parameters(), first.key_map.parameters(), strict=True):
        assert torch.equal(query_weight, key_weight[:, None].expand_as(query_weight))
    assert not torch.equal(first.key_map.weight, second.key_map.weight)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["linear", "performer", "retention", "gla"])
def test_a_querys_own_token_has_the_share_its_formula_says(name, causal):
    """o_i = g_i v_i + (1 - g_i) average_i with g_i = sigmoid(a_h q_i . k_i + b_h); pads have none."""
    case = Case(name, "llama", causal, {"self_weight": "learned"})
    mechanism, plain = case.make(), Case(name, "llama", causal).make()
    query, key, value = case.heads(33)
    mask = torch.ones(2, 33, dtype=torch.bool)
    mask[0, :5] = False
    slope, bias = torch.tensor([[0.4, -0.3, 1.0, 0.0], [-1.0, 0.5, 2.0, 1.0]], dtype=torch.float64)
    with torch.no_grad():
        mechanism.self_weight.slope.copy_(slope)
        mechanism.self_weight.bias.copy_(bias)
        got, average = (m(query, key, value, mask)[0] for m in (mechanism, plain))
    for row in range(2):
        for head in range(4):
            own = (query[row, head] * key[row, head // 2]).sum(-1)
            share = mask[row] / (1 + torch.exp(-slope[head] * own - bias[head]))
            want = share[:, None] * value[row, head // 2] + (1 - share[:, None]) * average[row, head]
            torch.testing.assert_close(got[row, head], want)


def test_a_share_that_no_features_could_make_is_found():
    """Half of every query's weight on its own token: a matrix of full rank, for 40 keys and 8 features."""
    case, plain = Case("linear", "llama", False, {"self_weight": "learned"}), Case("linear", "llama", False).make()
    mechanism, heads = case.make(), [x.requires_grad_() for x in case.heads(40, batch=1)]
    with torch.no_grad():
        mechanism.self_weight.slope.zero_()
        mechanism.self_weight.bias.zero_()
    ranks = [torch.linalg.matrix_rank(m.attention_matrix(*heads[:2])) for m in (mechanism, plain)]
    assert ranks[0].unique().tolist() == [40] and ranks[1].max() <= 8
    mechanism(*heads)[0].sin().sum().backward()
    assert all(p.grad.abs().min() > 0 for p in mechanism.parameters())


def test_measured_rates_begin_where_softmax_attention_looks_as_far_and_are_then_left_alone():
    query, key, value = Case("linear", "llama", True).heads(50)
    for decay, itself in (("learned", True), ("measured", True), ("measured", False)):
        options = {"decay": decay} if itself else {"decay": decay, "self_weight": "learned"}
        mechanism = Case("linear", "llama", True, options).make()
        first = mechanism.log_decay_rate.detach().exp()
        mechanism.prepare(query, key, value, None)
        prepared = mechanism.log_decay_rate.detach().exp()
        want = matching_decay_rate(query, key, mechanism.layer.scaling, True, None, itself)
        torch.testing.assert_close(prepared, first if decay == "learned" else want)
        mechanism.prepare(3 * query, key, value, None)
        assert torch.equal(mechanism.log_decay_rate.detach().exp(), prepared)
    half = Case("linear", "llama", True, {"decay": "measured"}).make(torch.bfloat16).float()  # as calibrate has it
    half.prepare(query, key, value, None)
    want = matching_decay_rate(query, key, half.layer.scaling, True).float()
    torch.testing.assert_close(half.log_decay_rate.detach().exp(), want, rtol=1e-4, atol=0)
    assert mechanism.prepares and not Case("linear", "llama", True, {"decay": "learned"}).make().prepares
