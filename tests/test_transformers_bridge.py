"""What a patched forward is given and what it refuses."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DecisionTransformerConfig,
    DecisionTransformerModel,
    SegformerConfig,
    SegformerModel,
)

from hf_linattn import (
    UnsupportedModeError,
    UnsupportedModelError,
    get_mechanisms,
    masks,
    original_attention,
    patch_model,
)
from hf_linattn.attention_modules import self_attention_modules
from hf_linattn.masks import PositionArgument, sequence_ids
from hf_linattn.positions.tables import position_tables
from hf_linattn.support.tiny import tiny_inputs, tiny_model
from tests.helpers import Snapshot, assert_close, generate, logits_of, loss_gradients, make_patched, make_tokens, pad
from tests.models import ARCHITECTURES, CAUSAL, SPINE, make_model

each_family = pytest.mark.parametrize("name", SPINE)
POSITIONS = 64  # of every tiny model with a table
WITH_TABLE = ("bert", "gpt2", "opt", "roberta")


def other_batch(model, ids):
    model(input_ids=ids, attention_mask=torch.ones(3, 9))


def other_length(model, ids):
    model(input_ids=ids, attention_mask=torch.ones(2, 12), use_cache=False)


def attentions_by_argument(model, ids):
    model(input_ids=ids, output_attentions=True)


def other_direction(model, ids):
    module = next(iter(self_attention_modules(model).values()))
    module.is_causal = not module.is_causal
    try:
        model(input_ids=ids)
    finally:
        module.is_causal = not module.is_causal


REFUSED = [
    (other_batch, r"attention_mask is \(3, 9\), but the call has a batch of 2"),
    (other_length, r"attention_mask is \(2, 12\), but .* 9 queries and 9 keys"),
    (attentions_by_argument, "output_attentions=True .*original_attention"),
    (other_direction, r"is_causal=(True|False) was asked of layer 0, .*unpatch"),
]


@pytest.mark.covering(2)
@each_family
@pytest.mark.parametrize(("call", "message"), REFUSED)
@pytest.mark.parametrize("mechanism", ["performer", "softmax"])
def test_a_call_without_an_answer_is_refused_and_changes_nothing(name, mechanism, call, message):
    model = make_patched(name, mechanism)
    before = Snapshot.of(model)
    with pytest.raises(UnsupportedModeError, match=message):
        call(model, make_tokens(2, 9))
    before.assert_kept(model)


@each_family
def test_attentions_that_the_config_asks_for_are_refused(name):
    """Set before patching: afterwards transformers itself refuses the setting."""
    model = make_patched(name, attn_implementation="eager", output_attentions=True)
    with pytest.raises(UnsupportedModeError, match=r"output_attentions=True .*original_attention"):
        logits_of(model, make_tokens(2, 9))
    with original_attention(model):
        assert len(model(input_ids=make_tokens(2, 9)).attentions) == 2
    with pytest.raises(ValueError, match="output_attentions"):
        make_patched(name).config.output_attentions = True


@pytest.mark.parametrize("name", WITH_TABLE)
def test_an_input_longer_than_the_position_table_is_named(name):
    model = make_patched(name)
    limit = POSITIONS - 2 if name == "roberta" else POSITIONS
    before = Snapshot.of(model)
    assert logits_of(model, make_tokens(1, limit)).shape[1] == limit
    with pytest.raises(UnsupportedModeError, match=f"position {limit + 1}, but .* holds {limit}"):
        logits_of(model, make_tokens(1, limit + 1))
    before.assert_kept(model)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
@pytest.mark.parametrize("cache", [True, False])
def test_generation_beyond_the_position_table_is_named(name, cache):
    model = make_patched(name)
    before = Snapshot.of(model)
    generate(model, make_tokens(1, POSITIONS - 4), new_tokens=5, use_cache=cache)  # the last token is never read
    with pytest.raises(UnsupportedModeError, match=f"position {POSITIONS + 1}, but .* holds {POSITIONS}"):
        generate(model, make_tokens(1, POSITIONS - 4), new_tokens=6, use_cache=cache)
    before.assert_kept(model)


@pytest.mark.parametrize("name", WITH_TABLE)
def test_explicit_positions_are_held_to_the_table(name):
    """A model whose table starts behind the padding index takes positions that start there too."""
    model = make_patched(name)
    first = 2 if name == "roberta" else 0
    limit = POSITIONS - first
    positions = torch.arange(first, POSITIONS)[None]
    ids = make_tokens(1, limit)
    assert_close(logits_of(model, ids, position_ids=positions), logits_of(model, ids))
    with pytest.raises(UnsupportedModeError, match=f"holds {limit}"):
        logits_of(model, ids, position_ids=positions + 1)


def test_a_table_of_another_tower_does_not_bound_the_tokens():
    """The pictures' positions of Phi 4, 16 here, lie inside the model whose layers read the text."""
    model = tiny_model("phi4_multimodal").eval()
    assert not position_tables(model, of_parts=True)
    ids = torch.randint(5, 90, (2, 23))
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        got = patch_model(model, "softmax")(input_ids=ids, use_cache=False).logits
    assert_close(got, want)



