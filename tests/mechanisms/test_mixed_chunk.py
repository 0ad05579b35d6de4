"""What is particular to mixed_chunk: chunks cut from the start, one denominator, squared relu, its state."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_linattn import OptionError, UnknownNameError
from hf_linattn.config import make_config
from hf_linattn.ops import reference
from hf_linattn.testing import Case

FAR = {"linear": "performer", "linear_options": {"num_features": 16, "decay": "learned"}}
SOFTMAX, SQUARES = {**FAR, "block_size": 8}, {**FAR, "block_size": 8, "inside": "relu2"}


def trained(case: Case, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """Return a mechanism whose parameters, one number per head each, are no longer the initial ones."""
    mechanism = case.make(dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += 0.7 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return mechanism


def loop_over_tokens(mechanism, query, key, value) -> torch.Tensor:
    """The formula for one query of one head at a time, with nothing taken out of the exponentials."""
    config, layer, phi = mechanism.config, mechanism.layer, mechanism.linear.feature_map.exact
    rates, output = mechanism.linear.log_decay_rate.exp(), torch.zeros_like(query)
    for b, h, i in itertools.product(*map(range, query.shape[:3])):
        shared = h * key.shape[1] // query.shape[1]
        j = torch.arange(i + 1 if layer.causal else key.shape[2])
        q, k = query[b, h, i], key[b, shared, j]
        far = (phi(q[None]) * phi(k)).sum(-1) * (mechanism.log_mix[h] - rates[shared] * (i - j).abs()).exp()
        if config.inside == "softmax":
            own, least = (layer.scaling * k @ q).exp(), 0
        else:
            own, least = (layer.scaling * k @ q / 2 + mechanism.bias[h]).clamp(min=0) ** 2, len(j)
        weights = torch.where(i // config.block_size == j // config.block_size, own, far)
        output[b, h, i] = weights @ value[b, shared, j] / weights.sum().clamp(min=least)
    return output


@torch.no_grad()
@pytest.mark.parametrize("options", [SOFTMAX, SQUARES], ids=["softmax", "relu2"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [0.4, 3.0])
def test_equals_the_loop_over_tokens(options, causal, size):
    """At size 3 log scales reach into the tens; which part has the maximum, weights or count, changes by query."""
    case = Case("mixed_chunk", "llama", causal, options)
    query, key, value = case.heads(43, size=size)
    mechanism = trained(case)
    want = loop_over_tokens(mechanism, query, key, value)
    torch.testing.assert_close(mechanism(query, key, value)[0], want, rtol=1e-9, atol=1e-9)
    matrix = mechanism.attention_matrix(query, key)
    torch.testing.assert_close(reference.attend(matrix, value), want, rtol=1e-9, atol=1e-9)
    single, _ = trained(case, torch.float32)(query.float(), key.float(), value.float())
    torch.testing.assert_close(single.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [SOFTMAX, SQUARES, {"block_size": 1}, {"block_size": 64}])
def test_parts_of_any_size_give_what_the_whole_gives(options):
    case = Case("mixed_chunk", "llama", True, options)
    query, key, value = case.heads(93)
    mechanism = trained(case)
    want, end = mechanism(query, key, value)
    for sizes in ([1] * 93, [64, 16, 1, 12], [5, 88], [8, 8, 77]):
        state, parts, start = None, [], 0
        for size in sizes:
            span = slice(start, start + size)
            part, state = mechanism(query[:, :, span], key[:, :, span], value[:, :, span], None, None, state)
            parts.append(part)
            start += size
        torch.testing.assert_close(torch.cat(parts, 2), want, rtol=1e-10, atol=1e-10)
        sums, other = (x.kv * x.log_max.exp()[..., None, None] for x in (state, end))
        torch.testing.assert_close(sums, other, rtol=1e-10, atol=1e-10)
        for name in ("key", "value", "length"):
            assert torch.equal(getattr(state, name), getattr(end, name)), name


@pytest.mark.parametrize("options", [SOFTMAX, SQUARES])
def test_rows_of_different_lengths_continue_each_at_its_own_place(options):
    """Rows end inside a chunk, on its border and before any token; then all read on, in one part or by token."""
    case = Case("mixed_chunk", "llama", True, options)
    mechanism, lengths = trained(case), (0, 3, 8, 23, 40)
    query, key, value = case.heads(60, batch=5)
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    early, first = mechanism(*(x[:, :, :40] for x in (query, key, value)), mask)
    for sizes in ([20], [1] * 20, [7, 1, 12]):
        parts, state, start = [early], first, 40
        for size in sizes:
            span = slice(start, start + size)
            part, state = mechanism(*(x[:, :, span] for x in (query, key, value)), None, None, state)
            parts.append(part)
            start += size
        got = torch.cat(parts, 2)
        for row, length in enumerate(lengths):
            kept = torch.cat([torch.arange(length), torch.arange(40, 60)])
            want, _ = mechanism(*(x[row : row + 1, :, kept] for x in (query, key, value)))
            torch.testing.assert_close(got[row : row + 1, :, kept], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [SOFTMAX, SQUARES])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_begin_where_the_sequence_does(options, causal):
    """Padded on the left by 5, on the right by 11, and packed behind another: as alone."""
    case = Case("mixed_chunk", "llama", causal, options)
    query, key, value = case.heads(50)
    mechanism = trained(case)
    mask, ids = torch.ones(2, 50, dtype=torch.bool), (torch.arange(50) >= 19).long().expand(2, -1)
    mask[0, :5], mask[1, 39:] = False, False
    for sequence_ids in (None, ids):
        got, _ = mechanism(query, key, value, mask, sequence_ids)
        for row in range(2):
            spans = [mask[row]] if sequence_ids is None else [mask[row] & (ids[row] == n) for n in range(2)]
            for span in spans:
                want, _ = mechanism(*(x[row : row + 1, :, span] for x in (query, key, value)))
                torch.testing.assert_close(got[row : row + 1, :, span], want, rtol=1e-10, atol=1e-10)
        assert not got.transpose(1, 2)[~mask].any()


@pytest.mark.parametrize("cut", [16, 21, 24])
def test_no_scale_is_shared_with_the_future(cut):
    for options in (SOFTMAX, SQUARES):
        mechanism = trained(Case("mixed_chunk", "gpt2", True, options))
        heads = Case("mixed_chunk", "gpt2", True).heads(40)
        loud = torch.where(torch.arange(40) < cut, 1.0, 300.0)[:, None]
        want, _ = mechanism(*heads)
        got, _ = mechanism(*(x * loud for x in heads))
        torch.testing.assert_close(got[:, :, :cut], want[:, :, :cut], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_one_chunk_is_softmax_attention(causal):
    case = Case("mixed_chunk", "llama", causal, {**FAR, "block_size": 41})
    query, key, value = case.heads(41)
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(case.make()(query, key, value)[0], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("inside", ["softmax", "relu2"])
@pytest.mark.parametrize("linear", ["hedgehog", "linear", "performer"])
def test_zero_vectors_start_with_the_weight_softmax_gives_them(inside, linear):
    """So the output is the mean of the values, in a query's own chunk and beyond."""
    case = Case("mixed_chunk", "llama", True, {"inside": inside, "linear": linear, "block_size": 6})
    query, key, value = case.heads(40, size=0.0)
    mean = value.repeat_interleave(2, 1).cumsum(2) / torch.arange(1, 41)[:, None]
    torch.testing.assert_close(case.make()(query, key, value)[0], mean, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_small_squares_are_divided_by_the_number_of_keys_as_in_the_paper():
    """Its quadratic part plus its linear part over n, while weights stay below one on average; means if above."""
    case = Case("mixed_chunk", "gpt2", True, {"inside": "relu2", "block_size": 8, "linear": "linear"})
    query, key, value = case.heads(24, size=0.3)
    mechanism = case.make()
    mechanism.bias.zero_()
    mechanism.log_mix.fill_(-3.0)
    scores = (query @ key.mT * 8**-0.5 / 2).tril().clamp(min=0)
    phi = mechanism.linear.feature_map.exact
    own = torch.arange(24)[:, None] // 8 == torch.arange(24) // 8
    quadratic = (scores**2 * own) @ value
    linear = ((phi(query) @ phi(key).mT).tril() * ~own) @ value * torch.tensor(-3.0).exp()
    want = (quadratic + linear) / torch.arange(1, 25)[:, None]
    torch.testing.assert_close(mechanism(query, key, value)[0], want, rtol=1e-6, atol=1e-6)
    mechanism.bias.fill_(100.0)
    assert not mechanism.averages
    assert mechanism(query, key, value)[0].abs().max() <= value.abs().max()


def test_parameters_get_the_gradients_of_the_formula():
    for causal, options in itertools.product((False, True), (SOFTMAX, SQUARES, {"block_size": 8})):
        case = Case("mixed_chunk", "llama", causal, options)
        mechanism = trained(case)
        query, key, value = case.heads(45)
        mask = torch.ones(2, 45, dtype=torch.bool)
        mask[0, :9], mask[1, 30:] = False, False
        parameters = list(mechanism.parameters())
        weight = torch.randn(query.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        weight = weight * mask[:, None, :, None]
        got = torch.autograd.grad((mechanism(query, key, value, mask)[0] * weight).sum(), parameters)
        want = reference.attend(mechanism.attention_matrix(query, key, mask), value)
        for a, b in zip(got, torch.autograd.grad((want * weight).sum(), parameters), strict=True):
            assert b.any()
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_the_state_is_constant_and_per_key_value_head():
    case, shapes = Case("mixed_chunk", "llama", True, SOFTMAX), []
    for length in (1, 40, 300):
        output, state = case.make(torch.float32)(*case.heads(length, dtype=torch.bfloat16))
        assert output.dtype == torch.bfloat16
        shapes.append([tuple(x.shape) for x in state])
        assert {x.dtype for x in state} == {torch.float32, torch.int64}
    assert shapes == [[(2, 2, 8, 8)] * 2 + [(2, 2, 16, 9), (2, 2), (2,)]] * 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block_size": 0}, OptionError, "block_size must be an integer >= 1, got 0"),
        ({"inside": "relu"}, UnknownNameError, "unknown inside 'relu'; did you mean relu2"),
        ({"linear": "mixed_chunk"}, OptionError, "linear must be one of .*performer.*, got 'mixed_chunk'"),
        ({"linear": "gated_deltanet"}, OptionError, "linear must be one of .*performer.*, got 'gated_deltanet'"),
        ({"linear": "deltanet"}, OptionError, "linear must be one of (?!.*deltanet, ).*, got 'deltanet'"),
        ({"linear": "performer", "linear_options": {"num_feature": 3}}, OptionError, "did you mean num_features"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make_config("mixed_chunk", options)
