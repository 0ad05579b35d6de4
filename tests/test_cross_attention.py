"""Cross-attention of encoder-decoders in whole models; the invariants of `hf_linattn.testing.cross` test the rest."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    ConditionalDetrConfig,
    ConditionalDetrForObjectDetection,
    DynamicCache,
    EncoderDecoderCache,
    MarianConfig,
    MarianMTModel,
    MllamaForCausalLM,
    ResNetConfig,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig
from typer.testing import CliRunner

from hf_linattn import (
    PatchConfig,
    calibrate,
    get_mechanisms,
    get_patch_config,
    is_patched,
    list_mechanisms,
    original_attention,
    patch_model,
    unpatch_model,
)
from hf_linattn.attention_call import AttentionCall
from hf_linattn.cli import app
from hf_linattn.config import make_config
from hf_linattn.errors import CheckpointError, HfLinattnError, OptionError, UnsupportedModeError, UnsupportedModelError
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.testing.models import random_tokens, source_of, tiny_model

ACROSS = [name for name in list_mechanisms() if "cross" in MECHANISMS.get(name).modes and name != "softmax"]
TWO = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}


def bart(dtype: torch.dtype = torch.float64):
    return tiny_model("bart", False, dtype)


def logits(model, source=None, target=None, **options):
    source = random_tokens(2, 41) if source is None else source
    target = random_tokens(2, 17, seed=1) if target is None else target
    with torch.no_grad():
        return model(source, decoder_input_ids=target, **options).logits


def t5gemma() -> T5GemmaForConditionalGeneration:
    """Grouped queries, rotary positions and a soft cap on both sides."""
    side = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4096, "query_pre_attn_scalar": 8,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    config = T5GemmaConfig(encoder=side, decoder=side, **TWO, dropout_rate=0.0, attention_dropout=0.0)
    return T5GemmaForConditionalGeneration(config).double().eval()


def marian() -> MarianMTModel:
    torch.manual_seed(0)
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "max_position_embeddings": 64}
    return MarianMTModel(MarianConfig(**TWO, **sizes, **heads, forced_eos_token_id=None)).double().eval()


@pytest.mark.parametrize("make", [t5gemma, marian], ids=["t5gemma", "marian"])
@pytest.mark.parametrize("mechanism", ["linear", "performer", "linformer", "local"])
def test_generate_equals_uncached_in_other_families(make, mechanism):
    model = make()
    with torch.no_grad():  # attention far from uniform, which all mechanisms agree on
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.dim() == 1 and parameter.mean() > 0.5))
    ids, mask = random_tokens(2, 31), torch.ones(2, 31, dtype=torch.long)
    mask[1, 20:] = 0
    before = logits(model, ids, attention_mask=mask)
    patch_model(model, "linear", cross_attention={mechanism: {"window_size": 3} if mechanism == "local" else {}})
    assert len(get_mechanisms(model)) == 6  # two layers of each: encoder, decoder, across
    cached, full = (
        model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, num_beams=2, use_cache=use)
        for use in (True, False)
    )
    assert torch.equal(cached, full)
    assert (logits(model, ids, attention_mask=mask) - before).abs().max() > 1e-3
    unpatch_model(model)
    assert torch.equal(logits(model, ids, attention_mask=mask), before)


@pytest.mark.parametrize("mechanism", ACROSS)
def test_what_is_kept_of_the_encoder_is_made_once(mechanism, monkeypatch):
    model = patch_model(bart(), "softmax", cross_attention=mechanism)
    made = []
    for path, found in get_mechanisms(model).items():
        if found.layer.cross:
            make = found.cross_state
            monkeypatch.setattr(found, "cross_state", lambda *x, path=path, make=make: made.append(path) or make(*x))
    model.generate(random_tokens(2, 40), max_new_tokens=8, do_sample=False, num_beams=3)
    assert sorted(made) == sorted(path for path in get_mechanisms(model) if "encoder_attn" in path)
    assert len(made) == 2


@pytest.mark.parametrize("mechanism", ["linear", "linformer", "local"])
def test_a_cache_that_softmax_filled_is_continued(mechanism):
    """The encoder's keys are read from it; the decoder's own layers begin anew, so all is as without a cache."""
    source, target = random_tokens(2, 41), random_tokens(2, 17, seed=1)
    model, cache = bart(), EncoderDecoderCache(DynamicCache(), DynamicCache())
    patch_model(model, "softmax", cross_attention=mechanism)
    want = logits(model, source, target)
    # the first token's cross-attention says nothing of its own keys and values in the first layer
    only = patch_model(bart(), "softmax", cross_attention={mechanism: {"layers": 1}})
    with original_attention(only):
        logits(only, source, target[:, :0].new_ones(2, 1), past_key_values=cache)
    cache.self_attention_cache = DynamicCache()
    got = logits(model, source, target, past_key_values=cache)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kept", ["rejected tokens", "the encoder's half", "what softmax filled"])
def test_a_window_stands_where_the_decoder_does_whatever_its_cache_went_through(kept):
    source, target = random_tokens(2, 41), random_tokens(2, 17, seed=1)
    # across in the last layer alone, so that softmax there leaves the same keys in the decoder's own layers
    window = {"layers": 1, "window_size": 3, "keys_per_query": 2}
    model = patch_model(bart(), "softmax", cross_attention={"local": window})
    want, cache = logits(model, source, target), EncoderDecoderCache(DynamicCache(), DynamicCache())
    if kept == "rejected tokens":
        logits(model, source, torch.cat([target[:, :9], target[:, :4]], dim=1), past_key_values=cache)
        cache.crop(-4)
    elif kept == "the encoder's half":
        logits(model, source, target[:, 5:], past_key_values=cache)
        cache = EncoderDecoderCache(DynamicCache(), cache.cross_attention_cache)
        logits(model, source, target[:, :9], past_key_values=cache)
    else:
        with original_attention(model):
            logits(model, source, target[:, :9], past_key_values=cache)
    got = logits(model, source, target[:, 9:], past_key_values=cache)
    assert torch.allclose(got, want[:, 9:], rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("count", [5, 12])
@pytest.mark.parametrize("across", [None, "linear", {"local": {"window_size": 3}}])
def test_a_cache_keeps_all_tokens_of_an_image_beside_those_of_the_text(across, count):
    """Mllama's has both, seven of text here, and its layers across are declared as any others."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MllamaTextConfig(**sizes, **TWO, num_hidden_layers=4, cross_attention_layers=[1, 3])
    model = MllamaForCausalLM(config).double().eval()
    for layer in (1, 3):
        model.model.layers[layer].cross_attn_attn_gate.fill_(1)
    mask = torch.zeros(2, 1, 1, count, dtype=torch.float64)
    mask[1, ..., -2:] = torch.finfo(mask.dtype).min
    image = {"cross_attention_states": torch.randn(2, count, 32).double(), "cross_attention_mask": mask}
    ids = random_tokens(2, 7)
    before = model(ids, **image, use_cache=False).logits
    patch_model(model, "softmax", cross_attention=across)
    assert len(get_mechanisms(model)) == (2 if across is None else 4)
    want, cache = model(ids, **image, use_cache=False).logits, DynamicCache(config=model.config)
    assert torch.allclose(want, before, rtol=0, atol=1e-12) == (across is None)
    got = [model(ids[:, :4], **image, past_key_values=cache).logits]
    got.append(model(ids[:, 4:], cross_attention_mask=mask, past_key_values=cache).logits)
    assert torch.allclose(torch.cat(got, 1), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("move", "argument", "order"),
    [
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("batch_select_indices", torch.tensor([2, 0]), [2, 0]),
        ("reorder_cache", torch.tensor([1, 1, 0, 2]), [1, 1, 0, 2]),
    ],
)
def test_other_rows_than_before_are_read_on(move, argument, order):
    source, target = random_tokens(3, 41), random_tokens(3, 6, seed=1)
    model, cache = patch_model(bart(), "linear", cross_attention="linear"), EncoderDecoderCache(
        DynamicCache(), DynamicCache()
    )
    logits(model, source, target[:, :5], past_key_values=cache)
    getattr(cache, move)(argument)
    got = logits(model, source[order], target[order, 5:], past_key_values=cache)
    want = logits(model, source[order], target[order])[:, 5:]
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


