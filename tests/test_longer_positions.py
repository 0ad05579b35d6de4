"""extend_positions on many architectures: the old lengths as before, longer ones, saved, undone, refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel, EncoderDecoderConfig, EncoderDecoderModel, PreTrainedModel

from hf_linattn import extend_positions, is_patched, patch_model, unpatch_model
from hf_linattn.errors import OptionError, PatchError, UnsupportedModeError, UnsupportedModelError
from hf_linattn.hub import load_checkpoint
from hf_linattn.support.tiny import tiny_config
from tests.helpers import make_tokenizer
from tests.models import fill, make_model

OLD, NEW = 16, 41
SIZES: dict[str, Any] = {
    "vocab_size": 60, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": OLD,
}  # fmt: skip
OFFSET = {"max_position_embeddings": OLD + 2}  # the padding row and the one before
SEQ2SEQ = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
# model class -> what its config says otherwise
LEARNED: dict[str, dict[str, Any]] = {
    "BertModel": {}, "RobertaModel": OFFSET, "XLMRobertaModel": OFFSET, "MPNetModel": OFFSET, "GPT2Model": {},
    "GPTNeoModel": {"attention_types": [[["global"], 1]], "num_layers": 1}, "OPTModel": {"ffn_dim": 48},
    "DistilBertModel": {"hidden_dim": 48, "dropout": 0.0}, "ElectraModel": {"embedding_size": 16},
    "AlbertModel": {"embedding_size": 16}, "BartModel": SEQ2SEQ, "BioGptModel": {}, "CLIPTextModel": {},
}  # fmt: skip
COMPUTED: dict[str, dict[str, Any]] = {
    "MarianModel": {**SEQ2SEQ, "decoder_start_token_id": 2}, "XGLMModel": {"ffn_dim": 48, "num_layers": 1},
    "GPTJModel": {"rotary_dim": 4}, "RoFormerModel": {},
}  # fmt: skip
ROTARY: dict[str, dict[str, Any]] = {
    "LlamaModel": {}, "Qwen3Model": {"head_dim": 8, "num_hidden_layers": 2},
    "ModernBertModel": {"cls_token_id": 2, "sep_token_id": 3, "num_hidden_layers": 2, "layer_types": None},
}  # fmt: skip
ALL = LEARNED | COMPUTED | ROTARY


@functools.cache
def config_of(name: str) -> Any:
    kind = getattr(transformers, name).config_class
    return tiny_config(kind, **{**SIZES, **ALL[name]})


def make(name: str) -> PreTrainedModel:
    """Return a model with random weights; what transformers computes stays as it is."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(config_of(name))
    return model.eval() if name in COMPUTED else fill(model)


def read(model: PreTrainedModel, length: int, seed: int = 0) -> torch.Tensor:
    """Return the last hidden states of a batch of rows of one length."""
    tokens = torch.randint(4, 60, (2, length), generator=torch.Generator().manual_seed(seed))
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        return model(**inputs).last_hidden_state


@pytest.mark.parametrize("name", ALL)
def test_the_old_length_is_as_before_longer_inputs_run_and_all_of_it_is_saved_and_undone(name, tmp_path):
    model, tokenizer = make(name), make_tokenizer()
    tokenizer.model_max_length = OLD
    trained = {path: parameter.requires_grad for path, parameter in model.named_parameters()}
    parameters, said = dict(model.named_parameters()), said_by(model)
    before, state = read(model, OLD), torch.random.get_rng_state()
    if name in LEARNED:
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            read(model, NEW)
    assert extend_positions(model, NEW, "dynamic" if name in ROTARY else None, tokenizer=tokenizer) is model
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(read(model, OLD), before)
    after = read(model, NEW)
    assert after.isfinite().all() and tokenizer.model_max_length == NEW
    assert {x: y.requires_grad for x, y in model.named_parameters()} == trained

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(read(loaded, NEW), after)
    assert {x: y.shape for x, y in loaded.named_buffers()} == {x: y.shape for x, y in model.named_buffers()}
    assert loaded.config.max_position_embeddings == model.config.max_position_embeddings

    unpatch_model(model)
    assert torch.equal(read(model, OLD), before) and tokenizer.model_max_length == OLD
    assert said_by(model) == said
    assert all(parameters[path] is parameter for path, parameter in model.named_parameters())