@pytest.mark.parametrize("layers", [None, 0])
def test_a_layer_that_never_calls_its_mechanism_is_named(layers, monkeypatch):
    """A model whose attention passes by the interface would only look patched, but where that layer is left out."""
    model = patch_model(make_model("llama"), "linear", layers)
    module = model.model.layers[1].self_attn
    monkeypatch.setattr(module, "forward", lambda hidden_states, **kwargs: (hidden_states, None))
    named = pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn never called .*unpatch_model.* layers=")
    with named if layers is None else nullcontext():
        logits_of(model, make_tokens(1, 5))


@torch.no_grad()
@pytest.mark.parametrize("plan", ["softmax", {"linear": 1}])
def test_a_layer_that_pools_its_keys_keeps_softmax(plan):
    """SegFormer's first has more queries than keys, and no causality."""
    torch.manual_seed(0)
    sizes = {"depths": [1, 1], "sr_ratios": [4, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2]}
    sizes |= {"patch_sizes": [7, 3], "strides": [2, 2], "mlp_ratios": [2, 2], "num_encoder_blocks": 2}
    model, pictures = SegformerModel(SegformerConfig(**sizes)).eval(), torch.randn(2, 3, 32, 32)
    want = model(pictures, output_hidden_states=True).hidden_states
    got = patch_model(model, plan)(pictures, output_hidden_states=True).hidden_states
    assert_close(got[0], want[0])
    assert torch.allclose(got[1], want[1], atol=1e-4) == (plan == "softmax")


# of these no position reaches a layer by itself, in one layer's masks or more; the others are in `ARCHITECTURES`
EMBEDDED = (
    "clip_text_model", "cosmos3_edge_text", "ctrl", "esm", "fuyu", "gpt_bigcode", "gte", "jina_embeddings_v3",
    "layoutlm", "markuplm", "persimmon", "qwen2_vl_text", "splinter",
)  # fmt: skip
LENGTHS = (7, 1, 11)


def packed_row(model, batch=1):
    """Return tokens and positions of rows of sequences of `LENGTHS`."""
    first = max((first for first, _ in position_tables(model, of_parts=True).values()), default=0)
    positions = torch.cat([first + torch.arange(length) for length in LENGTHS]).expand(batch, -1)
    return make_tokens(batch, sum(LENGTHS)), positions


