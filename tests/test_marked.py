"""A model that says `hf_linattn` never answers by softmax: each route to another attention is right or refused."""

from __future__ import annotations

import copy
import json
import logging
import pickle

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    BertPreTrainedModel,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    XGLMForCausalLM,
)

from hf_linattn import (
    CheckpointError,
    PatchError,
    UnsupportedModeError,
    get_mechanisms,
    get_patch_config,
    is_patched,
    original_attention,
    patch_model,
    unpatch_model,
)
from hf_linattn.hub import load_checkpoint
from hf_linattn.pinning import base_class
from hf_linattn.support.tiny import tiny_config
from tests.helpers import Snapshot, logits_of, make_patched, make_tokens
from tests.models import GROUPED, SIZES, SPINE, TOKENS, fill, make_model

IDS = make_tokens(2, 9)


def make_llava() -> PreTrainedModel:
    """A model of two towers with configs of their own."""
    vision = {name: SIZES[name] for name in SIZES if name != "max_position_embeddings"}
    tower = CLIPVisionConfig(**vision, image_size=8, patch_size=4)
    config = LlavaConfig(text_config=LlamaConfig(**GROUPED), vision_config=tower, image_token_index=95)
    return fill(LlavaForConditionalGeneration(config))


def make_bart() -> PreTrainedModel:
    """Layers that attend to themselves and, left out of the patch, to an encoder, of one config."""
    sides = ("encoder", "decoder")
    sizes = {f"{side}_{what}": number for side in sides for what, number in (("layers", 1), ("attention_heads", 4))}
    sizes |= {f"{side}_ffn_dim": 48 for side in sides}
    return fill(BartForConditionalGeneration(BartConfig(**TOKENS, **sizes, d_model=32, max_position_embeddings=64)))


FAMILIES = {name: (lambda name=name: make_model(name)) for name in SPINE} | {"llava": make_llava, "bart": make_bart}
each_family = pytest.mark.parametrize("name", FAMILIES)


def answer(model: PreTrainedModel) -> torch.Tensor:
    return logits_of(model, IDS, **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}))


# -- another attention is chosen --------------------------------------------------------------------------------------


def choose_in_each_config(model: PreTrainedModel) -> None:
    for mechanism_path in get_mechanisms(model):
        model.get_submodule(mechanism_path).config._attn_implementation = "eager"


CHOICES = {
    "set_attn_implementation": lambda model: model.set_attn_implementation("eager"),
    "of a part": lambda model: model.base_model.set_attn_implementation("eager"),
    "a dict": lambda model: model.set_attn_implementation({"": "eager", "text_config": "eager"}),
    "the config": lambda model: setattr(model.config, "_attn_implementation", "eager"),
    "the configs of the layers": choose_in_each_config,
}


@pytest.mark.covering(1)
@each_family
@pytest.mark.parametrize("choice", CHOICES)
def test_a_patched_model_keeps_its_attention(name, choice):
    model = patch_model(FAMILIES[name](), "linear")
    before = Snapshot.of(model)
    with pytest.raises(PatchError, match=r"attn_implementation='eager'.*original_attention.*unpatch_model"):
        CHOICES[choice](model)
    before.assert_kept(model)


@each_family
def test_after_unpatching_any_attention_can_be_chosen(name):
    model = FAMILIES[name]()
    before = Snapshot.of(model)
    unpatch_model(patch_model(model, "linear"))
    before.assert_kept(model)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(answer(model), before.logits)


def test_a_patched_model_is_compiled_as_one_graph():
    """Each layer reads its attention off a pinned config, which must not break the graph."""
    torch.compiler.reset()
    model = make_patched("llama", "linear")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, logits_of(model, IDS, use_cache=False))


# -- a model is made from the config of a patched one -----------------------------------------------------------------

BY_CLASS = {
    "the class": lambda model, folder: type(model)(model.config),
    "a copied config": lambda model, folder: type(model)(copy.deepcopy(model.config)),
    "a pickled config": lambda model, folder: type(model)(pickle.loads(pickle.dumps(model.config))),
    "a config that was read": lambda model, folder: type(model)(AutoConfig.from_pretrained(folder)),
    "weights of softmax": lambda model, folder: type(model).from_pretrained(folder / "plain", config=model.config),
    "the inner class": lambda model, folder: type(model.base_model)(model.base_model.config),
}


@pytest.mark.covering(1)
@each_family
@pytest.mark.parametrize("way", BY_CLASS)
def test_a_class_makes_no_model_from_the_config_of_a_patched_one(tmp_path, name, way):
    model = FAMILIES[name]()
    model.save_pretrained(tmp_path / "plain")
    patch_model(model, "linear").save_pretrained(tmp_path)
    with pytest.raises(PatchError, match="an Auto class, such as"):
        BY_CLASS[way](model, tmp_path)


def of_dict(config: PreTrainedConfig) -> PreTrainedConfig:
    return base_class(type(config)).from_dict(config.to_dict())


