"""What is read off a transformers model: its attention modules, their sizes, their projections."""

from __future__ import annotations

import ast
from copy import deepcopy
from itertools import chain
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import ModuleList
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    BeitConfig,
    BeitModel,
    DetrConfig,
    MaskFormerConfig,
    MaskFormerModel,
    MaskFormerSwinConfig,
    Wav2Vec2ConformerConfig,
    Wav2Vec2ConformerModel,
    WhisperConfig,
    WhisperModel,
)

from hf_linattn import UnsupportedModelError, architecture, get_mechanisms, is_patched, patch_model, unpatch_model
from hf_linattn.attention_modules import cross_attention_modules, self_attention_modules, undeclared_attention
from hf_linattn.errors import HfLinattnError
from hf_linattn.positions.tables import position_tables
from hf_linattn.support.tiny import tiny_config, tiny_inputs, tiny_model
from tests.models import ARCHITECTURES, HEAD_DIM, LATENT, NUM_HEADS, make_latent, make_model

UNGROUPED = {"bert", "gpt2", "opt", "roberta", "distilbert", "modernbert"}
# beside "q_proj", "k_proj", "v_proj", "o_proj" of most models
PROJECTIONS = {
    "bert": ["self.query", "self.key", "self.value", "output.dense"],
    "roberta": ["self.query", "self.key", "self.value", "output.dense"],
    "gpt2": ["attn.c_attn", "attn.c_proj"],
    "opt": ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj"],
    "distilbert": ["attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"],
    "modernbert": ["attn.Wqkv", "attn.Wo"],
    "phi3": ["self_attn.qkv_proj", "self_attn.o_proj"],
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_are_described(name):
    model = make_model(name)
    described = list(architecture.describe_layers(model, self_attention_modules(model)).values())
    assert [layer.index for layer in described] == [0, 1]
    for layer in described:
        assert (layer.num_heads, layer.head_dim) == (NUM_HEADS, HEAD_DIM)
        assert layer.num_key_value_heads == (NUM_HEADS if name in UNGROUPED else NUM_HEADS // 2)
        assert layer.causal is ARCHITECTURES[name].causal
        assert layer.scaling == pytest.approx(HEAD_DIM**-0.5)
        assert (layer.device, layer.dtype) == (torch.device("cpu"), torch.float32)


@torch.no_grad()
def test_a_field_of_shared_heads_that_a_model_does_not_read_is_not_read_either():
    """transformers keeps whatever a config says."""
    model = patch_model(make_model("gpt2", num_key_value_heads=NUM_HEADS // 2), "hedgehog")
    assert {x.layer.num_key_value_heads for x in get_mechanisms(model).values()} == {NUM_HEADS}
    assert model(torch.arange(9)[None]).logits.isfinite().all()


def test_heads_that_a_config_counts_by_a_name_of_its_own():
    config = tiny_config(CONFIG_MAPPING["rf_detr"])
    model = AutoModel.from_config(config)
    layers = architecture.describe_layers(model, self_attention_modules(model))
    found = {layer.num_heads for path, layer in layers.items() if path.startswith("decoder.")}
    assert found == {config.decoder_self_attention_heads}


def test_heads_that_nothing_counts_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(architecture, "NUM_HEADS", ("heads_of_nobody",))
    model = make_model("gpt2")
    with pytest.raises(UnsupportedModelError, match="how many heads it has under one of the names heads_of_nobody"):
        patch_model(model, "linear")
    assert not is_patched(model)


@pytest.mark.parametrize("model_type", LATENT)
def test_heads_of_latent_attention_are_as_wide_as_their_projections(model_type):
    """Keys have a rotary part and another one beside it, of 4 and 6 numbers; values have 5."""
    model = make_latent(model_type)
    layers = architecture.describe_layers(model, self_attention_modules(model)).values()
    assert {(x.head_dim, x.value_dim, x.num_key_value_heads) for x in layers} == {(10, 5, 4)}


TOWER = "visual.encoder.layers"
# of models that declare these as any other attention
CROSSING = {
    "mllama": ["model.layers.1.cross_attn"],
    "kosmos-2.5": ["image_to_text_projection.x_attn"],
    "sam3": ["detr_encoder.layers.0.cross_attn", "detr_decoder.layers.1.text_cross_attn"],
}


@pytest.mark.parametrize("model_type", CROSSING)
def test_layers_that_attend_to_other_tokens_are_told_by_their_names(model_type):
    model = tiny_model(model_type)
    own, across = self_attention_modules(model), cross_attention_modules(model)
    assert set(CROSSING[model_type]) <= set(across) and not set(own) & set(across)
    assert not any("cross_attn" in path or "x_attn" in path for path in own)


def test_attention_that_a_model_does_not_declare_is_named_as_it_keeps_softmax(caplog):
    model, left = patch_model(tiny_model("cosmos3_edge"), "linear"), {f"{TOWER}.{i}.self_attn" for i in range(2)}
    assert {*undeclared_attention(model)} == left and not left & {*get_mechanisms(model)}
    (said,) = caplog.messages
    assert f"does not declare {len(left)} of its attention modules" in said and min(left) in said
    other = make_model("bert")
    other.compiled = torch.jit.script(torch.nn.ReLU())  # whose forward has no code
    assert patch_model(other, "linear") and len(caplog.messages) == 1


def test_position_biases_are_refused_where_a_model_has_them():
    """Beit adds its own to the mask; a module that can have one is known by the positions that it says it has."""
    for shared in (True, False):
        own = {"use_relative_position_bias": not shared, "use_shared_relative_position_bias": shared}
        config = tiny_config(BeitConfig, **own)
        with pytest.raises(UnsupportedModelError, match=r"BeitRelativePositionBias\) adds a position bias to every"):
            patch_model(BeitModel(config), "linear")
    for positions in ("rotary", None, "relative"):
        model = Wav2Vec2ConformerModel(tiny_config(Wav2Vec2ConformerConfig, position_embeddings_type=positions)).eval()
        if positions == "relative":
            with pytest.raises(UnsupportedModelError, match="adds a position bias to every"):
                patch_model(model, "softmax")
            continue
        inputs = tiny_inputs(model)
        with torch.no_grad():
            before = model(**inputs).last_hidden_state
            after = patch_model(model, "softmax")(**inputs).last_hidden_state
        torch.testing.assert_close(after, before)


def test_a_bias_of_another_part_of_the_model_is_none_of_the_patched_one():
    """MaskFormer's pictures go through a Swin, its queries through a Detr without a bias."""
    kinds = ("layers", "attention_heads", "ffn_dim")
    sizes = {f"{side}_{kind}": 2 for side in ("encoder", "decoder") for kind in kinds}
    swin = MaskFormerSwinConfig(depths=[1], num_heads=[1], embed_dim=8, window_size=2, image_size=32)
    config = MaskFormerConfig(
        backbone_config=swin, decoder_config=DetrConfig(d_model=32, **sizes), fpn_feature_size=32, mask_feature_size=32
    )
    assert get_mechanisms(patch_model(MaskFormerModel(config), "linear"))


def test_heads_that_a_module_widens_are_as_wide_as_its_attention_gets_them():
    """Moonshine puts zeros behind heads of 8 numbers, and scales their products as before."""
    model = tiny_model("moonshine")
    layers = architecture.describe_layers(model, self_attention_modules(model)).values()
    assert {(x.head_dim, x.value_dim, x.scaling) for x in layers} == {(12, None, 8**-0.5)}


def test_layers_of_a_model_in_half_precision_keep_its_dtype():
    mechanisms = get_mechanisms(patch_model(make_model("llama").to(torch.bfloat16), "performer"))
    assert {m.feature_map.projection.dtype for m in mechanisms.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_projections_of_queries_keys_values_and_outputs_are_found(name):
    model = make_model(name)
    expected = PROJECTIONS.get(name, [f"self_attn.{x}_proj" for x in "qkvo"])
    for path in self_attention_modules(model):
        found = architecture.attention_projections(model, path)
        assert len(found) == len(expected)
        for part in expected:
            assert any(projection.endswith(f".{part}") for projection in found), (found, part)
        assert architecture.output_projection(model, path)[0] in found


def test_a_missing_output_projection_is_named():
    model = make_model("gpt2")
    del model.transformer.h[0].attn.c_proj
    with pytest.raises(UnsupportedModelError, match=r"projection of transformer\.h\.0\.attn is not one of o_proj"):
        architecture.output_projection(model, "transformer.h.0.attn")


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(HfLinattnError, match="must be a transformers PreTrainedModel"):
        architecture.root_model(torch.nn.ReLU())


@torch.no_grad()
def test_a_position_table_is_that_of_the_inputs_it_serves():
    """Not of a tower inside, of patches, nor of features whose second dimension counts no tokens."""
    towers = tiny_model("xclip")
    assert not position_tables(towers) and not position_tables(towers.vision_model)
    assert position_tables(towers.text_model)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sound = WhisperConfig(d_model=16, num_mel_bins=20, max_source_positions=10, vocab_size=90, pad_token_id=0, **sizes)
    patch_model(WhisperModel(sound), "linear").encoder(torch.randn(1, 20, 20))


def test_models_that_call_their_attention_causally_are_those_of_transformers():
    """Named by their class: one that was renamed is not found any more, and every forward refused."""
    models, calling = Path(transformers.__file__).parent / "models", set()
    for file in chain(models.glob("*clip*/modeling_*.py"), models.glob("owl*/modeling_*.py")):
        for node in ast.parse(file.read_text("utf-8")).body:
            calls = [x for x in ast.walk(node) if isinstance(x, ast.Call)]
            given = [key for call in calls for key in call.keywords if key.arg == "is_causal"]
            if isinstance(node, ast.ClassDef) and any(getattr(key.value, "value", False) is True for key in given):
                calling.add(node.name)
    assert calling == set(architecture.CALLED_CAUSAL)


@torch.no_grad()
def test_the_text_of_x_clip_sees_no_later_token():
    text = tiny_model("xclip").text_model
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    own, changed = text(ids).last_hidden_state, ids.clone()
    changed[:, 6] += 1
    torch.testing.assert_close(patch_model(deepcopy(text), "softmax")(ids).last_hidden_state, own)
    linear = patch_model(text, "linear")
    first, second = (linear(x).last_hidden_state for x in (ids, changed))
    assert torch.equal(first[:, :6], second[:, :6]) and not torch.equal(first[:, 6:], second[:, 6:])


def test_what_makes_a_mask_of_its_own_is_refused_before_anything_changes():
    model = tiny_model("doge")
    with pytest.raises(UnsupportedModelError, match=r"DogeAttention.* makes a mask of its own from its values"):
        patch_model(model, "softmax")
    assert not is_patched(model)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_layer_in_two_places_is_refused_before_it_is_patched_and_when_it_is_saved(tmp_path, name):
    """The config of what is saved would have another number of layers than the plan."""
    plain, model = make_model(name), patch_model(make_model(name), "linear")
    path, stack = next((path, part) for path, part in plain.named_modules() if isinstance(part, ModuleList))
    twice = rf"^\w+: {path}\.{len(stack)} is {path}\.0 once more, .* put copy\.deepcopy\(model\.{path}\[0\]\) there"
    for changed in (plain, model):
        changed.get_submodule(path).append(changed.get_submodule(path)[0])
    with pytest.raises(UnsupportedModelError, match=twice):
        patch_model(plain, "linear")
    with pytest.raises(UnsupportedModelError, match=twice):
        model.save_pretrained(tmp_path / "new")
    assert not is_patched(plain) and not (tmp_path / "new").exists() and not is_patched(unpatch_model(model))
