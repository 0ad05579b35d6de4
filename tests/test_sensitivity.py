"""Sensitivity of layers: against models in which one layer is really converted alone."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_linattn import (
    OptionError,
    UnsupportedModelError,
    calibrate,
    choose_layers,
    get_mechanisms,
    layer_sensitivity,
    patch_model,
    unpatch_model,
)
from hf_linattn.attention_call import interceptor_of
from hf_linattn.config import make_config
from hf_linattn.plan_search.divergence_signal import DivergenceSignal
from hf_linattn.plan_search.gates import gated
from hf_linattn.testing.models import random_tokens, tiny_model
from tests.helpers import logits_of, make_tokens, pad
from tests.models import SPINE, make_model


@pytest.mark.parametrize("name", SPINE)
def test_a_layer_costs_what_a_model_with_it_alone_converted_loses(name):
    original = make_model(name, std=0.4).eval()
    model = patch_model(copy.deepcopy(original), {"linear": [0], "performer": [1]})
    ids, mask = pad([make_tokens(1, 9)[0], make_tokens(1, 6, seed=1)[0]], 0, side="right")
    got = layer_sensitivity(model, [{"input_ids": ids, "attention_mask": mask, "labels": ids}])
    want = logits_of(original, ids, attention_mask=mask).double().log_softmax(-1)
    assert list(got) == list(get_mechanisms(model))
    for cost, plan in zip(got.values(), ({"linear": [0]}, {"performer": [1]}), strict=True):
        alone = logits_of(patch_model(copy.deepcopy(original), plan).eval(), ids, attention_mask=mask).double()
        divergence = (want.exp() * (want - alone.log_softmax(-1))).sum(-1)[mask.bool()]
        assert cost == pytest.approx(float(divergence.mean()), rel=1e-3) and cost > 0


def test_the_mean_is_over_the_tokens_of_all_batches_and_softmax_layers_have_no_cost():
    model = patch_model(make_model("gpt2", std=0.4), {"linear": [1]}).train()
    batches = [{"input_ids": make_tokens(2, 9)}, {"input_ids": make_tokens(1, 5, seed=1)}]
    (path,) = layer_sensitivity(model, batches)
    first, second = (layer_sensitivity(model, [batch])[path] for batch in batches)
    assert layer_sensitivity(model, batches)[path] == pytest.approx((18 * first + 5 * second) / 23, rel=1e-5)
    assert model.training and all(interceptor_of(m) is None for m in get_mechanisms(model).values())


def test_of_an_encoder_decoder_the_tokens_count_that_its_decoder_predicts():
    """Its mask of the encoder was taken for that, and two lengths ended in a RuntimeError."""
    model = tiny_model("bart", False, torch.float32)
    source = pad([random_tokens(1, 13)[0], random_tokens(1, 9)[0]], 0, side="right")
    target, last = random_tokens(2, 7, seed=1), torch.tensor([7, 5])
    batch = {
        "input_ids": source[0], "attention_mask": source[1], "decoder_input_ids": target,
        "decoder_attention_mask": (torch.arange(7) < last[:, None]).long(),
    }  # fmt: skip
    rows = [
        {"input_ids": source[0][[i], :n], "decoder_input_ids": target[[i], : last[i]]} for i, n in enumerate((13, 9))
    ]
    with gated(model, make_config("local", {"window_size": 3}), "head") as gates, torch.no_grad():
        signal, shut = DivergenceSignal([batch]), torch.zeros(len(gates))
        whole, *single = (float(signal.value(gates, shut, example)) for example in (batch, *rows))
    assert whole == pytest.approx((7 * single[0] + 5 * single[1]) / 12, rel=1e-3) and whole < 0
    model = patch_model(model, {"local": {"window_size": 3}})
    whole, *single = (sum(layer_sensitivity(model, [example]).values()) for example in (batch, *rows))
    assert whole == pytest.approx((7 * single[0] + 5 * single[1]) / 12, rel=1e-3) and whole > 0


@pytest.mark.parametrize("start", [2, 0], ids=["start", "pad"])
def test_a_decoder_reads_the_labels_where_it_is_given_nothing_else_and_its_last_pads_count_not(start, monkeypatch):
    """As collators of transformers make batches: with or without the ids of the decoder, never with their mask."""
    model = patch_model(tiny_model("bart", False, torch.float32), {"local": {"window_size": 3}})
    model.config.pad_token_id, model.config.decoder_start_token_id = 0, start
    ids, labels = random_tokens(2, 13), random_tokens(2, 9, seed=1)
    labels[1, 6:] = -100
    shifted = model.prepare_decoder_input_ids_from_labels(labels=labels)
    mask = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    full = {"input_ids": ids, "decoder_input_ids": shifted, "decoder_attention_mask": mask}
    want = layer_sensitivity(model, [full])
    padded = {**full, "decoder_input_ids": torch.nn.functional.pad(shifted, (0, 4), value=model.config.pad_token_id)}
    del padded["decoder_attention_mask"]
    for batch in ({"input_ids": ids, "labels": labels}, padded):
        assert layer_sensitivity(model, [batch]) == pytest.approx(want, rel=1e-4)
    monkeypatch.delattr(type(model), "prepare_decoder_input_ids_from_labels")
    with pytest.raises(OptionError, match="no decoder_input_ids, which BartForConditionalGeneration makes of them in"):
        layer_sensitivity(model, [{"input_ids": ids, "labels": labels}])
    model = patch_model(unpatch_model(model), "hedgehog")
    fits = [calibrate(copy.deepcopy(model), [batch]) for batch in (full, padded)]
    assert fits[0] == {path: pytest.approx(errors, rel=1e-3) for path, errors in fits[1].items()}


@pytest.mark.parametrize(("share", "kept"), [(0.0, [0, 1, 2, 3]), (0.25, [0, 1, 3]), (0.5, [1, 3]), (0.7, [1, 3])])
def test_the_most_sensitive_layers_keep_softmax_within_the_budget(share, kept):
    assert choose_layers({"a": 0.5, "b": 0.1, "c": 0.7, "d": 0.2}, share) == kept


def test_layers_are_chosen_by_their_index_where_some_keep_softmax_or_attend_to_an_encoder():
    batch = {"input_ids": random_tokens(1, 9)}
    kept = patch_model(make_model("llama", num_hidden_layers=4), "linear", layers=[1, 3])
    costs = layer_sensitivity(kept, [batch])
    assert choose_layers(costs, 0.0) == [1, 3] and choose_layers(costs, 0.5) in ([1], [3])
    crossed = patch_model(tiny_model("bart", False, torch.float32), "linear", cross_attention="linear")
    costs = layer_sensitivity(crossed, [{**batch, "decoder_input_ids": batch["input_ids"]}])
    own = [m.layer.index for m in get_mechanisms(crossed).values() if not m.layer.cross]
    assert choose_layers(costs, 0.0) == own and len(costs) > len(own)
    assert len(choose_layers(costs, 0.5)) == len(own) - len(own) // 2


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(OptionError, match="at least one batch"):
        layer_sensitivity(patch_model(make_model("gpt2"), "linear"), [])
    broken = patch_model(make_model("gpt2"), "linear")
    with torch.no_grad():
        broken.transformer.wpe.weight[8] = float("inf")
    message = r"batches\[1\]: divergence of transformer\.h\.0\.attn must be finite, .* load it in float32"
    with pytest.raises(OptionError, match=message):
        layer_sensitivity(broken, [{"input_ids": make_tokens(1, length)} for length in (8, 9)])
    number = make_model("bert", "ForSequenceClassification", num_labels=1)
    with pytest.raises(UnsupportedModelError, match=r"has logits \[1, 1\], which are not of tokens"):
        layer_sensitivity(patch_model(number, "linear"), [{"input_ids": make_tokens(1, 5)}])
    with pytest.raises(OptionError, match="softmax_share must be at least 0 and below 1, got 1"):
        choose_layers({"a": 1.0}, 1)


def test_no_gradients_are_kept():
    model = patch_model(make_model("gpt2"), "hedgehog")
    layer_sensitivity(model, [{"input_ids": make_tokens(1, 5)}])
    assert all(p.grad is None for p in model.parameters()) and torch.is_grad_enabled()
