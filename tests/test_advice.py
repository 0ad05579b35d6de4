"""Advice before a conversion: trials against what a user would measure, the rule by which one is recommended."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from unittest import mock

import accelerate
import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config
from typer.testing import CliRunner

from hf_linattn import DataError, OptionError, PatchError, UnknownNameError, UnsupportedModelError, advice, patch_model
from hf_linattn.advice import Advice, Settings, Trial, advise, candidate_plans, recommend, trial
from hf_linattn.advice.advise import ROOM
from hf_linattn.advice.candidates import with_share_kept
from hf_linattn.architecture import layers_sharing_keys
from hf_linattn.attention_modules import self_attention_modules
from hf_linattn.chosen_plan import ChosenPlan, PlanRecord
from hf_linattn.cli import app
from hf_linattn.cli.advise import advise as command
from hf_linattn.config import make_config
from hf_linattn.evaluation import Spread, state_bytes_by_length
from hf_linattn.evaluation.speed import SpeedRow
from hf_linattn.plan import PatchConfig, name_or_plan
from hf_linattn.training.data import load_text_splits
from hf_linattn.training.finetuning import fine_tune
from tests.helpers import Snapshot, logits_of, make_tokenizer, make_tokens
from tests.models import SHARING, make_model, make_sharing

LLAMA = "recipes/pretrained/llama"
SETTINGS = Settings(calibration_tokens=128, windows=2, prompts=2, block_size=64, batch_size=2, lora_rank=2)
PLANS = {
    "window": [{"mechanism": "streaming", "options": {"window_size": 8}}],
    "linear": [{"mechanism": "linear", "options": {"decay": "learned"}}],
}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return load_text_splits()["test"]["text"][:40]


def test_a_trial_says_what_a_patched_model_has_and_the_model_stays_as_it_was(texts):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(LLAMA), AutoTokenizer.from_pretrained(LLAMA)
    before = Snapshot.of(model)
    found = advise(model, tokenizer, texts, 192, plans=PLANS, settings=SETTINGS)
    before.assert_kept(model)
    assert [trial.name for trial in found.trials] == list(PLANS) and found.recommended in PLANS
    window = found.trials[0]
    patch_model(model, window.plan)
    assert window.state_bytes == state_bytes_by_length(model, [192])[0].patched < window.original_state_bytes
    assert window.loss == pytest.approx(found.original_loss + window.loss_increase) and window.loss_increase > 0
    assert window.step_seconds > 0 and 0 <= window.recall <= 1 and window.speed.length == 192
    steps = SETTINGS.recovery_tokens / (SETTINGS.block_size * SETTINGS.batch_size)
    assert found.recovery_seconds(window) == pytest.approx(steps * window.step_seconds)
    assert json.loads(json.dumps(found.document()))["trials"][0]["name"] == "window"
    assert [trial.calibrated for trial in found.trials] == [False, True], "a window has nothing that is fitted"
    for name in PLANS:
        command = shlex.split(replace(found, recommended=name).command("m", files=["a b.txt"]))
        assert command[:4] == ["hf-linattn", "convert", "m", "converted"] and json.loads(command[5]) == PLANS[name]
        fitted = ["--calibrate", "a b.txt", "--calibration-tokens", "128"]
        assert command[6:] == (fitted if name == "linear" else []), "fitted on as many tokens"


def test_the_error_of_a_trial_is_over_texts_as_windows_of_one_are_alike():
    """Each text is one window of 32 tokens, over and over."""
    texts = [" ".join(f"w{5 + (i * step) % 90}" for i in range(32)) for step in (7, 11, 13, 17)]
    model, settings = make_model("llama", std=0.3), replace(SETTINGS, windows=6, block_size=32)
    module = import_module("hf_linattn.advice.advise")
    repeated = [" ".join([text] * 3) for text in texts]
    no_prompts = mock.patch.object(module, "make_prompts", lambda *_, **__: [])
    with no_prompts, mock.patch.object(trial, "answered", lambda *_: [1.0]):
        material = module.read_material(model, make_tokenizer(), repeated, 32, settings)
        found = trial.run_trial(model, "local", [{"mechanism": "local", "options": {"window_size": 4}}], material, 0.0)
    rows = torch.tensor([[int(word[1:]) for word in text.split()] for text in texts[2:]])
    before = losses_of(model, rows)
    increase = losses_of(patch_model(model, "local", window_size=4), rows) - before
    assert found.loss_increase == pytest.approx(float(increase.mean()), rel=1e-4)
    half = 12.7062047 * float((increase[0] - increase[1]).abs()) / 2  # of two texts
    assert found.loss_error == pytest.approx(half, rel=1e-3)


@torch.no_grad()
def losses_of(model, rows: torch.Tensor) -> torch.Tensor:
    """The mean negative log-likelihood of each row [B, N], in float64."""
    logits = model(rows).logits[:, :-1].double().log_softmax(-1)
    return -logits.gather(-1, rows[:, 1:, None]).squeeze(-1).mean(1)


def test_a_timed_step_leaves_modes_random_states_and_the_device_as_they_were(monkeypatch):
    def states() -> list[object]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    def watched(model, data, arguments, *rest, **options):
        trained_on.append(arguments.use_cpu)
        return fine_tune(model, data, arguments, *rest, **options)

    trained_on, model, rows = [], make_model("llama").train(), make_tokens(2, 16)
    model.lm_head.eval()
    monkeypatch.setattr(trial, "fine_tune", watched)
    modes, before = [module.training for module in model.modules()], states()
    gradients = {name: torch.full_like(parameter, 2.0) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    with trial.patched(model, "linear"), torch.no_grad():
        material = trial.Material(make_tokenizer(), rows, rows, [], torch.zeros(2), 1, 16, SETTINGS)
        seconds = trial.step_seconds(model, material)
        assert seconds > 0 and trained_on == [True], "a Trainer takes a GPU where there is one"
        model.lm_head.weight.data.fill_(math.inf)
        assert trial.step_seconds(model, material) is None, "no step ended, as the first loss was not finite"
    assert [module.training for module in model.modules()] == modes and states() == before
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert all(bool((gradient == 2).all()) for gradient in gradients.values())
    with trial.untouched(model.to("meta")):
        model.to_empty(device="cpu")
    assert model.device.type == "meta"


def test_a_step_of_what_is_offloaded_is_left_open(caplog):
    model, rows = make_model("llama"), make_tokens(2, 16)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with trial.patched(model, "local"):
        material = trial.Material(make_tokenizer(), rows, rows, [], torch.zeros(2), 1, 16, SETTINGS)
        assert trial.step_seconds(model, material) is None
    assert "model.embed_tokens.weight is offloaded, and is not trained" in caplog.text
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags


def test_a_step_of_what_has_adapters_is_left_open_and_they_stay(caplog):
    """Those of the step have the same name, and are taken out with all others."""
    model, rows = make_model("llama"), make_tokens(2, 16)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    before = logits_of(model, rows)
    with trial.patched(model, "local"):
        material = trial.Material(make_tokenizer(), rows, rows, [], torch.zeros(2), 1, 16, SETTINGS)
        assert trial.step_seconds(model, material) is None
    assert "the model has adapters" in caplog.text
    assert torch.equal(logits_of(model, rows), before) and model.active_adapters() == ["default"]


def test_rows_have_no_more_tokens_than_positions_and_lie_where_the_model_does(monkeypatch):
    module, measured, chosen_on = import_module("hf_linattn.advice.advise"), [], []

    def trial(model, name, plan, material, least):
        measured.append(material)
        assert not torch.is_inference_mode_enabled(), "what is made there cannot be trained on"
        return make_trial(name, 1.0, 0.0, 1)

    monkeypatch.setattr(module, "run_trial", trial)
    monkeypatch.setattr(module, "with_costs", lambda _, trial, __: trial)
    monkeypatch.setattr(module, "make_prompts", lambda *_, **__: [])
    monkeypatch.setattr(module, "answered", lambda *_: [1.0])
    monkeypatch.setattr(module, "choose_plan", lambda *_, batches, **__: chosen_on.extend(batches))
    monkeypatch.setattr(module, "chosen_plans", lambda _: {})
    model, settings = make_model("gpt2"), replace(SETTINGS, block_size=512)
    with torch.inference_mode():
        found = advise(model, make_tokenizer(), ["w5 w6 " * 200], 16, plans=PLANS, settings=settings)
    assert not measured[0].calibration.is_inference()
    assert found.settings == measured[0].settings == replace(settings, block_size=64)
    assert measured[0].calibration.shape == (2, 64)
    module.choose(model.to("meta"), measured[0], False)
    assert [batch["input_ids"].device.type for batch in chosen_on] == ["meta", "meta"]
    with pytest.raises(OptionError, match="GPT2LMHeadModel is on the meta device, where nothing can be measured"):
        advise(model, make_tokenizer(), ["w5 w6 " * 200], 16)


@pytest.mark.parametrize(
    ("length", "why"), [(240, "the longest prompt has 239 tokens"), (150, "must be at least 180 for the task")]
)
def test_inputs_that_choose_no_heads_leave_the_other_plans_to_be_tried(length, why, monkeypatch, caplog):
    module, tried = import_module("hf_linattn.advice.advise"), []

    def trial(model, name, plan, material, least):
        tried.append(name)
        return make_trial(name, 1.0, 0.0, 1)

    monkeypatch.setattr(module, "run_trial", trial)
    monkeypatch.setattr(module, "with_costs", lambda _, trial, __: trial)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(LLAMA), AutoTokenizer.from_pretrained(LLAMA)
    texts = load_text_splits()["test"]["text"][:40]
    advise(model, tokenizer, texts, length, settings=SETTINGS)
    assert tried == list(candidate_plans(4)) and re.search(f"no heads are chosen.*{why}", caplog.text)


def test_a_plan_that_is_refused_is_left_out_and_says_why(monkeypatch, caplog):
    module, refused = import_module("hf_linattn.advice.advise"), ["window"]

    def trial(model, name, plan, material, least):
        if name in refused:
            raise OptionError(f"the loss of {name} must be finite")
        return make_trial(name, 1.0, 0.0, 1)

    monkeypatch.setattr(module, "run_trial", trial)
    monkeypatch.setattr(module, "with_costs", lambda _, trial, __: trial)
    monkeypatch.setattr(module, "make_prompts", lambda *_, **__: [])
    monkeypatch.setattr(module, "answered", lambda *_: [1.0])
    given = make_model("gpt2"), make_tokenizer(), ["w5 w6 " * 200], 16
    assert [trial.name for trial in advise(*given, plans=PLANS, settings=SETTINGS).trials] == ["linear"]
    assert "the plan 'window' is left out, as it cannot be measured: the loss of window" in caplog.text
    refused.append("linear")
    with pytest.raises(OptionError, match="the loss of linear must be finite"):
        advise(*given, plans=PLANS, settings=SETTINGS)


def test_a_plan_whose_costs_cannot_be_measured_keeps_its_trial(monkeypatch, caplog):
    module = import_module("hf_linattn.advice.advise")

    def costs(model, trial, material):
        if trial.name == "window":
            raise OptionError("the seconds of a step must be finite")
        return replace(trial, step_seconds=2.0)

    untimed = replace(make_trial("", 1.0, 0.0, 1), step_seconds=None)
    monkeypatch.setattr(module, "run_trial", lambda _, name, *__: replace(untimed, name=name))
    monkeypatch.setattr(module, "with_costs", costs)
    monkeypatch.setattr(module, "make_prompts", lambda *_, **__: [])
    monkeypatch.setattr(module, "answered", lambda *_: [1.0])
    found = advise(make_model("gpt2"), make_tokenizer(), ["w5 w6 " * 200], 16, plans=PLANS, settings=SETTINGS)
    assert {trial.name: trial.step_seconds for trial in found.trials} == {"window": None, "linear": 2.0}
    assert "the costs of the plan 'window' are left open, as they cannot be measured: the seconds" in caplog.text


def make_trial(name: str, recall: float, increase: float, state: int) -> Trial:
    speed = SpeedRow(8, 1, Spread(1, 1, 1), Spread(1, 1, 1))
    return Trial(name, "linear", 3 + increase, increase, 0.0, recall, 10, state, 100, False, speed, 1.0, 1.0)


@pytest.mark.parametrize(
    ("rows", "original", "wanted"),
    [
        ([("a", 0.9, 0.01, 50), ("b", 1.0, 0.04, 20), ("c", 0.0, 0.01, 5)], 1.0, "b"),  # the smallest that recalls
        ([("a", 1.0, 0.01, 50), ("b", 1.0, 0.2, 20)], 1.0, "a"),  # the smallest loses too much
        ([("a", 1.0, 0.3, 50), ("b", 1.0, 0.2, 60), ("c", 0.2, 0.0, 10)], 1.0, "b"),  # all that recall lose much
        ([("a", 1.0, 0.01, 50), ("b", 0.2, 0.02, 20)], 0.1, "b"),  # the original does not recall either
    ],
)
def test_the_smallest_state_that_recalls_and_loses_little_is_recommended(rows, original, wanted):
    assert recommend([make_trial(*row) for row in rows], original, Settings(prompts=10)).name == wanted


def test_a_plan_that_can_no_longer_be_recommended_is_asked_no_further_and_its_costs_are_not_measured(monkeypatch):
    """Ten prompts of which `right` are answered: what each plan is asked, and of which the costs are measured."""
    module, asked, timed, as_it_was = import_module("hf_linattn.advice.advise"), [], [], trial.patched
    right = {"most": "1111101111", "none": "0000000000", "few": "1110110101", "as many": "0111111111", None: "1" * 10}

    def answer(model, tokenizer, prompts, **options):
        (number,) = prompts
        asked.append(model.plan)
        return [{"found": float(right[model.plan][number])}]

    @contextmanager
    def patched(model, plan):
        model.plan = plan
        with as_it_was(model, "linear"):
            yield model
        model.plan = None

    def costs(model, trial, material):
        timed.append(trial.name)
        return replace(trial, step_seconds=1.0)

    model = make_model("gpt2")
    model.plan = None
    for name, value in {"answer_prompts": answer, "patched": patched}.items():
        monkeypatch.setattr(trial, name, value)
    monkeypatch.setattr(module, "with_costs", costs)
    monkeypatch.setattr(module, "make_prompts", lambda *_, count, **__: range(count))
    plans = {name: name for name in right if name}
    found = advise(model, make_tokenizer(), ["w5 w6 " * 200], 16, plans=plans, settings=replace(SETTINGS, prompts=10))
    assert [asked.count(name) for name in (None, *plans)] == [10, 10, 3, 9, 10]
    assert [(trial.recall, trial.prompts) for trial in found.trials] == [(0.9, 10), (0, 3), (6 / 9, 9), (0.9, 10)]
    assert timed == ["most", "as many"]
    assert [found.recovery_seconds(trial) is None for trial in found.trials] == [False, True, True, False]


def test_the_command_prints_a_table_and_the_command_that_makes_the_plan(monkeypatch, tmp_path):
    trials = (make_trial("softmax every 4th + streaming", 0.9, 0.0123, 50), make_trial("b", 1.0, 0.04, 20))
    trials += (replace(trials[0], name="c", recall=0.0, prompts=2, speed=None, step_seconds=None, loss_error=12.3456),)
    found = Advice(512, 3.0, 1.0, trials, "b", Settings(recovery_tokens=2048 * 3600))
    monkeypatch.setattr(advice, "advise", lambda *_, **__: found)
    (tmp_path / "text.txt").write_text("some text")
    command = ["advise", LLAMA, "--text", str(tmp_path / "text.txt")]
    printed = CliRunner().invoke(app, command, env={"COLUMNS": "80"}).stdout
    parts = ("+0.012 ±12.346", "50.0%", "20.0%", "0 of 2", "LoRA in float32", f"hf-linattn convert {LLAMA}")
    for part in (*parts, "softmax every 4th + streaming", "9 of 10", "recommended: b"):
        assert part in " ".join(printed.split()), part
    assert len([line for line in printed.splitlines() if " of 10" in line or " of 2" in line]) == len(trials)
    document = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert document["recommended"] == "b" and document["command"] == found.command(LLAMA)
    assert found.recovery_seconds(trials[1]) == 3600


KEPT = ChosenPlan.of(PlanRecord("Model", [2, 2], "head", [[1, 0]], {"mechanism": "linear", "options": {}},
                                [[0.1, 0.5], [0.9, 0.3]], "slope", "recall"))  # fmt: skip
LINEAR = make_config("linear", {"decay": "learned"})


@pytest.mark.parametrize(
    ("plan", "data"),
    [
        ("linear", "linear"),
        (LINEAR, [{"mechanism": "linear", "options": LINEAR.to_options()}]),
        ({"linear": range(2)}, {"linear": [0, 1]}),
        ({"linear": np.arange(2)}, {"linear": [0, 1]}),
        (KEPT, list(KEPT)),
    ],
    ids=["name", "config", "mapping", "array", "chosen"],
)
def test_every_kind_of_plan_is_data_in_the_document_and_made_by_the_command(plan, data):
    found = Advice(512, 3.0, 1.0, (replace(make_trial("a", 1.0, 0.0, 1), plan=plan),), "a", Settings())
    assert json.loads(json.dumps(found.document()))["trials"][0]["plan"] == data and found.chosen.plan is plan
    given = shlex.split(found.command("m"))
    assert name_or_plan("mechanism", given[given.index("--mechanism") + 1]) == data


def test_an_edited_candidate_leaves_later_ones_alone():
    want = candidate_plans(8)
    for plan in candidate_plans(8).values():
        plan[0]["options"]["window_size"] = 1
    assert candidate_plans(8) == want


def test_candidates_resolve_and_leave_every_fourth_layer():
    for plan in candidate_plans(8).values():
        assert PatchConfig.from_plan(plan, 8).count in (6, 8)
    assert list(candidate_plans(2)) == [name for name in candidate_plans(8) if "every" not in name]


@torch.no_grad()
@pytest.mark.parametrize("name", SHARING)
def test_candidates_decode_where_layers_share_keys(name):
    model, ids = make_sharing(name), make_tokens(1, 12)
    sharing = layers_sharing_keys(self_attention_modules(model))
    assert sharing == [[0, 2], [1, 3]]
    for plan in (plan for name, plan in candidate_plans(4, sharing).items() if "every" in name):
        with trial.patched(model, plan):
            cache = model(input_ids=ids, use_cache=True).past_key_values
            assert model(input_ids=ids[:, :1], past_key_values=cache).logits.isfinite().all()


def test_another_share_keeps_the_heads_of_highest_score():
    assert with_share_kept(KEPT, 0.75).record.kept == [[0, 1], [1, 0], [1, 1]]
    assert with_share_kept(KEPT, 0.01).record.kept == [[1, 0]]
    with pytest.raises(OptionError, match="unit must be 'head', got 'layer'"):
        with_share_kept(ChosenPlan.of(replace(KEPT.record, unit="layer")), 0.5)


def test_what_cannot_be_advised_on_is_refused(texts):
    tokenizer, model = make_tokenizer(), make_model("llama")
    with pytest.raises(PatchError, match="is patched already"):
        advise(patch_model(make_model("llama"), "linear"), tokenizer, texts, 16)
    with pytest.raises(UnsupportedModelError, match="no causal language model"):
        advise(make_model("bert"), tokenizer, texts, 16)
    with pytest.raises(OptionError, match="length must be at most"):
        advise(make_model("gpt2"), tokenizer, texts, 10**6)
    (said,) = re.findall(r"advise gpt2 .*--length (\d+)", command.__doc__)
    assert int(said) + ROOM <= GPT2Config().n_positions
    for name in ("prompts", "windows", "block_size", "lora_rank", "calibration_tokens"):
        with pytest.raises(OptionError, match=f"{name} must be an integer >= 1, got 0"):
            replace(SETTINGS, **{name: 0})
    with pytest.raises(UnknownNameError, match="did you mean single_text"):
        replace(SETTINGS, recall_task="single_texts")
    with pytest.raises(OptionError, match="plans must be"):
        advise(model, tokenizer, texts, 16, plans={})
    with pytest.raises(DataError, match="windows of 64 tokens for windows"):
        advise(model, tokenizer, ["w5 " * 300], 64, settings=replace(SETTINGS, windows=9))
    with pytest.raises(DataError, match="no document of one half has the 64 tokens of a row; give longer documents"):
        advise(model, tokenizer, ["w5 " * 20] * 100, 64, settings=SETTINGS)
    with pytest.raises(DataError, match="no document of one half has the 64 tokens of a row"):
        advise(model, tokenizer, [], 64, settings=SETTINGS)
    with pytest.raises(DataError, match=r"texts must be a sequence of texts, got one string; pass \[text\]"):
        advise(model, tokenizer, "w5 " * 300, 64, settings=SETTINGS)
    with torch.inference_mode():
        inside = make_model("llama").to(torch.float64)
    with pytest.raises(OptionError, match=r"weights were made inside torch.inference_mode\(\).*load the model"):
        advise(inside, tokenizer, texts, 16)
    assert torch.is_grad_enabled()
