"""The decoding state inside transformers' caches: its size, its moves, and what it refuses."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer, QuantizedLayer

from hf_linattn import list_mechanisms, original_attention, patch_model, unpatch_model
from hf_linattn.cache import StateLayer, StaticStateLayer, state_bytes
from hf_linattn.errors import UnsupportedModeError
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.composite import JoinedState
from hf_linattn.ops.block_softmax.interface import KeptKeys
from hf_linattn.ops.hybrid.interface import HybridState
from hf_linattn.support.tiny import tiny_model
from tests.helpers import BOTH_WAYS, assert_close, each_of, generate, logits_of, make_patched, make_tokens
from tests.models import NUM_HEADS, NUM_KEY_VALUE_HEADS, NUM_LAYERS, SHARING, make_model, make_sharing

KEY_VALUE_HEADS = {"gpt2": NUM_HEADS, "llama": NUM_KEY_VALUE_HEADS}
CONSTANT = [name for name in list_mechanisms() if MECHANISMS.get(name).constant_state]
STATIC = [name for name in CONSTANT if MECHANISMS.get(name).static_steps]
each_family = pytest.mark.parametrize("name", KEY_VALUE_HEADS)
each_mechanism = pytest.mark.parametrize("mechanism", CONSTANT)
# of a state, how many of the first tensors are tokens of a window, which lie in the dtype of the model
TOKENS = {KeptKeys: 2, HybridState: 4}


def dtypes_of(state, dtype: torch.dtype) -> list[torch.dtype]:
    """Return what the dtypes of the tensors of a state have to be; those that count tokens apart."""
    states = state.split() if isinstance(state, JoinedState) else [state]
    return [dtype if i < TOKENS.get(type(x), 0) else torch.float32 for x in states for i in range(len(x))]


def read(model, ids, **options):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **options)


def tensors_of(cache):
    return [tensor for layer in cache.layers for tensor in layer.state]


@pytest.mark.covering(1)
@each_family
@each_mechanism
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_is_per_key_value_head_and_constant_and_sums_are_float32(name, mechanism, dtype):
    model = make_patched(name, mechanism).to(dtype)
    short, long = (read(model, make_tokens(3, n)).past_key_values for n in (1, 60))
    assert [type(layer) for layer in long.layers] == [StateLayer] * NUM_LAYERS
    expected = [kind for layer in long.layers for kind in dtypes_of(layer.state, dtype)]
    for tensor, kind in zip(tensors_of(long), expected, strict=True):
        assert tensor.shape[0] == 3
        if tensor.is_floating_point():  # the others count tokens
            assert tensor.dtype == kind
            assert tensor.shape[1] == KEY_VALUE_HEADS[name]
    assert [t.shape for t in tensors_of(short)] == [t.shape for t in tensors_of(long)]
    assert state_bytes(short) == state_bytes(long) == sum(t.nbytes for t in tensors_of(long))
    assert long.get_seq_length() == 60


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mechanism", ["local", "streaming", "longformer", "hybrid", "fusion"])
def test_windows_in_half_precision_lose_nothing(mechanism, dtype):
    """Tokens came in that precision: with a state that is widened before each call the logits are the same."""
    model, ids = make_patched("llama", mechanism).to(dtype), make_tokens(2, 61)
    results = []
    for widen in (False, True):
        cache, logits = DynamicCache(config=model.config), []
        for part in ids.split([33, 17, 8, 1, 1, 1], dim=1):
            for layer in cache.layers if widen and logits else ():
                layer.state = type(layer.state)(*(x.float() if x.dtype == dtype else x for x in layer.state))
            logits.append(read(model, part, past_key_values=cache).logits)
        results.append(torch.cat(logits, dim=1))
    assert torch.equal(*results)


@pytest.mark.covering(1)
@each_family
@each_mechanism
def test_keys_and_values_that_were_read_leave_memory(name, mechanism):
    cache = read(make_patched(name, mechanism), make_tokens(2, 33)).past_key_values
    for layer in cache.layers:
        assert layer.keys.shape[-2] == layer.values.shape[-2] == 0
        assert layer.keys.untyped_storage().nbytes() == layer.values.untyped_storage().nbytes() == 0


@each_family
def test_bytes_of_softmax_grow_with_the_context(name):
    model = make_model(name)
    short, long = (state_bytes(read(model, make_tokens(1, n)).past_key_values) for n in (10, 20))
    assert long == 2 * short > 0


@pytest.mark.parametrize("variant", [nullcontext, original_attention])
@pytest.mark.parametrize("model_type", ["jamba", "falcon_h1"])  # recurrences between attention layers, and in them
def test_bytes_are_those_of_all_tensors_where_layers_are_recurrent(model_type, variant):
    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
        return [x for part in inside for x in tensors(part)]

    model = patch_model(tiny_model(model_type), "linear")
    with variant(model):
        cache = read(model, make_tokens(2, 9)).past_key_values
    expected = sum(x.nbytes for layer in cache.layers for x in tensors(vars(layer)))
    assert state_bytes(cache) == expected > 0


@pytest.mark.parametrize("plan", ["linear", {"linear": [0]}], ids=["all layers", "some layers"])
def test_a_recurrence_beside_a_state_stays_where_it_is_when_a_cache_is_offloaded(plan, monkeypatch):
    model, ids = patch_model(tiny_model("falcon_h1"), plan), make_tokens(2, 9)
    want = generate(model, ids)[1]
    for place, name in ((torch, "Stream"), (torch.cuda, "default_stream")):  # of a GPU
        monkeypatch.setattr(place, name, MagicMock())
    moved, offload = [], LinearAttentionLayer.offload
    monkeypatch.setattr(LinearAttentionLayer, "offload", lambda layer: [moved.append(type(layer)), offload(layer)])
    assert torch.equal(generate(model, ids, cache_implementation="offloaded")[1], want)
    assert set(moved) == (set() if plan == "linear" else {LinearAttentionAndFullAttentionLayer})


@pytest.mark.covering(1)
@each_family
@each_mechanism
def test_rows_of_the_state_move_as_beams_do(name, mechanism):
    model = make_patched(name, mechanism)
    ids, order, following = make_tokens(3, 9), torch.tensor([2, 0, 0]), make_tokens(3, 1, seed=1)
    cache = read(model, ids).past_key_values
    expected = logits_of(model, torch.cat([ids[order], following], 1))[:, -1:]
    reordered, selected = copy.deepcopy(cache), copy.deepcopy(cache)
    reordered.reorder_cache(order)
    selected.batch_select_indices(order)
    for moved in (reordered, selected):
        assert_close(read(model, following, past_key_values=moved).logits, expected)
    cache.batch_repeat_interleave(2)
    repeated = read(model, following.repeat_interleave(2, 0), past_key_values=cache).logits
    assert_close(repeated[::2], logits_of(model, torch.cat([ids, following], 1))[:, -1:])
    assert torch.equal(repeated[::2], repeated[1::2])


@pytest.mark.covering(1)
@each_family
@pytest.mark.parametrize(("mechanism", "kind"), [(x, "dynamic") for x in CONSTANT] + [(x, "static") for x in STATIC])
def test_a_cache_of_the_original_model_is_continued(name, mechanism, kind):
    """With one layer the keys do not depend on the attention below, so the patched model alone must say the same."""
    one_layer = {"gpt2": {"n_layer": 1}, "llama": {"num_hidden_layers": 1}}[name]
    original, model = make_model(name, **one_layer), make_patched(name, mechanism, **one_layer)
    ids = make_tokens(2, 13)
    config = original.config
    cache = StaticCache(config, max_cache_len=32) if kind == "static" else DynamicCache(config=config)
    read(original, ids[:, :9], past_key_values=cache)
    expected = logits_of(model, ids)
    assert_close(read(model, ids[:, 9:12], past_key_values=cache).logits, expected[:, 9:12])
    assert_close(read(model, ids[:, 12:], past_key_values=cache).logits, expected[:, 12:])
    assert cache.get_seq_length() == 13
    assert [type(layer) for layer in cache.layers] == [{"dynamic": StateLayer, "static": StaticStateLayer}[kind]]


@each_family
def test_cropping_a_state_is_refused(name):
    model = make_patched(name)
    cache = read(model, make_tokens(1, 9)).past_key_values
    with pytest.raises(UnsupportedModeError, match=r"crop\(-2\)|crop\(2\)"):
        cache.layers[0].crop(2)
    with pytest.raises((UnsupportedModeError, ValueError)):
        generate(model, make_tokens(1, 9), assistant_model=make_model(name))


@torch.no_grad()
@pytest.mark.parametrize("whole", [True, False], ids=["layer", "heads"])
def test_a_cache_that_was_cropped_in_part_goes_on_no_longer(whole):
    plan = {"linear": [1]} if whole else {"linear": {"layers": 1, "heads": 1}}
    model, ids = patch_model(make_model("llama"), plan), make_tokens(1, 12)
    cache = read(model, ids[:, :9]).past_key_values
    with pytest.raises(UnsupportedModeError, match=r"crop\(-2\)"):
        cache.crop(-2)
    for _ in range(2):
        with pytest.raises(UnsupportedModeError, match=r"read 7 tokens in layer 0 and 9 in layer 1, .* a new cache"):
            read(model, ids[:, 9:], past_key_values=cache)
    cache.reset()
    assert_close(read(model, ids, past_key_values=cache).logits, logits_of(model, ids))


@each_family
def test_reset_makes_a_cache_new(name):
    model, ids = make_patched(name), make_tokens(2, 9)
    cache = read(model, make_tokens(2, 5, seed=3)).past_key_values
    cache.reset()
    assert cache.get_seq_length() == 0 and state_bytes(cache) == 0
    assert torch.equal(read(model, ids, past_key_values=cache).logits, logits_of(model, ids))


@each_family
@pytest.mark.parametrize("length", [1, 3])
def test_the_original_attention_refuses_a_state(name, length):
    """Without the keys it could only compute garbage, so it must not answer even once."""
    model, ids, following = make_patched(name), make_tokens(2, 9), make_tokens(2, length, seed=1)
    cache = read(model, ids).past_key_values
    expected = read(model, following, past_key_values=copy.deepcopy(cache)).logits
    with original_attention(model), pytest.raises(UnsupportedModeError, match="past_key_values"):
        read(model, following, past_key_values=cache)
    assert torch.equal(read(model, following, past_key_values=cache).logits, expected)
    with pytest.raises(UnsupportedModeError, match="past_key_values"):
        read(unpatch_model(model), following, past_key_values=cache)


@each_family
def test_a_softmax_layer_refuses_a_state(name):
    cache = read(make_patched(name), make_tokens(2, 9)).past_key_values
    mixed = patch_model(make_model(name), {"softmax": "0-1"})
    with pytest.raises(UnsupportedModeError, match="past_key_values"):
        read(mixed, make_tokens(2, 1), past_key_values=cache)


class RoundingLayer(QuantizedLayer):
    """A quantised layer without a quantisation library."""

    def _quantize(self, tensor, axis):
        return tensor.to(torch.float16)

    def _dequantize(self, tensor):
        return tensor.to(torch.float32)


@pytest.mark.parametrize("steps", [0, 2])
def test_keys_that_cannot_be_read_are_named(steps):
    """Also when a few recent keys can: the others would be lost without a word."""
    original = make_model("llama")
    cache = DynamicCache()
    cache.layers = [RoundingLayer() for _ in range(NUM_LAYERS)]
    for ids in (make_tokens(1, 9), *make_tokens(steps, 1)[:, None]):
        read(original, ids, past_key_values=cache)
    with pytest.raises(UnsupportedModeError, match="RoundingLayer"):
        read(patch_model(original, "linear"), make_tokens(1, 1), past_key_values=cache)


@pytest.mark.parametrize("plan", ["linear", {"linear": [1]}], ids=["all layers", "some layers"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_refused_call_leaves_the_cache_as_it_was(plan, kind):
    """By a mask before any layer ran; by a direction in the first one, which then had a prompt of the original's."""
    model, (ids, more) = make_model("llama"), make_tokens(2, 13).split([9, 4], dim=1)
    cache = kind(model.config, 32) if kind is StaticCache else kind(config=model.config)
    read(model, ids, past_key_values=cache)
    patch_model(model, plan)
    expected = read(model, more, past_key_values=copy.deepcopy(cache)).logits
    refused = {"attention_mask": torch.ones(2, 1, 4, 13)}, {"attention_mask": torch.ones(2, 1, 1, 13)}
    for options in refused:
        with pytest.raises(UnsupportedModeError, match=r"attention_mask, .* has 4 dimensions"):
            read(model, more, past_key_values=cache, **options)
    if plan == "linear":
        model.config.is_causal = False
        with pytest.raises(UnsupportedModeError, match="is_causal=False was asked of layer 0"):
            read(model, more, past_key_values=cache)
        del model.config.is_causal
    assert cache.get_seq_length() == 9
    assert torch.equal(read(model, more, past_key_values=cache).logits, expected)
    assert cache.get_seq_length() == 13


