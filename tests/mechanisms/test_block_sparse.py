"""The fixed patterns against what others compute, and what is particular to each of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from hf_linattn import OptionError, get_mechanisms, list_mechanisms, patch_model
from hf_linattn.cache import state_bytes
from hf_linattn.config import LARGEST_SEED, make_config
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.block_sparse import BlockSparseMechanism
from hf_linattn.ops.block_softmax.interface import keep_keys
from hf_linattn.ops.block_softmax.patterns import make_parts
from hf_linattn.testing import Case, random_tokens, tiny_model

PATTERNS = [name for name in list_mechanisms() if issubclass(MECHANISMS.get(name), BlockSparseMechanism)]
LENGTH = 150


def band(length: int, window_size: int, causal: bool) -> torch.Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    return (distance.abs() < window_size) & ((distance >= 0) | (not causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window_size", "block_size"), [(1, 8), (19, 8), (16, 16), (40, 7), (500, 64)])
def test_local_equals_sdpa_with_a_band_mask(causal, window_size, block_size):
    case = Case("local", "llama", causal, {"window_size": window_size, "block_size": block_size})
    query, key, value = case.heads(LENGTH)
    got, _ = case.make()(query, key, value)
    mask = band(LENGTH, window_size, causal)
    want = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("length", [9, 10, 14])
@pytest.mark.parametrize(("window", "sinks"), [(8, 3), (1, 4), (5, 0)])
def test_rows_that_have_passed_their_window_keep_what_is_looked_for_elsewhere(length, window, sinks):
    """The same state as that of rows whose length is given."""
    options = {"window_size": window, "num_sink_tokens": sinks, "block_size": 4}
    pattern = Case("streaming", "llama", True, options).make()
    key, value = torch.randn(2, 2, length, 6), torch.randn(2, 2, length, 5)
    expected = keep_keys(key, value, pattern, torch.full((2,), length))
    for got, want in zip(keep_keys(key, value, pattern), expected, strict=True):
        assert torch.equal(got, want) and got.dtype == want.dtype


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "options", "first"), [("local", {}, 16), ("longformer", {"num_global": 5}, 24)])
def test_blocks_in_a_row_are_read_as_a_window_where_no_global_token_stands(name, options, first, causal):
    """Without a table and a copy: from the first block that reaches back to no global one."""
    case = Case(name, "llama", causal, {"block_size": 8, "window_size": 11, **options})
    parts = make_parts(*case.heads(LENGTH)[:2], case.make(), 8, LENGTH, causal)
    windows = {part.first * 8 for part in parts if part.window is not None}
    assert min(windows) == first and sum(len(part.table) for part in parts if part.window is None) < 8


@pytest.mark.parametrize("num_global", [0, 1, 5])
def test_longformer_equals_that_of_transformers(num_global):
    """On the same weights, the global projections being copies of the local ones."""
    torch.manual_seed(0)
    config = LongformerConfig(
        hidden_size=32, num_attention_heads=4, attention_window=[16], attention_probs_dropout_prob=0.0
    )
    theirs = LongformerSelfAttention(config, layer_id=0).double().eval()
    for part in ("query", "key", "value"):
        getattr(theirs, f"{part}_global").load_state_dict(getattr(theirs, part).state_dict())
    hidden = torch.randn(2, 64, 32, dtype=torch.float64)
    mask = torch.zeros(2, 64, dtype=torch.float64)
    mask[:, :num_global] = 1  # theirs: below 0 masked, above 0 global
    with torch.no_grad():
        want = theirs(
            hidden, attention_mask=mask, is_index_masked=mask < 0, is_index_global_attn=mask > 0,
            is_global_attn=bool(num_global),
        )[0]  # fmt: skip
        heads = [getattr(theirs, part)(hidden).view(2, 64, 4, 8).transpose(1, 2) for part in ("query", "key", "value")]
        case = Case("longformer", "bert", False, {"window_size": 9, "num_global": num_global, "block_size": 16})
        got, _ = case.make()(*heads)
    torch.testing.assert_close(got.transpose(1, 2).flatten(2), want)


@pytest.mark.parametrize("causal", [False, True])
def test_bigbird_equals_a_softmax_over_its_layout(causal):
    """The layout written down block by block, each key once however often it was drawn."""
    size, num_global, num_random = 8, 5, 3
    options = {"block_size": size, "num_global": num_global, "num_random": num_random, "window_blocks": 1}
    case = Case("bigbird", "llama", causal, options)
    mechanism = case.make()
    query, key, value = case.heads(LENGTH, batch=1)
    got, _ = mechanism(query, key, value)
    blocks = -(-LENGTH // size)
    drawn = mechanism.drawn(torch.arange(blocks)[None, None])[0]
    assert drawn.shape == (4, blocks, num_random)
    for head in range(4):
        mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        for block in range(blocks):
            rows = slice(block * size, (block + 1) * size)
            for seen in (block - 1, block, block + 1, *drawn[head, block].tolist()):
                if seen >= 0:
                    mask[rows, seen * size : (seen + 1) * size] = True
        mask[:, :num_global] = True
        if causal:
            mask = mask.tril()
        else:
            mask[:num_global] = True
        scores = query[0, head] @ key[0, head // 2].T * 8**-0.5
        want = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value[0, head // 2]
        torch.testing.assert_close(got[0, head], want)


@pytest.mark.parametrize("name", ["random_blocks", "bigbird"])
def test_random_blocks_differ_between_layers_heads_and_seeds_and_not_between_modes(name):
    """R1: transformers' BigBird draws block 0 for everyone in evaluation, and counts it several times."""
    blocks = torch.arange(40)[None, None]

    def drawn(**options) -> list[torch.Tensor]:
        model = patch_model(tiny_model("gpt2", True), name, **options)
        return [m.drawn(blocks)[0] for mode in (True, False) for m in get_mechanisms(model.train(mode)).values()]

    first, second, first_eval, second_eval = drawn()
    assert torch.equal(first, first_eval) and torch.equal(second, second_eval)
    assert not torch.equal(first, second) and not torch.equal(first[0], first[1])
    for seed in (1, LARGEST_SEED):
        assert not torch.equal(first, drawn(seed=seed)[0])
    assert (first >= 0).all() and (first <= blocks[0, 0][None, :, None]).all()
    share = first[:, 20:].double() / blocks[0, 0, 20:, None]
    assert 0.35 < share.mean() < 0.65  # all of the past has its turn


