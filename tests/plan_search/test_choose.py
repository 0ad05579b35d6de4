"""choose_plan: what it takes and refuses, plans as JSON, and that a model is left as it was."""

from __future__ import annotations

import copy
import json
import logging
import math
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, DynamicCache

from hf_linattn import (
    CheckpointError,
    ChosenPlan,
    DataError,
    OptionError,
    PatchError,
    UnknownNameError,
    UnsupportedModelError,
    choose_plan,
    get_mechanisms,
    get_patch_config,
    is_patched,
    layer_sensitivity,
    patch_model,
)
from hf_linattn.chosen_plan import PlanRecord
from hf_linattn.evaluation.recall import OwnAnswer
from hf_linattn.plan_search import SEARCHES
from hf_linattn.plan_search.recall_signal import RecallSignal
from hf_linattn.support.tiny import tiny_config, tiny_inputs, tiny_model
from tests.evaluation.recall_reader import bundled_tokenizer
from tests.helpers import Snapshot, assert_close, logits_of, make_tokens
from tests.models import SHARING, make_model, make_sharing
from tests.plan_search.retriever import FOUND, WINDOW, choose, make_prompt, make_prompts, make_retriever

TEXT = [{"input_ids": make_tokens(2, 12)}]


def saved_with(**fields) -> str:
    """Return a plan as JSON text, edited."""
    record = PlanRecord("LlamaForCausalLM", [2], "head", [[0, 1]], {"mechanism": "linear"}, [[0.1, 0.9]], "slope", "")
    return json.dumps(json.loads(ChosenPlan.of(record).to_json()) | fields)


@pytest.fixture(scope="module")
def plan() -> ChosenPlan:
    return choose(make_retriever(), 1, seed=3)


def test_a_plan_is_one_for_patch_model_and_says_how_it_came_about(plan):
    model = patch_model(make_retriever(), plan)
    assert [m.config.mechanism for m in get_mechanisms(model).values()] == ["streaming", "by_head"]
    assert get_patch_config(model).layers[1].plan["streaming"]["heads"] == [0]
    record = plan.record
    assert (record.model, record.heads, record.unit, record.search) == ("LlamaForCausalLM", [2, 2], "head", "slope")
    assert (record.signal, record.reason, record.seed) == ("recall", "", 3)
    assert record.examples == {"find 24": 2, "seek 30": 2} and record.seconds > 0
    assert record.replace["mechanism"] == "streaming" and record.options["keep"] == 1


def test_plans_come_back_from_json_and_files(plan, tmp_path):
    for again in (ChosenPlan.from_json(plan.to_json()), ChosenPlan.load(plan.save(tmp_path / "deep" / "plan.json"))):
        assert list(again) == list(plan) and again.record == plan.record
    ids = make_tokens(1, 12) % 30
    expected = logits_of(patch_model(make_retriever(), plan), ids)
    assert torch.equal(logits_of(patch_model(make_retriever(), again), ids), expected)


def test_a_plan_that_was_saved_before_records_said_who_shares_keys_is_read(plan):
    document = json.loads(plan.to_json())
    assert document.pop("sharing") == []
    assert ChosenPlan.from_json(json.dumps(document)).record == plan.record


