"""cosformer, retention, gla and deltanet against their formulas, token by token, with trained parameters."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from hf_linattn import OptionError, get_mechanisms, patch_model
from hf_linattn.attention_call import AttentionCall
from hf_linattn.config import make_config
from hf_linattn.errors import UnsupportedModeError
from hf_linattn.testing import Case, random_tokens, tiny_model
from hf_linattn.testing.invariants import CAUSAL_ONLY, INVARIANTS

LENGTH = 75  # tokens, one chunk and a part


@torch.no_grad()
def train(mechanism: nn.Module) -> Any:
    """Move all parameters away from where they start, the same way each time."""
    for seed, parameter in enumerate(mechanism.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        parameter += (0.5 * noise).to(parameter)
    return mechanism


@dataclass
class Trained(Case):
    """A case whose gates differ from token to token."""

    def make(self, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
        return train(super().make(dtype, **options))

    def model(self, dtype: torch.dtype = torch.float64) -> Any:
        model = super().model(dtype)
        for mechanism in get_mechanisms(model).values():
            train(mechanism)
        return model


CASES = [
    ("cosformer", {"max_length": 80}), ("cosformer", {}), ("retention", {"feature_map": "elu"}),
    ("gla", {"feature_map": "elu"}), ("gla", {"feature_map": "learned_exp", "feature_dim": 6}),
    ("deltanet", {"feature_map": "elu"}), ("deltanet", {"feature_map": "elu", "gate": True}),
    ("deltanet", {"feature_map": "learned_exp", "feature_dim": 6, "gate": True}),
]  # fmt: skip
MODES = [(*case, causal) for case in CASES for causal in (True, False) if causal or case[0] != "deltanet"]
NUMBERS = ["1 causality", "2 padding", "4 decoding", "5 packing", "9 reference", "10 finite"]
each_case = pytest.mark.parametrize(("name", "options", "causal"), MODES)


def features(mechanism: Any, query: Tensor, key: Tensor, b: int, h: int) -> tuple[Tensor, Tensor, int]:
    """Return phi of one head's queries and keys [N, F], and the number of its key/value head."""
    groups = query.shape[1] // key.shape[1]
    shared = h // groups
    q, k = query[b, h], key[b, shared]
    if mechanism.config.mechanism == "cosformer":
        return q.clamp(min=0), k.clamp(min=0), shared
    if mechanism.config.feature_map == "elu":
        return F.elu(q) + 1, F.elu(k) + 1, shared
    query_map, key_map = mechanism.query_map, mechanism.key_map
    of_query = (q @ query_map.weight[shared, h % groups] + query_map.bias[shared, h % groups]).exp()
    return of_query, (k @ key_map.weight[shared] + key_map.bias[shared]).exp(), shared


def pair_factors(mechanism: Any, key: Tensor, shared: int, tokens: list[int], i: int) -> Tensor:
    """Return what the weights of query i and each key of its sequence's `tokens` that it sees are multiplied by."""
    place = tokens.index(i)
    seen = range(place + 1 if mechanism.layer.causal else len(tokens))
    if mechanism.config.mechanism == "cosformer":
        longest = mechanism.config.max_length or (16384 if mechanism.layer.causal else len(tokens))
        return torch.tensor([math.cos(math.pi / 2 * (place - p) / longest) for p in seen], dtype=key.dtype)
    if mechanism.config.mechanism == "retention":
        gate = [[1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128, 1 - 1 / 256][shared]] * len(tokens)
    else:
        scores = key[tokens] @ mechanism.gate.weight[shared] + mechanism.gate.bias[shared]
        gate = (1 / (1 + scores.exp())).tolist()
    between = ((min(p, place) + 1, max(p, place) + 1) for p in seen)
    return torch.tensor([math.prod(gate[start:end]) for start, end in between], dtype=key.dtype)


