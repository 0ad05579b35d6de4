"""gated_deltanet against its formula, token by token, with trained parameters; what it reads of the layer's input."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from hf_linattn import OptionError, calibrate, get_mechanisms, patch_model
from hf_linattn.attention_call import AttentionCall, intercept_attention
from hf_linattn.config import make_config
from hf_linattn.errors import OperandError, UnsupportedModeError, UnsupportedModelError
from hf_linattn.ops.reference import allowed_pairs, attend, softmax_matrix
from hf_linattn.testing import Case, random_tokens, tiny_model
from hf_linattn.testing.invariants import INVARIANTS
from tests.mechanisms.test_recurrences import Trained, train

LENGTH = 75  # tokens, one chunk and a part
THETA = 10_000.0
CASES: list[dict[str, Any]] = [
    {},
    {"rotation": "kept", "beta_range": 2, "normalisation": "softmax"},
    {"expand_key": 3, "conv_size": 4},
    {"normalisation": "silu", "expand_key": 2, "expand_value": 2},
    {"expand_value": 2, "expand_key": 2, "normalisation": "softmax", "conv_size": 1},
    {"output_norm": True, "expand_value": 3, "beta_range": 2},
]
HIDDEN = {"gate_input": "hidden", "output_gate": True, "expand_value": 2, "conv_size": 3}
each_case = pytest.mark.parametrize("options", [*CASES, HIDDEN])
NUMBERS = ["1 causality", "2 padding", "4 decoding", "5 packing", "9 reference", "10 finite"]


def make(options: dict[str, Any], architecture: str = "llama") -> Any:
    return Trained("gated_deltanet", architecture, True, options).make()


def hidden_of(mechanism: Any, length: int, batch: int = 2) -> dict[str, Tensor]:
    """The layer's input, for a mechanism that reads it."""
    if not mechanism.reads_hidden:
        return {}
    generator = torch.Generator().manual_seed(9)
    shape = batch, length, mechanism.layer.hidden_size
    return {"hidden_states": torch.randn(shape, generator=generator, dtype=torch.float64)}


def unturned(x: Tensor) -> Tensor:
    """Heads [N, D] of a Llama without the turn of positions 0 ... N - 1: pairs of numbers as complex ones."""
    half = x.shape[1] // 2
    rate = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(len(x), half, dtype=torch.float64), -torch.arange(len(x))[:, None] * rate)
    back = torch.complex(x[:, :half].contiguous(), x[:, half:].contiguous()) * turn
    return torch.cat([back.real, back.imag], dim=1)