@pytest.mark.parametrize("plan", ["linear", "streaming", {"local": "0", "softmax": "1"}])
@pytest.mark.parametrize("kind", [torch.bool, torch.long])
def test_a_mask_that_says_other_tokens_of_a_state_are_pads_is_refused(plan, kind):
    """As in a second turn of a batch in which one row had ended, and was filled with pads that were read as real."""
    model, ids = patch_model(make_model("llama"), plan), make_tokens(2, 19)
    mask = torch.ones(2, 19, dtype=kind)
    mask[0, :3] = 0  # on the left, as the first call says too
    cache = read(model, ids[:, :9], attention_mask=mask[:, :9]).past_key_values
    for position in (9, 10):
        read(model, ids[:, position, None], attention_mask=mask[:, : position + 1], past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    ids, mask = ids.flip(0), mask.flip(0)
    before = copy.deepcopy(cache)
    for row, column, value in ((0, 10, 0), (1, 2, 1)):
        for end in (12, 19):
            other = mask[:, :end].clone()
            other[row, column] = value
            summed = 11 - 3 * row
            said = summed + 2 * value - 1
            message = f"{said} real tokens among the first 11 of row {row}, .* sum up {summed} of them"
            with pytest.raises(UnsupportedModeError, match=message):
                read(model, ids[:, 11:end], attention_mask=other, past_key_values=cache)
    whole = read(model, ids, attention_mask=mask).logits[:, 11:]
    for given in (before, cache):
        found = read(model, ids[:, 11:], attention_mask=mask, past_key_values=given).logits
        assert_close(found, whole)


@torch.no_grad()
@pytest.mark.parametrize("mechanism", each_of(BOTH_WAYS))
def test_a_bidirectional_layer_sees_the_keys_of_all_calls_with_one_cache(mechanism):
    """As those of a prefix. In one layer the last tokens then get what they get beside all others in one call."""
    model = make_patched("bert", mechanism, "LMHeadModel", num_hidden_layers=1)
    tokens, cache = make_tokens(2, 14), DynamicCache()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    whole = model(tokens, attention_mask=mask).logits
    for first, end in ((0, 6), (6, 10), (10, 14)):
        got = model(tokens[:, first:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True).logits
    assert_close(got, whole[:, 10:])
    assert cache.get_seq_length() == 14


@pytest.mark.parametrize("plan", ["retention", {"linear": [0], "retention": list(range(1, NUM_LAYERS))}])
def test_a_state_of_another_mechanism_is_refused_and_left_as_it_was(plan):
    """Also where the first layer has the same one still: it has not read on by then."""
    model, ids = make_model("llama"), make_tokens(2, 9)
    cache = read(patch_model(model, "linear"), ids).past_key_values
    before = [x.clone() for x in tensors_of(cache)]
    unpatch_model(model)
    patch_model(model, plan)
    message = r"layer \d that was made by LinearConfig.*RetentionConfig.*new cache"
    with pytest.raises(UnsupportedModeError, match=message):
        read(model, ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 9
    assert all(torch.equal(now, x) for now, x in zip(tensors_of(cache), before, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("plan", ["linear", {"local": [0], "linear": list(range(1, NUM_LAYERS))}])
def test_a_cache_made_of_the_parts_of_another_is_refused(plan):
    """A state is no part of it: the model would go on as if nothing had been read."""
    model, ids = patch_model(make_model("llama"), plan), make_tokens(2, 9)
    parts = tuple(read(model, ids).past_key_values)
    with pytest.raises(UnsupportedModeError, match=r"parts of another.*the cache that .* returned"):
        read(model, ids[:, :1], past_key_values=DynamicCache(parts))


@torch.no_grad()
def test_a_cache_that_is_given_by_position_is_looked_at_as_one_by_name():
    model, ids = make_model("gpt2").transformer, make_tokens(2, 9)
    model = patch_model(model, "linear")
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(UnsupportedModeError, match=rf"position {9 + 64}, but .* holds 64"):
        model(make_tokens(2, 64), cache)
    patch_model(unpatch_model(model), "retention")
    with pytest.raises(UnsupportedModeError, match=r"made by LinearConfig.*RetentionConfig.*new cache"):
        model(ids[:, :1], cache)
    assert cache.get_seq_length() == 9


def caches(model):
    """Return caches of every kind: with a place for each layer, with places as they are asked for, with fixed room."""
    return DynamicCache(config=model.config), DynamicCache(), StaticCache(config=model.config, max_cache_len=24)


@torch.no_grad()
@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("plan", ["linear", "softmax", {"local": [0, 2], "linear": [1, 3]}, {"linear": [0, 2]}])
def test_layers_that_share_keys_decode_what_they_compute_without_a_cache(name, plan):
    model, ids = patch_model(make_sharing(name), plan), make_tokens(2, 17)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    want = model(input_ids=ids, use_cache=False, attention_mask=mask).logits
    for cache, kept in zip(caches(model), (1, 2, 9), strict=True):  # Gemma 4 drops other queries
        got = read(model, ids[:, :12], past_key_values=cache, logits_to_keep=kept, attention_mask=mask[:, :12]).logits
        assert_close(got, want[:, 12 - kept : 12])
        for n in (15, 16, 17):
            seen = int(cache.get_seq_length())
            got = read(model, ids[:, seen:n], past_key_values=cache, attention_mask=mask[:, :n]).logits
            assert_close(got, want[:, seen:n])


@torch.no_grad()
@pytest.mark.parametrize("plan", [{"linear": [0]}, {"linear": [2]}])
def test_a_state_in_one_alone_of_two_layers_that_share_keys_is_refused_and_nothing_is_read(plan):
    model, ids = patch_model(make_sharing("Gemma3n"), plan), make_tokens(2, 9)
    cache = DynamicCache(config=model.config)
    for given in (cache, None):
        with pytest.raises(UnsupportedModeError, match=r"layer 2 attends to the keys of layer 0, .* use_cache=False"):
            read(model, ids, past_key_values=given)
    assert cache.get_seq_length() == 0
    assert model(input_ids=ids, use_cache=False).logits.isfinite().all()


@torch.no_grad()
def test_layers_that_share_keys_go_on_from_a_cache_of_the_original_and_move_with_beams():
    model, ids = patch_model(make_sharing("Gemma3n"), "linear"), make_tokens(2, 17)
    results = []
    for parts in ([8, 4, 1], [13]):
        with original_attention(model):
            cache = read(model, ids[:, :4], past_key_values=DynamicCache(config=model.config)).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        for part in ids[[1, 0], 4:].split(parts, dim=1):
            logits = read(model, part, past_key_values=cache).logits
        results.append(logits[:, -1])
        assert [layer.get_seq_length() for layer in cache.layers] == [17] * 4
    assert_close(*results)