def by_token(mechanism: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
    """The formula, one query of one head at a time."""
    output = torch.zeros(*query.shape[:3], value.shape[3], dtype=value.dtype)
    for b, h in itertools.product(*map(range, query.shape[:2])):
        q, k, shared = features(mechanism, query, key, b, h)
        for number in ids[b].unique():
            tokens = [j for j in range(query.shape[2]) if mask[b, j] and ids[b, j] == number]
            if mechanism.config.mechanism == "deltanet":
                read_deltanet(mechanism, q, k, key[b, shared], value[b, shared], h, shared, tokens, output[b, h])
                continue
            for place, i in enumerate(tokens):
                seen = tokens[: place + 1] if mechanism.layer.causal else tokens
                weights = k[seen] @ q[i] * pair_factors(mechanism, key[b, shared], shared, tokens, i)
                output[b, h, i] = weights @ value[b, shared, seen] / weights.sum() if weights.any() else 0
    return output


def read_deltanet(mechanism, q, k, key, value, h, shared, tokens, output) -> None:
    """S = g (I - beta k k^T) S + beta k v^T, o = s S^T q, with k and q of length 1."""
    state = torch.zeros(k.shape[1], value.shape[1], dtype=value.dtype)
    for i in tokens:
        unit = k[i] / k[i].square().sum().sqrt()
        beta = 1 / (1 + (-key[i] @ mechanism.write_weight[shared] - mechanism.write_bias[shared]).exp())
        state = state - beta * torch.outer(unit, unit) @ state
        if mechanism.config.gate:
            state = state / (1 + (key[i] @ mechanism.gate.weight[shared] + mechanism.gate.bias[shared]).exp())
        state = state + beta * torch.outer(unit, value[i])
        output[i] = mechanism.output_scale[h] * state.T @ q[i] / q[i].square().sum().sqrt()


@torch.no_grad()
@each_case
def test_outputs_are_the_formula(name, options, causal):
    """Grouped queries, pads on the left, on the right and inside, two and three packed sequences."""
    case = Trained(name, "llama" if options else "gpt2", causal, options)
    mechanism, heads = case.make(), case.heads(LENGTH)
    mask, ids = torch.ones(2, LENGTH, dtype=torch.bool), torch.zeros(2, LENGTH, dtype=torch.long)
    mask[0, :5], mask[0, 21:24], mask[1, 69:] = False, False, False
    ids[0, 40:], ids[1, 2:], ids[1, 67:] = 1, 1, 2
    for packing in (None, ids):
        got, _ = mechanism(*heads, mask, packing)
        want = by_token(mechanism, *heads, mask, torch.zeros_like(ids) if packing is None else ids)
        torch.testing.assert_close(got * mask[:, None, :, None], want, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), CASES)
def test_calls_of_any_size_continue_the_state(name, options):
    case = Trained(name, "llama", True, options if name != "cosformer" else {"max_length": 160})
    mechanism, heads = case.make(), case.heads(150)
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[0, :9], mask[1, 71:76] = False, False
    want, last = mechanism(*heads, mask)
    state, parts = None, []
    for span in torch.arange(150).split([70, 1, 1, 1, 66, 3, 8]):
        part, state = mechanism(*(x[:, :, span] for x in heads), mask[:, span], None, state)
        parts.append(part)
    real = mask[:, None, :, None]
    torch.testing.assert_close(torch.cat(parts, 2) * real, want * real, rtol=1e-10, atol=1e-10)
    for a, b in zip(state, last, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("check", "case"),
    [
        pytest.param(INVARIANTS[check], Trained(name, "llama", causal, options), id=f"{name}{options}{causal} {check}")
        for name, options, causal in MODES
        for check in NUMBERS
        if name in ("gla", "deltanet") and (causal or check not in CAUSAL_ONLY)
    ],
)
def test_invariants_hold_with_trained_gates(check, case):
    """As they start, gates are the same for all tokens."""
    check(case)


@torch.no_grad()
@each_case
def test_scores_are_logarithms_of_the_weights(name, options, causal):
    """For a few queries at a time, under padding and packing; where weights may be zero there are none."""
    mechanism = Trained(name, "llama", causal, options).make()
    assert mechanism.has_scores == (name in ("retention", "gla"))
    if mechanism.has_scores:
        query, key, value = Case(name, "llama", causal).heads(37)
        mask, ids = torch.ones(2, 37, dtype=torch.bool), (torch.arange(37) >= 20).long().expand(2, -1)
        mask[0, :2], mask[1, 30:33] = False, False
        want = mechanism.attention_matrix(query, key, mask, ids)
        for pairs in AttentionCall(query, key, value, mask, ids, {}).pairs(causal, 16):
            scores = mechanism.scores(pairs).masked_fill(~pairs.allowed, -math.inf)
            size, seen = scores.shape[2:]
            rows = want[:, :, pairs.first : pairs.first + size, :seen] * pairs.real
            torch.testing.assert_close(scores.softmax(-1).nan_to_num() * pairs.real, rows, rtol=1e-9, atol=1e-9)


