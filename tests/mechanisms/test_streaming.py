"""streaming with positions counted inside the cache, against the authors' procedure done key by key."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_linattn import patch_model
from hf_linattn.errors import OptionError, UnsupportedModeError, UnsupportedModelError
from hf_linattn.testing.models import tiny_model

SINKS, WINDOW, LENGTH, HEADS, HEAD_DIM = 3, 7, 41, 4, 8
OPTIONS = {"window_size": WINDOW, "num_sink_tokens": SINKS, "block_size": 8}


def make_model(**options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=HEADS * HEAD_DIM, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=64, **options,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    for parameter in model.model.layers[0].self_attn.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
    """RoPE of one head vector [D] by the textbook: pairs (i, i + D/2) turn by position / 10000^(2i/D)."""
    half = HEAD_DIM // 2
    angle = position * 10000.0 ** (-2 * torch.arange(half, dtype=torch.float64) / HEAD_DIM)
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def stream(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Read token by token: the cache holds sinks and window before rotation, positions are places in the cache."""
    outputs = []
    for i in range(LENGTH):
        cached = [j for j in range(i + 1) if j < SINKS or i - j < WINDOW]
        scores = []
        for place, j in enumerate(cached):
            scores.append(rotate(query[i], len(cached) - 1) @ rotate(key[j], place) * HEAD_DIM**-0.5)
        outputs.append(torch.stack(scores).softmax(0) @ value[cached])
    return torch.stack(outputs)


@torch.no_grad()
def test_streaming_positions_are_places_in_the_cache():
    model = patch_model(make_model(), "streaming", positions="streaming", **OPTIONS)
    attention = model.model.layers[0].self_attn
    seen = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).register_forward_hook(lambda m, i, o, name=name: seen.update({name: o[0]}))
    attention.o_proj.register_forward_pre_hook(lambda m, i: seen.update(output=i[0][0]))
    model(torch.randint(50, (1, LENGTH)), use_cache=False)
    query, key, value = (seen[name].unflatten(-1, (-1, HEAD_DIM)) for name in ("q_proj", "k_proj", "v_proj"))
    output = seen["output"].unflatten(-1, (HEADS, HEAD_DIM))
    for head in range(HEADS):
        expected = stream(query[:, head], key[:, head // 2], value[:, head // 2])
        torch.testing.assert_close(output[:, head], expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_within_the_cache_nothing_is_moved_and_beyond_it_is():
    plain, streaming = (patch_model(make_model(), "streaming", positions=p, **OPTIONS) for p in ("model", "streaming"))
    tokens = torch.randint(50, (2, LENGTH))
    one, other = (model(tokens, use_cache=False).logits for model in (plain, streaming))
    cached = SINKS + WINDOW
    torch.testing.assert_close(one[:, :cached], other[:, :cached], rtol=0, atol=1e-12)
    assert (one[:, cached:] - other[:, cached:]).abs().amax() > 1e-4


@pytest.mark.parametrize(("architecture", "causal"), [("gpt2", True), ("bert", False), ("llama", False)])
def test_streaming_needs_a_causal_layer_with_rotary_positions(architecture, causal):
    model = tiny_model(architecture, causal)
    with pytest.raises(UnsupportedModeError, match="positions='streaming' needs a causal layer with rotary positions"):
        patch_model(model, "streaming", positions="streaming")


def test_rotations_that_change_with_the_length_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="rope type 'dynamic'"):
        patch_model(make_model(rope_parameters=rope), "streaming", positions="streaming")


def test_unknown_positions():
    with pytest.raises(OptionError, match="positions must be 'model' or 'streaming', got 'cache'"):
        patch_model(make_model(), "streaming", positions="cache")