@torch.no_grad()
@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize(("unit", "heads"), [("head", 1), ("layer", 2)])
def test_a_plan_decodes_where_layers_share_keys(name, unit, heads):
    """Of each layer and the one that lends it keys, the cache has keys of both or of none."""
    model, ids = make_sharing(name, num_key_value_heads=heads), make_tokens(2, 12)
    chosen = choose(model, 1, unit=unit, signal="divergence", batches=TEXT)
    assert chosen.record.sharing == [[0, 2], [1, 3]]
    patch_model(model, chosen)
    exact = chosen.record.kept[0][0]
    (kept,) = [m for m in get_mechanisms(model).values() if m.layer.index == exact]
    assert set(kept.members) == {"softmax"}, "all of the layer"
    cache, want = DynamicCache(config=model.config), model(input_ids=ids, use_cache=False).logits
    got = [model(input_ids=part, past_key_values=cache).logits for part in ids.split([9, 1, 2], dim=1)]
    assert_close(torch.cat(got, dim=1), want)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "format_version must be 1, got None"),
        ('{"format_version": 2}', "format_version must be 1, got 2"),
        ('{"format_version": 1}', "the field 'plan' is missing"),
        (saved_with(plan={"linear": "0-1"}), "the field 'plan' must be a list of entries, got {'linear': '0-1'}"),
        (saved_with(plan=["linear"]), "the field 'plan' must be a list of entries"),
        (saved_with(heads=None), "the field 'heads' must be a list, got None"),
        (saved_with(kept=[[0, 0]]), "do not come to the entries in 'plan', so something was changed by hand"),
        (saved_with(kept=[1]), "do not come to the entries in 'plan'"),
    ],
)
def test_what_is_no_saved_plan_is_refused(text, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        ChosenPlan.from_json(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        ChosenPlan.load(tmp_path / "none.json")


def test_a_plan_of_another_model_is_refused_and_names_both(plan):
    for options, count in (({"num_hidden_layers": 3}, "3 layers of 2"), ({"num_key_value_heads": 4}, "2 layers of 4")):
        other = make_model("llama", **options)
        before = Snapshot.of(other)
        with pytest.raises(PatchError, match=rf"with 2 layers of 2 key/value heads, and this model has {count} key"):
            patch_model(other, plan)
        before.assert_kept(other)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"unit": "heads"}, UnknownNameError, "unknown unit 'heads'; did you mean head"),
        ({"signal": "text"}, UnknownNameError, "unknown signal 'text'"),
        ({"search": "slop"}, UnknownNameError, "unknown search 'slop'; did you mean slope"),
        ({"replace": "streamin"}, UnknownNameError, "unknown mechanism 'streamin'; did you mean streaming"),
        ({"replace": "softmax"}, OptionError, "replace must be something else"),
        ({"replace": {"streaming": {}, "local": {}}}, OptionError, "replace must be a name, a mechanism config"),
        ({"replace": "fusion"}, OptionError, "replace must be a mechanism that is not made .* 'layer', got 'fusion'"),
        ({"replace": {"by_head": {}}}, OptionError, "replace must be a mechanism that is not made of others"),
        ({"lenghts": [8]}, OptionError, "choose_plan has no option 'lenghts'; did you mean length"),
        ({"num_prompts": 0}, OptionError, "num_prompts must be an integer >= 1"),
        ({"lengths": []}, OptionError, "lengths must be at least one"),
        ({"prompts": []}, OptionError, "prompts must be at least one"),
        ({"seed": -1}, OptionError, "seed must be an integer from 0"),
        ({"length": 8}, OptionError, "length must be given with state_bytes"),
        ({"signal": "divergence"}, OptionError, "batches must hold at least one batch of text"),
        ({"signal": "both"}, OptionError, "batches must hold at least one batch of text"),
        ({"prompts": None}, DataError, "tokenizer must be the model's, got None"),
        ({"replace": {"streaming": 3}}, OptionError, r"replace must be a name, .* got {'streaming': 3}"),
        ({"replace": {"streaming": "x"}}, OptionError, r"replace must be a name, .* got {'streaming': 'x'}"),
        ({"lengths": 512}, OptionError, "lengths must be at least one number of tokens, in a list, got 512"),
        ({"tasks": "seek"}, OptionError, "tasks must be at least one kind of prompts, in a list, got 'seek'"),
        ({"prompts": ["x"]}, OptionError, "prompts must be what make_prompts makes, .* got 'x'"),
        ({"learning_rate": "a"}, OptionError, "learning_rate must be above 0, and finite, got 'a'"),
        ({"state_bytes": "1GB", "length": 9}, OptionError, "state_bytes must be an integer >= 1, got '1GB'"),
        ({"state_bytes": 10**6, "length": 1.5}, OptionError, "length must be an integer >= 1, got 1.5"),
        ({"lengths": [64, 10**6], "prompts": None}, OptionError, "prompts of 1000000 tokens are asked for, .* has 64"),
        ({"batches": TEXT[0]}, OptionError, "batches must hold dicts of tensors, got str; give batches made with"),
        ({"batches": TEXT[0]["input_ids"]}, OptionError, "batches must hold dicts of tensors, got Tensor"),
    ],
)
def test_options_are_checked_and_nothing_is_changed(options, error, message):
    model = make_retriever()
    before = Snapshot.of(model, logits_of(model, make_tokens(2, 9) % 30))
    with pytest.raises(error, match=message):
        choose(model, 1, **options)
    assert before.structure == Snapshot.of(model, before.logits).structure