def test_a_refused_call_leaves_the_cache_as_it_was():
    """By a mask before any layer ran; in a layer across, which is not given the tokens again."""
    model, target = patch_model(bart(), "linear", cross_attention="linear"), random_tokens(2, 9, seed=1)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    encoded, want = model.model.encoder(random_tokens(2, 41)), logits(model, target=target)
    options = {"encoder_outputs": encoded, "past_key_values": cache}
    with pytest.raises(UnsupportedModeError, match=r"attention_mask, .* has 4 dimensions"):
        model(decoder_input_ids=target, attention_mask=torch.ones(2, 1, 9, 41), **options)
    assert cache.get_seq_length() == 0
    across = model.model.decoder.layers[0].encoder_attn
    states = torch.randn(2, 9, 32, dtype=torch.float64), encoded.last_hidden_state
    with pytest.raises(UnsupportedModeError, match=r"attention_mask, .* has 4 dimensions"):
        across(*states, past_key_values=cache, attention_mask=torch.ones(2, 1, 9, 41))
    got = logits(model, target=target, past_key_values=cache)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


def test_softmax_refuses_what_a_mechanism_keeps():
    model, cache = patch_model(bart(), "softmax", cross_attention="linear"), EncoderDecoderCache(
        DynamicCache(), DynamicCache()
    )
    logits(model, past_key_values=cache)
    with original_attention(model), pytest.raises(UnsupportedModeError, match="encoder's tokens"):
        logits(model, past_key_values=cache)


