"""extend_positions on many architectures: the old lengths as before, longer ones, saved, undone, refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel, EncoderDecoderConfig, EncoderDecoderModel, PreTrainedModel

from hf_linattn import extend_positions, is_patched, patch_model, unpatch_model
from hf_linattn.errors import OptionError, PatchError, UnsupportedModeError
from hf_linattn.hub import load_checkpoint
from hf_linattn.support.tiny import tiny_config
from tests.helpers import make_tokenizer
from tests.models import fill

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
    "DebertaV2Model": {"relative_attention": True, "position_buckets": 4, "max_relative_positions": OLD},
    "AlbertModel": {"embedding_size": 16}, "BartModel": SEQ2SEQ, "BioGptModel": {}, "CLIPTextModel": {},
}  # fmt: skip
FSMT = {**SEQ2SEQ, "langs": ["en", "de"], "src_vocab_size": 60, "tgt_vocab_size": 60, "d_model": 32}
COMPUTED: dict[str, dict[str, Any]] = {
    "MarianModel": {**SEQ2SEQ, "decoder_start_token_id": 2}, "XGLMModel": {"ffn_dim": 48, "num_layers": 1},
    "GPTJModel": {"rotary_dim": 4}, "RoFormerModel": {}, "FSMTModel": FSMT,
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
    with pytest.raises(OptionError, match=f"^max_positions must be above {OLD}, .* got {OLD}"):
        patch_model(model, "performer", max_positions=OLD)
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


@pytest.mark.parametrize("shared", ["module", "weight"])
def test_a_table_that_two_modules_have_stays_one(shared):
    model = make("BartModel")
    encoder, decoder = model.encoder, model.decoder
    if shared == "module":
        decoder.embed_positions = encoder.embed_positions
    else:
        decoder.embed_positions.weight = encoder.embed_positions.weight
    table, rows = encoder.embed_positions.weight, len(encoder.embed_positions.weight)
    extend_positions(model, NEW)
    assert decoder.embed_positions.weight is encoder.embed_positions.weight is not table
    unpatch_model(model)
    for part in (encoder, decoder):
        assert part.embed_positions.weight is table and part.embed_positions.num_embeddings == len(table) == rows


def test_an_interpolated_table_is_undone_to_its_rows_of_before():
    model = make("BertModel")
    rows = model.embeddings.position_embeddings.weight.detach().clone()
    extend_positions(model, NEW, "interpolate")
    with torch.no_grad():
        model.embeddings.position_embeddings.weight += 1.0
    unpatch_model(model)
    assert torch.equal(model.embeddings.position_embeddings.weight, rows)


def test_a_table_in_float64_is_interpolated_in_float64():
    model = make("BertModel").double()
    rows = model.embeddings.position_embeddings.weight.detach().numpy()
    new = extend_positions(model, NEW, "interpolate").embeddings.position_embeddings.weight.detach().numpy()
    places = np.arange(NEW) * (OLD - 1) / (NEW - 1)
    expected = np.stack([np.interp(places, np.arange(OLD), column) for column in rows.T], 1)
    assert np.abs(new - expected).max() < 1e-13


def test_dynamic_turns_by_the_longest_input_since_one_below_the_old_length():
    """As transformers does; the formula (NTK) is computed by hand."""
    model = make("LlamaModel")
    before = {length: read(model, length) for length in (OLD - 1, OLD)}
    extend_positions(model, NEW, "dynamic")
    rotary, dim, factor = model.rotary_emb, 8, NEW / OLD
    for longest, length in ((OLD, OLD), (NEW, NEW), (NEW, OLD), (NEW, OLD + 9), (OLD, OLD - 1), (OLD, OLD)):
        after = read(model, length)
        base = 10000.0 * (factor * longest / OLD - factor + 1) ** (dim / (dim - 2))
        expected = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        assert torch.allclose(rotary.inv_freq.double(), expected, rtol=1e-5)
        assert longest > OLD or torch.equal(after, before[length])
    assert not torch.equal(extend_positions(make("LlamaModel"), NEW, "linear").rotary_emb.inv_freq, rotary.inv_freq)


def test_a_rotation_with_a_config_of_its_own_reads_the_new_parameters():
    """As of models whose layers have several bases."""
    model = make("LlamaModel")
    model.rotary_emb.config = said = copy.deepcopy(model.config)
    before = read(model, OLD)
    extend_positions(model, NEW, "dynamic")
    assert torch.equal(read(model, NEW), read(extend_positions(make("LlamaModel"), NEW, "dynamic"), NEW))
    unpatch_model(model)
    assert model.rotary_emb.config is said and torch.equal(read(model, OLD), before)


def test_a_model_inside_another_is_initialised_as_its_own_class_says():
    model = fill(transformers.DPRQuestionEncoder(tiny_config(transformers.DPRConfig, **SIZES)))
    tokens = torch.randint(4, 60, (2, NEW), generator=torch.Generator().manual_seed(0))
    before = model(tokens[:, :OLD]).pooler_output
    extend_positions(model, NEW)
    assert torch.equal(model(tokens[:, :OLD]).pooler_output, before) and model(tokens).pooler_output.isfinite().all()


@pytest.mark.parametrize("name", ["XGLMModel", "FSMTModel"])
def test_sinusoids_that_grew_as_they_were_read_are_still_computed(name):
    """XGLM has them in a buffer, FSMT in a weight."""
    model = make(name)
    before = {length: read(copy.deepcopy(model), length) for length in (OLD, NEW)}
    read(model, OLD + 4)
    extend_positions(model, NEW)
    assert all(torch.equal(read(model, length), states) for length, states in before.items())


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