def test_inference_mode_around_it_changes_nothing():
    model, records = make_retriever(), []
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            text = [{"input_ids": TEXT[0]["input_ids"] % 30}]
            records.append(choose(model, 1, signal="divergence", batches=text).record)
    assert records[1].scores == records[0].scores


def test_what_was_made_inside_inference_mode_is_refused_and_stays():
    with torch.inference_mode():
        model = make_retriever().to(torch.float64)
    with pytest.raises(OptionError, match=r"weights were made inside torch.inference_mode\(\).*load the model"):
        choose(model, 1)
    assert all(parameter.requires_grad for parameter in model.parameters()) and not is_patched(model)


def test_where_recall_cannot_choose_divergence_does_and_says_so(caplog):
    wrong = [SimpleNamespace(**{**vars(p), "answer_ids": [9]}) for p in make_prompts()]
    cases = {
        "LlamaForCausalLM itself answers 0 of 4 prompts": (make_retriever(), wrong),
        "BertForMaskedLM does not continue a prompt": (make_model("bert", std=0.3), make_prompts()),
    }
    text = [{"input_ids": TEXT[0]["input_ids"] % 30}]
    for reason, (model, prompts) in cases.items():
        with pytest.raises(DataError, match=f"recall cannot choose: {reason}.*; give batches of text"):
            choose(model, 1, prompts=prompts)
        with caplog.at_level(logging.WARNING):
            chosen = choose(model, 1, prompts=prompts, batches=text)
        assert f"recall cannot choose: {reason}" in caplog.text and "divergence is used" in caplog.text
        assert chosen.record.signal == "divergence" and chosen.record.reason.startswith(reason)
        assert list(chosen) == list(choose(model, 1, signal="divergence", batches=text))


def test_a_classifier_predicts_no_tokens_to_choose_by():
    model = make_model("llama", "ForSequenceClassification")
    for text in ({}, {"batches": TEXT}):
        with pytest.raises(UnsupportedModelError, match=r"^LlamaForSequenceClassification has logits of texts, which"):
            choose(model, 1, **text)


@pytest.mark.parametrize("kind", ["vit", "dinov2", "clip_vision_model", "audio-spectrogram-transformer"])
def test_a_model_without_a_vocabulary_predicts_no_tokens_to_choose_by(kind):
    model = AutoModel.from_config(tiny_config(CONFIG_MAPPING[kind]))
    message = rf"^{type(model).__name__} has no vocabulary and predicts no tokens, .*patch_model\(model, mechanism, l"
    for given in ({}, {"batches": [{model.main_input_name: torch.zeros(2, 3, 8, 8)}], "signal": "divergence"}):
        with pytest.raises(UnsupportedModelError, match=message):
            choose(model, 1, **given)
    assert not is_patched(model)
    with pytest.raises(UnsupportedModelError, match=message):
        layer_sensitivity(patch_model(model, "linear"), [{model.main_input_name: torch.zeros(2, 3, 8, 8)}])


