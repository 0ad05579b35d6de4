"""original_attention: the softmax teacher for a while, what it leaves, and what is copied or trained meanwhile."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, EncoderDecoderModel

from hf_linattn import PatchError, original_attention, patch_model, unpatch_model
from tests.helpers import OPTIONS, Snapshot, assert_close, logits_of, make_patched, make_tokens, pad
from tests.models import make_model
from tests.test_patching import COPIES, each_family, each_patch


@each_patch
def test_original_attention_is_the_original_bit_for_bit(name, mechanism):
    ids = make_tokens(2, 9)
    model = make_model(name)
    softmax = logits_of(model, ids)
    patch_model(model, mechanism, **OPTIONS.get(mechanism, {}))
    before = Snapshot.of(model)
    with original_attention(model) as teacher:
        assert teacher is model
        assert torch.equal(logits_of(model, ids), softmax)
        with original_attention(model):
            assert torch.equal(logits_of(model, ids), softmax)
        assert torch.equal(logits_of(model, ids), softmax)
    before.assert_kept(model)


@pytest.mark.parametrize("patched", ["whole", "halves"])
def test_a_pair_of_models_takes_padded_rows_until_it_is_unpatched(patched):
    """A pair gives its halves new configs, by which they make masks; their attention modules keep the old ones."""
    halves = make_model("bert", "Model"), make_model("bert", "LMHeadModel", is_decoder=True, add_cross_attention=True)
    ids, mask = pad([make_tokens(1, 9)[0], make_tokens(1, 4, seed=1)[0]], 0, "right")
    given = {"attention_mask": mask, "decoder_input_ids": ids[:, :3]}
    plain = EncoderDecoderModel(encoder=copy.deepcopy(halves[0]), decoder=copy.deepcopy(halves[1])).eval()
    softmax, before = logits_of(plain, ids, **given), Snapshot.of(plain)
    if patched == "whole":
        model = patch_model(plain, "linear")
    else:
        encoder, decoder = (patch_model(half, "linear") for half in halves)
        model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    got = logits_of(model, ids, **given)
    assert not torch.allclose(got, softmax)
    assert_close(got[1:], logits_of(model, ids[1:, :4], decoder_input_ids=ids[1:, :3]))
    with original_attention(model):
        assert torch.equal(logits_of(model, ids, **given), softmax)
    assert torch.equal(logits_of(model, ids, **given), got)
    assert torch.equal(logits_of(unpatch_model(model), ids, **given), softmax)
    if patched == "whole":
        before.assert_kept(model)


@each_family
def test_original_attention_ends_with_an_exception(name):
    model = make_patched(name)
    before = Snapshot.of(model)
    with pytest.raises(ZeroDivisionError), original_attention(model), original_attention(model):
        raise ZeroDivisionError
    before.assert_kept(model)


def test_a_model_that_is_unpatched_within_original_attention_stays_so():
    model = make_model("llama")
    before = Snapshot.of(model)
    with original_attention(patch_model(model, "performer")):
        unpatch_model(model)
    before.assert_kept(model)


@each_family
def test_original_attention_gives_its_attention_matrices(name):
    model = make_patched(name, attn_implementation="eager")
    with original_attention(model):
        attentions = model(input_ids=make_tokens(2, 9), output_attentions=True).attentions
    assert_close(attentions[0].sum(-1), torch.ones(attentions[0].shape[:3]))


SWITCHES = {
    "softmax, then mechanisms": (original_attention, nullcontext),
    "mechanisms, then softmax": (nullcontext, original_attention),
    "mechanisms, then none": (nullcontext, lambda model: nullcontext(unpatch_model(model))),
}


@pytest.mark.parametrize("how", SWITCHES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_are_not_made_again_by_another_attention(how, reentrant):
    """Their gradients would be those of another model."""
    forward, backward = SWITCHES[how]
    model, ids = make_patched("llama", "hedgehog").train(), make_tokens(2, 9)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with forward(model):
        loss = model(ids, labels=ids, use_cache=False).loss
    with pytest.raises(PatchError, match=r"again without; call backward\(\) before"), backward(model):
        loss.backward()


def test_backward_may_come_after_original_attention_where_no_layer_is_made_again():
    found = {}
    for how in ("inside", "after", "made again inside"):
        model, ids = make_patched("llama", "hedgehog").train(), make_tokens(2, 9)
        if how == "made again inside":
            model.gradient_checkpointing_enable()
        with original_attention(model):
            loss = model(ids, labels=ids, use_cache=False).loss
            if how != "after":
                loss.backward()
        if how == "after":
            loss.backward()
        found[how] = [p.grad for p in model.parameters() if p.grad is not None]
    for how in ("after", "made again inside"):
        torch.testing.assert_close(found[how], found["inside"])


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_made_within_original_attention_is_patched(tmp_path, way):
    model, ids = make_patched("llama"), make_tokens(2, 9)
    expected, part = logits_of(model, ids), model.model(ids, use_cache=False).last_hidden_state
    with original_attention(model), original_attention(model):
        softmax = logits_of(model, ids)
        copied, copied_part, layer = map(COPIES[way], (model, model.model, model.model.layers[0]))
        assert torch.equal(logits_of(model, ids), softmax)
    assert torch.equal(logits_of(copied, ids), expected)
    assert torch.equal(copied_part(ids, use_cache=False).last_hidden_state, part)
    assert layer.self_attn.config._attn_implementation == "hf_linattn"
    copied.save_pretrained(tmp_path)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids), expected)
    with original_attention(copied):
        assert torch.equal(logits_of(copied, ids), softmax)
    assert torch.equal(logits_of(copied, ids), expected)
    assert torch.equal(logits_of(unpatch_model(copied), ids), softmax)


def test_attention_of_which_peft_trains_a_copy_is_switched_too(tmp_path):
    model, ids = make_patched("llama"), make_tokens(2, 9)
    expected = logits_of(model, ids)
    with original_attention(model):
        softmax = logits_of(model, ids)
    copied = LoraConfig(target_modules=["up_proj"], modules_to_save=["self_attn"])
    adapted = get_peft_model(model, copied).eval()
    for merge in (False, True):
        model = adapted.merge_and_unload() if merge else adapted
        assert torch.equal(logits_of(model, ids), expected)
        with original_attention(model):
            assert torch.equal(logits_of(model, ids), softmax)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids), expected)
    assert torch.equal(logits_of(unpatch_model(model), ids), softmax)
