"""Windows of equal bytes against what caches really hold after long decoding."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BertConfig, DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_linattn import OptionError, PatchError, UnsupportedModelError, patch_model
from hf_linattn.cache import StateLayer, state_bytes
from hf_linattn.evaluation import constant_state_bytes, streaming_bytes, streaming_for, streaming_like
from tests.models import make_model

LAYERS = 3


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def llama(request):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(request.param).eval()


def decoded(model, plan) -> tuple[DynamicCache, list[int]]:
    """Return a cache that has read more tokens than windows hold, the last ones one by one, and bytes by layer."""
    patched = patch_model(copy.deepcopy(model), plan)
    cache, ids = DynamicCache(config=patched.config), torch.arange(109).remainder(50)[None]
    with torch.no_grad():
        for part in (ids[:, :100], *ids[:, 100:].split(1, dim=1)):
            patched(part, past_key_values=cache)
    return cache, [layer.nbytes if isinstance(layer, StateLayer) else 0 for layer in cache.layers]


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("given", [8_001, 12_345])
def test_no_more_bytes_than_asked_and_one_token_more_would_be(llama, given, sinks):
    plan = streaming_for(llama, bytes=given, num_sink_tokens=sinks)
    (options,) = plan.values()
    assert options["num_sink_tokens"] == sinks and options["window_size"] + sinks < 100
    total = state_bytes(decoded(llama, plan)[0])
    assert total <= given and streaming_bytes(llama, **options) == total
    wider = {"streaming": options | {"window_size": options["window_size"] + 1}}
    assert state_bytes(decoded(llama, wider)[0]) > given


def test_chosen_layers_share_the_bytes(llama):
    plan = streaming_for(llama, bytes=6_000, layers="0,-1")
    assert plan["streaming"]["layers"] == [0, 2]
    of_layers = decoded(llama, plan)[1]
    assert of_layers[0] == of_layers[2] > 2_800 and of_layers[1] == 0 and sum(of_layers) <= 6_000


def test_a_config_gives_the_plan_of_its_model(llama):
    config = copy.deepcopy(llama.config)
    config.dtype = llama.dtype
    assert streaming_for(config, bytes=9_000) == streaming_for(llama, bytes=9_000)
    half = streaming_for(config, bytes=9_000, dtype=torch.bfloat16)
    assert half == streaming_for(copy.deepcopy(llama).to(torch.bfloat16), bytes=9_000)


@pytest.mark.parametrize("mechanism", ["gla", "hybrid", "deltanet"])
def test_the_bytes_are_those_of_the_converted_layers(llama, mechanism):
    model = patch_model(copy.deepcopy(llama), mechanism, layers="1-2")
    (options,) = streaming_like(model).values()
    assert options["layers"] == [1, 2]
    own = constant_state_bytes(model)
    assert own == sum(decoded(llama, {mechanism: "1-2"})[1])
    assert streaming_bytes(model, **options) <= own
    assert streaming_bytes(model, **options | {"window_size": options["window_size"] + 1}) > own


def test_what_has_no_window_of_its_bytes(llama):
    for mechanism, options in (("dynamic_sparse", {}), ("linear", {}), ("softmax", {})):
        model = patch_model(copy.deepcopy(llama), mechanism, **options)
        sinks = 400 if mechanism == "linear" else 4  # a state smaller than the sink tokens
        assert streaming_like(model, num_sink_tokens=sinks) is None, mechanism
    bert = patch_model(make_model("bert"), "linear")
    assert constant_state_bytes(bert) is None and streaming_like(bert) is None
    with pytest.raises(PatchError, match="is not patched"):
        streaming_like(llama)


def test_what_cannot_be_asked_for(llama):
    least = streaming_bytes(llama, window_size=1)
    assert streaming_for(llama, bytes=least) == {"streaming": {"window_size": 1, "num_sink_tokens": 4}}
    message = f"bytes must be at least {least:,}, which 4 sink tokens and a window of one token take, got {least - 1}"
    with pytest.raises(OptionError, match=message):
        streaming_for(llama, bytes=least - 1)
    with pytest.raises(OptionError, match=r"bytes must be .* got 1e\+20"):
        streaming_for(llama, bytes=1e20)
    with pytest.raises(OptionError, match=r"num_sink_tokens must be .* got -1"):
        streaming_for(llama, bytes=10_000, num_sink_tokens=-1)
    with pytest.raises(OptionError, match="names layer 3"):
        streaming_for(llama, bytes=10_000, layers=[3])
    for encoder in (make_model("bert"), BertConfig(num_hidden_layers=1)):
        with pytest.raises(UnsupportedModelError, match=r"layer 0 of Bert.* is bidirectional"):
            streaming_for(encoder, bytes=10**6)