@pytest.mark.parametrize("name", PATTERNS)
def test_named_blocks_hold_every_key_that_is_seen(name):
    """`key_table` is about speed and `sees` the truth: nothing seen may stand outside the named blocks."""
    for causal in (False, True):
        mechanism = Case(name, "gpt2", causal, {"block_size": 4}).make()
        rows, columns = torch.arange(400)[None, None, :, None], torch.arange(400)[None, None, None, :]
        seen = mechanism.sees(rows, columns).expand(1, 4, 400, 400)[0]
        seen = seen.tril() if causal else seen
        named = mechanism.key_table(100, causal).expand(-1, 4, -1)
        shown = torch.arange(mechanism.num_global) // 4
        for block in (0, 1, 7, 50, 99):
            for head in range(4):
                numbers = {*named[block, head].tolist(), *shown.tolist()}
                needed = seen[head, block * 4 : (block + 1) * 4].any(0).nonzero().flatten() // 4
                assert set(needed.tolist()) <= numbers, f"{name}, causal={causal}, block {block}"


@pytest.mark.parametrize("name", [name for name in PATTERNS if MECHANISMS.get(name).constant_state])
def test_decoding_forgets_nothing_it_still_needs_and_keeps_its_size(name):
    """Bytes after 5 and after 700 tokens are equal; every key a later query sees is in the state."""
    options = {"block_size": 4}
    if "window_size" in make_config(name, {}).to_options():
        options["window_size"] = 9
    case = Case(name, "llama", True, options)
    mechanism = case.make(torch.float32)
    sizes = set()
    for length in (5, 700):
        query, key, value = case.heads(length, dtype=torch.float32)
        _, state = mechanism(query, key, value)
        sizes.add(sum(x.nbytes for x in state))
    assert len(sizes) == 1
    kept = set((state.position[0, 0] - 1).tolist())
    rows, columns = torch.arange(700, 1400)[None, None, :, None], torch.arange(700)[None, None, None, :]
    seen = mechanism.sees(rows, columns)[0].any(0).any(0) | (columns[0, 0, 0] < mechanism.num_global)
    assert set(seen.nonzero().flatten().tolist()) <= kept


def test_hardening_a_learned_pattern_keeps_the_heaviest_distances_and_is_saved(tmp_path):
    model = patch_model(tiny_model("llama", True, torch.float32), "learned_sparse", block_size=8, reach=5)
    tokens = random_tokens(1, 100)
    for mechanism in get_mechanisms(model).values():
        with torch.no_grad():
            mechanism.pattern.copy_(torch.tensor([9.0, -30.0, 2.0, -30.0, -30.0, 3.0]).expand(4, -1))
    want = model(tokens).logits
    for mechanism in get_mechanisms(model).values():
        mechanism.harden(3)
        assert mechanism.kept()[0].tolist() == [True, False, True, False, False, True]
        assert sorted(mechanism.key_table(8, True)[7, 0].tolist()) == [2, 5, 7]
    torch.testing.assert_close(model(tokens).logits, want, rtol=1e-4, atol=1e-4)  # what fell away weighed nothing
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(mechanism.num_kept == 3 for mechanism in get_mechanisms(loaded).values())
    with pytest.raises(OptionError, match="top_blocks must be an integer from 1 to 6, got 7"):
        mechanism.harden(7)


def test_dynamic_blocks_are_those_with_the_best_mean_key():
    """One block's keys point along the query, so it is chosen however far away it lies."""
    case = Case("dynamic_sparse", "gpt2", True, {"block_size": 8, "num_blocks": 1})
    query, key, _ = case.heads(96, batch=1, size=0.1)
    key[:, :, 24:32] = query[:, :, 80:88].mean(2, keepdim=True) * 50
    mechanism = case.make()
    matrix = mechanism.attention_matrix(query, key)
    assert (matrix[0, :, 87, 24:32] > 0).all()
    assert ((matrix[0, :, 80:88] > 0).sum(-1) == 8 + torch.arange(1, 9)).all()
    assert not matrix[0, :, :24, 24:32].any()


@pytest.mark.parametrize("name", PATTERNS)
def test_options_out_of_range_are_named(name):
    with pytest.raises(OptionError, match="block_size must be an integer >= 1, got 0"):
        make_config(name, {"block_size": 0})


def test_a_window_of_one_keeps_no_key():
    model = patch_model(tiny_model("gpt2", True), "local", window_size=1)
    cache = DynamicCache()
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        want = model(tokens).logits
        got = [model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(9)]
    torch.testing.assert_close(torch.cat(got, 1), want)
    assert state_bytes(cache) == 2 * 2 * 8  # of two layers and rows: how many tokens were read
