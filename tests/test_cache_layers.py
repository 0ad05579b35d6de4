"""Which layers of a cache are read, and how: under an early exit, and of what inference mode has made."""

from __future__ import annotations

import pytest
import torch

from hf_linattn import patch_model
from hf_linattn.errors import UnsupportedModeError
from tests.helpers import KINDS, assert_close, logits_of, make_patched, make_tokens
from tests.models import make_model


@pytest.mark.parametrize("mechanism", ["softmax", "local"])
def test_an_early_exit_leaves_the_model_whole(mechanism):
    """transformers takes layers off the config for the draft, and puts them back where nothing fails before."""
    model, ids = make_model("llama"), make_tokens(1, 12)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    patch_model(model, mechanism, **({"window_size": 200} if mechanism == "local" else {}))
    before = logits_of(model, ids)
    if mechanism == "softmax":
        assert torch.equal(model.generate(ids, assistant_early_exit=1, **options), expected)
    else:
        with pytest.raises(UnsupportedModeError, match="no assisted generation"):
            model.generate(ids, assistant_early_exit=1, **options)
    assert model.config.num_hidden_layers == 2
    assert torch.equal(logits_of(model, ids), before)
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("mechanism", KINDS)
def test_a_prompt_that_inference_mode_read_is_continued_with_gradients(mechanism):
    model, ids = make_patched("llama", mechanism), make_tokens(2, 12)
    with torch.inference_mode():
        cache = model(ids[:, :8], use_cache=True).past_key_values
    model(ids[:, 8:11], past_key_values=cache).logits.sum().backward()
    assert all(p.grad is not None for p in model.model.embed_tokens.parameters())
    assert_close(model(ids[:, 11:], past_key_values=cache).logits.detach(), logits_of(model, ids)[:, 11:])
