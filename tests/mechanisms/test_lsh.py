"""LSH attention against its definition in loops, against transformers' Reformer, and free of the faults of others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from hf_linattn import OptionError, patch_model
from hf_linattn.config import make_config
from hf_linattn.testing import Case, random_tokens, tiny_model
from tests.helpers import generate, pad

SMALL = {"num_buckets": 4, "bucket_size": 5, "num_rounds": 3}
LENGTH = 61


def buckets(x: torch.Tensor, rotation: torch.Tensor, count: int) -> torch.Tensor:
    """argmax [x R, -x R] of vectors [N, D]."""
    rotated = x @ rotation[:, : count // 2].double()
    return torch.cat([rotated, -rotated], -1).argmax(-1)


def by_query(mechanism, query, key, value) -> torch.Tensor:
    """The union of what the rounds find, one query of one head at a time, in float64."""
    config, layer, rotations = mechanism.config, mechanism.layer, mechanism.rotations
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    count = config.num_buckets
    if not layer.causal:
        count = min(count, 2 * -(-length // (2 * config.bucket_size)))
    output = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            q, k, v = query[b, h], key[b, h // groups], value[b, h // groups]
            if config.shared_qk:
                group = slice(h // groups * groups, h // groups * groups + groups)
                mixed = (query[b, group] + k) / 2
                q, k = mixed[h % groups], mixed.mean(0)
                k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                of_query, of_key = ([buckets(x, r, count) for r in rotations] for x in (q, k))
            else:
                norms = k.norm(dim=-1)
                largest = norms.cummax(0).values if layer.causal else norms.max()
                lifted = torch.cat([k, (largest**2 - norms**2).clamp(min=0).sqrt()[:, None]], -1)
                of_query = [buckets(F.pad(q, (0, 1)), r, count) for r in rotations]
                of_key = [buckets(lifted, r, count) for r in rotations]
            for i in range(length):
                chosen = set()
                for hashed_query, hashed_key in zip(of_query, of_key, strict=True):
                    same = (hashed_key == hashed_query[i]).nonzero().flatten().tolist()
                    chosen |= set([j for j in same if j <= i][-config.bucket_size :])
                    if not layer.causal:
                        chosen |= set([j for j in same if j > i][: config.bucket_size])
                if not config.shared_qk:
                    chosen.add(i)
                elif len(chosen - {i}):
                    chosen.discard(i)
                index = sorted(chosen) or [i]
                output[b, h, i] = (layer.scaling * k[index] @ q[i]).softmax(0) @ v[index]
    return output


@pytest.mark.parametrize("shared_qk", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_a_softmax_over_the_union_of_the_rounds(causal, shared_qk):
    case = Case("lsh", "llama", causal, {**SMALL, "shared_qk": shared_qk})
    query, key, value = case.heads(LENGTH)
    mechanism = case.make()
    got, _ = mechanism(query, key, value)
    want = by_query(mechanism, query, key, value)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    assert (want - exact).abs().max() > 0.1  # and it is no softmax over everything


@pytest.mark.parametrize("causal", [False, True])
def test_one_chunk_equals_the_reformer_of_transformers(causal):
    """Shared queries and keys at transformers' temperature: x_i . x_j / |x_j|, oneself only if alone."""
    torch.manual_seed(0)
    config = ReformerConfig(
        hidden_size=32, num_attention_heads=4, attention_head_size=8, lsh_attn_chunk_length=LENGTH, num_hashes=1,
        lsh_attention_probs_dropout_prob=0.0, is_decoder=causal,
    )  # fmt: skip
    theirs = LSHSelfAttention(config, layer_idx=0).double().eval()
    hidden = torch.randn(2, LENGTH, 32, dtype=torch.float64)
    options = {"num_buckets": 1, "bucket_size": LENGTH, "num_rounds": 1, "shared_qk": True}
    with torch.no_grad():
        want = theirs(hidden).hidden_states
        projected = [part(hidden) for part in (theirs.query_key, theirs.value)]
        shared, value = (x.view(2, LENGTH, 4, 8).transpose(1, 2) for x in projected)
        got, _ = Case("lsh", "bert", causal, options).make()(shared, shared, value)
    torch.testing.assert_close(got.transpose(1, 2).flatten(2), want, rtol=1e-6, atol=1e-6)


