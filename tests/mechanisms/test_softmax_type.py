"""A sink in the denominator, for every mechanism that has the option: against matrices without one, and their sums."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_linattn import OptionError, list_mechanisms
from hf_linattn.attention_call import AttentionCall
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.softmax_type import SoftmaxTypeConfig, SoftmaxTypeMechanism
from hf_linattn.ops import reference as naive
from hf_linattn.testing import Case
from hf_linattn.training.losses.attention_transfer import attention_divergence
from tests.training.test_transfer import make_call

LENGTH = 77
SINK = torch.tensor([-1.5, 0.3, 2.0, 0.9], dtype=torch.float64)  # one per query head
NAMES = [name for name in list_mechanisms() if issubclass(MECHANISMS.get(name).config_class, SoftmaxTypeConfig)]
OPTIONS: dict[str, dict[str, Any]] = {  # several blocks, and some keys that are not seen
    "atrous": {"block_size": 16, "window_size": 7, "dilation": 3},
    "bigbird": {"block_size": 8, "num_global": 5, "num_random": 2},
    "checkerboard": {"block_size": 8, "window_size": 51},
    "conv": {"window_size": 19, "kernel_radius": 4},
    "dynamic_sparse": {"block_size": 16, "num_blocks": 2},
    "evo": {"window_size": 9, "kernel_radius": 3},
    "fixed_pattern": {"block_size": 8, "group_size": 20, "num_summary": 3},
    "mixed_chunk": {"block_size": 8, "linear": "linear"},
    "hybrid": {"window_size": 9, "num_sink_tokens": 2, "linear_options": {"decay": "learned"}, "initial_share": 1},
    "learned_sparse": {"block_size": 8, "reach": 3},
    "linformer": {"num_slots": 7, "block_size": 8},
    "local": {"block_size": 8, "window_size": 19},
    "longformer": {"block_size": 8, "window_size": 11, "num_global": 3},
    "lsh": {"num_buckets": 4, "bucket_size": 8},
    "radial": {"block_size": 8, "window_blocks": 2},
    "random_blocks": {"block_size": 8, "num_random": 2},
    "streaming": {"block_size": 8, "window_size": 11, "num_sink_tokens": 3},
    "sparse_transformer": {"block_size": 8, "window_size": 11, "stride": 3, "num_strides": 2},
    "synthesizer": {"initial_mix": 0.0, "max_length": 128},
    "vq": {"num_codes": 7, "block_size": 8},
}
each_name = pytest.mark.parametrize("name", NAMES)
each_mode = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def make_case(name: str, causal: bool, **options: Any) -> Case:
    """Grouped queries: four query heads, two key/value heads."""
    return Case(name, "llama", causal, {**OPTIONS.get(name, {}), **options})


def learned(case: Case, dtype: torch.dtype, sink: Tensor = SINK) -> Any:
    """Return the mechanism with these sinks as its trained parameter."""
    made: Any = dataclasses.replace(case, options={**case.options, "sink_logit": "learned"}).make(dtype)
    with torch.no_grad():
        made.sink_logit.copy_(sink)
    return made


def own_scores(name: str, causal: bool, query: Tensor, key: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Return the log of the weight, before any division, that each query gives to its own key [B, H, N]."""
    if name == "linformer" and not causal:  # to the mean key of its segment
        rows = []
        for keys, real in zip(key, mask, strict=True):
            place = real.long().cumsum(0) - 1
            slot = place * OPTIONS[name]["num_slots"] // int(real.sum())
            member = F.one_hot(slot.clamp(min=0)).to(keys) * real[:, None]
            rows.append(((member.mT @ keys) / member.sum(0)[:, None])[:, slot.clamp(min=0)])
        key = torch.stack(rows)
    return (query * naive.repeat_heads(key, query)).sum(-1) * scaling


def reference(case: Case, heads: list[Tensor], sink: Tensor, mask: Tensor) -> Tensor:
    """Return sum_j w_ij v_j / (exp(b_h) + sum_j w_ij), from p_ij = w_ij / sum_j w_ij without a sink, and w_ii."""
    query, key, value = heads
    mechanism = case.make()
    matrix = mechanism.attention_matrix(query, key, mask)
    own = own_scores(case.mechanism, case.causal, query, key, mask, mechanism.layer.scaling)
    log_sum = own - torch.where(mask[:, None], matrix.diagonal(dim1=-2, dim2=-1), 1.0).log()
    return naive.attend(matrix * torch.sigmoid(log_sum - sink[:, None])[..., None], value)