def assert_packed_equals_separate(model, call=None):
    ids, positions = packed_row(model)
    call, options = model if call is None else call, {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    packed = call(input_ids=ids, position_ids=positions, **options)[0]
    assert_close(packed, torch.cat([model(input_ids=row, **options)[0] for row in ids.split(LENGTHS, dim=1)], dim=1))


@torch.no_grad()
@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("mechanism", ["linear", "performer", "softmax"])
def test_packed_rows_equal_separate_ones(name, mechanism):
    assert_packed_equals_separate(make_patched(name, mechanism))


PLACES = {  # positions of a row -> the documents that they tell apart
    "clamped to a table": ([0, 1, 2, 3, 3, 3, 3], None),
    "grouped": ([0, 0, 0, 1, 1, 1, 2], None),
    "documents of one token": ([0, 0, 1, 2, 0, 0, 1], [0, 1, 1, 1, 2, 3, 3]),
    "clamped documents": ([0, 1, 2, 2, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1]),
    "beginning at 2, as RoBERTa's": ([2, 2, 3, 4, 2, 3, 4], [0, 1, 1, 1, 2, 2, 2]),
}


@pytest.mark.parametrize("places", PLACES)
def test_positions_that_stay_begin_a_document_at_its_first_position_alone(places):
    positions, documents = PLACES[places]
    for pads in (0, 2):
        given = torch.tensor([[1] * pads + positions])
        mask = torch.arange(len(given[0]))[None] >= pads
        found = sequence_ids(given, None, mask if pads else None, len(given[0]), len(given[0]))
        assert (documents is None and found is None) or found[0, pads:].tolist() == documents


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_row_whose_positions_stay_is_read_as_by_the_original(name):
    model, ids = make_model(name), make_tokens(1, 20)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["position_ids"] = torch.arange(20).clamp(max=11)[None] if name == "bert" else torch.arange(20)[None] // 4
    before = model(**inputs).logits
    assert_close(patch_model(model, "local", window_size=32)(**inputs).logits, before)


@torch.no_grad()
@pytest.mark.parametrize("model_type", EMBEDDED)
def test_packed_rows_of_models_that_only_embed_positions(model_type):
    assert_packed_equals_separate(patch_model(tiny_model(model_type), {"linear": {"layers": [0]}}))


@torch.no_grad()
@pytest.mark.parametrize("name", ["distilbert", "modernbert", "llama"])
def test_packed_rows_of_a_compiled_model(name):
    model = make_patched(name, "linear")
    assert_packed_equals_separate(model, torch.compile(model, backend="eager"))


@torch.no_grad()
@pytest.mark.parametrize("name", ["distilbert", "modernbert", "gpt2"])
def test_packed_rows_by_an_argument_without_a_name(name):
    model = make_patched(name, "linear", head="Model")
    ids, positions = packed_row(model)
    given = {"input_ids": ids, "position_ids": positions, **({"use_cache": False} if name == "gpt2" else {})}
    names = list(inspect.signature(model.forward).parameters)
    row = [given.pop(name, None) for name in names[: names.index("position_ids") + 1]]
    assert torch.equal(model(*row, **given)[0], model(input_ids=ids, position_ids=positions, **given)[0])


@pytest.mark.parametrize("name", ["distilbert", "modernbert"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_packed_rows_that_gradient_checkpointing_makes_again(name, reentrant):
    model = make_patched(name, "linear").train()
    ids, positions = packed_row(model, batch=2)
    expected = loss_gradients(model, ids, position_ids=positions)
    calls = [mechanism.calls for mechanism in get_mechanisms(model).values()]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    actual = loss_gradients(model, ids, position_ids=positions)
    assert [mechanism.calls for mechanism in get_mechanisms(model).values()] == [3 * n for n in calls]
    for key in expected:
        torch.testing.assert_close(actual[key], expected[key], rtol=0, atol=0, msg=key)


@torch.no_grad()
def test_positions_of_a_text_do_not_reach_the_pictures_beside_it():
    """Nor those of a model another model inside it, which is handed what else it is called with."""
    model = patch_model(tiny_model("clip"), "linear")
    pictures = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
    ids = make_tokens(2, 17)  # as many as a picture has patches
    positions = (torch.arange(17) % 9).expand(2, -1)
    plain, packed = model(input_ids=ids, **pictures), model(input_ids=ids, position_ids=positions, **pictures)
    assert torch.equal(packed.image_embeds, plain.image_embeds)
    assert not torch.allclose(packed.text_embeds, plain.text_embeds)
    argument = PositionArgument.of(model.vision_model.forward)
    assert not argument.handed_on({masks.POSITIONS: positions}, argument.given((), {}))


SEQUENCES = [
    # positions, key mask, expected ids of the restarts
    ([[0, 1, 2, 3]], None, None),
    ([[0, 1, 0, 1]], None, [[0, 0, 1, 1]]),
    ([[0, 0, 0, 1]], None, [[0, 1, 2, 2]]),
    ([[5, 6, 7, 8]], None, None),
    ([[0, 0, 0, 0], [0, 0, 1, 0]], None, [[0, 0, 0, 0], [0, 1, 1, 2]]),  # the first counts nothing
    ([[7, 7, 7, 7]], None, None),
    ([[0, 0, 0, 1]], [[1, 1, 1, 0]], None),
    ([[1, 1, 0, 1]], [[0, 0, 1, 1]], None),  # left padding
    ([[0, 0, 0, 1]], [[0, 0, 1, 1]], None),
    ([[0, 1, 1, 1]], [[1, 1, 0, 0]], None),  # right padding
    ([[0, 0, 1, 0]], [[0, 1, 1, 1]], [[0, 0, 0, 1]]),  # left padding, then two sequences
    ([[0, 1, 0, 1]], [[1, 1, 1, 1], [1, 1, 1, 0]], [[0, 0, 1, 1], [0, 0, 1, 1]]),
]


@pytest.mark.parametrize(("positions", "mask", "expected"), SEQUENCES)
def test_sequences_are_told_apart_by_restarts_and_not_by_padding(positions, mask, expected):
    mask = None if mask is None else torch.tensor(mask).bool()
    ids = sequence_ids(torch.tensor(positions), None, mask, 4, 4)
    assert (None if ids is None else ids.tolist()) == expected


@torch.no_grad()
@pytest.mark.parametrize("mask", [None, torch.ones(2, 6, dtype=torch.long)])
def test_positions_that_a_model_does_not_count_part_nothing(mask):
    """Decision Transformer hands its GPT-2 zeros for all tokens."""
    torch.manual_seed(0)
    sizes = {"state_dim": 5, "act_dim": 3, "hidden_size": 32, "n_layer": 2, "n_head": 2, "max_ep_len": 8}
    model = DecisionTransformerModel(DecisionTransformerConfig(**sizes)).eval()
    widths = {"states": 5, "actions": 3, "rewards": 1, "returns_to_go": 1}
    inputs = {name: torch.randn(2, 6, width) for name, width in widths.items()}
    inputs |= {"timesteps": torch.arange(6).expand(2, -1), "attention_mask": mask}
    want = model(**inputs).action_preds
    assert_close(patch_model(model, "softmax")(**inputs).action_preds, want)


def test_cumulative_lengths_of_flash_attention_tell_sequences_apart():
    ids = sequence_ids(None, torch.tensor([0, 3, 4, 6], dtype=torch.int32), None, 6, 6)
    assert ids.tolist() == [[0, 0, 0, 1, 2, 2]]


@each_family
def test_a_wholly_padded_row_is_finite(name):
    model = make_patched(name)
    ids, mask = pad([make_tokens(1, 9)[0], make_tokens(1, 9, seed=1)[0]], 0)
    mask[1] = 0
    logits = logits_of(model, ids, attention_mask=mask)
    assert torch.isfinite(logits).all()
    assert_close(logits[0], logits_of(model, ids[:1])[0])


@torch.no_grad()
@pytest.mark.parametrize("name", CAUSAL)
def test_a_decoder_that_its_config_makes_an_encoder(name, tmp_path):
    """It is one as patched, saved and loaded; a config that changes afterwards is refused."""
    ids = make_tokens(2, 9)
    original = make_model(name, is_causal=False, attn_implementation="eager")
    want = original(ids).logits
    assert not torch.allclose(want, make_model(name, attn_implementation="eager")(ids).logits)
    model = patch_model(original, {"local": {"layers": 0, "window_size": 64}})
    if getattr(model.config, "sliding_window", None) is None and name != "gemma2":  # which local has not
        assert_close(model(ids).logits, want)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    assert_close(patch_model(make_model(name, is_causal=False), "softmax")(ids).logits, want)
    model.config.is_causal = True
    with pytest.raises(UnsupportedModeError, match="is_causal=True was asked of layer 0, which was patched with is_c"):
        model(ids)


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["linear", "softmax"])
@pytest.mark.parametrize("model_type", ["moonshine", "moonshine_streaming"])
def test_a_module_that_asks_for_causal_attention_where_it_has_no_mask_alone(model_type, mechanism):
    """With one, and for one token, it says is_causal=False."""
    model = tiny_model(model_type)
    inputs = tiny_inputs(model)
    patch_model(model, mechanism)
    ids, want = inputs["decoder_input_ids"], model(**inputs).logits
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    real = mask.bool()
    assert_close(model(**inputs, decoder_attention_mask=mask).logits[real], want[real])
    assert_close(model(**{**inputs, "decoder_input_ids": ids[:, :1]}).logits, want[:, :1])


@torch.no_grad()
def test_a_batch_that_mixes_adapters_with_own_mechanisms_is_refused():
    ids, lora = make_tokens(2, 9), LoraConfig(r=2, target_modules="all-linear", modules_to_save=["hf_linattn"])
    wrapped = get_peft_model(make_patched("llama", "hedgehog"), lora, "first").eval()
    wrapped.add_adapter("second", lora)
    for name, parameter in wrapped.named_parameters():
        if ".second." in name:
            parameter.add_(0.3 * torch.randn_like(parameter))
    alone = {}
    for adapter in ("first", "second"):
        wrapped.set_adapter(adapter)
        alone[adapter] = logits_of(wrapped, ids)
    assert not torch.equal(*alone.values())
    for call in (wrapped, partial(wrapped.generate, max_new_tokens=2)):
        with pytest.raises(UnsupportedModeError, match=r"adapter_names=\['first', 'second'\] mixes.*set_adapter"):
            call(input_ids=ids, adapter_names=["first", "second"])
        for adapter, logits in alone.items():
            wrapped.set_adapter(adapter)
            assert torch.equal(logits_of(wrapped, ids), logits)


@pytest.mark.parametrize("parameters", [["key_projection"], ["key_projection", "value_projection"]])
def test_an_adapter_of_a_mechanisms_own_parameter_is_refused_by_name(parameters):
    """PEFT puts a wrapper around the mechanism, for each parameter one, which is no copy that it trains."""
    model, ids = make_patched("llama", "linformer"), make_tokens(2, 9)
    before = logits_of(model, ids)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=parameters))
    why = rf"of LlamaAttention of layer \d has ParamWrapper, .*'{parameters[-1]}'.*modules_to_save=\['hf_linattn'\]"
    for use in (partial(logits_of, wrapped, ids), partial(get_mechanisms, wrapped)):
        with pytest.raises(UnsupportedModelError, match=why):
            use()
    assert torch.equal(logits_of(wrapped.unload(), ids), before)
    attention = wrapped.unload().model.layers[0].self_attn
    attention.hf_linattn = torch.compile(attention.hf_linattn, backend="eager")
    with pytest.raises(UnsupportedModelError, match=r"has OptimizedModule in place of .*; wrap or compile the"):
        logits_of(model, ids)
