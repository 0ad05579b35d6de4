"""What is particular to fusion: the pooling, its members' options, states and hooks, and whom calibration prefers."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_linattn import OptionError, UnknownNameError, calibrate, get_mechanisms, patch_model, set_backend
from hf_linattn.attention_call import intercept_attention
from hf_linattn.config import make_config
from hf_linattn.errors import UnsupportedModeError, UnsupportedModelError
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.composite import JoinedState
from hf_linattn.mechanisms.local import LocalMechanism
from hf_linattn.mechanisms.sequence import select_rows
from hf_linattn.ops import reference
from hf_linattn.support import check_architecture
from hf_linattn.testing import Case, random_tokens, tiny_model

LENGTH = 45
MEMBERS: dict[str, dict[str, Any]] = {
    "performer": {"num_features": 6, "decay": "learned"},
    "local": {"window_size": 5, "block_size": 8},
    "lsh": {"num_buckets": 4, "bucket_size": 3, "num_rounds": 2},
}
each_mode = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def trained(case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a fusion that judges its members, each token and head in its own way."""
    mechanism = case.make(dtype, **options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name in ("pool_weight", "pool_bias", "pool_score", "member_bias"):
            parameter = getattr(mechanism, name)
            parameter.copy_(1.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return mechanism


def masks() -> list[torch.Tensor | None]:
    """No padding; one row padded on the left and one on the right; a row without any token."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :6], mask[1, 38:] = False, False
    return [None, mask, torch.ones(2, LENGTH, dtype=torch.bool) & torch.tensor([[True], [False]])]


def pooled(mechanism: Any, matrices: dict[str, torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """The formula, token by token and head by head, from the matrices of the members."""
    heads, length = matrices["local"].shape[1:3]
    output = value.new_zeros(len(value), heads, length, value.shape[3])
    weight, bias, score = mechanism.pool_weight, mechanism.pool_bias, mechanism.pool_score
    for b in range(len(value)):
        for h in range(heads):
            own = value[b, h * value.shape[1] // heads]
            for i in range(length):
                found = [matrices[name][b, h, i] @ own for name in sorted(matrices)]
                logits = [
                    sum(score[h, u] * max(weight[h, u] @ x + bias[h, u], 0) for u in range(weight.shape[1])) + d
                    for x, d in zip(found, mechanism.member_bias[:, h], strict=True)
                ]
                beta = torch.stack(logits).softmax(0)
                output[b, h, i] = sum(share * x for share, x in zip(beta, found, strict=True))
    return output


@each_mode
@pytest.mark.parametrize("padding", range(3))
@torch.no_grad()
def test_equals_the_formula_over_the_members_own_matrices(causal, padding):
    case, mask = Case("fusion", "llama", causal, {"members": MEMBERS, "pool_size": 3}), masks()[padding]
    query, key, value = case.heads(LENGTH)
    mechanism = trained(case)
    alone = {name: Case(name, "llama", causal, options).make() for name, options in MEMBERS.items()}
    matrices = {name: member.attention_matrix(query, key, mask) for name, member in alone.items()}
    got, _ = mechanism(query, key, value, mask)
    matrix = mechanism.attention_matrix(query, key, mask, value=value)
    real = torch.ones(2, LENGTH, dtype=torch.bool) if mask is None else mask
    for output in (got, reference.attend(matrix, value)):
        want = pooled(mechanism, matrices, value).transpose(1, 2)[real]
        torch.testing.assert_close(output.transpose(1, 2)[real], want, rtol=1e-9, atol=1e-9)
    assert mechanism.shares([reference.attend(x, value) for x in matrices.values()]).std(2).min() > 1e-3  # by token


@each_mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_member_alone_is_that_mechanism_bit_for_bit(causal, dtype):
    for name, options in {**MEMBERS, "hybrid": {"window_size": 9}}.items():
        case = Case("fusion", "llama", causal, {"members": {name: options}, "seed": 3})
        heads = case.heads(LENGTH, dtype=dtype)
        want, state = Case(name, "llama", causal, {**options, "seed": 3}).make(dtype)(*heads)
        got, own = trained(case, dtype)(*heads)
        assert torch.equal(got, want), name
        assert all(torch.equal(x, y) for x, y in zip(own or (), state or (), strict=True))


@pytest.mark.parametrize("mask", masks()[:2], ids=["whole", "padded"])
@torch.no_grad()
def test_calls_that_continue_each_other_are_one_call(mask):
    """Between them the state is copied, pickled and its rows are swapped and swapped back."""
    case = Case("fusion", "llama", True, {"members": MEMBERS})
    mechanism, heads, swap = trained(case), case.heads(LENGTH), torch.tensor([1, 0])
    want, _ = mechanism(*heads, mask)
    outputs, state = [], None
    for first, end in ((0, 17), (17, 18), (18, 40), (40, LENGTH)):
        span = None if mask is None else mask[:, first:end]
        output, state = mechanism(*(x[:, :, first:end] for x in heads), span, None, state)
        outputs.append(output)
        assert {len(tensor) for tensor in state} == {2}
        state = select_rows(pickle.loads(pickle.dumps(copy.deepcopy(state))), swap)
        state = type(state)(*(tensor[swap] for tensor in state))
        assert isinstance(state, JoinedState) and len(list(state.split())) == 3
    real = torch.ones(2, LENGTH, dtype=torch.bool) if mask is None else mask
    got = torch.cat(outputs, 2)
    torch.testing.assert_close(got.transpose(1, 2)[real], want.transpose(1, 2)[real], rtol=1e-9, atol=1e-9)


@each_mode
def test_every_parameter_learns(causal):
    case = Case("fusion", "llama", causal, {"members": MEMBERS})
    mechanism, heads = trained(case), [x.requires_grad_() for x in case.heads(LENGTH)]
    want = reference.attend(mechanism.attention_matrix(*heads[:2], value=heads[2]), heads[2])
    everything = [*heads, *mechanism.parameters()]
    wanted = torch.autograd.grad(want.sin().sum(), everything)
    for x, y in zip(torch.autograd.grad(mechanism(*heads)[0].sin().sum(), everything), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)
        assert x.any()


def test_the_matrix_needs_the_values():
    case = Case("fusion", "gpt2", True)
    query, key, _ = case.heads(5)
    with pytest.raises(UnsupportedModeError, match=r"'fusion' weighs its members by their outputs.*pass value="):
        case.make().attention_matrix(query, key)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("members", "best"),
    [
        ({"local": {"window_size": 3}, "linear": {}}, "linear"),
        ({"local": {"window_size": 160}, "linear": {}, "lsh": {"num_buckets": 8, "bucket_size": 4}}, "local"),
    ],
)
@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_calibration_leaves_most_weight_to_the_member_nearest_to_softmax(architecture, members, best):
    model = patch_model(tiny_model(architecture, architecture != "bert", torch.float32), "fusion", members=members)
    calibrate(model, [{"input_ids": random_tokens(12, 60, seed=s)} for s in range(4)], steps=12)
    mechanisms, found = get_mechanisms(model), []

    def watch(mechanism):
        def answer(call):
            target, outputs = call.run_softmax(mechanism), [member(*call[:5])[0] for member in mechanism.parts()]
            errors = torch.stack([(x - target).square().sum((0, 2, 3)) for x in outputs])
            found.append((errors, mechanism.shares(outputs).mean((1, 3))))
            return target

        return answer

    watched = {path: watch(mechanism) for path, mechanism in mechanisms.items()}
    with torch.no_grad(), intercept_attention(mechanisms, watched):
        model(random_tokens(8, 60, seed=99))
    names = sorted(members)
    for errors, shares in found:  # [P, H]
        assert [names[place] for place in shares.argmax(0)] == [best] * 4
        assert torch.equal(errors.argmin(0), shares.argmax(0))
        assert shares.amax(0).min() > 0.6


def test_members_begin_with_the_shares_they_are_given():
    case = Case("fusion", "llama", True, {"members": MEMBERS, "shares": {"lsh": 1, "local": 2.5, "performer": 0.5}})
    query, key, value = case.heads(LENGTH)
    want = sum(
        share / 4 * Case(name, "llama", True, MEMBERS[name]).make()(query, key, value)[0]
        for name, share in {"lsh": 1.0, "local": 2.5, "performer": 0.5}.items()
    )
    torch.testing.assert_close(case.make()(query, key, value)[0], want, rtol=1e-6, atol=1e-6)
    equal = Case("fusion", "llama", True, {"members": MEMBERS}).make()
    shares = equal.shares([torch.randn(2, 4, 9, 8, dtype=torch.float64) for _ in range(3)])
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / 3))


def test_calibration_keeps_shares_that_were_given_and_fits_the_members():
    members, batches = {"local": {"window_size": 4}, "hedgehog": {}}, [{"input_ids": random_tokens(2, 33)}]
    model = tiny_model("gpt2", True, torch.float32)
    patch_model(model, "fusion", members=members, shares={"local": 1, "hedgehog": 9})
    before = copy.deepcopy(get_mechanisms(model))
    assert set(calibrate(model, batches, steps=3)) == set(before)
    for path, mechanism in get_mechanisms(model).items():
        for name, parameter in mechanism.named_parameters():
            kept = torch.equal(parameter, before[path].get_parameter(name))
            assert kept != name.startswith("members."), f"{path}.{name}"
    model = tiny_model("gpt2", True, torch.float32)
    patch_model(model, "fusion", members={"local": {}, "linear": {}}, shares={"local": 1, "linear": 1})
    assert calibrate(model, batches) == {}, "there is nothing to fit"


def test_the_order_of_members_in_a_file_does_not_matter(tmp_path):
    """config.json is written with sorted keys."""
    members = {"streaming": {"window_size": 4}, "linear": {}, "hedgehog": {"seed": 5}}
    model = patch_model(tiny_model("gpt2", True, torch.float32), "fusion", members=members)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    model.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["hf_linattn"]["groups"][0]["options"]["members"]
    assert list(text) == ["hedgehog", "linear", "streaming"]
    pattern = {"block_size": 64, "num_sink_tokens": 4, "positions": "model", "window_size": 4}
    assert text["streaming"] == {**pattern, "initial_sink": -4.0, "sink_logit": None}
    tokens = random_tokens(2, 33)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, model(tokens).logits)


def test_a_members_seed_is_the_fusions_unless_it_has_its_own():
    def projection(own, **options):
        case = Case("fusion", "gpt2", True, {"members": {"performer": options}, "seed": own})
        return case.make().members["performer"].feature_map.projection

    assert torch.equal(projection(3), projection(0, seed=3))
    assert not torch.equal(projection(3), projection(0))
    assert torch.equal(projection(3, seed=1), projection(4, seed=1))


def test_what_a_layer_is_told_reaches_the_members():
    members = {"performer": {"num_features": 16, "redraw_interval": 1}, "linformer": {"sharing": "layers"}}
    model = patch_model(tiny_model("gpt2", True, torch.float32), "fusion", members=members).train()
    first, second = get_mechanisms(model).values()
    assert second.members["linformer"].key_projection is None
    assert second.members["linformer"].projections(torch.zeros(1))[0] is first.members["linformer"].key_projection
    projection = first.members["performer"].feature_map.projection
    model(random_tokens(1, 9))
    before = projection.clone()
    model(random_tokens(1, 9))
    assert not torch.equal(projection, before)
    set_backend(model, "torch")
    model(random_tokens(1, 9), use_cache=False)
    assert {member.backend for member in first.parts()} == {"torch"}
    with pytest.raises(OptionError, match="mechanism 'fusion' of layer 0 has no backend 'compile'"):
        set_backend(model, "compile")


def test_it_holds_of_a_fusion_what_holds_of_all_its_members():
    def kinds_of(*members):
        mechanism = Case("fusion", "gpt2", True, {"members": {name: {} for name in members}}).make()
        return mechanism.constant_state, mechanism.continuous

    assert kinds_of("local", "linear") == (True, True)
    assert kinds_of("local", "lsh") == (True, False)
    assert kinds_of("random_blocks", "linear") == (False, MECHANISMS.get("random_blocks").continuous)


def test_a_member_without_the_form_that_a_layer_needs_says_so(monkeypatch):
    monkeypatch.setattr(LocalMechanism, "modes", frozenset({"causal"}))
    with pytest.raises(UnsupportedModeError, match="mechanism 'local' has no bidirectional form"):
        patch_model(tiny_model("bert", False), "fusion")


def test_values_need_not_be_as_wide_as_keys():
    case = Case("fusion", "llama", True, {"members": MEMBERS})
    layer = replace(case.make().layer, value_dim=6)
    query, key, value = case.heads(LENGTH)
    mechanism = MECHANISMS.get("fusion")(make_config("fusion", dict(case.options)), layer).double()
    matrix = mechanism.attention_matrix(query, key, value=value[..., :6])
    want = reference.attend(matrix, value[..., :6])
    torch.testing.assert_close(mechanism(query, key, value[..., :6])[0], want, rtol=1e-9, atol=1e-9)
    with pytest.raises(UnsupportedModelError, match="layer 0 has values of 8 numbers, fusion was made for 6"):
        mechanism(query, key, value)


def test_a_layers_own_width_of_values_is_known():
    row = check_architecture("deepseek_v3", "fusion")
    assert (row.status, row.layers) == ("patched", 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"members": {}}, OptionError, "members must be a dict of mechanisms and their options.*got {}"),
        ({"members": ["local"]}, OptionError, r"members must be a dict .*got \['local'\]"),
        ({"members": {"local": None}}, OptionError, "members must be a dict of mechanisms and their options"),
        ({"members": {"locla": {}}}, UnknownNameError, "unknown mechanism 'locla'; did you mean local"),
        ({"members": {"local": {"window": 3}}}, OptionError, "no option 'window'; did you mean window_size"),
        ({"members": {"local": {"window_size": 0}}}, OptionError, "window_size must be an integer >= 1, got 0"),
        ({"members": {"fusion": {}}}, OptionError, "a member of 'fusion' must be a mechanism that is not made of oth"),
        ({"members": {"by_head": {}}}, OptionError, "a member of 'fusion' must be a mechanism that is not made of ot"),
        ({"members": {"softmax": {}}}, OptionError, "a member of 'fusion' must be a mechanism that can stand for sof"),
        ({"shares": {"local": 1}}, OptionError, "shares must be a dict with a number .* for each of local, linear"),
        ({"shares": {"local": 1, "linear": 0}}, OptionError, "shares must be a dict with a number from 1e-6 to 1e6"),
        ({"shares": {"local": 1, "linear": True}}, OptionError, "shares must be a dict with a number from 1e-6"),
        ({"pool_size": 0}, OptionError, "pool_size must be an integer >= 1, got 0"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make_config("fusion", options)


def test_members_prepare_themselves():
    """A member finds its codes as it does alone, by_head's from its own heads."""
    case = Case("fusion", "llama", True, {"members": {"vq": {}, "linear": {}}})
    mechanism, alone = case.make(), Case("vq", "llama", True).make()
    query, key, value = case.heads(200)
    assert mechanism.prepares and not Case("fusion", "llama", True).make().prepares
    for x in (mechanism, alone):
        x.prepare(query, key, value, None)
    torch.testing.assert_close(mechanism.members["vq"].codebook, alone.codebook)
    loud = key * torch.tensor([1.0, 9.0])[:, None, None]
    codes = []
    for x in (key, loud):
        mechanism = Case("by_head", "llama", True, {"plan": {"vq": 0, "linear": 1}}).make()
        mechanism.prepare(query, x, value, None)
        codes.append(mechanism.members["vq"].codebook)
    torch.testing.assert_close(codes[0], codes[1])
    assert len(codes[0]) == 1 and bool(mechanism.members["vq"].counts.any())