def said_by(model: PreTrainedModel) -> dict[str, Any]:
    """Return the config as data, without what `save_pretrained` writes into it."""
    return {name: x for name, x in model.config.to_dict().items() if name not in ("architectures", "dtype")}


def tables_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = ("position_embeddings", "wpe", "embed_positions", "position_embedding")
    return {
        path: module.weight.detach().clone()
        for path, module in model.named_modules()
        if path.rsplit(".", 1)[-1] in found and isinstance(module, torch.nn.Embedding)
    }


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "OPTModel", "BartModel"])
@settings(max_examples=6, deadline=None)
@given(length=st.integers(OLD + 1, 5 * OLD), method=st.sampled_from(("copy", "mirror", "interpolate")))
def test_rows_are_what_the_method_says_and_the_offset_keeps_its_rows(name, length, method):
    model = make(name)
    old = tables_of(model)
    new = tables_of(extend_positions(model, length, method))
    assert old and old.keys() == new.keys()
    for path, rows in old.items():
        first = len(rows) - OLD
        assert torch.equal(new[path][:first], rows[:first]) and len(new[path]) == first + length
        for i in {0, 1, OLD - 1, OLD, length // 2, length - 1}:
            turned = i % OLD if (i // OLD) % 2 == 0 else OLD - 1 - i % OLD
            place = i * (OLD - 1) / (length - 1)
            below, share = int(place), place - int(place)
            above = min(below + 1, OLD - 1)
            body = rows[first:].double()
            expected = {
                "copy": body[i % OLD], "mirror": body[turned],
                "interpolate": (1 - share) * body[below] + share * body[above],
            }[method]  # fmt: skip
            tolerance = 1e-5 if method == "interpolate" else 0.0
            assert (new[path][first + i].double() - expected).abs().max() <= tolerance


@settings(max_examples=10, deadline=None)
@given(longest=st.integers(OLD + 1, 60), data=st.data())
def test_any_length_up_to_the_new_one_runs_and_one_more_does_not(longest, data):
    model = bert()
    short = data.draw(st.integers(1, OLD))
    before = read(model, short)
    extend_positions(model, longest)
    try:
        assert torch.equal(read(model, short), before)
        assert read(model, data.draw(st.integers(OLD + 1, longest))).isfinite().all()
        with pytest.raises((IndexError, RuntimeError)):
            read(model, longest + 1)
    finally:
        unpatch_model(model)


@functools.cache
def bert() -> PreTrainedModel:
    return make("BertModel")


@pytest.mark.parametrize("method", ["linear", "yarn", "dynamic"])
def test_rotary_positions_turn_by_transformers_own_parameters(method, tmp_path):
    model = extend_positions(make("LlamaModel"), 4 * OLD, method)
    said = model.config.rope_parameters
    assert (said["rope_type"], said["factor"]) == (method, 4.0)
    assert model.config.max_position_embeddings == (OLD if method == "dynamic" else 4 * OLD)
    if method == "linear":  # position 4 p is turned as p was
        own = make("LlamaModel").rotary_emb
        heads = torch.zeros(1, 1)
        for new, old in zip(
            model.rotary_emb(heads, 4 * torch.arange(5)[None]), own(heads, torch.arange(5)[None]), strict=True
        ):
            assert torch.allclose(new, old, atol=1e-6)
    model.save_pretrained(tmp_path)
    assert torch.equal(read(AutoModel.from_pretrained(tmp_path).eval(), 4 * OLD), read(model, 4 * OLD))


@pytest.mark.parametrize("name", ["BertModel", "BartModel", "LlamaModel"])
def test_a_patch_with_max_positions_is_saved_and_undone_as_a_whole(name, tmp_path):
    model = make(name)
    before, said = read(model, OLD), said_by(model)
    patch_model(model, "linear", max_positions=NEW)
    after = read(model, NEW)
    model.save_pretrained(tmp_path)
    assert torch.equal(read(AutoModel.from_pretrained(tmp_path).eval(), NEW), after)
    unpatch_model(model)
    assert torch.equal(read(model, OLD), before)
    assert said_by(model) == said


def test_a_patch_that_fails_leaves_the_old_table():
    model = make("BertModel")
    before = read(model, OLD)
    with pytest.raises(OptionError, match="no option 'num_feature'"):
        patch_model(model, "performer", max_positions=NEW, num_feature=3)
    assert torch.equal(read(model, OLD), before) and model.config.max_position_embeddings == OLD
    with pytest.raises(PatchError, match="is not patched"):
        unpatch_model(model)


def test_what_was_trained_after_a_copy_stays_when_it_is_undone():
    model = extend_positions(make("BertModel"), NEW)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight += 1.0
    rows = model.embeddings.position_embeddings.weight[:OLD].detach().clone()
    unpatch_model(model)
    assert torch.equal(model.embeddings.position_embeddings.weight, rows)


def test_one_extension_after_another_is_undone_by_one_call_each():
    model = make("RobertaModel")
    extend_positions(extend_positions(model, 20), 30)
    patch_model(model, "linear")
    lengths = []
    for _ in range(3):
        lengths.append(len(model.embeddings.position_embeddings.weight) - 2)
        unpatch_model(model)
    assert [*lengths, len(model.embeddings.position_embeddings.weight) - 2] == [30, 30, 20, OLD]


def test_a_longer_input_is_refused_by_length_table_and_remedy():
    model = patch_model(make("BertModel"), "linear")
    with pytest.raises(UnsupportedModeError, match=rf"{NEW}, but BertModel.*embeddings holds {OLD}.*extend_positions"):
        read(model, NEW)


@pytest.mark.parametrize(
    "name, options, reason",
    [
        ("t5", {}, "relative distances"), ("bloom", {}, "ALiBi"), ("vit", {}, "grid of image patches"),
        ("mamba", {}, "no table"), ("deberta-v2", {"relative_attention": True}, "rel_embeddings"),
    ],
)  # fmt: skip
def test_what_has_no_table_is_refused_with_the_reason(name, options, reason):
    model = AutoModel.from_config(tiny_config(transformers.CONFIG_MAPPING[name], **options))
    with pytest.raises(UnsupportedModelError, match=reason):
        extend_positions(model, 5000)


@pytest.mark.parametrize(
    "name, length, method, message",
    [
        ("BertModel", OLD, None, f"max_length must be above {OLD}, the positions that BertModel has.*, got {OLD}"),
        ("RobertaModel", OLD, None, f"must be above {OLD}"), ("BertModel", 0, None, "max_length must be an integer"),
        ("LlamaModel", 3, None, f"must be above {OLD}"),
        ("BertModel", NEW, "yarn", "method must be one of copy, interpolate, mirror for BertModel.*got 'yarn'"),
        ("LlamaModel", NEW, "copy", "method must be one of yarn, linear, dynamic for LlamaModel.*got 'copy'"),
        ("MarianModel", NEW, "copy", "method must be left out for MarianModel.*got 'copy'"),
    ],
)  # fmt: skip
def test_lengths_and_methods_that_do_not_fit_are_refused_and_nothing_changes(name, length, method, message):
    model, tokenizer = make(name), make_tokenizer()
    before, said = read(model, 8), (model.config.to_dict(), tokenizer.model_max_length)
    with pytest.raises(OptionError, match=message):
        extend_positions(model, length, method, tokenizer=tokenizer)
    assert torch.equal(read(model, 8), before) and (model.config.to_dict(), tokenizer.model_max_length) == said


@pytest.mark.parametrize("name", ["BertModel", "LlamaModel"])
def test_what_is_no_tokenizer_is_refused_before_anything_is_longer(name):
    model = make(name)
    before, said = read(model, 8), model.config.to_dict()
    with pytest.raises(OptionError, match="tokenizer must be a tokenizer or None, got 'bert-base-uncased'"):
        extend_positions(model, NEW, tokenizer="bert-base-uncased")
    assert torch.equal(read(model, 8), before) and model.config.to_dict() == said


def test_a_patched_model_and_a_rope_type_of_its_own_are_refused():
    with pytest.raises(PatchError, match="is patched"):
        extend_positions(patch_model(make_model("bert"), "linear"), 100)
    model = extend_positions(make("LlamaModel"), NEW)
    with pytest.raises(UnsupportedModelError, match="rope type is 'yarn' already"):
        extend_positions(model, 2 * NEW)


def make_bert2bert() -> PreTrainedModel:
    """Return an encoder and a decoder whose configs are in that of the whole."""
    half = config_of("BertModel").to_dict()
    decoder = half | {"is_decoder": True, "add_cross_attention": True}
    ids = {"decoder_start_token_id": 2, "pad_token_id": 1}
    return fill(EncoderDecoderModel(EncoderDecoderConfig(encoder=half, decoder=decoder, **ids)))


# what makes a whole -> the path of a part of it
WHOLES: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "llama": (lambda: fill(transformers.LlamaForCausalLM(copy.deepcopy(config_of("LlamaModel")))), "model"),
    "bert": (lambda: fill(transformers.BertForMaskedLM(copy.deepcopy(config_of("BertModel")))), "bert"),
    "bert2bert": (make_bert2bert, "encoder"),
}


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("name", WHOLES)
def test_a_whole_is_saved_with_the_positions_of_its_part(name, patched, tmp_path):
    make_whole, path = WHOLES[name]
    whole, tokens = make_whole(), torch.arange(NEW)[None]
    said, part = said_by(whole), whole.get_submodule(path)
    patch_model(unpatch_model(patch_model(part, "linear")), "linear", max_positions=NEW)
    if not patched:
        extend_positions(unpatch_model(part), NEW)
    after = part(tokens).last_hidden_state
    whole.save_pretrained(tmp_path)
    loaded = load_checkpoint(str(tmp_path)).eval()
    assert torch.equal(loaded.get_submodule(path)(tokens).last_hidden_state, after) and is_patched(loaded) == patched
    assert said_by(whole) == said


def test_a_table_of_a_pair_is_extended_beside_an_encoder_whose_positions_are_rotary():
    encoder, decoder = config_of("ModernBertModel").to_dict(), config_of("GPT2Model").to_dict()
    encoder |= {"max_position_embeddings": 2 * NEW}
    decoder |= {"is_decoder": True, "add_cross_attention": True}
    whole = fill(EncoderDecoderModel(EncoderDecoderConfig(encoder=encoder, decoder=decoder)))
    rotation = copy.deepcopy(whole.config.encoder.rope_parameters)
    extend_positions(whole, NEW)
    assert len(whole.decoder.transformer.wpe.weight) == NEW and whole.config.encoder.rope_parameters == rotation


def test_both_halves_of_a_pair_are_extended_saved_and_undone(tmp_path):
    whole = make_bert2bert()
    before, said = read_pair(whole, OLD), said_by(whole)
    extend_positions(whole, NEW)
    assert whole.config.encoder.max_position_embeddings == whole.config.decoder.max_position_embeddings == NEW
    assert torch.equal(read_pair(whole, OLD), before)
    after = read_pair(whole, NEW)
    whole.save_pretrained(tmp_path)
    assert torch.equal(read_pair(EncoderDecoderModel.from_pretrained(tmp_path).eval(), NEW), after)
    unpatch_model(whole)
    assert torch.equal(read_pair(whole, OLD), before) and said_by(whole) == said


def read_pair(model: PreTrainedModel, length: int) -> torch.Tensor:
    tokens = torch.arange(length)[None]
    with torch.no_grad():
        return model(input_ids=tokens, decoder_input_ids=tokens).logits


def test_a_whole_whose_config_cannot_say_the_positions_of_its_part_is_not_saved(tmp_path):
    whole = make("BartModel")
    extend_positions(whole.encoder, NEW)
    with pytest.raises(PatchError, match=r"'encoder' were extended, and BartModel has one config.*of 'decoder'"):
        whole.save_pretrained(tmp_path)
    extend_positions(whole.decoder, NEW + 1)
    with pytest.raises(PatchError, match=r"not extended alike"):
        whole.save_pretrained(tmp_path)
    unpatch_model(whole.decoder)
    extend_positions(whole.decoder, NEW).save_pretrained(tmp_path / "part")
    whole.save_pretrained(tmp_path)
    assert torch.equal(read(AutoModel.from_pretrained(tmp_path).eval(), NEW), read(whole, NEW))
    whole.config = copy.deepcopy(config_of("BartModel"))
    with pytest.raises(PatchError, match=r"'encoder' were extended, and its config is not in that of BartModel"):
        whole.save_pretrained(tmp_path)
