"""What is particular to by_head: which heads a mechanism gets, softmax among them, and plans that name heads."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_linattn import (
    OptionError,
    PatchConfig,
    UnknownNameError,
    get_mechanisms,
    get_patch_config,
    layer_sensitivity,
    patch_model,
    unpatch_model,
)
from hf_linattn.cache import state_bytes
from hf_linattn.config import make_config
from hf_linattn.ops import reference
from hf_linattn.ops.common.exact_softmax import softmax_attention
from hf_linattn.testing import Case, random_tokens, tiny_model
from tests.helpers import assert_close, generate, logits_of, make_tokens
from tests.models import make_model

LENGTH = 45
# one model with four key/value heads, one with two that are shared by two query heads each
PLANS = {
    "gpt2": {"local": {"heads": [3, 0], "window_size": 7}, "performer": {"heads": "1", "num_features": 5}},
    "llama": {"performer": {"heads": -1, "num_features": 5}},
}
OWNERS = {"gpt2": ["local", "performer", "softmax", "local"], "llama": ["softmax"] * 2 + ["performer"] * 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"window_size": 7},
    "performer": {"num_features": 5},
    "linear": {},
    "lsh": {},
    "hybrid": {},
    "softmax": {},
}
each_mode = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
each_architecture = pytest.mark.parametrize("architecture", PLANS)


def by_head(architecture: str, causal: bool, plan: dict[str, Any], **options: Any) -> Case:
    return Case("by_head", architecture, causal, {"plan": plan, **options})


@pytest.mark.covering(2)
@each_mode
@each_architecture
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_all_heads_to_one_mechanism_is_that_mechanism_bit_for_bit(architecture, causal, dtype):
    for name, options in {**OPTIONS, "linear": {"decay": "learned"}}.items():
        case = by_head(architecture, causal, {name: {"heads": None, **options}}, seed=3)
        heads = case.heads(LENGTH, dtype=dtype)
        want, state = Case(name, architecture, causal, {**options, "seed": 3}).make(dtype)(*heads)
        got, own = case.make(dtype)(*heads)
        assert torch.equal(got, want), name
        assert all(torch.equal(x, y) for x, y in zip(own or (), state or (), strict=True))


@each_mode
@each_architecture
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_head_has_the_output_of_its_mechanism_and_those_left_out_softmax(architecture, causal, dtype):
    case = by_head(architecture, causal, PLANS[architecture])
    heads = case.heads(LENGTH, dtype=dtype)
    got, _ = case.make(dtype)(*heads)
    for head, name in enumerate(OWNERS[architecture]):
        want, _ = Case(name, architecture, causal, OPTIONS[name]).make(dtype)(*heads)
        if name == "softmax":
            assert torch.equal(got[:, head], want[:, head])
        torch.testing.assert_close(got[:, head], want[:, head], rtol=1e-12, atol=1e-12)


@each_architecture
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_calls_that_continue_each_other_are_one_call_for_each_sequence(architecture, packed):
    """Rows padded on the left, inside and on the right; the last sequence of a packed row is gone on with."""
    case = by_head(architecture, True, PLANS[architecture])
    mechanism, heads = case.make(), case.heads(LENGTH, batch=3)
    mask = torch.ones(3, LENGTH, dtype=torch.bool)
    mask[0, :5], mask[1, 15:18], mask[2, 40:] = False, False, False
    ids = torch.zeros(3, LENGTH, dtype=torch.long)
    if packed:
        ids = (torch.arange(LENGTH) >= torch.tensor([11, 25, 9])[:, None]) + ids  # inside the first or second call
    state, outputs = None, []
    for first, end in ((0, 18), (18, 31), (31, 32), (32, LENGTH)):
        span = slice(first, end)
        own = ids[:, span] if packed and first < 32 else None
        output, state = mechanism(*(x[:, :, span] for x in heads), mask[:, span], own, state)
        outputs.append(output)
    got = torch.cat(outputs, 2)
    for row in range(3):
        for number in ids[row].unique():
            chosen = mask[row] & (ids[row] == number)
            want, _ = mechanism(*(x[row : row + 1, :, chosen] for x in heads))
            torch.testing.assert_close(got[row : row + 1, :, chosen], want, rtol=1e-9, atol=1e-9)


def test_a_state_holds_its_own_heads_in_the_dtype_of_the_model():
    case = by_head("gpt2", True, {"linear": "0-2"})
    mechanism, heads = case.make(torch.bfloat16), case.heads(LENGTH, dtype=torch.bfloat16)
    _, kept = mechanism(*heads)[1].split()
    assert kept.key.shape == (2, 1, LENGTH, 8) and kept.value.dtype == torch.bfloat16
    assert kept.key.untyped_storage().nbytes() == kept.key.nbytes
    assert mechanism(*heads, keep_state=False)[1] is None


@pytest.mark.parametrize(
    ("member", "options"),
    [("gated_deltanet", {"output_norm": True}), ("hybrid", {"num_hard_keys": 3, "window_size": 64})],
)
@pytest.mark.parametrize("mechanism", ["by_head", "fusion"])
@torch.no_grad()
def test_members_whose_weights_depend_on_values_are_given_these(mechanism, member, options):
    own = {"plan": {member: {"heads": [1], **options}}} if mechanism == "by_head" else {"members": {member: options}}
    case = Case(mechanism, "llama", True, own)
    heads = case.heads(150)
    matrix = case.make().attention_matrix(*heads[:2], value=heads[2])
    torch.testing.assert_close(reference.attend(matrix, heads[2]), case.make()(*heads)[0], rtol=1e-9, atol=1e-9)


def test_what_holds_of_all_members_holds():
    def traits_of(plan):
        mechanism = by_head("gpt2", True, plan).make()
        return mechanism.constant_state, mechanism.subquadratic, mechanism.continuous, mechanism.has_scores

    assert traits_of({"linear": None}) == (True, True, True, True)
    assert traits_of({"linear": 0}) == (False, False, True, True)
    assert traits_of({"lsh": "0-1", "linear": "2-3"}) == (True, True, False, False)


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
@pytest.mark.parametrize("plan", [{"softmax": None}, {"softmax": 1}], ids=str)
def test_softmax_heads_keep_the_layers_own_sliding_window_and_soft_cap(name, plan):
    model, ids = make_model(name), make_tokens(2, 21)
    model.set_attn_implementation("eager")  # in transformers 5.17 the other one passes over the soft cap
    logits, (generated, chosen_from) = logits_of(model, ids), generate(model, ids)
    patch_model(model, "by_head", plan=plan)
    assert_close(logits_of(model, ids), logits)
    again, logits = generate(model, ids)
    assert torch.equal(again, generated)
    assert_close(logits, chosen_from)
    assert max(layer_sensitivity(model, [{"input_ids": ids}]).values()) < 1e-9


@pytest.mark.parametrize("sink", ["one", "learned"])
def test_heads_left_out_have_no_option_of_the_softmax_that_is_named(sink):
    named = {"mechanism": "softmax", "heads": 0, "options": {"sink_logit": sink}}
    left_out = by_head("gpt2", True, [named])
    spelt_out = by_head("gpt2", True, [named, {"mechanism": "softmax", "heads": "1-3"}])
    heads = left_out.heads(LENGTH)
    assert torch.equal(left_out.make()(*heads)[0], spelt_out.make()(*heads)[0])
    assert list(left_out.make().members) == list(spelt_out.make().members)


def test_heads_left_out_are_with_those_of_a_softmax_without_options():
    members = by_head("gpt2", True, {"linear": 2, "softmax": 0}).make().members
    assert {name: member.layer.num_heads for name, member in members.items()} == {"linear": 1, "softmax": 3}


def test_softmax_heads_keep_the_dropout_of_attention():
    case = by_head("gpt2", True, {"linear": "0-1"})
    mechanism, heads = case.make(), case.heads(9)
    plain, dropped = (mechanism(*heads, dropout=rate)[0] for rate in (0.0, 0.9))
    assert torch.equal(plain[:, :2], dropped[:, :2]) and not torch.equal(plain[:, 2:], dropped[:, 2:])


def test_what_a_layer_is_told_reaches_the_members():
    plan = {"linformer": {"layers": None, "heads": 0, "sharing": "layers"}, "performer": {"heads": 1}}
    first, second = get_mechanisms(patch_model(tiny_model("llama", True), plan)).values()
    shared = second.members["linformer"].projections(torch.zeros(1).double())[0]
    assert shared is first.members["linformer"].key_projection


# -- plans that name heads --------------------------------------------------------------------------------------------


def test_a_plan_names_heads_of_some_layers():
    plan = {
        "performer": {"layers": "0-2", "heads": "0-1", "num_features": 64},
        "local": {"layers": "1-2", "heads": 2},
        "linear": 3,
    }
    config = PatchConfig.from_plan(plan, num_layers=5)
    performer = {"heads": "0-1", "num_features": 64}
    both = make_config("by_head", {"plan": {"performer": performer, "local": 2}})
    alone = make_config("by_head", {"plan": {"performer": performer}})
    assert config.layers == {0: alone, 1: both, 2: both, 3: make_config("linear", {})}
    options = {"window_size": 256, "block_size": 64, "keys_per_query": 1.0, "sink_logit": None, "initial_sink": -4.0}
    assert both.plan["local"] == {"heads": 2, **options}  # as other versions may differ
    assert PatchConfig.from_dict(json.loads(json.dumps(config.to_dict(), sort_keys=True))) == config


@pytest.mark.parametrize("heads", [range(2), (0, 1), {0, 1}, np.arange(2), torch.arange(2), [np.int64(0), 1]])
def test_heads_may_be_any_iterable(heads):
    config = make_config("by_head", {"plan": {"linear": {"heads": heads}, "local": np.int64(3)}})
    assert config == make_config("by_head", {"plan": {"linear": {"heads": [0, 1]}, "local": 3}})
    assert make_config("by_head", json.loads(json.dumps(config.to_options()))) == config


@each_architecture
def test_a_model_with_a_plan_over_heads_is_saved_loaded_and_restored(architecture, tmp_path):
    original, tokens = tiny_model(architecture, True, torch.float32), random_tokens(2, 33)
    plan = {
        "local": {"layers": 1, "heads": 1, "window_size": 4},
        "hedgehog": {"heads": [0]},
    }
    with torch.no_grad():
        want, keys = original(tokens).logits, list(original.state_dict())
        model = patch_model(original, plan)
        for mechanism in get_mechanisms(model).values():
            for parameter in mechanism.parameters():
                parameter += 0.1
        changed = model(tokens).logits
        assert (changed - want).abs().max() > 1e-3
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(tokens).logits, changed)
        assert get_patch_config(loaded) == get_patch_config(model)
        assert torch.equal(unpatch_model(model)(tokens).logits, want) and list(model.state_dict()) == keys


def test_the_bytes_of_a_cache_fall_with_the_heads_that_keep_softmax():
    def cache_bytes(length, heads):
        model = patch_model(tiny_model("gpt2", True, torch.float32), {"linear": {"heads": heads}})
        cache = DynamicCache()
        model(random_tokens(1, length), past_key_values=cache, use_cache=True)
        return state_bytes(cache)

    grown = [cache_bytes(60, heads) - cache_bytes(20, heads) for heads in ("0", "0-2", "0-3")]
    assert grown == [2 * 40 * 2 * 4 * 8 * kept for kept in (3, 1, 0)]  # layers, tokens, k and v, bytes, numbers


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ({"linear": {"heads": 2}}, OptionError, "heads 2 names head 2, but layer 0 has the key/value heads 0 to 1"),
        ({"linear": {"heads": "0-1"}, "local": {"heads": -1}}, OptionError, "head 1 to both 'linear' and 'local'; na"),
        ({"linear": {"heads": []}}, OptionError, r"heads must name at least one head, got \[\]; leave it out"),
        ({"linear": {"heads": "a"}}, OptionError, "heads must be like 3, '0-5', '0-10:2', '0-2,7' or .*got 'a'"),
        ({"linear": {"heads": 0, "decoy": 1}}, OptionError, "no option 'decoy'; did you mean decay"),
        ({"linaer": {"heads": 0}}, UnknownNameError, "unknown mechanism 'linaer'; did you mean linear"),
        ({"fusion": {"heads": 0}}, OptionError, "a member of 'by_head' must be a mechanism that is not made of oth"),
        ({"by_head": {"heads": 0}}, OptionError, "a member of 'by_head' must be a mechanism that is not made of othe"),
        ({"linear": {"layers": 1, "heads": 0}, "local": "0-1"}, OptionError, "layer 1 to both 'linear' and 'local';"),
        ({"local": "0-1", "linear": {"heads": 0}}, OptionError, "layer 0 to both 'local' and 'linear'; .*the heads"),
        ({"by_head": {"plan": {}}}, OptionError, "plan must be a dict of mechanisms and heads.*got {}"),
        ({"by_head": {"plan": "linear"}}, OptionError, "plan must be a dict of mechanisms and heads.*got 'linear'"),
        ({"by_head": {"plan": {"linear": "1", "local": [0, 1]}}}, OptionError, "head 1 to both 'linear' and 'local'"),
    ],
)
def test_bad_plans_are_named_and_change_nothing(plan, error, message):
    model, tokens = tiny_model("llama", True), random_tokens(1, 9)
    want = model(tokens).logits
    with pytest.raises(error, match=message):
        patch_model(model, plan)
    assert torch.equal(model(tokens).logits, want)


def test_softmax_attention_is_what_the_softmax_heads_compute():
    """Independently of the mechanism of that name, for grouped heads."""
    case = by_head("llama", True, {"linear": 0})
    query, key, value = case.heads(LENGTH)
    want = softmax_attention(query, key, value, scaling=8**-0.5, causal=True)
    assert torch.equal(case.make()(query, key, value)[0][:, 2:], want[:, 2:])
