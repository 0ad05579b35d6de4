"""A few heads that stay exact beside windows: on decoders of every kind, and what their keys cost while they grow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from hf_linattn import list_mechanisms, patch_model
from hf_linattn.cache import state_bytes
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.softmax import SoftmaxState
from hf_linattn.ops.common.fused_attention import fused_attention
from hf_linattn.ops.common.growing import SPARE, grown, held_bytes
from hf_linattn.testing import ARCHITECTURES, INVARIANTS, MORE_ARCHITECTURES, Case, Check, random_tokens, tiny_model
from hf_linattn.testing.models import KEY_VALUE_HEADS
from tests.helpers import assert_close, generate

WINDOW = {"block_size": 8, "window_size": 11, "num_sink_tokens": 3}
DECODERS = (*sorted({*ARCHITECTURES} - {"bert"}), *MORE_ARCHITECTURES)
# key/value heads that stay exact, of all there are
EXACT = {"none": lambda heads: 0, "one": lambda heads: 1, "all_but_one": lambda heads: heads - 1}
# checkpointing and compiling, and what is counted, are the parts' own: `tests/invariants`
SHARED = [x for x in INVARIANTS if x.split()[0] not in ("11", "12")]


def plan_of(heads: int, exact: int) -> dict[str, Any]:
    """The first heads are windows, so that the exact ones stand behind them."""
    return {"streaming": {"heads": list(range(heads - exact)), **WINDOW}}


def case_of(architecture: str, exact: str) -> Case:
    heads = KEY_VALUE_HEADS[architecture]
    return Case("by_head", architecture, True, {"plan": plan_of(heads, EXACT[exact](heads))})


@pytest.mark.covering(1)
@pytest.mark.parametrize("invariant", SHARED)
@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("architecture", DECODERS)
def test_the_invariants_hold_for_plans_by_head(architecture, exact, invariant):
    Check(case_of(architecture, exact), invariant).run()


# -- the keys of exact heads ------------------------------------------------------------------------------------------


def exact_and_windows(dtype: torch.dtype = torch.float64):
    """A mechanism whose second key/value head is exact."""
    return Case("by_head", "llama", True, {"plan": plan_of(2, 1)}).make(dtype).eval()


def softmax_state(state: Any) -> SoftmaxState:
    return next(x for x in state.split() if isinstance(x, SoftmaxState))


def test_a_step_writes_the_new_keys_behind_the_old_ones_and_copies_none():
    mechanism, (query, key, value) = exact_and_windows(), Case("by_head", "llama", True).heads(SPARE + 60)
    with torch.no_grad():
        _, state = mechanism(query[:, :, :50], key[:, :, :50], value[:, :, :50])
        assert softmax_state(state).key.untyped_storage().nbytes() == 2 * 50 * 8 * 8  # rows, tokens, numbers, bytes
        places = []
        for at in range(50, SPARE + 60):
            step = slice(at, at + 1)
            _, state = mechanism(query[:, :, step], key[:, :, step], value[:, :, step], None, None, state)
            places.append(softmax_state(state).key.data_ptr())
    kept = softmax_state(state)
    assert torch.equal(kept.key, key[:, 1:]) and torch.equal(kept.value, value[:, 1:])
    assert len(set(places)) == 2  # a room for the first step, and one where that was full
    assert held_bytes(kept.key) == 2 * (50 + 2 * (SPARE + 1)) * 8 * 8
    assert kept.visible.shape == (2, 0)


@torch.no_grad()
def test_two_goes_on_from_one_state_do_not_see_each_other():
    mechanism, (query, key, value) = exact_and_windows(), Case("by_head", "llama", True).heads(40)

    def read(state, first, end, flip=False):
        heads = [x[:, :, first:end].flip(0) if flip else x[:, :, first:end] for x in (query, key, value)]
        return mechanism(*heads, None, None, state)

    _, begun = read(None, 0, 20)
    _, begun = read(begun, 20, 21)  # has room
    kept = [x.clone() for x in begun]
    wants = [read(copy.deepcopy(begun), 21, 40, flip)[0] for flip in (False, True)]
    _, first = read(begun, 21, 30)
    _, second = read(begun, 21, 30, flip=True)  # the room is taken
    assert all(torch.equal(x, y) for x, y in zip(begun, kept, strict=True))
    for state, flip, want in ((first, False, wants[0]), (second, True, wants[1])):
        got, _ = read(state, 30, 40, flip)
        torch.testing.assert_close(got, want[:, :, 9:], rtol=1e-12, atol=1e-12)


def test_grown_keeps_gradients_dtypes_and_modes():
    kept, new = torch.ones(1, 1, 3, 2, requires_grad=True), torch.zeros(1, 1, 1, 2)
    longer = grown(kept, new)
    squares = longer.square().sum()
    grown(longer, new)  # writes nothing that the backward pass reads
    squares.backward()
    assert torch.equal(kept.grad, 2 * torch.ones_like(kept))
    with torch.inference_mode():
        longer = grown(grown(kept, new), new)
    with torch.no_grad():
        longest = grown(longer, new + 5)
        assert torch.equal(grown(longest, new), torch.cat([longer, new + 5, new], 2))
        assert grown(longest, new.double()).dtype == torch.float64
        again = copy.deepcopy(longest)
        assert torch.equal(grown(again, new + 7)[:, :, :-1], again) and not (grown(longest, new)[:, :, -1]).any()
        empty = grown(torch.ones(2, 0, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool), dim=1)
    assert not empty.any() and empty.shape == (2, 3)


@pytest.mark.parametrize("masked", ["all see all", "some keys", "other keys for each head"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_query_heads_that_share_keys_read_them_as_heads_that_do_not(masked, dtype):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, h, n, 8, generator=generator) for h, n in ((6, 1), (2, 37), (2, 37)))
    mask = torch.rand(2, 6 if masked.startswith("other") else 1, 1, 37, generator=generator) < 0.7
    options = {} if masked == "all see all" else {"attn_mask": mask}
    heads = [x.to(dtype) for x in (query, key, value)]
    got = fused_attention(*heads, scale=0.3, enable_gqa=True, **options)
    own = [x.double().repeat_interleave(3, dim=1) for x in heads[1:]]
    want = F.scaled_dot_product_attention(heads[0].double(), *own, scale=0.3, **options)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


# -- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_generation_after_left_padding_is_that_of_each_row_alone(architecture, implementation):
    model, tokens = case_of(architecture, "one").model(), random_tokens(2, 33)
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    got = model.generate(tokens, attention_mask=mask, cache_implementation=implementation, **options)
    for row, first in ((0, 0), (1, 9)):
        alone = model.generate(tokens[row : row + 1, first:], use_cache=False, **options)
        assert torch.equal(got[row, 33:], alone[0, 33 - first :])


def test_prefill_in_pieces_generates_the_same():
    model, tokens = case_of("llama", "one").model(), random_tokens(2, 61)
    whole, logits = generate(model, tokens)
    pieces, again = generate(model, tokens, prefill_chunk_size=13)
    assert torch.equal(whole, pieces)
    assert_close(again, logits)


def test_the_cache_holds_all_keys_of_the_exact_heads_alone():
    length = 2000
    plan = {"streaming": {"layers": 0, "heads": "1-3", **WINDOW}, "local": {"layers": 1, "window_size": 9}}
    model, cache = patch_model(tiny_model("gpt2", True, torch.float32), plan), DynamicCache()
    with torch.no_grad():
        model(random_tokens(1, length), past_key_values=cache, use_cache=True)
    exact = length * 2 * 8 * 4  # tokens, key and value, numbers, bytes
    assert exact < state_bytes(cache) < 1.2 * exact  # beside 13 and 8 keys of all other heads
    with torch.no_grad():
        model(random_tokens(1, 1), past_key_values=cache, use_cache=True)
    room = (SPARE + 1) * 2 * 8 * 4
    assert exact + room < state_bytes(cache) < 1.2 * exact + room


@pytest.mark.parametrize("mechanism", [x for x in list_mechanisms() if "causal" in MECHANISMS.get(x).modes])
@torch.no_grad()
def test_a_state_holds_nothing_of_the_heads_it_was_made_from(mechanism):
    """Each member of by_head gets a view of all heads, of which its state must not keep the others."""
    case = Case(mechanism, "llama", True)
    heads = case.heads(37, dtype=torch.float32)
    _, state = case.make(torch.float32)(*heads)
    own = {x.untyped_storage().data_ptr() for x in heads}
    assert not own & {x.untyped_storage().data_ptr() for x in state}