def test_a_key_found_twice_counts_once():
    """With the same rotation in all rounds, several rounds are one."""
    query, key, value = Case("lsh", "llama", True).heads(LENGTH)
    one = Case("lsh", "llama", True, {**SMALL, "num_rounds": 1}).make()
    three = Case("lsh", "llama", True, SMALL).make()
    three.rotations.copy_(one.rotations.expand_as(three.rotations))
    torch.testing.assert_close(three(query, key, value)[0], one(query, key, value)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared_qk", [False, True])
def test_the_choice_of_keys_does_not_depend_on_the_future(shared_qk):
    """R8: sorting and chunking the whole sequence moves the borders of earlier chunks."""
    case = Case("lsh", "llama", True, {**SMALL, "shared_qk": shared_qk})
    query, key, value = case.heads(128)
    mechanism = case.make()
    before, _ = mechanism(query, key, value)
    changed = [x.clone() for x in (query, key, value)]
    for x in changed:
        x[:, :, 112:] = torch.randn(x[:, :, 112:].shape, dtype=x.dtype) * 20
    after, _ = mechanism(*changed)
    assert (after - before)[:, :, :112].abs().max() < 1e-12
    assert (after - before)[:, :, 112:].abs().max() > 0.1


def test_every_row_of_a_batch_decodes_with_its_own_state():
    """R7: transformers' Reformer looks all rows' keys up in row 0."""
    model = patch_model(tiny_model("llama", True), "lsh", **SMALL)
    rows = [random_tokens(1, length, seed=length)[0] for length in (33, 40, 27)]
    ids, mask = pad(rows, 0)
    tokens, logits = generate(model, ids, attention_mask=mask)
    for row, got_tokens, got in zip(rows, tokens, logits, strict=True):
        alone_tokens, alone = generate(model, row[None], attention_mask=torch.ones(1, len(row), dtype=torch.long))
        assert torch.equal(got_tokens, alone_tokens[0])
        torch.testing.assert_close(got, alone[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shared_qk", [False, True])
def test_a_token_is_written_where_the_state_of_a_cache_lies(shared_qk):
    """Every token takes the place of another; a copy of the cache, and beams, go their own way."""
    model = patch_model(tiny_model("llama", True), "lsh", **SMALL, shared_qk=shared_qk)
    ids = random_tokens(2, 90)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = model(ids[:, :70], use_cache=True).past_key_values
        place = [layer.state.keys.data_ptr() for layer in cache.layers]
        snapshot = copy.deepcopy(cache)
        for n in range(70, 90):
            if n == 80:
                cache.reorder_cache(torch.tensor([0, 1]))
                place = [layer.state.keys.data_ptr() for layer in cache.layers]
            step = model(ids[:, n : n + 1], past_key_values=cache).logits
            torch.testing.assert_close(step, whole[:, n : n + 1], rtol=1e-9, atol=1e-9)
            assert [layer.state.keys.data_ptr() for layer in cache.layers] == place
        again = model(ids[:, 70:71], past_key_values=snapshot).logits
    torch.testing.assert_close(again, whole[:, 70:71], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("made", "read", "owned"),
    [
        (torch.no_grad, torch.no_grad, False),  # no cache has it
        (torch.no_grad, torch.enable_grad, True),
        (torch.enable_grad, torch.no_grad, True),  # a graph is made of it
        (torch.inference_mode, torch.no_grad, True),  # its tensors cannot be changed
    ],
)
def test_a_state_that_others_may_need_stays_as_it_is(made, read, owned):
    case = Case("lsh", "llama", True, SMALL)
    mechanism, heads = case.make(), case.heads(LENGTH)
    with made():
        state = mechanism(*(x[:, :, :-1].clone().requires_grad_(torch.is_grad_enabled()) for x in heads))[1]
    state = mechanism.owned_state(state) if owned else state
    before = [x.clone() for x in state]
    with read():
        output, _ = mechanism(*(x[:, :, -1:] for x in heads), state=state)
    torch.testing.assert_close(output, mechanism(*heads)[0][:, :, -1:], rtol=1e-9, atol=1e-9, check_stride=False)
    assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))


def test_hashing_leaves_the_global_random_state_and_no_length_is_remembered():
    """R9: transformers' Reformer reseeds everything, freezes its buckets at the first length, needs whole chunks."""
    before = torch.random.get_rng_state()
    case = Case("lsh", "gpt2", False, SMALL)
    first, second = case.make(), case.make()
    assert torch.equal(first.rotations, second.rotations)
    assert not torch.equal(first.rotations, Case("lsh", "gpt2", False, {**SMALL, "seed": 1}).make().rotations)
    short, long = case.heads(7), case.heads(53)
    for x in long:
        x.requires_grad_()
    first(*short)
    output, _ = first(*long)
    output.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in long)
    assert torch.equal(output, second(*long)[0])
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_buckets": 3}, "num_buckets must be 1 or even, got 3"),
        ({"num_rounds": 0}, "num_rounds must be an integer >= 1, got 0"),
        ({"bucket_size": True}, "bucket_size must be an integer >= 1, got True"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(OptionError, match=message):
        make_config("lsh", options)
