"""Scheduled changes in training: when directions are drawn anew and codes move, and when they wait."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from transformers import DynamicCache, StaticCache

from hf_linattn import patch_model
from hf_linattn.errors import UnsupportedModeError
from tests.helpers import assert_close, directions_of, logits_of, loss_gradients, make_tokens
from tests.models import SPINE, make_model

each_family = pytest.mark.parametrize("name", SPINE)
each_generator = pytest.mark.parametrize("name", ["gpt2", "llama"])


def make_redrawing(name, interval):
    return patch_model(make_model(name), "performer", num_features=8, redraw_interval=interval)


def drawn_anew(before, after):
    changed = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert len(set(changed)) == 1
    return changed[0]


@each_family
def test_directions_are_drawn_anew_every_so_many_training_forwards(name):
    model, ids = make_redrawing(name, 3), make_tokens(2, 9)
    history = [directions_of(model)]
    for _ in range(7):
        model.train()(input_ids=ids)
        logits_of(model.eval(), ids)  # counts for nothing
        history.append(directions_of(model))
    assert [drawn_anew(*pair) for pair in pairwise(history)] == [False, False, False, True, False, False, True]


@each_family
def test_directions_are_not_drawn_in_evaluation(name):
    model = make_redrawing(name, 1)
    before = directions_of(model)
    for _ in range(3):
        logits_of(model, make_tokens(2, 9))
    assert not drawn_anew(before, directions_of(model))


@each_family
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_uses_the_directions_of_the_first(name, reentrant):
    plain, checkpointed, ids = make_redrawing(name, 1).train(), make_redrawing(name, 1).train(), make_tokens(2, 9)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(3):
        expected, actual = loss_gradients(plain, ids), loss_gradients(checkpointed, ids)
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


SCHEDULED = {
    "performer": {"num_features": 8, "redraw_interval": 1},
    "vq": {"num_codes": 5, "block_size": 8},
    "hybrid": {
        "linear": "performer", "linear_options": {"num_features": 8, "redraw_interval": 1}, "num_hard_keys": 3,
        "window_size": 1,
    },
    "fusion": {"members": {"vq": {"num_codes": 5, "block_size": 8}, "local": {"window_size": 3}}},
}  # fmt: skip


def two_forwards(mechanism, checkpointing):
    """Return a model after a backward pass of two forwards, and what it has of buffers after each forward."""
    model, buffers = patch_model(make_model("llama"), mechanism, **SCHEDULED[mechanism]).train(), []
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    model(input_ids=make_tokens(2, 40), use_cache=False)  # by which codes move before the next one
    loss = 0
    for seed in (1, 2):
        loss = loss + model(input_ids=make_tokens(2, 40, seed=seed), use_cache=False).logits.sin().sum()
        buffers.append({name: x.clone() for name, x in model.named_buffers() if "hf_linattn" in name})
    loss.backward()
    buffers.append({name: x.clone() for name, x in model.named_buffers() if "hf_linattn" in name})
    return model, buffers


@pytest.mark.parametrize("mechanism", SCHEDULED)
@pytest.mark.parametrize("checkpointing", ["reentrant", "not reentrant"])
def test_two_forwards_before_one_backward_are_recomputed_with_what_they_read(mechanism, checkpointing):
    """As of a loss between two texts, each read by itself."""
    (plain, _), (model, (first, second, after)) = (two_forwards(mechanism, x) for x in (None, checkpointing))
    wanted, got = ([p.grad for p in x.parameters() if p.grad is not None] for x in (plain, model))
    assert all(torch.equal(x, y) for x, y in zip(wanted, got, strict=True))
    read = {name for name in first if name.endswith(("codebook", "projection"))}
    assert read and all(torch.equal(first[name], second[name]) for name in read)
    assert all(torch.equal(second[name], x) for name, x in after.items())  # a backward pass writes nothing down
    model(input_ids=make_tokens(2, 40), use_cache=False)
    changed = dict(model.named_buffers())
    assert not any(torch.equal(second[name], changed[name]) for name in read)  # the next forward does


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_does_not_wait_for_the_gradients_of_the_original(copied):
    model, ids = make_redrawing("llama", 1).train(), make_tokens(2, 9)
    loss = model(input_ids=ids).logits.sum()
    other = copied(model)
    before = directions_of(other)
    model(input_ids=ids), other(input_ids=ids)
    assert drawn_anew(before, directions_of(other)) and not drawn_anew(before, directions_of(model))
    loss.backward()
    model(input_ids=ids)
    assert drawn_anew(before, directions_of(model))


@each_generator
def test_directions_stay_from_prefill_to_the_last_token_also_in_training_mode(name):
    model, ids = make_redrawing(name, 1).train(), make_tokens(2, 9)
    model(input_ids=ids)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :5], past_key_values=cache)
        prefilled = directions_of(model)
        for position in range(5, 9):
            step = model(input_ids=ids[:, position : position + 1], past_key_values=cache).logits
    assert not drawn_anew(prefilled, directions_of(model))
    assert_close(step, logits_of(model.eval(), ids)[:, -1:])


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("plan", ["performer", "hybrid", "by_head"])
@torch.no_grad()
def test_a_state_of_directions_before_a_draw_is_refused(plan, kind):
    """As where a forward of other inputs comes between prefill and decoding, in training mode."""
    by_head = {"performer": {"heads": "0", **SCHEDULED["performer"]}, "softmax": {"heads": "1"}}
    given, options = (by_head, {}) if plan == "by_head" else (plan, SCHEDULED[plan])
    model, ids = patch_model(make_model("llama"), given, **options).train(), make_tokens(2, 9)
    cache = kind(model.config, 32) if kind is StaticCache else kind(config=model.config)
    for position in range(5):
        step = model(input_ids=ids[:, position : position + 1], past_key_values=cache).logits
    assert_close(step, logits_of(model.eval(), ids[:, :5])[:, -1:])
    model.train()(input_ids=ids)
    with pytest.raises(UnsupportedModeError, match=r"layer 0 that was made before a .* anew \(redraw_interval\)"):
        model(input_ids=ids[:, 5:6], past_key_values=cache)
    assert cache.get_seq_length() == 5
    cache.reset()
    assert_close(logits_of(model.eval(), ids, past_key_values=cache), logits_of(model, ids))


@each_generator
def test_directions_are_drawn_anew_before_each_forward_with_a_tuned_prefix(name):
    """PEFT gives every forward a cache that holds the keys of the prefix."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, history = make_redrawing(name, 1), []
    wrapped = get_peft_model(model, config).train()
    for _ in range(3):
        wrapped(input_ids=make_tokens(2, 9))
        history.append(directions_of(model))
    assert [drawn_anew(*pair) for pair in pairwise(history)] == [True, True]
