"""One code path for every architecture: a mechanism of each kind, on models nobody wrote special code for."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipTextConfig,
    SiglipTextModel,
)

from hf_linattn import get_mechanisms, patch_model, unpatch_model
from hf_linattn.mechanisms import MECHANISMS
from tests.helpers import OPTIONS, assert_close, each_kind, generate, logits_of, make_patched, make_tokens, pad
from tests.models import ARCHITECTURES, CAUSAL, ENCODERS, NUM_HEADS, NUM_LAYERS, fill, make_model

LENGTH = 19  # longer than the sliding windows, and odd


each_pair, each_causal_pair, each_encoder_pair = (
    pytest.mark.parametrize(("name", "mechanism"), each_kind(names)) for names in (ARCHITECTURES, CAUSAL, ENCODERS)
)


@each_causal_pair
def test_left_padded_generation_with_a_cache_equals_unpadded_without(name, mechanism):
    model = make_patched(name, mechanism)
    rows = [make_tokens(1, length, seed=length)[0] for length in (LENGTH, 11, 1)]
    ids, mask = pad(rows, model.config.pad_token_id)
    tokens, logits = generate(model, ids, 3, attention_mask=mask)
    for index, row in enumerate(rows):
        alone = {"attention_mask": torch.ones_like(row[None]), "use_cache": False}
        alone_tokens, alone_logits = generate(model, row[None], 3, **alone)
        assert tokens[index].tolist() == alone_tokens[0].tolist()
        assert_close(logits[index], alone_logits[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("side", ["left", "right"])
@each_encoder_pair
def test_a_padded_encoder_equals_an_unpadded_one(name, mechanism, side):
    model = make_patched(name, mechanism)
    rows = [make_tokens(1, length, seed=length)[0] for length in (LENGTH, 11, 1)]
    ids, mask = pad(rows, model.config.pad_token_id, side)
    first = model.config.pad_token_id + 1 if name == "roberta" else 0
    positions = (mask.cumsum(1) - 1).clamp(min=0) + first
    padded = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    for index, row in enumerate(rows):
        assert_close(padded[index, mask[index].bool()], logits_of(model, row[None])[0])


@each_pair
def test_every_layer_calls_its_mechanism_and_the_outputs_change(name, mechanism):
    ids = make_tokens(2, LENGTH)
    before = logits_of(make_model(name), ids)
    model = make_patched(name, mechanism)
    after = logits_of(model, ids)
    mechanisms = get_mechanisms(model)
    assert [m.calls for m in mechanisms.values()] == [1] * NUM_LAYERS
    assert [m.layer.num_heads for m in mechanisms.values()] == [NUM_HEADS] * NUM_LAYERS
    assert [m.layer.causal for m in mechanisms.values()] == [ARCHITECTURES[name].causal] * NUM_LAYERS
    if MECHANISMS.get(mechanism).limit.equal is None:  # the others are exact on inputs as short as these
        assert (after - before).abs().mean() > 0.02 * before.std()
    assert torch.equal(logits_of(unpatch_model(model), ids), before)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_softmax_equals_the_eager_attention_of_transformers(name, padded):
    """Also beyond the sliding window and with capped scores, where those belong to the model."""
    model = make_model(name, attn_implementation="eager")
    ids, mask = pad([make_tokens(1, n, seed=n)[0] for n in (LENGTH, 12)], model.config.pad_token_id, "right")
    inputs = {"attention_mask": mask} if padded else {}
    expected = logits_of(model, ids, **inputs)
    actual = logits_of(patch_model(model, "softmax"), ids, **inputs)
    kept = mask.bool() if padded else torch.ones_like(mask).bool()
    assert_close(actual[kept], expected[kept])


@pytest.mark.parametrize("name", CAUSAL)
def test_softmax_generates_as_the_eager_attention_of_transformers(name):
    rows = [make_tokens(1, length, seed=length)[0] for length in (LENGTH, 12)]
    ids, mask = pad(rows, 0)
    model = make_model(name, attn_implementation="eager")
    tokens, logits = generate(model, ids, attention_mask=mask)
    patched_tokens, patched_logits = generate(patch_model(model, "softmax"), ids, attention_mask=mask)
    assert patched_tokens.tolist() == tokens.tolist()
    assert_close(patched_logits, logits)


@pytest.mark.covering(2)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("order", ["softmax last", "softmax first"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_mixed_plan_generates_the_same_with_every_cache(name, order, cache):
    """Layers of both kinds in one cache, beyond the sliding window, with and without padding."""
    softmax, linear = ([1], "0") if order == "softmax last" else ([0], "1")
    plan = {"performer": {"layers": linear, **OPTIONS["performer"]}, "softmax": softmax}
    model = patch_model(make_model(name), plan)
    rows = [make_tokens(1, length, seed=length)[0] for length in (LENGTH, 12)]
    for ids, mask in ((rows[0][None], torch.ones(1, LENGTH, dtype=torch.int64)), pad(rows, 0)):
        expected_tokens, expected_logits = generate(model, ids, 3, attention_mask=mask, use_cache=False)
        tokens, logits = generate(model, ids, 3, attention_mask=mask, cache_implementation=cache)
        assert tokens.tolist() == expected_tokens.tolist()
        assert_close(logits, expected_logits)


ZAMBA = {
    "zamba": {"n_mamba_heads": 2, "mamba_dt_rank": 4},
    "zamba2": {
        "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_expand": 2, "mamba_headdim": 16, "num_mem_blocks": 1
    },
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["softmax", "linear", "local"])
@pytest.mark.parametrize("name", ZAMBA)
def test_layers_that_are_told_their_place_in_the_cache_have_it(name, mechanism):
    """What such a module says itself is -1, or nothing; the last layer of these has no attention."""
    config = AutoConfig.for_model(
        name, vocab_size=96, hidden_size=32, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=48, mamba_d_state=8, layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"],
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **ZAMBA[name],
    )  # fmt: skip
    model = fill(AutoModelForCausalLM.from_config(config)).eval()
    ids, mask = pad([make_tokens(1, count, seed=count)[0] for count in (9, 6)], 0)
    options = {"attention_mask": mask}
    original = generate(model, ids, 4, **options)
    patch_model(model, mechanism)
    with_cache, without = (generate(model, ids, 4, use_cache=use_cache, **options) for use_cache in (True, False))
    torch.testing.assert_close(with_cache[1], without[1], rtol=1e-3, atol=1e-3)
    if mechanism == "softmax":
        assert torch.equal(with_cache[1], original[1])


SIGLIP = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
EXACT = {
    name: kind.limit.equal(16)
    for name, kind in ((name, MECHANISMS.get(name)) for name in MECHANISMS.names())
    if "bidirectional" in kind.modes and kind.limit.equal is not None
}


@torch.no_grad()
@pytest.mark.parametrize("mechanism", EXACT)
def test_a_text_whose_last_token_is_a_pad_is_pooled_there(mechanism):
    """SigLIP's pooler reads it, so at the exactness limit it is softmax's, too."""
    model = fill(SiglipTextModel(SiglipTextConfig(**SIGLIP, vocab_size=96, max_position_embeddings=16))).eval()
    ids, mask = pad([make_tokens(1, count, seed=count)[0] for count in (9, 6)], 1, "right")
    expected = model(ids, attention_mask=mask).pooler_output
    patch_model(model, mechanism, **EXACT[mechanism])
    assert_close(model(ids, attention_mask=mask).pooler_output, expected)


@torch.no_grad()
def test_a_head_that_makes_a_mask_for_pytorchs_attention_gets_one_of_pairs():
    """SigLIP 2's pooler has the config of the layers; it took a mask of keys for one of rows and heads."""
    config = Siglip2VisionConfig(**SIGLIP, patch_size=8, num_patches=16)
    model = fill(Siglip2VisionModel(config)).eval()
    pixels = torch.randn(2, 12, 192, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    shapes = torch.tensor([[2, 4], [3, 4]])
    expected = model(pixels, mask, shapes).pooler_output
    for patched in (patch_model(model, "softmax"), copy.deepcopy(model)):
        assert_close(patched(pixels, mask, shapes).pooler_output, expected)
        assert_close(patched(pixels[1:], mask[1:], shapes[1:]).pooler_output, expected[1:])
        assert unpatch_model(patched).head.config is patched.encoder.layers[0].self_attn.config
        assert torch.equal(patched(pixels, mask, shapes).pooler_output, expected)
