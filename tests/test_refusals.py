"""The table "What cannot exist" of docs/mechanisms.md: every entry is provoked, and raises what it says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import QuantizedLayer
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

from docs.generate import missing_forms
from docs.refusals import REFUSALS
from hf_linattn import (
    MechanismConfig,
    OptionError,
    UnsupportedModeError,
    explain_backend,
    extend_positions,
    get_mechanisms,
    original_attention,
    patch_model,
    register_mechanism,
)
from hf_linattn.attention_modules import self_attention_modules
from hf_linattn.mechanisms import Mechanism
from tests.helpers import logits_of, make_patched, make_tokens
from tests.models import make_model, make_sharing

TINY = {"vocab_size": 96, "hidden_size": 32}
TOKENS = make_tokens(1, 5)


class UnreadableLayer(QuantizedLayer):
    """A quantised layer without a quantisation library."""

    def _quantize(self, tensor, axis):
        return tensor.to(torch.float16)

    def _dequantize(self, tensor):
        return tensor.to(torch.float32)


def causal_only() -> str:
    """Register a mechanism that declares one form and writes no weights."""

    class Config(MechanismConfig):
        pass

    @register_mechanism("causal_only")
    class CausalOnly(Mechanism):
        config_class = Config
        modes = frozenset({"causal"})

    return "causal_only"


def bloom_and_mamba():
    for model in (
        BloomForCausalLM(BloomConfig(**TINY, n_layer=2, n_head=4)),
        MambaForCausalLM(MambaConfig(**TINY, num_hidden_layers=2)),
    ):
        try:
            patch_model(model, "linear")
        except REFUSALS["no attention"].error as error:
            last = error
        else:
            pytest.fail(f"{type(model).__name__} was patched")
    raise last


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    patch_model(T5ForConditionalGeneration(T5Config(vocab_size=96, **sizes)), "linear")


def idle_layer():
    model = make_patched("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    logits_of(model, TOKENS)


def shared_heads():
    model = make_model("llama")
    model._tp_size = 2  # as transformers leaves it
    patch_model(model, "hedgehog")


def no_floating_dtype():
    model = make_model("llama")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float8_e4m3fn)
    model.config.dtype = None
    patch_model(model, "hedgehog")


def other_direction():
    model = make_patched("gpt2")
    next(iter(self_attention_modules(model).values())).is_causal = False
    logits_of(model, TOKENS)


def no_matrix():
    model = patch_model(make_model("gpt2"), causal_only())
    next(iter(get_mechanisms(model).values())).attention_matrix(*torch.randn(2, 1, 4, 5, 8))


def state_to_softmax():
    model = make_patched("gpt2")
    cache = model(TOKENS, use_cache=True).past_key_values
    with original_attention(model):
        model(TOKENS, past_key_values=cache, use_cache=True)


def unreadable_keys():
    model, cache = make_model("llama"), DynamicCache()
    cache.layers = [UnreadableLayer() for _ in range(2)]
    model(TOKENS, past_key_values=cache, use_cache=True)
    patch_model(model, "linear")(TOKENS, past_key_values=cache, use_cache=True)


def images():
    rule = partial(create_causal_mask, block_sequence_ids=torch.zeros_like(TOKENS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "create_causal_mask", rule)
        logits_of(make_patched("llama"), TOKENS)


PROVOKED: dict[str, Callable[[], object]] = {
    "no attention": bloom_and_mamba,
    "position bias": t5,
    "idle layer": idle_layer,
    "shared heads": shared_heads,
    "no floating dtype": no_floating_dtype,
    "missing form": lambda: patch_model(make_model("bert"), causal_only()),
    "other direction": other_direction,
    "4-D mask": lambda: make_patched("gpt2")(TOKENS, attention_mask=torch.ones(1, 1, 5, 5)),
    "rule": images,
    "other mask": lambda: make_patched("llama")(TOKENS, attention_mask=torch.ones(1, 4)),
    "attentions": lambda: make_patched("gpt2")(TOKENS, output_attentions=True),
    "other attention": lambda: make_patched("llama").set_attn_implementation("sdpa"),
    "pages": lambda: make_patched("gpt2").generate_batch([[7, 8]]),
    "no matrix": no_matrix,
    "too long": lambda: make_patched("gpt2")(make_tokens(1, 65)),
    "nothing to extend": lambda: extend_positions(BloomForCausalLM(BloomConfig(**TINY, n_layer=1, n_head=4)), 100),
    "unsplit feed-forward": lambda: patch_model(make_model("opt"), "linear", chunk_feed_forward=8),
    "crop": lambda: make_patched("gpt2")(TOKENS, use_cache=True).past_key_values.crop(2),
    "state to softmax": state_to_softmax,
    "shared keys": lambda: patch_model(make_sharing("Gemma3n"), {"linear": [0]})(TOKENS, use_cache=True),
    "static cache": lambda: make_patched("llama", "lsh").generate(TOKENS, cache_implementation="static"),
    "unreadable keys": unreadable_keys,
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_said_to_raise_raises(name: str):
    with pytest.raises(REFUSALS[name].error):
        PROVOKED[name]()


def test_a_missing_form_is_listed_with_the_mechanisms_that_have_it():
    for name in (causal_only(), "deltanet"):
        (row,) = [line for line in missing_forms().splitlines() if line.startswith(f"| [`{name}`]")]
        assert row.split("|")[2].strip() == "bidirectional" and "`performer`" in row and f"`{name}`," not in row


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["linear", "softmax"])
@pytest.mark.parametrize("with_config", [True, False])
def test_a_cache_of_a_forward_that_broke_off_goes_on_no_longer(mechanism, with_config):
    """One without a config has no layers yet where nothing was read."""
    model, ids = patch_model(make_model("llama"), mechanism), make_tokens(1, 8)
    cache = DynamicCache(**({"config": model.config} if with_config else {}))

    def stop(*_):
        raise RuntimeError("no memory")

    hook = model.model.layers[0].mlp.register_forward_hook(stop)
    with pytest.raises(RuntimeError, match="no memory"):
        model(ids, past_key_values=cache)
    hook.remove()
    with pytest.raises(UnsupportedModeError, match=r"read 8 tokens in layer 0 and 0 in layer 1, .* a new cache"):
        model(ids, past_key_values=cache)


@torch.no_grad()
def test_a_padded_prefix_of_a_windows_cache_goes_on():
    """Which of the keys that it dropped were pads, the cache does not say; a mask was refused for it."""
    model, ids = patch_model(make_model("mistral"), "linear", layers="1"), make_tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    cache = DynamicCache(config=model.config)
    with original_attention(model):
        model(ids[:, :12], attention_mask=mask[:, :12], past_key_values=cache)
    for last in (13, 14):
        output = model(ids[:, last - 1 : last], attention_mask=mask[:, :last], past_key_values=cache)
        assert output.logits.isfinite().all()


@pytest.mark.parametrize("inputs", ["text", [1, 2, 3]], ids=str)
def test_what_is_no_input_is_explained_to_nobody(inputs):
    with pytest.raises(OptionError, match="inputs must be token ids as a tensor, or a mapping of inputs"):
        explain_backend(patch_model(make_model("llama"), "linear"), inputs)