def make_mask(padded: bool) -> Tensor:
    """The first row padded on the left, the second on the right."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    if padded:
        mask[0, :9], mask[1, 70:] = False, False
    return mask


def test_every_mechanism_with_one_denominator_over_keys_has_the_option():
    assert set(NAMES) == {*OPTIONS, "softmax"}
    assert {name for name in list_mechanisms() if issubclass(MECHANISMS.get(name), SoftmaxTypeMechanism)} == set(NAMES)


@pytest.mark.covering(2)
@each_name
@each_mode
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_outputs_and_gradients_are_those_of_the_formula(name, causal, padded):
    case, mask = make_case(name, causal), make_mask(padded)
    heads = case.heads(LENGTH, size=0.7)
    exact = [x.float().double().requires_grad_() for x in heads]
    sink = SINK.clone().requires_grad_()
    want = reference(case, exact, sink, mask).transpose(1, 2)[mask]
    weight = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    want_grads = torch.autograd.grad((want * weight).sum(), [*exact, sink])
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):  # the C is for float32
        own = [x.detach().to(dtype).requires_grad_() for x in exact]
        mechanism = learned(case, dtype)
        got = mechanism(*own, mask if padded else None)[0].transpose(1, 2)[mask].double()
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        grads = torch.autograd.grad((got * weight).sum(), [*own, mechanism.sink_logit])
        for got_grad, want_grad in zip(grads, want_grads, strict=True):
            limit = tolerance * float(want_grad.abs().max())
            torch.testing.assert_close(got_grad.double(), want_grad, atol=limit, rtol=tolerance)
        with torch.no_grad():
            inferred = mechanism.eval()(*own, mask if padded else None)[0].transpose(1, 2)[mask]
        torch.testing.assert_close(inferred.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.covering(1)
@each_name
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_decoding_is_the_full_forward(name, dtype):
    case = make_case(name, True)
    heads = case.heads(LENGTH, size=0.7)
    want = reference(case, list(heads), SINK, make_mask(False))
    mechanism, parts, state = learned(case, dtype).eval(), [], None
    with torch.no_grad():
        for part in zip(*(x.to(dtype).split([41, 9] + [1] * 27, 2) for x in heads), strict=True):
            output, state = mechanism(*part, state=state)
            parts.append(output)
    torch.testing.assert_close(torch.cat(parts, 2).double(), want, atol=2e-5, rtol=2e-5)


@each_name
@each_mode
def test_a_layers_own_sinks_are_as_learned_ones(name, causal):
    case = make_case(name, causal)
    heads, sink = case.heads(LENGTH, dtype=torch.float32), torch.nn.Parameter(SINK.float())
    mechanism, own = case.make(torch.float32), learned(case, torch.float32)
    (got, _), (want, _) = mechanism(*heads, sink=sink), own(*heads)
    assert torch.equal(got, want)
    got_grad, want_grad = (torch.autograd.grad(x.square().sum(), s) for x, s in ((got, sink), (want, own.sink_logit)))
    assert torch.equal(got_grad[0], want_grad[0]) and bool(got_grad[0].any())
    matrices = mechanism.attention_matrix(*heads[:2], sink=sink), own.attention_matrix(*heads[:2])
    assert torch.equal(*matrices) and bool((matrices[0].sum(-1) < 1).all())
    assert "sink" not in " ".join(mechanism.state_dict()) and mechanism.log_sink(heads[0]) is None
    assert not torch.equal(mechanism(*heads)[0], got)  # nothing of it is left


@torch.no_grad()
@pytest.mark.parametrize("scale", ["exact", "maximum"])
@pytest.mark.parametrize("heads", [None, 1], ids=["hybrid", "by_head"])
def test_scores_of_a_hybrid_know_the_layers_own_sinks(scale, heads):
    """The share of far keys is limited beside the exact weights, and a sink is one of these."""
    options = {"window_size": 9, "num_sink_tokens": 2, "window_scale": scale, "initial_share": 0.4}
    of_heads = {"plan": {"hybrid": {"heads": heads, **options}}}
    case = Case(*(("hybrid", "llama", True, options) if heads is None else ("by_head", "llama", True, of_heads)))
    mechanism, (query, key, value), sink = case.make(), case.heads(LENGTH, size=0.7), SINK + 2
    matrix = mechanism.attention_matrix(query, key, sink=sink)
    for pairs in AttentionCall(query, key, value, None, None, {"sink": sink}).pairs(True, 32):
        scores = mechanism.scores(pairs).masked_fill(~pairs.allowed, -1e30)
        beside = mechanism.log_sink(scores, sink)[:, None, None].expand(*scores.shape[:3], 1)
        want = matrix[:, :, pairs.first : pairs.first + scores.shape[2], : scores.shape[3]]
        torch.testing.assert_close(torch.cat([scores, beside], -1).softmax(-1)[..., :-1], want)


@pytest.mark.covering(1)
@each_name
@each_mode
def test_a_sink_far_below_all_scores_is_none_and_one_far_above_is_all(name, causal):
    case = make_case(name, causal)
    for dtype in (torch.float64, torch.float32):
        heads = [x.requires_grad_() for x in case.heads(LENGTH, dtype=dtype)]
        want, _ = case.make(dtype)(*heads)
        want_grads = torch.autograd.grad(want.sin().sum(), heads)
        for below in (-1e4, float("-inf")):
            mechanism = learned(case, dtype, torch.full((4,), below))
            got, _ = mechanism(*heads)
            torch.testing.assert_close(got, want)
            *grads, of_sink = torch.autograd.grad(got.sin().sum(), [*heads, mechanism.sink_logit])
            for got_grad, want_grad in zip(grads, want_grads, strict=True):
                torch.testing.assert_close(got_grad, want_grad, atol=1e-5, rtol=1e-5)
            assert not of_sink.any()
        drained, _ = learned(case, dtype, torch.full((4,), 1e4))(*heads)
        assert not drained.any()
        assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(drained.sum(), heads))


@each_name
def test_one_is_softmax1(name):
    case = make_case(name, True, sink_logit="one")
    heads = case.heads(LENGTH)
    got, _ = case.make()(*heads)
    assert not [parameter for parameter, _ in case.make().named_parameters() if "sink" in parameter]
    without = make_case(name, True)
    torch.testing.assert_close(got, reference(without, list(heads), torch.zeros(4), make_mask(False)))
    # a query with one key whose score is 0 gives half of its weight away
    zeros, value = [torch.zeros_like(x[:, :, :1]) for x in heads[:2]], heads[2][:, :, :1]
    torch.testing.assert_close(case.make()(*zeros, value)[0], naive.repeat_heads(value, zeros[0]) / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_softmax_in_half_precision_rounds_no_sink(dtype):
    """The sinks are numbers that the dtype does not have, and the scaling, 8^-1/2, no power of two."""
    sink = torch.tensor([5.03, -3.017, 0.777, 7.891])
    case = Case("softmax", "llama", True)
    query, key, value = (x.to(dtype) for x in case.heads(33, size=0.1))
    got, _ = case.make(torch.float32)(query, key, value, sink=sink)
    matrix = case.make().attention_matrix(query.double(), key.double(), sink=sink)
    want = naive.attend(matrix, value.double())
    error = (got.double() - want).abs().amax((0, 2, 3)) / want.abs().amax((0, 2, 3))
    assert got.dtype == dtype and float(error.max()) < 2 * torch.finfo(dtype).eps
    for extreme in (-1e5, 1e5):
        assert bool(case.make(torch.float32)(query, key, value, sink=torch.full((4,), extreme))[0].isfinite().all())


def test_softmax_keeps_window_cap_and_packing_beside_a_sink():
    case = Case("softmax", "llama", True)
    query, key, value = case.heads(LENGTH)
    ids = (torch.arange(LENGTH) >= 30).long().expand(2, -1)
    allowed = naive.allowed_pairs(LENGTH, LENGTH, True, None, ids)
    steps = torch.arange(LENGTH)
    near = allowed & ((steps[:, None] - steps).abs() < 12)
    scores = torch.einsum("bhid,bhjd->bhij", query, naive.repeat_heads(key, query)) * 8**-0.5
    for cap in (None, 2.0):
        capped = scores if cap is None else cap * torch.tanh(scores / cap)
        weights = torch.where(near, capped.exp(), 0.0)
        want = naive.attend(weights / (weights.sum(-1, keepdim=True) + SINK.exp()[:, None, None]), value)
        got, _ = case.make()(query, key, value, None, ids, sink=SINK, sliding_window=12, softcap=cap, dropout=0.0)
        tolerance = 1e-9 if cap is None else 1e-5  # capped scores are taken in float32
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@each_mode
def test_composites_hand_a_layers_sinks_to_their_members(causal):
    plan = {"local": {"heads": 1, **OPTIONS["local"]}, "linear": {"heads": 0}}
    by_head = Case("by_head", "llama", causal, {"plan": plan})
    query, key, value = by_head.heads(LENGTH)
    mechanism = by_head.make()
    got, _ = mechanism(query, key, value, sink=SINK)
    want = reference(make_case("local", causal), [query, key, value], SINK, make_mask(False))
    torch.testing.assert_close(got[:, 2:], want[:, 2:])
    without, _ = mechanism(query, key, value)
    assert torch.equal(got[:, :2], without[:, :2])  # linear leaves them out, and says so
    assert mechanism.mechanisms_dropping_sinks() == ["linear"]
    assert mechanism.log_sink(query, SINK).tolist() == [-torch.inf, -torch.inf, *SINK[2:].tolist()]
    matrix = mechanism.attention_matrix(query, key, sink=SINK)
    torch.testing.assert_close(naive.attend(matrix, value), got)
    members = {"local": OPTIONS["local"], "linformer": OPTIONS["linformer"]}
    fusion = Case("fusion", "llama", causal, {"members": members}).make()
    cases = [make_case(name, causal) for name in fusion.members]
    outputs = [reference(case, [query, key, value], SINK, make_mask(False)) for case in cases]
    want = sum(share[..., None] * output for share, output in zip(fusion.shares(outputs), outputs, strict=True))
    torch.testing.assert_close(fusion(query, key, value, sink=SINK)[0], want)
    torch.testing.assert_close(naive.attend(fusion.attention_matrix(query, key, value=value, sink=SINK), value), want)
    assert fusion.mechanisms_dropping_sinks() == []


@each_mode
@pytest.mark.parametrize("target", [None, SINK + 0.4], ids=["softmax", "with sinks"])
@pytest.mark.parametrize("mechanism", ["hybrid", "linear", "by_head"])
def test_the_divergence_counts_a_sink_as_a_key_if_both_have_one(mechanism, causal, target):
    """Where only softmax has one, the weights among the keys are compared: those of both then add up to one."""
    options = {"hybrid": {**OPTIONS["hybrid"], "sink_logit": "one"}, "by_head": {"plan": {"linear": {"heads": 0}}}}
    made = Case(mechanism, "llama", causal, {**options.get(mechanism, {})}).make()
    call = make_call(Case("softmax", "llama", causal), sink=target)
    mask, ids = call.key_padding_mask, call.sequence_ids
    exact = Case("softmax", "llama", causal).make()
    got, wanted = (
        x.attention_matrix(call.query, call.key, mask, ids, **({"sink": target} if x.takes_sink else {}))
        for x in (made, exact)
    )
    without = {"hybrid": [], "linear": [0, 1, 2, 3], "by_head": [0, 1]}[mechanism]  # heads that have none
    wanted[:, without] = exact.attention_matrix(call.query, call.key, mask, ids)[:, without]
    both = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (wanted, got))
    wanted, got = (x.detach().clamp(min=1e-300) for x in both)
    terms = torch.where(wanted > 1e-14, wanted * (wanted / got).log(), 0.0)
    expected = terms.sum(-1).transpose(1, 2)[mask].mean()
    for block_size in (5, 64):
        found = attention_divergence(made, call, block_size).detach()
        torch.testing.assert_close(found, expected)
        assert float(found) >= 0


def test_what_cannot_be_is_refused():
    layer = Case("local", "llama", True).make().layer
    having = dataclasses.replace(layer, has_sinks=True)
    for name in NAMES:
        with pytest.raises(OptionError, match="sink_logit must be None for layer 0, which has learned sinks"):
            MECHANISMS.get(name)(make_config(name, {"sink_logit": "one"}), having)
        MECHANISMS.get(name)(make_config(name, {}), having)
    for options, message in (
        ({"sink_logit": "two"}, "sink_logit must be None, 'one' or 'learned', got 'two'"),
        ({"sink_logit": "learned", "initial_sink": "low"}, "initial_sink must be .* from -100 to 100, got 'low'"),
        ({"sink_logit": "learned", "initial_sink": True}, "initial_sink must be a number"),
    ):
        with pytest.raises(OptionError, match=message):
            make_config("local", options)
    for name, options in (("conv", {"form": "raw"}), ("evo", {"form": "raw"}), ("mixed_chunk", {"inside": "relu2"})):
        with pytest.raises(OptionError, match="sink_logit must be None with"):
            make_config(name, {**options, "sink_logit": "one"})
        assert Case(name, "llama", True, options).make().mechanisms_dropping_sinks() == [name]