@each_case
def test_parameters_get_the_gradients_of_the_matrix(name, options, causal):
    case = Trained(name, "llama", causal, options)
    mechanism, (query, key, value) = case.make(), case.heads(LENGTH)
    named = dict(mechanism.named_parameters())
    if not named:
        assert name == "cosformer" or options == {"feature_map": "elu"}
        return
    got = torch.autograd.grad(mechanism(query, key, value)[0].sin().sum(), list(named.values()))
    naive = mechanism.attention_matrix(query, key) @ value.repeat_interleave(2, 1)
    want = torch.autograd.grad(naive.sin().sum(), list(named.values()))
    for parameter, a, b in zip(named, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
        assert a.abs().min() > 0 or "map" in parameter, parameter


@each_case
def test_the_c_gives_what_pytorch_gives(name, options, causal):
    """Outputs and all gradients, in training and without gradients."""
    case = Trained(name, "llama", causal, options if name != "cosformer" else {"max_length": 160})
    query, key, value = case.heads(150, dtype=torch.float32)
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[1, :11] = False
    results = []
    for backend in ("auto", "torch"):
        mechanism, heads = case.make(torch.float32), [x.clone().requires_grad_() for x in (query, key, value)]
        mechanism.backend = backend
        output, _ = mechanism(*heads, mask)
        with torch.no_grad():
            inferred, _ = mechanism.eval()(*heads, mask)
        wanted = [*heads, *mechanism.parameters()]
        results.append([output, inferred, *torch.autograd.grad((output.sin() * mask[:, None, :, None]).sum(), wanted)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


# cosformer


@pytest.mark.parametrize("causal", [True, False])
def test_cosformer_refuses_more_tokens_than_max_length(causal):
    """Tokens of a sequence, without pads and without its neighbours."""
    case = Case("cosformer", "llama", causal, {"max_length": 20})
    mechanism, heads = case.make(), case.heads(21)
    mask, ids = torch.ones(2, 21, dtype=torch.bool), torch.zeros(2, 21, dtype=torch.long)
    ids[:, 9:] = 1
    mechanism(*heads, None, ids)
    message = "max_length of cosformer in layer 0 is 20, but a sequence has 21 tokens: .* max_length=32 or more"
    with pytest.raises(OptionError, match=message):
        mechanism(*heads, mask)
    mask[:, 3] = False
    mechanism(*heads, mask)


@torch.no_grad()
def test_cosformer_counts_what_was_read_before():
    model = patch_model(tiny_model("gpt2", True), "cosformer", max_length=20)
    cache = DynamicCache()
    model(random_tokens(2, 19), past_key_values=cache, use_cache=True)
    model(random_tokens(2, 1), past_key_values=cache, use_cache=True)
    with pytest.raises(OptionError, match="is 20, but a sequence has 21 tokens"):
        model(random_tokens(2, 1), past_key_values=cache, use_cache=True)


# retention


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        ({"fastest": 0.5}, [1 / 2, 1 / 4, 1 / 8, 1 / 16]),
        ({"fastest": 0.8, "slowest": 0.1}, [0.8, 0.4, 0.2, 0.1]),
        ({"fastest": 0.3, "slowest": 0.3}, [0.3] * 4),
    ],
)
def test_retention_is_linear_with_these_rates(options, shares):
    for causal in (True, False):
        case = Case("retention", "gpt2", causal, {**options, "feature_map": "elu"})
        retention, linear = case.make(), Case("linear", "gpt2", causal, {"decay": "learned"}).make()
        assert list(retention.state_dict()) == []
        gamma = 1 - torch.tensor(shares, dtype=torch.float64)
        linear.log_decay_rate.copy_((-gamma.log()).log())
        heads = case.heads(LENGTH)
        torch.testing.assert_close(retention(*heads)[0], linear(*heads)[0], rtol=1e-12, atol=1e-12)


# gla


@torch.no_grad()
def test_gla_starts_next_to_linear_and_can_forget_everything():
    options = {"feature_map": "elu"}
    for causal in (True, False):
        case = Case("gla", "llama", causal, {**options, "initial_decay": 1e-9})
        mechanism, (query, key, value) = case.make(), case.heads(LENGTH)
        want, _ = Case("linear", "llama", causal).make()(query, key, value)
        torch.testing.assert_close(mechanism(query, key, value)[0], want, rtol=1e-6, atol=1e-6)
        mechanism.gate.bias.fill_(100)  # 0.3 ** 100 of everything before is left
        got, _ = mechanism(query, key, value)
        torch.testing.assert_close(got, value.repeat_interleave(2, 1), rtol=1e-12, atol=1e-12)
        gates = Case("gla", "llama", causal).make().log_decay(key, None)
        torch.testing.assert_close(gates, torch.full_like(gates, -(2.0**-8)), rtol=1e-6, atol=0)


def test_hybrid_has_no_gates_beyond_its_window():
    with pytest.raises(OptionError, match=r"linear must be one of .*retention.*, got 'gla'"):
        make_config("hybrid", {"linear": "gla"})


# deltanet


@torch.no_grad()
@pytest.mark.parametrize("gate", [False, True])
def test_deltanet_replaces_what_a_key_stood_for(gate):
    """Orthogonal keys written with all their strength: a query reads the last value of its key, all of the others
    stay as they are; with a gate that shuts, only what was written last is left."""
    mechanism = Case("deltanet", "llama", True, {"feature_map": "relu", "gate": gate}).make()
    mechanism.write_bias.fill_(100)
    _, _, value = Case("deltanet", "llama", True).heads(200)
    which = torch.randint(8, (200,), generator=torch.Generator().manual_seed(0))
    key = 3 * F.one_hot(which, 8).double().expand(2, 2, 200, 8)
    asked = torch.randint(8, (200,), generator=torch.Generator().manual_seed(1))
    query = 5 * F.one_hot(asked, 8).double().expand(2, 4, 200, 8)
    if gate:
        mechanism.gate.bias.fill_(-100)
    want = torch.zeros(2, 4, 200, 8, dtype=torch.float64)
    for i in range(200):
        before = [j for j in range(i + 1) if which[j] == asked[i]]
        if before:
            want[:, :, i] = value[:, :, before[-1]].repeat_interleave(2, 1)
    torch.testing.assert_close(mechanism(query, key, value)[0], want, rtol=1e-12, atol=1e-12)
    if gate:
        mechanism.gate.bias.fill_(100)
        kept = (which == asked)[:, None] * value.repeat_interleave(2, 1)
        torch.testing.assert_close(mechanism(query, key, value)[0], kept, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_deltanet_stays_exact_in_float32_when_all_keys_are_alike():
    """The triangular systems are then furthest from the identity."""
    case = Case("deltanet", "llama", True)
    query, key, value = case.heads(1000)
    key = key[:, :, :1] + 1e-3 * key
    mechanism, single = case.make(), case.make(torch.float32)
    mechanism.write_bias.fill_(9)
    single.write_bias.fill_(9)
    want, _ = mechanism(query, key, value)
    got, state = single(query.float(), key.float(), value.float())
    assert (got.double() - want).abs().max() < 1e-5 * want.abs().max()
    assert state.memory.dtype == torch.float32 and state.memory.shape == (2, 2, 32, 8)


def test_deltanet_has_an_order():
    with pytest.raises(UnsupportedModeError, match="'deltanet' has no bidirectional form, which layer 0 needs"):
        patch_model(tiny_model("bert", False), "deltanet")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosformer", {"max_length": 0}, "max_length must be None or an integer >= 1, got 0"),
        ("cosformer", {"max_length": 0.5}, "max_length must be None or an integer >= 1, got 0.5"),
        ("retention", {"fastest": 1}, "fastest must be a float between 0 and 1, got 1"),
        ("retention", {"fastest": 0.0}, "fastest must be a float between 0 and 1, got 0.0"),
        ("retention", {"slowest": 0.5}, "slowest must be None or a float above 0 and at most fastest = 0.03125"),
        ("retention", {"decay": "learned"}, "mechanism 'retention' has no option 'decay'"),
        ("gla", {"decay": "learned"}, "mechanism 'gla' has no option 'decay'"),
        ("gla", {"initial_decay": 0.0}, "initial_decay must be a float above 0, at most 16, got 0.0"),
        ("gla", {"initial_decay": math.nan}, "initial_decay must be a float above 0, at most 16, got nan"),
        ("deltanet", {"gate": 1}, "gate must be True or False, got 1"),
        ("deltanet", {"feature_map": "elu", "feature_dim": 3}, "feature_dim must be None, .*'elu' is fixed, got 3"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(OptionError, match=message):
        make_config(name, options)