def test_rows_within_the_window_say_nothing():
    """There what replaces heads equals softmax, and slopes are rounding, which counts as much as any others."""
    size = WINDOW["streaming"]["window_size"]
    long, short = [{"input_ids": make_tokens(2, count) % 30} for count in (12, size)]
    padded = {
        "input_ids": make_tokens(2, size + 3) % 30,
        "attention_mask": (torch.arange(size + 3) >= 3).long().expand(2, -1),
    }
    packed = {**long, "position_ids": torch.arange(12)[None].expand(2, -1) % size}
    masked = {**packed, "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    for within in ([short, padded], [packed], [masked]):
        with pytest.raises(DataError, match=f"batches: the longest row has {size} tokens, and up to"):
            choose(make_retriever(), 1, signal="divergence", batches=within)
    want, got = (
        choose(make_retriever(), 1, signal="divergence", batches=batches).record.scores
        for batches in ([long], [short, long, padded])
    )
    assert got == want


@pytest.mark.parametrize(("name", "longest"), [("bart", 20), ("whisper", 64)])
def test_rows_are_as_long_as_what_layers_attend_to(name, longest):
    """Of an encoder-decoder the decoder may read more, and of a spectrogram the first dimension is no length."""
    model = tiny_model(name)
    batch = tiny_inputs(model) | {"decoder_input_ids": make_tokens(2, 20)}
    if name == "bart":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    options = {"signal": "divergence", "prompts": None, "batches": [batch]}
    with pytest.raises(DataError, match=f"batches: the longest row has {longest} tokens"):
        choose(model, 1, replace={"streaming": {"window_size": longest, "num_sink_tokens": 0}}, **options)
    assert len(choose(model, 1, replace=WINDOW, **options).record.kept) == 1 and not is_patched(model)


@pytest.mark.parametrize("search", SEARCHES)
def test_text_on_which_the_model_overflows_chooses_no_head(search):
    """All comparisons with NaN are false: any head came out."""
    model, texts = make_retriever(), [make_tokens(2, 12, seed=seed) % 29 for seed in range(2)]
    texts[1][0, 5] = 29
    batches = [{"input_ids": ids} for ids in texts]
    with torch.no_grad():
        model.model.embed_tokens.weight[29] = float("nan")
    message = r"divergence of example 1 \(text\) must be finite, .* load it in float32 or bfloat16"
    with pytest.raises(OptionError, match=message):
        choose(model, 1, signal="divergence", search=search, batches=batches)


def test_gates_that_overflow_half_open_are_not_trained_on(monkeypatch):
    value = RecallSignal.value

    def overflows(signal, gates, values, example):
        between = (values > 0) & (values < 1)
        return value(signal, gates, values, example) * (float("nan") if bool(between.any()) else 1.0)

    monkeypatch.setattr(RecallSignal, "value", overflows)
    with pytest.raises(OptionError, match=r"recall of example 0 \(find 24\) must be finite"):
        choose(make_retriever(), 1, search="gates", steps=2)


def test_a_prompt_on_which_what_replaces_heads_overflows_is_left_out(monkeypatch, caplog):
    value, broken, prompts = RecallSignal.value, [], make_prompts()
    expected = choose(make_retriever(), 1, prompts=prompts[:3]).record

    def overflows(signal, gates, values, example):
        found = value(signal, gates, values, example)
        return found if bool(values.any()) or example.prompt_ids not in broken else found * float("nan")

    monkeypatch.setattr(RecallSignal, "value", overflows)
    broken[:] = [prompts[3].prompt_ids]
    found = choose(make_retriever(), 1, prompts=prompts).record
    assert (found.scores, found.examples) == (expected.scores, expected.examples)
    assert "recall is nan on a prompt of 'seek'" in caplog.text
    broken[:] = [prompt.prompt_ids for prompt in prompts[1:]]  # too few are left
    with pytest.raises(OptionError, match=r"recall of example 1 \(seek 30\) must be finite"):
        choose(make_retriever(), 1, prompts=prompts)


def test_both_is_the_mean_of_the_two():
    text = [{"input_ids": TEXT[0]["input_ids"] % 30}]
    scores = {
        signal: torch.tensor(choose(make_retriever(), 1, signal=signal, batches=text).record.scores)
        for signal in ("recall", "divergence", "both")
    }
    mean = sum(scores[name] / scores[name].norm() for name in ("recall", "divergence"))
    torch.testing.assert_close(scores["both"], mean / mean.norm())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(fails, training):
    model = make_retriever().train(training)
    embedding = model.model.embed_tokens.weight.requires_grad_(False)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    ids = make_tokens(2, 9) % 30
    before, state = Snapshot.of(model, logits_of(model, ids)), torch.get_rng_state()
    if fails:
        prompts = make_prompts()
        prompts[3].prompt_ids[5] = 1000  # no row of the embedding
        with pytest.raises(IndexError):
            choose(model, 1, prompts=prompts)
    else:
        choose(model, 1, search="gates", steps=2)
    assert before.structure == Snapshot.of(model, before.logits).structure
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.tensors.items())
    assert torch.equal(logits_of(model, ids), before.logits) and torch.equal(torch.get_rng_state(), state)
    assert not embedding.requires_grad and model.lm_head.weight.requires_grad and model.training is training
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))