def test_a_static_cache_serves_whisper():
    model = patch_model(tiny_model("whisper", False, torch.float32), "linear", cross_attention="performer")
    options = {**source_of("whisper", 2, 0, torch.float32), "max_new_tokens": 7, "do_sample": False}
    want = model.generate(**options, use_cache=False)
    assert torch.equal(model.generate(**options, cache_implementation="static"), want)


def test_calibration_brings_cross_attention_nearer_to_softmax():
    model = patch_model(bart(torch.float32), "softmax", cross_attention="hedgehog")
    with torch.no_grad():  # far from the uniform attention of random keys
        for module in model.model.decoder.layers:
            module.encoder_attn.q_proj.weight.mul_(2)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 25:] = 0
    batch = {"input_ids": random_tokens(2, 40), "attention_mask": mask, "decoder_input_ids": random_tokens(2, 23, 9)}
    errors = calibrate(model, [batch] * 3, steps=10)
    assert sorted(errors) == [f"model.decoder.layers.{i}.encoder_attn" for i in range(2)]
    assert all(history[-1] < 0.5 * history[0] for history in errors.values()), errors


def test_pads_of_the_encoder_do_not_count_in_calibration():
    """What pads hold changes no fit: their keys are masked, and the mask is not taken for the queries'."""
    fits = []
    for filling in (5, 17):
        model = patch_model(bart(), "softmax", cross_attention="hedgehog")
        ids, mask = random_tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
        ids[1, 25:], mask[1, 25:] = filling, 0
        batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": random_tokens(2, 40, 3)}
        fits.append(calibrate(model, [batch, batch], steps=3))
    for path, errors in fits[0].items():
        assert errors == pytest.approx(fits[1][path], rel=1e-9)