DICTS = {
    "its dict": of_dict,
    "its JSON": lambda config: base_class(type(config)).from_dict(json.loads(config.to_json_string())),
    "by its model type": lambda config: AutoConfig.for_model(**config.to_dict()),
    "a copy of what was made of it": lambda config: copy.deepcopy(of_dict(config)),
}


@pytest.mark.covering(1)
@each_family
@pytest.mark.parametrize("way", DICTS)
def test_nothing_is_made_from_the_dict_of_a_patched_config(name, way):
    model = patch_model(FAMILIES[name](), "linear")
    whole, part = model, next(x for x in reversed(list(model.modules())) if isinstance(x, PreTrainedModel))
    for patched in (whole, part):
        kind, config = type(patched), DICTS[way](patched.config)
        with pytest.raises(PatchError, match=r"the dict of a patched model's config.*from_config\(model.config\)"):
            kind(config)
        unpatched = DICTS[way](FAMILIES[name]().config)
        assert not is_patched(type(whole)(unpatched))


def test_no_pair_is_made_from_the_configs_of_patched_halves():
    encoder = patch_model(make_model("bert", "Model"), "linear")
    decoder = patch_model(make_model("bert", "LMHeadModel", is_decoder=True, add_cross_attention=True), "linear")
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder.config, decoder.config)
    for make in (EncoderDecoderModel, AutoModelForSeq2SeqLM.from_config):
        with pytest.raises(PatchError, match="BertConfig was made from the dict of a patched model's config"):
            make(config)
    pair = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    assert is_patched(pair.encoder) and is_patched(pair.decoder)
    with pytest.raises(PatchError, match="from the dict of a patched model's config"):
        EncoderDecoderModel(copy.deepcopy(pair.config))
    unpatch_model(pair)
    assert not is_patched(EncoderDecoderModel(pair.config)) and not is_patched(BertModel(pair.encoder.config))


@each_family
def test_an_auto_class_makes_a_patched_model_from_the_config_of_one(tmp_path, name):
    model = FAMILIES[name]()
    softmax = answer(model)
    patch_model(model, "linear")
    weights = model.state_dict()
    model.save_pretrained(tmp_path)
    auto = AutoModelForCausalLM if name == "llama" else AutoModel
    for config in (model.config, AutoConfig.from_pretrained(tmp_path)):
        made = auto.from_config(config).eval()
        assert is_patched(made) and len(get_mechanisms(made)) == len(get_mechanisms(model))
        if type(made) is type(model):
            made.load_state_dict(weights)
            assert torch.equal(answer(made), answer(model))
            with original_attention(made):
                torch.testing.assert_close(answer(made), softmax)


# -- attention without a mechanism ------------------------------------------------------------------------------------


def test_a_layer_that_was_put_in_later_is_named():
    model = patch_model(make_model("llama"), "linear")
    model.model.layers[1] = copy.deepcopy(make_model("llama").model.layers[1])
    model.model.layers[1].self_attn.config = model.config
    with pytest.raises(PatchError, match="attention layers of LlamaModel are not those that were patched"):
        logits_of(model, IDS)
    with pytest.raises(PatchError, match="LlamaAttention has attn_implementation 'hf_linattn' and no mechanism"):
        model.model.layers[1](torch.zeros(1, 3, 32), position_embeddings=(torch.zeros(1, 3, 8),) * 2)


# -- layers that are taken out, doubled or moved ----------------------------------------------------------------------


def swap(layers: nn.ModuleList) -> None:
    layers[0], layers[1] = layers[1], layers[0]


SURGERY = {
    "taken out": lambda layers: layers.__delitem__(0),
    "the last taken out": lambda layers: layers.__delitem__(1),
    "doubled": lambda layers: layers.append(copy.deepcopy(layers[1])),
    "written over": lambda layers: layers.__setitem__(1, copy.deepcopy(layers[0])),
    "swapped": swap,
}


@pytest.mark.parametrize("plan", ["linear", {"local": {"layers": "0", "window_size": 4}, "linear": "1"}])
@pytest.mark.parametrize("how", SURGERY)
def test_a_model_whose_layers_were_moved_is_not_saved_and_can_be_patched_anew(tmp_path, how, plan):
    """A loaded model would have the mechanisms in other places, or not load."""
    model, plain = patch_model(make_model("llama"), plan), make_model("llama")
    logits_of(model, IDS)
    for changed in (model, plain):
        SURGERY[how](changed.model.layers)
        changed.config.num_hidden_layers = len(changed.model.layers)
        for index, layer in enumerate(changed.model.layers):
            layer.self_attn.layer_idx = index
    moved = "are not those that were patched, in their order.*unpatch_model"
    for part in (model, model.model):
        with pytest.raises(PatchError, match=f"layers of {type(part).__name__} {moved}"):
            part.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    if how != "swapped":  # where each layer goes on with its own mechanism
        for _ in range(2):
            with pytest.raises(PatchError, match=moved):
                logits_of(model, IDS)
        with original_attention(model), pytest.raises(PatchError, match=moved):
            logits_of(model, IDS)
    unpatch_model(model)
    assert not is_patched(model) and torch.equal(logits_of(model, IDS), logits_of(plain, IDS))
    patch_model(model, "linear").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits_of(loaded, IDS), logits_of(patch_model(plain, "linear"), IDS))