def test_a_patched_model_is_refused():
    with pytest.raises(PatchError, match="is patched already"):
        choose(patch_model(make_retriever(), "linear"), 1)


@pytest.mark.parametrize("replace", ["linear", {"hybrid": {"window_size": 4}}, {"local": {"window_size": 4}}])
def test_other_mechanisms_can_replace_heads(replace):
    model = make_retriever()
    chosen = choose(model, 1, replace=replace)
    logits = logits_of(patch_model(copy.deepcopy(model), chosen), make_tokens(1, 9) % 30)
    assert chosen.record.num_kept == 1 and bool(logits.isfinite().all())


def test_a_layer_whose_options_are_edited_leaves_the_others_alone(plan):
    """Entries and the record had one dictionary."""
    record = copy.deepcopy(plan.record)
    edited = ChosenPlan.of(record)
    edited[-1]["options"]["window_size"] = 99
    assert ChosenPlan.of(record) == list(plan) and edited[0]["options"] == plan[0]["options"]


def test_the_same_choice_comes_out_again(plan):
    again = choose(make_retriever(), 1, seed=3)
    assert again.record.scores == plan.record.scores and json.loads(plan.to_json())["plan"] == list(again)


def test_answers_are_those_that_the_original_writes(monkeypatch):
    tokenizer, ids, seen = bundled_tokenizer(), make_tokens(1, 60), []
    model = make_model("llama", max_position_embeddings=1024, vocab_size=len(tokenizer))
    expected = logits_of(model, ids)

    def own_answers(asked, tokenizer, prompts, progress):
        assert torch.equal(logits_of(asked, ids), expected)  # not those of what replaces heads
        found = (OwnAnswer([7, 8], 2 * math.log(0.6)), OwnAnswer([9, 9], 2 * math.log(0.4)), None)
        return [found[number % 3] for number in range(len(prompts))]

    def value(signal, gates, values, example):
        seen.append(example.answer_ids)
        return gates.run(values, {"input_ids": ids}).logits[0, -1, 7]

    monkeypatch.setattr(import_module("hf_linattn.evaluation.recall"), "own_answers", own_answers)
    monkeypatch.setattr(RecallSignal, "value", value)
    options = {"tasks": ["single_noise"], "lengths": [900], "num_prompts": 9}
    record = choose_plan(model, tokenizer, 1, replace=WINDOW, **options).record
    assert record.examples == {"single_noise 900": 3} and set(map(tuple, seen)) == {(7, 8)}


def test_a_prompt_is_read_by_the_original_and_then_once_for_each_round():
    """The forward in which it is lost is that of its first slopes."""
    model, forwards, backwards = make_retriever(), [], []
    model.register_forward_pre_hook(lambda *_: forwards.append(None))
    model.lm_head.register_full_backward_hook(lambda *_: backwards.append(None))
    record = choose(model, 2, rounds=2).record
    count = sum(record.examples.values())
    assert (len(forwards), len(backwards)) == ((1 + 2) * count, 2 * count) and count == len(make_prompts())


@pytest.mark.parametrize("linear", ["hedgehog", "deltanet"])
def test_heads_beside_a_plan_get_hybrids_with_hard_keys(linear):
    """The answer stands in a block that has left the window, and its key is none of the hard ones in all prompts."""
    options = {"window_size": 1, "num_sink_tokens": 1, "num_hard_keys": 2, "linear": linear}
    prompts, long = [make_prompt(seed, 140) for seed in range(4)], make_retriever()
    long.config.max_position_embeddings = 160
    chosen = choose(long, 1, replace={"hybrid": options}, prompts=prompts)
    assert chosen.record.kept == [list(FOUND)] and chosen.record.reason == ""
    assert {name: chosen.record.replace["options"][name] for name in options} == options
    model = patch_model(make_retriever(), ChosenPlan.from_json(chosen.to_json()))
    assert get_patch_config(model).layers[1].plan["hybrid"]["num_hard_keys"] == 2
    ids = torch.tensor([prompt.prompt_ids for prompt in prompts])
    assert logits_of(model, ids)[:, -1].argmax(-1).tolist() == [prompt.answer_ids[0] for prompt in prompts]