def test_a_call_across_counts_queries_by_themselves():
    """Five queries and nine keys, three of them pads: the mask says nothing of queries."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 4, n, 8, generator=generator) for n in (5, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 4:7] = False
    call = AttentionCall(query, key, key, mask, None, {}, cross=True)
    assert call.real is None
    parts = list(call.pairs(causal=False, block_size=3))
    assert torch.equal(torch.cat([part.query for part in parts], dim=2), query)
    assert torch.cat([part.query_position for part in parts], dim=1).tolist() == [[0, 1, 2, 3, 4]]
    for part in parts:
        assert part.real.all() and torch.equal(part.key, key)
        assert torch.equal(part.allowed, mask[:, None, None].expand(2, 1, part.query.shape[2], 9))
        assert part.key_position[1].tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 5]  # pads do not count


def test_a_plan_over_the_layers_across(tmp_path):
    model = patch_model(
        bart(torch.float32), {"performer": "0", "softmax": "1-2"},
        cross_attention={"linformer": {"layers": 1, "num_slots": 5}},
    )  # fmt: skip
    config = get_patch_config(model)
    assert (config.num_layers, config.cross.num_layers) == (3, 2)
    assert config.cross.layers[1].num_slots == 5 and 0 not in config.cross.layers
    kinds = [found.config.mechanism for found in get_mechanisms(model).values()]
    assert kinds == ["performer", "softmax", "softmax", "softmax", "linformer"]
    want = logits(model)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["hf_linattn"]
    assert stored["format_version"] == 2
    reloaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(reloaded), want)
    again = patch_model(bart(torch.float32), PatchConfig.from_dict(stored))
    assert get_patch_config(again) == config


def test_a_missing_tensor_across_is_missed(tmp_path):
    """Also by a class without the head, which may lack what it does not have."""
    patch_model(bart(torch.float32), "softmax", cross_attention="hedgehog").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "model.decoder.layers.1.encoder_attn.hf_linattn.query_map.weight"
    kept = {name: x for name, x in tensors.items() if name != lost}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=lost.removeprefix("model.")):
        AutoModel.from_pretrained(tmp_path)


def test_without_cross_attention_the_format_stays_what_older_versions_read(caplog):
    plain = PatchConfig.from_plan("linear", num_layers=2)
    assert plain.to_dict()["format_version"] == 1
    with caplog.at_level(logging.WARNING):
        read = PatchConfig.from_dict({**plain.to_dict(), "cross_attention": plain.to_dict()})
    assert read == plain and "cross_attention" in caplog.text  # version 1 knows no such field


@pytest.mark.parametrize(
    ("make", "across", "error", "named"),
    [
        (bart, "lsh", UnsupportedModeError, "no cross form"),
        (bart, "deltanet", UnsupportedModeError, "linformer"),
        (bart, {"linear": {"decay": "learned"}}, UnsupportedModeError, "decay='learned'"),
        (bart, {"linear": {"self_weight": "learned"}}, UnsupportedModeError, "self_weight='learned'"),
        (bart, {"linear": {"ridge": "learned"}}, UnsupportedModeError, "ridge='learned' .* cross layer"),
        (bart, {"linear": {"layers": 2}}, OptionError, "layer 2"),
        (bart, {"local": {"keys_per_query": 0}}, OptionError, "keys_per_query"),
        (lambda: tiny_model("llama", True), "linear", UnsupportedModelError, "no cross-attention layers"),
    ],
    ids=["no form", "others", "decay", "self weight", "ridge", "no layer", "rate", "no encoder"],
)
def test_what_cannot_be_is_refused_and_leaves_the_model_alone(make, across, error, named):
    model = make()
    keys, implementation = list(model.state_dict()), model.config._attn_implementation
    with pytest.raises(error, match=named):
        patch_model(model, "linear", cross_attention=across)
    assert not is_patched(model)
    assert list(model.state_dict()) == keys and model.config._attn_implementation == implementation


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.update(cross_attention=3), "hf_linattn.cross_attention in config.json"),
        (lambda d: d["cross_attention"].update(num_layers=None), "cross_attention.num_layers"),
        (lambda d: d["cross_attention"]["groups"][0].pop("options"), r"cross_attention.groups\[0\].options"),
        (lambda d: d["cross_attention"]["groups"][0].update(mechanism="lineer"), "lineer"),
        (lambda d: d["cross_attention"]["groups"].append(d["cross_attention"]["groups"][0]), "layer 1 again"),
    ],
    ids=["kind", "number", "options", "name", "twice"],
)
def test_a_damaged_form_names_the_field(change, named):
    model = patch_model(bart(), "linear", cross_attention={"linear": {"layers": 1}})
    document = get_patch_config(model).to_dict()
    change(document)
    with pytest.raises(HfLinattnError, match=named):
        PatchConfig.from_dict(document)


def test_t5_is_refused_with_its_reason():
    model = T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50))
    with pytest.raises(UnsupportedModelError, match="position bias"):
        patch_model(model, "linear", cross_attention="linear")


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["softmax", "local"])
def test_keys_that_have_a_place_beside_their_content_are_wider_than_values(mechanism):
    """As those of Conditional DETR; a window beyond all of them is softmax."""
    backbone = ResNetConfig(hidden_sizes=[8] * 4, embedding_size=8, depths=[1] * 4, out_features=["stage4"])
    layers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = ConditionalDetrConfig(
        use_timm_backbone=False, backbone_config=backbone, use_pretrained_backbone=False, backbone=None, d_model=32,
        encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=5, **layers,
    )  # fmt: skip
    model = ConditionalDetrForObjectDetection(config).eval()
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    expected = model(pixel_values=pixels).logits
    patch_model(model, "softmax", cross_attention=mechanism)
    crossing = [x.layer for x in get_mechanisms(model).values() if x.layer.cross]
    assert [(layer.head_dim, layer.value_dim) for layer in crossing] == [(32, 16)] * 2
    torch.testing.assert_close(model(pixel_values=pixels).logits, expected)


def test_a_patch_config_names_its_cross_attention_itself():
    config = PatchConfig.from_plan("linear", num_layers=3)
    model = patch_model(bart(), config, cross_attention=make_config("performer", {"num_features": 16}))
    assert get_patch_config(model).cross.layers[0].num_features == 16
    with pytest.raises(OptionError, match="cross_attention"):
        patch_model(bart(), get_patch_config(model), cross_attention="linear")


def test_the_command_converts_it(tmp_path):
    bart(torch.float32).save_pretrained(tmp_path / "original")
    result = CliRunner().invoke(
        app,
        ["convert", str(tmp_path / "original"), str(tmp_path / "out"), "--mechanism", "linear", "--cross-attention",
         '{"linformer": {"num_slots": 6}}', "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["converted_cross_layers"] == 2
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert get_patch_config(model).cross.layers[1].num_slots == 6