@pytest.mark.parametrize("name", SPINE)
def test_our_attention_by_its_name_alone_is_refused_until_the_model_is_patched(name):
    softmax, expected = logits_of(make_model(name), IDS), logits_of(make_patched(name, "linear"), IDS)
    model = make_model(name, attn_implementation="hf_linattn")
    with pytest.raises(PatchError, match="no mechanism; call patch_model"):
        logits_of(model, IDS)
    patch_model(model, "linear")
    assert torch.equal(logits_of(model, IDS), expected)
    with original_attention(model):
        assert torch.equal(logits_of(model, IDS), softmax)
    assert torch.equal(logits_of(unpatch_model(model), IDS), softmax)


# -- a part and the whole ---------------------------------------------------------------------------------------------

PARTS = {
    "bert": "bert", "gpt2": "transformer", "llama": "model", "llava": "model.language_model", "bart": "model.decoder"
}  # fmt: skip


@pytest.mark.parametrize(("name", "part"), PARTS.items())
def test_a_part_and_the_whole_are_not_both_patched(name, part):
    model = FAMILIES[name]()
    original = Snapshot.of(model)
    for first, second in ((model, model.get_submodule(part)), (model.get_submodule(part), model)):
        patch_model(first, "linear")
        assert is_patched(first) and is_patched(second)
        before = Snapshot.of(model)
        with pytest.raises(PatchError, match=r"patched already.*unpatch_model"):
            patch_model(second, "local", window_size=4)
        before.assert_kept(model)
        unpatch_model(model)
        assert not is_patched(first) and not is_patched(second)
        original.assert_kept(model)


def test_parts_are_undone_and_run_as_softmax_by_the_whole():
    model = make_llava()
    original = Snapshot.of(model)
    patch_model(model.model.language_model, "linear")
    patch_model(model.model.vision_tower, "linear")
    with original_attention(model):
        assert torch.equal(answer(model), original.logits)
    paths = get_mechanisms(model)
    assert len(paths) == 4 and all(model.get_submodule(path).hf_linattn for path in paths)
    unpatch_model(model)
    original.assert_kept(model)
    patch_model(model, "linear")
    with pytest.raises(PatchError, match=r"CLIPVisionModel is part of a model that is patched already; .*the whole"):
        unpatch_model(model.model.vision_tower)


# -- a model is loaded again by its name ------------------------------------------------------------------------------


@each_family
def test_the_class_of_a_converted_model_loads_it_and_its_config_class_does_not(tmp_path, caplog, monkeypatch, name):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    model = patch_model(FAMILIES[name](), "linear")
    model.save_pretrained(tmp_path)
    assert get_patch_config(type(model).from_pretrained(tmp_path)) == get_patch_config(model)
    assert "You are using a model of type" not in caplog.text
    with pytest.raises(CheckpointError, match=r"load the model through an Auto class, such as .*, or its own"):
        type(unpatch_model(model).config).from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"a converted model of type .*, and XGLMForCausalLM is of type 'xglm'"):
        XGLMForCausalLM.from_pretrained(tmp_path)


class WithMargin(BertConfig):
    margin: float = 0.5


class Tagger(BertPreTrainedModel):
    """A model class and a config class of one's own, which no Auto class knows."""

    config_class = WithMargin

    def __init__(self, config: WithMargin):
        super().__init__(config)
        self.bert, self.head = BertModel(config, add_pooling_layer=False), torch.nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.bert(input_ids).last_hidden_state) - self.config.margin


UNKNOWN_TO_AUTO = {
    "of transformers": lambda: CLIPTextModelWithProjection(tiny_config(CLIPTextConfig)),
    "one's own": lambda: Tagger(WithMargin(**TOKENS, **SIZES, margin=0.25)),
}


@pytest.mark.parametrize("which", UNKNOWN_TO_AUTO)
def test_a_class_that_no_auto_class_knows_loads_what_it_saved(tmp_path, which):
    model = patch_model(fill(UNKNOWN_TO_AUTO[which]()), "linear").eval()
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model) and is_patched(loaded) and not info["missing_keys"]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS)[0], model(IDS)[0])
    name = type(model).__name__
    with pytest.raises(CheckpointError, match=rf"saved as {name} .* no Auto class.*call {name}.from_pretrained"):
        load_checkpoint(str(tmp_path))


# -- pages ------------------------------------------------------------------------------------------------------------

PAGED = {
    "init": lambda model: model.init_continuous_batching(),
    "batch": lambda model: model.generate_batch([[7, 8]]),
    "generate": lambda model: model.generate(IDS[:1], cache_implementation="paged"),
    "a call": lambda model: model(IDS[:1], cache=object()),
}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("way", PAGED)
def test_continuous_batching_is_refused(name, way):
    model = make_patched(name)
    before = Snapshot.of(model)
    with pytest.raises(UnsupportedModeError, match=r"continuous batching.*call generate"):
        PAGED[way](model)
    before.assert_kept(model)
