"""Static caches: one compiled graph for all steps of decoding, and what they refuse. dynamo alone counts graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache

from hf_linattn import get_mechanisms, list_mechanisms, patch_model
from hf_linattn.cache import StaticStateLayer
from hf_linattn.errors import UnsupportedModeError
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.composite import CompositeMechanism
from tests.helpers import BOTH_WAYS, assert_close, each_of, generate, logits_of, make_patched, make_tokens, pad
from tests.models import NUM_LAYERS, make_model

WINDOW = {"window_size": 4, "block_size": 4}  # narrower than the prompt, so that steps leave it
PLANS: dict[str, Any] = {
    "linear": "linear",
    "performer": {"performer": {"num_features": 24}},
    "hedgehog": "hedgehog",
    "gated_deltanet": "gated_deltanet",
    "local": {"local": WINDOW},
    "streaming": {"streaming": {**WINDOW, "num_sink_tokens": 2}},
    "hybrid": {"hybrid": {"window_size": 4, "num_sink_tokens": 1}},
    "by layer": {},  # linear and softmax in turn
    "by head": {"linear": {"heads": "0"}, "softmax": {"heads": "1"}},
}
# whose steps are compiled in every run of the tests: one for each kind of state
OWN_GRAPH = {"single": ("linear",), "padded": ("gated_deltanet", "hybrid")}
PADDED = pad([make_tokens(1, 9)[0], make_tokens(1, 4, seed=1)[0]], 0)
SINGLE = PADDED[0][:1], PADDED[1][:1]
each_plan = pytest.mark.parametrize("plan", PLANS)


def make_planned(plan: str, name: str = "llama", **config: Any):
    given = PLANS[plan]
    if plan == "by layer" and (layers := config.get("num_hidden_layers", NUM_LAYERS)):
        given = {"linear": list(range(0, layers, 2)), "softmax": list(range(1, layers, 2))}
    if isinstance(given, dict) and len(given) == 1:
        ((mechanism, options),) = given.items()
        return patch_model(make_model(name, **config), mechanism, **options)
    return patch_model(make_model(name, **config), given)


def counting() -> tuple[CompileConfig, list[int]]:
    """Return a backend that runs graphs as they are, and how many of the inputs of each that it gets are numbers."""
    numbers: list[int] = []

    def run(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        numbers.append(sum(not isinstance(x, torch.Tensor) for x in inputs))
        return graph.forward

    torch.compiler.reset()
    counters.clear()
    config = CompileConfig(backend=run, mode=None)
    config._compile_all_devices = True
    return config, numbers


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        pytest.param(plan, rows, marks=[] if plan in own else [pytest.mark.exhaustive])
        for plan in PLANS
        for rows, own in OWN_GRAPH.items()
    ],
)
def test_all_steps_are_one_graph_without_numbers_and_say_the_same(plan, rows):
    model, (ids, mask) = make_planned(plan), SINGLE if rows == "single" else PADDED
    want = generate(model, ids, attention_mask=mask)
    config, numbers = counting()
    got = generate(model, ids, attention_mask=mask, cache_implementation="static", compile_config=config)
    assert numbers == [0] and not counters["graph_break"]
    assert torch.equal(got[0], want[0])
    assert_close(got[1], want[1])


@each_plan
@torch.no_grad()
def test_a_static_cache_is_read_on_in_pieces_and_stays_where_it_is(plan):
    """In steps and in several tokens at once, from a padded prompt on; a pad in a step leaves no trace in its row."""
    model, (ids, mask) = make_planned(plan), pad([make_tokens(1, 21)[0], make_tokens(1, 15, seed=1)[0]], 0)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    want = logits_of(model, ids, attention_mask=mask, position_ids=position)
    cache, places, start = StaticCache(config=model.config, max_cache_len=32), [], 0
    for length in (9, 1, 5, 1, 1, 4):
        end = start + length
        now = {"attention_mask": mask[:, :end], "position_ids": position[:, start:end]}
        got = model(ids[:, start:end], past_key_values=cache, **now).logits
        assert_close(got[0], want[0, start:end])
        assert_close(got[1, max(6 - start, 0) :], want[1, max(start, 6) : end])
        places.append([x.data_ptr() for layer in states_of(cache) for x in (*layer.state, layer.read)])
        start = end
    assert places.count(places[0]) == 6 and cache.get_seq_length() == 21

    token, two = make_tokens(2, 1, seed=2), make_tokens(2, 2, seed=3)
    real, position = torch.cat([mask, torch.tensor([[0], [1]])], dim=1), torch.tensor([[21], [15]])
    model(token, attention_mask=real, position_ids=position, past_key_values=cache)
    real, position = torch.cat([real, torch.ones_like(two)], dim=1), torch.tensor([[21, 22], [16, 17]])
    got = model(two, attention_mask=real, position_ids=position, past_key_values=cache).logits
    assert_close(got[:1], logits_of(model, torch.cat([ids[:1], two[:1]], dim=1))[:, -2:])


@pytest.mark.parametrize("pieces", [(12, 5, 1, 3), (4, 10, 1, 6)])
@torch.no_grad()
def test_layers_that_keep_softmax_with_a_sliding_window_see_no_pads(pieces):
    """transformers asks a state layer how wide the mask of all sliding layers is, full windows or not."""
    model, (ids, mask) = make_model("mistral"), pad([make_tokens(1, 21)[0], make_tokens(1, 12, seed=1)[0]], 0)
    patch_model(model, {"local": {**WINDOW, "layers": [0]}})
    position = (mask.cumsum(1) - 1).clamp(min=0)
    want = logits_of(model, ids, attention_mask=mask, position_ids=position)
    cache, start = StaticCache(config=model.config, max_cache_len=32), 0
    for end in itertools.accumulate(pieces):
        now = {"attention_mask": mask[:, :end], "position_ids": position[:, start:end]}
        got, real = logits_of(model, ids[:, start:end], past_key_values=cache, **now), mask[:, start:end].bool()
        assert_close(got[real], want[:, start:end][real])
        start = end


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("plan", ["linear", "gated_deltanet", "by layer", "softmax first", "softmax"])
@torch.no_grad()
def test_columns_of_tokens_to_come_are_left_out_in_every_piece(name, plan):
    """Before the cache is made, behind it, before a sliding window is full and after that, in steps and in pieces."""
    given = {"softmax first": {"softmax": 0, "linear": 1}, "softmax": "softmax"}
    model = patch_model(make_model(name), given[plan]) if plan in given else make_planned(plan, name)
    ids, mask = pad([make_tokens(1, 24)[0], make_tokens(1, 20, seed=1)[0]], 0)
    want = logits_of(model, ids, attention_mask=mask)
    cache, start = StaticCache(config=model.config, max_cache_len=32), 0
    for end in (6, 7, 12, 13, 18):
        got = logits_of(model, ids[:, start:end], attention_mask=mask, past_key_values=cache)
        real = mask[:, start:end].bool()
        assert_close(got[real], want[:, start:end][real])
        start = end


@pytest.mark.parametrize("mechanism", each_of(BOTH_WAYS))
@torch.no_grad()
def test_an_encoder_reads_the_keys_of_a_static_cache_as_those_of_another(mechanism):
    """It keeps no state: its query is the last of the tokens read, and not the last that the cache has room for."""
    model, ids = make_patched("llama", mechanism, is_causal=False), make_tokens(2, 21)
    caches, start = (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)), 0
    for end in (16, 17, 18, 21):
        want, got = (logits_of(model, ids[:, start:end], past_key_values=cache) for cache in caches)
        assert_close(got, want)
        start = end


@pytest.mark.parametrize("plan", [{"softmax": 0, "linear": 1}, "softmax"])
def test_a_full_window_gets_the_mask_that_generate_has_made_for_it(plan):
    model, (ids, mask) = patch_model(make_model("mistral"), plan), PADDED
    got = generate(model, ids, attention_mask=mask, cache_implementation="static")
    assert_close(got[1], generate(model, ids, attention_mask=mask, use_cache=False)[1])


@each_plan
def test_beams_move_the_rows_of_a_static_cache(plan):
    model, (ids, mask) = make_planned(plan), PADDED
    options = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    got = model.generate(ids, cache_implementation="static", **options)
    assert torch.equal(got, model.generate(ids, use_cache=False, **options))


def states_of(cache):
    return [layer for layer in cache.layers if isinstance(layer, StaticStateLayer)]


@pytest.mark.parametrize("mechanism", each_of(list_mechanisms()))
def test_every_mechanism_is_served_or_refused_by_name_before_anything_is_read(mechanism):
    model, (ids, mask) = make_patched("llama", mechanism), PADDED
    want = generate(model, ids, attention_mask=mask, use_cache=False)
    found = list(get_mechanisms(model).values())
    if all(x.static_steps for x in found):
        got = generate(model, ids, attention_mask=mask, cache_implementation="static")
        assert torch.equal(got[0], want[0])
        assert_close(got[1], want[1])
        return
    cache = StaticCache(config=model.config, max_cache_len=32)
    parts = found[0].parts() if isinstance(found[0], CompositeMechanism) else [found[0]]
    named = next(x.config.mechanism for x in parts if not x.static_steps)
    with pytest.raises(UnsupportedModeError, match=f"cache_implementation='static'.*'{named}' of layer 0.*one of"):
        model(ids, attention_mask=mask, past_key_values=cache)
    assert not any(layer.is_initialized for layer in cache.layers)
    assert torch.equal(generate(model, ids, attention_mask=mask)[0], want[0])


def test_a_prompt_that_is_compiled_in_chunks_is_refused_by_name():
    """As `generate` compiles it on a GPU: none of it was read before."""
    model, options = make_patched("llama", "linformer"), {"cache_implementation": "static", "prefill_chunk_size": 4}
    with pytest.raises(UnsupportedModeError, match=r"cache_implementation='static'.*'linformer' of layer 0"):
        generate(model, SINGLE[0], compile_config=counting()[0], **options)


@pytest.mark.parametrize(
    ("linear", "compiled"),
    [
        pytest.param(linear, compiled, marks=[pytest.mark.exhaustive] if compiled else [])
        for linear in ("linear", "gated_deltanet")
        for compiled in (False, True)
    ],
)
def test_hard_keys_stay_in_a_static_cache(linear, compiled):
    """Steps in which a block leaves the window, so that other keys are kept than those of the prompt."""
    model = make_model("llama", max_position_embeddings=256)
    patch_model(model, "hybrid", window_size=64, num_hard_keys=3, linear=linear)
    ids, mask = pad([make_tokens(1, 190)[0], make_tokens(1, 189, seed=1)[0]], 0)
    want, (config, numbers) = generate(model, ids, attention_mask=mask), counting()
    options = {"compile_config": config} if compiled else {}
    got = generate(model, ids, attention_mask=mask, cache_implementation="static", **options)
    assert numbers == [0] * compiled and not counters["graph_break"]
    assert torch.equal(got[0], want[0])
    assert_close(got[1], want[1])


def test_exact_heads_have_no_room_where_a_window_slides():
    model = make_planned("by head", "mistral")
    why = "'softmax' of layer 0 keeps a state that grows, and the cache has room for the layer's sliding window alone"
    with pytest.raises(UnsupportedModeError, match=why) as error:
        generate(model, *SINGLE[:1], cache_implementation="static")
    remedies = str(error.value).partition("one of ")[2].split(", ")
    assert "linear" in remedies and all(MECHANISMS.get(name).constant_state for name in remedies)


def test_more_tokens_than_a_static_cache_has_room_for_are_refused():
    model = make_planned("by head")
    with pytest.raises(UnsupportedModeError, match=r"room for 8 tokens, and 9 were read.*max_cache_len"):
        logits_of(model, SINGLE[0], past_key_values=StaticCache(config=model.config, max_cache_len=8))
    full = StaticCache(config=model.config, max_cache_len=8)
    logits_of(model, SINGLE[0][:, :8], past_key_values=full)
    with pytest.raises(UnsupportedModeError, match=r"room for 8 tokens, and 9 were read.*max_cache_len"):
        logits_of(model, SINGLE[0][:, 8:9], past_key_values=full)