def prepared(mechanism: Any, x: Tensor, taps: Tensor | None, directions: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the gates see of the heads of one sequence [N, D], and its features."""
    x = unturned(x) if mechanism.config.rotation == "undone" else x
    if taps is not None:
        x = torch.stack([sum(taps[i] * x[t - i] for i in range(len(taps)) if t >= i) for t in range(len(x))])
    features = x if directions is None else x @ directions
    if mechanism.config.normalisation == "softmax":
        features = features.softmax(-1)
    elif mechanism.config.normalisation == "silu":
        features = features / (1 + (-features).exp())
    elif directions is not None:
        features = features.clamp(min=0)
    return x, features / features.norm(dim=-1, keepdim=True)


def read_sequence(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, h: int, hidden: Tensor | None) -> Tensor:
    """The formula for one head of one sequence [N, D], token by token."""
    config, layer = mechanism.config, mechanism.layer
    groups = layer.num_heads // layer.num_key_value_heads
    shared, copies = h // groups, config.expand_value
    of_query = None if config.expand_key == 1 else mechanism.query_directions[shared, h % groups]
    of_key = None if config.expand_key == 1 else mechanism.key_directions[shared]
    taps = (None, None) if config.conv_size is None else (mechanism.query_taps[h], mechanism.key_taps[shared])
    _, q = prepared(mechanism, query, taps[0], of_query)
    seen, k = prepared(mechanism, key, taps[1], of_key)
    x = hidden if config.gate_input == "hidden" else seen
    total = torch.zeros_like(value)
    for m in range(copies):
        own = shared * copies + m
        left = 1 / (1 + (x @ mechanism.forget.weight[own] + mechanism.forget.bias[own]).exp())
        beta = config.beta_range / (1 + (-x @ mechanism.write.weight[own] - mechanism.write.bias[own]).exp())
        state = torch.zeros(value.shape[1], k.shape[1], dtype=value.dtype)
        share = mechanism.memory_mix[h, m] if copies > 1 else 1
        for t in range(len(query)):
            state = left[t] * state @ (torch.eye(k.shape[1], dtype=k.dtype) - beta[t] * torch.outer(k[t], k[t]))
            state = state + beta[t] * torch.outer(value[t], k[t])
            total[t] += share * state @ q[t]
    if config.output_norm:
        total = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    if config.output_gate:
        total = total * 2 / (1 + (-hidden @ mechanism.gate.weight[h] - mechanism.gate.bias[h]).exp())[:, None]
    return mechanism.output_scale[h] * total


@torch.no_grad()
@each_case
def test_outputs_are_the_formula(options):
    """Grouped queries, pads on the left, on the right and inside, two and three packed sequences."""
    mechanism, heads = make(options), Case("gated_deltanet", "llama", True).heads(LENGTH)
    extra = hidden_of(mechanism, LENGTH)
    mask, ids = torch.ones(2, LENGTH, dtype=torch.bool), torch.zeros(2, LENGTH, dtype=torch.long)
    mask[0, :5], mask[0, 21:24], mask[1, 69:] = False, False, False
    ids[0, 40:], ids[1, 2:], ids[1, 67:] = 1, 1, 2
    for packing in (None, ids):
        got, _ = mechanism(*heads, mask, packing, **extra)
        matrix = mechanism.attention_matrix(*heads[:2], mask, packing, heads[2], **extra)
        want = torch.zeros_like(got)
        for b, h in itertools.product(range(2), range(4)):
            for number in (ids if packing is not None else 0 * ids)[b].unique():
                own = mask[b] & ((ids[b] == number) if packing is not None else True)
                hidden = extra["hidden_states"][b, own] if extra else None
                sequence = heads[0][b, h, own], heads[1][b, h // 2, own], heads[2][b, h // 2, own]
                want[b, h, own] = read_sequence(mechanism, *sequence, h, hidden)
        real = mask[:, None, :, None]
        torch.testing.assert_close(got * real, want, rtol=1e-6, atol=1e-6)  # the model's angles are float32
        torch.testing.assert_close(attend(matrix, heads[2]) * real, got * real, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@each_case
def test_calls_of_any_size_continue_the_state(options):
    mechanism, heads = make(options), Case("gated_deltanet", "llama", True).heads(150)
    extra = hidden_of(mechanism, 150)
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[0, :9], mask[1, 71:76] = False, False
    want, last = mechanism(*heads, mask, **extra)
    state, parts = None, []
    for span in torch.arange(150).split([70, 1, 1, 1, 66, 3, 8]):
        own = {name: x[:, span] for name, x in extra.items()}
        part, state = mechanism(*(x[:, :, span] for x in heads), mask[:, span], None, state, **own)
        parts.append(part)
    real = mask[:, None, :, None]
    torch.testing.assert_close(torch.cat(parts, 2) * real, want * real, rtol=1e-10, atol=1e-10)
    for a, b in zip(state, last, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    _, state = mechanism(*heads, **extra)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in state)  # no views of all that was read


@pytest.mark.parametrize("check", NUMBERS)
@pytest.mark.parametrize("options", [CASES[0], *CASES[3:5]])
def test_invariants_hold_with_trained_gates(check, options):
    INVARIANTS[check](Trained("gated_deltanet", "llama", True, options))


@each_case
def test_parameters_get_the_gradients_of_the_matrix(options):
    mechanism, (query, key, value) = make(options), Case("gated_deltanet", "llama", True).heads(40)
    named, extra = dict(mechanism.named_parameters()), hidden_of(mechanism, 40)
    got = torch.autograd.grad(mechanism(query, key, value, **extra)[0].sin().sum(), list(named.values()))
    naive = attend(mechanism.attention_matrix(query, key, value=value, **extra), value)
    want = torch.autograd.grad(naive.sin().sum(), list(named.values()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
        assert a.abs().max() > 0


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"beta_range": 2}, {"expand_value": 2}, {"output_gate": True}])
def test_orthonormal_keys_are_recalled_exactly(options):
    """Written with all their strength and never forgotten: a query reads the last value of its key."""
    case = Case("gated_deltanet", "gpt2", True, options)
    mechanism = case.make()
    mechanism.write.bias.fill_(0.0 if mechanism.config.beta_range == 2 else 100.0)  # b = 1
    mechanism.forget.bias.fill_(-100.0)  # a = 1
    basis = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)).Q
    which, asked = torch.randint(8, (2, 200), generator=torch.Generator().manual_seed(0))
    _, _, value = case.heads(200)
    key, query = (size * basis[x].expand(2, 4, 200, 8) for size, x in ((3, which), (5, asked)))
    want = torch.zeros_like(value)
    for i in range(200):
        before = [j for j in range(i + 1) if which[j] == asked[i]]
        if before:
            want[:, :, i] = value[:, :, before[-1]]
    got, _ = mechanism(query, key, value, **hidden_of(mechanism, 200))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_undone_rotations_do_not_depend_on_where_a_key_stands():
    """A key far back is found as well as near: turned keys of the same token are no longer the same key."""
    mechanism = Case("gated_deltanet", "llama", True).make()
    x = torch.randn(2, 2, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).expand(-1, -1, 50, -1)
    turned = mechanism.layer.rotation.back(x, -torch.arange(50)[None])
    assert not torch.allclose(turned[:, :, :1].expand_as(x), turned, atol=0.1)
    torch.testing.assert_close(mechanism._plain(turned, torch.arange(50)[None]), x, rtol=1e-5, atol=1e-5)


# how it starts


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated_deltanet", "deltanet"])
def test_gates_and_gain_start_as_softmax_looks_and_answers(name):
    case = Case(name, "llama", True, {"expand_value": 2} if name == "gated_deltanet" else {"gate": True})
    mechanism, (query, key, value) = case.make(), case.heads(37, size=3.0)
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, :5] = False
    mechanism.prepare(query, key, value, mask)
    weights = softmax_matrix(query, key, mechanism.layer.scaling, allowed_pairs(37, 37, True, mask, None, key.device))
    want, places = attend(weights, value), torch.arange(37)
    distance = ((weights * (places[:, None] - places)).sum(-1) * mask[:, None]).sum((0, 2)) / mask.sum()
    distance = distance.unflatten(0, (2, 2)).mean(1)
    bias = mechanism.forget.bias.view(2, -1)[:, 0] if name == "gated_deltanet" else mechanism.gate.bias
    torch.testing.assert_close((1 / (1 + bias.exp())) ** distance, torch.full((2,), 0.5).double(), rtol=1e-5, atol=0)
    if name == "gated_deltanet":
        second = mechanism.forget.bias.view(2, -1)[:, 1]
        torch.testing.assert_close(F.softplus(second), F.softplus(bias) / 4, rtol=1e-6, atol=0)
    real = mask[:, None, :, None]
    sizes = [(x * real).square().sum((0, 2, 3)) for x in (mechanism(query, key, value, mask)[0], want)]
    torch.testing.assert_close(*sizes, rtol=1e-6, atol=0)
    before = [p.clone() for p in mechanism.parameters()]
    mechanism.prepare(2 * query, key, value, mask)  # of a second batch
    assert all(torch.equal(a, b) for a, b in zip(before, mechanism.parameters(), strict=True))


# the layer's input


def hidden_model(dtype: torch.dtype = torch.float64) -> Any:
    model = patch_model(tiny_model("llama", True, dtype), "gated_deltanet", **HIDDEN)
    for mechanism in get_mechanisms(model).values():
        train(mechanism)
    return model


@torch.no_grad()
def test_the_input_reaches_every_call(tmp_path):
    """Steps, padding, packing and a saved model agree, and each layer gets its own input, not its heads alone."""
    model, tokens = hidden_model(), random_tokens(2, 41)
    want = model(tokens).logits
    cache, got = DynamicCache(), []
    for span in torch.arange(41).split([30, 1, 1, 9]):
        got.append(model(tokens[:, span], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-9, atol=1e-9)
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(tokens, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(padded[1, 7:], model(tokens[1:, 7:]).logits[0], rtol=1e-9, atol=1e-9)
    packed = model(tokens, position_ids=torch.cat([torch.arange(13), torch.arange(28)]).expand(2, -1), use_cache=False)
    torch.testing.assert_close(packed.logits[:, 13:], model(tokens[:, 13:]).logits, rtol=1e-9, atol=1e-9)
    for layer, mechanism in enumerate(get_mechanisms(model).values()):
        assert mechanism.gate.weight.shape == (4, 32) and mechanism.forget.weight.shape == (4, 32)
        mechanism.forget.weight.zero_()
        assert not torch.allclose(model(tokens).logits, want), layer
    model = hidden_model(torch.float32)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), [("gated_deltanet", {}), ("hybrid", {"linear": "gated_deltanet"})])
def test_positions_that_count_pads_are_not_undone(name, options):
    """A limit: the turns that are undone are those of a sequence's own tokens (docs/limits.md has the remedy)."""
    model, tokens = patch_model(tiny_model("llama", True, torch.float64), name, **options), random_tokens(1, 90)
    for mechanism in get_mechanisms(model).values():
        train(mechanism)
    want, mask = model(tokens[:, 7:]).logits, (torch.arange(90) >= 7).long()[None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(tokens, attention_mask=mask, position_ids=positions).logits[:, 7:]
    torch.testing.assert_close(padded, want, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(model(tokens, attention_mask=mask).logits[:, 7:], want, rtol=1e-6, atol=1e-6)


def test_the_input_reaches_calibration_and_training():
    model, tokens = patch_model(tiny_model("llama", True), "gated_deltanet", **HIDDEN), random_tokens(8, 24)
    errors = calibrate(model, [{"input_ids": tokens[:4]}, {"input_ids": tokens[4:]}], steps=3)
    assert len(errors) == 2 and all(x.after < x.before for x in errors.held_out.values())
    seen: dict[str, AttentionCall] = {}

    def remember(path: str, call: AttentionCall) -> Tensor:
        seen[path] = call
        return call.run(mechanisms[path])

    mechanisms = get_mechanisms(model)
    answers = {path: lambda call, path=path: remember(path, call) for path in mechanisms}
    with torch.no_grad(), intercept_attention(mechanisms, answers):
        model(tokens, use_cache=False)
    for path, call in seen.items():
        one = call.rows([3])
        assert call.hidden_states.shape == (8, 24, 32) and torch.equal(one.hidden_states[0], call.hidden_states[3])
        torch.testing.assert_close(one.run(mechanisms[path])[0], call.run(mechanisms[path])[3])
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(tokens, use_cache=False).logits.sin().sum().backward()
    assert all(m.forget.weight.grad.any() and m.gate.weight.grad.any() for m in mechanisms.values())


@torch.no_grad()
@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        ("by_head", {"plan": {"gated_deltanet": {"heads": 0, **HIDDEN}}}),
        ("fusion", {"members": {"local": {"window_size": 5}, "gated_deltanet": HIDDEN}}),
    ],
)
def test_members_of_others_get_the_input(mechanism, options):
    model, tokens = patch_model(tiny_model("llama", True), mechanism, **options), random_tokens(2, 30)
    for made in get_mechanisms(model).values():
        train(made)
        assert made.reads_hidden == ("gate_input='hidden'", "output_gate=True")
    want, cache, got = model(tokens).logits, DynamicCache(), []
    for span in torch.arange(30).split([20, 1, 9]):
        got.append(model(tokens[:, span], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-9, atol=1e-9)


def test_the_input_is_asked_for_by_the_name_of_the_option():
    mechanism, heads = make(HIDDEN), Case("gated_deltanet", "llama", True).heads(9)
    with pytest.raises(UnsupportedModeError, match=r"gate_input='hidden' and output_gate=True.*called without it"):
        mechanism(*heads)
    with pytest.raises(OperandError, match=r"hidden_states \[2, 8, 32\] must be \[2, 9, 32\] for gate_input='hidden'"):
        mechanism(*heads, hidden_states=torch.zeros(2, 8, 32))
    model = patch_model(tiny_model("llama", True), "gated_deltanet", output_gate=True)
    module = model.model.layers[0].self_attn
    with pytest.raises(UnsupportedModeError, match="layer 0 has output_gate=True, for which it reads"):
        type(module).forward(module, torch.zeros(1, 3, 32).double(), (torch.ones(1, 3, 8), torch.zeros(1, 3, 8)))
    layer = Case("gated_deltanet", "llama", True).make().layer
    with pytest.raises(UnsupportedModelError, match=r"output_gate=True reads the input of layer 0, whose width"):
        type(mechanism)(make_config("gated_deltanet", {"output_gate": True}), replace(layer, hidden_size=None))


def test_many_memories_forget_as_slowly_as_float32_can_say():
    mechanism = Case("gated_deltanet", "llama", True, {"expand_value": 90}).make(torch.float32)
    assert mechanism.forget.bias.isfinite().all()


def test_norms_need_the_values():
    mechanism, (query, key, _) = make({"output_norm": True}), Case("gated_deltanet", "llama", True).heads(9)
    with pytest.raises(UnsupportedModeError, match=r"output_norm=True .* needs the values; pass value="):
        mechanism.attention_matrix(query, key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotation": "turned"}, "rotation must be 'undone' or 'kept', got 'turned'"),
        ({"normalisation": "l1"}, "normalisation must be 'l2' or 'softmax' or 'silu', got 'l1'"),
        ({"gate_input": None}, "gate_input must be 'key' or 'hidden', got None"),
        ({"output_gate": 1}, "output_gate must be True or False, got 1"),
        ({"beta_range": 3}, "beta_range must be 1 or 2, got 3"),
        ({"expand_key": 0}, "expand_key must be an integer >= 1, got 0"),
        ({"conv_size": 0}, "conv_size must be None or an integer >= 1, got 0"),
        ({"expand_value": 1.5}, "expand_value must be an integer >= 1, got 1.5"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(OptionError, match=message):
        make_config("gated_deltanet", options)
