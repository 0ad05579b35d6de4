"""Which layers of a cache are read, and how: under an early exit, of inference mode, across to an encoder."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from hf_linattn import original_attention, patch_model
from hf_linattn.errors import PatchError, UnsupportedModeError, UnsupportedModelError
from hf_linattn.support.tiny import tiny_inputs, tiny_model
from hf_linattn.testing.models import source_of
from hf_linattn.testing.models import tiny_model as harness_model
from tests.helpers import KINDS, assert_close, logits_of, make_patched, make_tokens
from tests.models import make_model


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("mechanism", ["softmax", "local"])
def test_an_early_exit_leaves_the_model_whole(mechanism, ran):
    """transformers takes layers off the config for the draft, and puts them back where nothing fails before.

    ran: whether all layers have run before.
    """
    model, ids = make_model("llama"), make_tokens(1, 12)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected, original = model.generate(ids, **options), logits_of(model, ids)
    patch_model(model, mechanism, **({"window_size": 200} if mechanism == "local" else {}))
    before = logits_of(model, ids) if ran else None
    if mechanism == "softmax":
        assert torch.equal(model.generate(ids, assistant_early_exit=1, **options), expected)
    else:
        with pytest.raises(UnsupportedModeError, match="no assisted generation"):
            model.generate(ids, assistant_early_exit=1, **options)
    assert model.config.num_hidden_layers == 2
    after = logits_of(model, ids)
    assert_close(after, original)
    assert before is None or torch.equal(after, before)
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("mechanism", KINDS)
def test_a_prompt_that_inference_mode_read_is_continued_with_gradients(mechanism):
    model, ids = make_patched("llama", mechanism), make_tokens(2, 12)
    with torch.inference_mode():
        cache = model(ids[:, :8], use_cache=True).past_key_values
    model(ids[:, 8:11], past_key_values=cache).logits.sum().backward()
    assert all(p.grad is not None for p in model.model.embed_tokens.parameters())
    assert_close(model(ids[:, 11:], past_key_values=cache).logits.detach(), logits_of(model, ids)[:, 11:])


@torch.no_grad()
def test_heads_that_a_model_pads_are_kept_across_as_they_came():
    """Moonshine pads what the cache hands out, in every step, to a width that some kernels like."""
    model = tiny_model("moonshine")
    for module in model.model.decoder.modules():
        if hasattr(module, "head_dim_padding"):
            module.head_dim_padding = 4
    inputs = tiny_inputs(model)
    ids = inputs.pop("decoder_input_ids")
    patch_model(model, "linear", cross_attention="performer")
    want = model(**inputs, decoder_input_ids=ids, use_cache=False).logits
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for position in range(3):
        step = ids[:, position : position + 1]
        assert_close(model(**inputs, decoder_input_ids=step, past_key_values=cache).logits[:, 0], want[:, position])


def test_what_whisper_asks_of_cross_attention_is_refused_with_the_way_to_have_it():
    model = harness_model("whisper", False, torch.float32)
    model.generation_config.alignment_heads = [[0, 0]]
    options = {**source_of("whisper", 2, 0, torch.float32), "max_new_tokens": 3, "do_sample": False}
    stamps = model.generate(**options, return_token_timestamps=True)
    patch_model(model, "linear", cross_attention="performer")
    with pytest.raises(UnsupportedModeError, match=r"and leave return_dict_in_generate out .*, as Whisper's does"):
        model.generate(**options, return_dict_in_generate=True)
    assert model.generate(**options, return_segments=True)["segments"]
    with pytest.raises(PatchError, match=r"original_attention\(model\) for a while, as for Whisper's return_"):
        model.generate(**options, return_token_timestamps=True)
    with original_attention(model):
        again = model.generate(**options, return_token_timestamps=True)
    assert torch.equal(again["token_timestamps"], stamps["token_timestamps"])


@pytest.mark.parametrize("name", ["mllama", "gpt2"])
def test_a_decoder_may_read_text_alone_before_it_has_an_encoders_tokens(name):
    model = tiny_model(name) if name == "mllama" else make_model(name, add_cross_attention=True)
    ids = make_tokens(2, 9)
    expected = logits_of(model, ids)
    patch_model(model, "local", window_size=100, cross_attention="linear")
    for _ in range(2):
        assert_close(logits_of(model, ids), expected)


def test_a_decoder_that_passes_its_encoder_by_is_refused(monkeypatch):
    model, ids = make_model("gpt2", add_cross_attention=True), make_tokens(2, 9)
    patch_model(model, "local", window_size=100, cross_attention="linear")
    for block in model.transformer.h:
        monkeypatch.setattr(block.crossattention, "forward", lambda hidden, *_, **__: (hidden, None))
    with pytest.raises(UnsupportedModelError, match=r"h\.0\.crossattention, .* never called the mechanism"):
        model(ids, encoder_hidden_states=torch.zeros(2, 3, model.config.n_embd))
