"""The distillation recipe as a whole: its stages, what counts as one run, interruptions in each of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, set_hf_deepspeed_config

import hf_linattn
from hf_linattn.calibration import _Fit
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.report import Report
from hf_linattn.training import finetuning, pipeline, trainers
from hf_linattn.training.arguments import DISTILLATION, parse_arguments
from hf_linattn.training.preparation import prepare
from hf_linattn.training.stages import calibration
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.recipes.test_finetune import ROOT, command, material, recorded

__all__ = ["material"]

FSDP_ON_CPU = ROOT / "tests" / "recipes" / "fsdp_on_cpu.py"
# an epoch of whole batches: processes fill up an incomplete one with rows seen before
EVEN = {
    "block_size": 28, "max_train_tokens": 2016, "calibration_tokens": 280, "transfer_tokens": 672, "logging_steps": 1,
    "hidden_weight": 0.5, "long_tokens": 448, "long_block_size": 56,
}  # fmt: skip
HEADS = {"layer_search": "slope", "layer_unit": "head", "layer_signal": "divergence"}
UNTAUGHT = {"kl_weight": None, "ce_weight": None}
STAGES = ("calibration", "transfer", "recovered_training")


def flags(material, output_dir, **changes) -> list[str]:
    options = {
        "mechanism": "hybrid", "mechanism_options": '{"window_size": 4}', "max_train_tokens": 1792,
        "calibration_tokens": 256, "transfer_tokens": 768, "kl_weight": 1, "ce_weight": 0.5, "lora_rank": 2,
        "window_dropout": 0.5, "learning_rates": "1e-3", "lr_search_tokens": None, "fidelity_windows": 0, **changes,
    }  # fmt: skip
    return command(material, output_dir, **options)


def run(flags: list[str]) -> Report:
    return pipeline.main(flags, DISTILLATION, "accelerate launch recipes/distill.py")


def weights(path: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


@pytest.fixture(scope="module")
def whole(material, tmp_path_factory) -> Path:
    """An unbroken run."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(flags(material, out, fidelity_windows=3))
    return out


def test_a_run_from_end_to_end(material, whole):
    report = Report.load(whole)
    assert [stage.name for stage in report.stages] == ["converted", "calibration", "transfer", "recovered"]
    assert [stage.tokens for stage in report.stages] == [0, 256, 768, 768]
    assert report.training.tokens == 1792 == sum(stage.tokens for stage in report.stages)
    assert recorded(whole, "control_training")["steps"] == 14, "the control trains on as many tokens"
    assert report.training.teaching == {
        "calibration_tokens": 256, "kl_weight": 1.0, "transfer_tokens": 768, "lora_rank": 2, "ce_weight": 0.5,
        "window_dropout": 0.5,
    }  # fmt: skip
    assert report.perplexity.recovered < report.perplexity.converted
    assert len(report.fidelity.control_recurrences) == len(report.fidelity.recurrences) > 1
    assert report.fidelity.control_positions != report.fidelity.original_positions
    assert report.fidelity.perplexity_without_linear != report.perplexity.recovered
    assert 0 < report.fidelity.linear_share < 1 and len(report.fidelity.positions) == 4
    assert "without it the test perplexity is" in (whole / "report.md").read_text()
    assert "recipes/distill.py" in report.provenance.command
    texts = [json.loads(line)["text"] for line in Path(material["test_file"]).read_text().splitlines()[:3]]
    assert [f"{x.prompt} {x.truth}" for x in report.samples] == [" ".join(text.split()[:32]) for text in texts]
    assert all(len(answer.split()) == 16 for x in report.samples for answer in (x.original, x.control, x.recovered))
    assert "| recovered | 768 |" in (whole / "report.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(whole)
    assert {m.config.mechanism for m in hf_linattn.get_mechanisms(model).values()} == {"hybrid"}
    names = model.state_dict().keys()
    assert not any("lora" in name or "modules_to_save" in name for name in names), "adapters are merged"


def test_each_stage_goes_on_from_the_one_before(material, whole):
    original = AutoModelForCausalLM.from_pretrained(material["model_name_or_path"])
    converted = hf_linattn.patch_model(original, "hybrid", window_size=4).state_dict()
    own = {name for name in converted if ".hf_linattn." in name}
    calibrated, transferred = (load_file(whole / "stages" / f"{x}.safetensors") for x in ("calibration", "transfer"))
    final = weights(whole)
    assert set(calibrated) == set(transferred) == own
    for name in own:
        states = [converted[name], calibrated[name], transferred[name], final[name]]
        assert all(not torch.equal(a, b) for i, a in enumerate(states) for b in states[:i]), name
    changed = {name for name in converted if not torch.equal(converted[name], final[name])} - own
    assert changed and all("attn.c_attn.weight" in name or "attn.c_proj.weight" in name for name in changed)


def test_blocks_of_layers_are_transferred_together_and_long_documents_are_read(material, tmp_path):
    texts = [" ".join(f"w{5 + (document + 3 * i) % 8}" for i in range(70)) for document in range(3)]
    long = tmp_path / "test.jsonl"
    long.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    changes = {"transfer_block_layers": 2, "fidelity_windows": 0, "long_windows": 2, "test_file": long}
    report = run(flags(material, tmp_path / "out", **changes))
    read = report.long_context  # 8 times block_size would be beyond the positions of the model
    assert read.recovered.length == read.control.length == 64 and read.recovered.windows == 2
    assert read.recovered.positions != read.original.positions != read.control.positions
    assert Report.load(tmp_path / "out") == report and "## Long documents" in (tmp_path / "out/report.md").read_text()
    assert report.training.teaching["transfer_block_layers"] == 2
    history = recorded(tmp_path / "out", "transfer")["history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert losses[-1] < losses[0]
    with pytest.raises(OptionError, match="transfer_projected must be absent where transfer_block_layers is set"):
        run(flags(material, tmp_path / "other", transfer_block_layers=2, transfer_projected=True))
    with pytest.raises(OptionError, match="transfer_weights_weight must be absent where transfer_block_layers is set"):
        run(flags(material, tmp_path / "other", transfer_block_layers=2, transfer_weights_weight=0.5))


def killed_in(stage: str, run_again: Callable[[], object]) -> None:
    """Run in a process of its own that is killed in the middle of a stage, once a checkpoint of it is written."""
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    save, fit = trainers.RecoveryTrainer._save_checkpoint, _Fit.__call__

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def save_and_die(trainer, *arguments):
        save(trainer, *arguments)
        if f"stages/{stage}/checkpoint" in trainer._get_output_dir(trial=None) + "/checkpoint":
            die()

    def fit_and_die(self, call):
        answer = fit(self, call)
        return die() if stage == "calibration" and len(self.errors) == 1 and self.mechanism.layer.index else answer

    trainers.RecoveryTrainer._save_checkpoint, _Fit.__call__ = save_and_die, fit_and_die
    try:
        run_again()
    finally:
        os._exit(0)


@pytest.mark.parametrize(
    "stage", [stage if stage == "transfer" else pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES]
)
def test_a_run_killed_in_any_stage_ends_as_an_unbroken_one(material, whole, tmp_path, stage):
    out = tmp_path / "out"
    given = flags(material, out, control_dir=whole)
    killed_in(stage, lambda: run(given))
    assert not (out / "stages" / f"{stage}.json").exists()
    if stage != "calibration":
        assert list((out / "stages" / stage).glob("checkpoint-*"))
    report = run(given)
    assert report.perplexity == Report.load(whole).perplexity
    expected, got = weights(whole), weights(out)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert recorded(out, "recovered_training")["eval_loss"] == recorded(whole, "recovered_training")["eval_loss"]


def launched(
    material, out: Path, config: str, script: Path = ROOT / "recipes" / "distill.py", **changes
) -> list[float]:
    """Run under `accelerate launch` with one of our configurations and return the training losses."""
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / f"recipes/accelerate/{config}.yaml")]
    result = subprocess.run(
        [sys.executable, *launch, str(script), *flags(material, out, **changes)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
        | {"ACCELERATE_USE_CPU": str(config != "zero3_cpu")},  # else Accelerate leaves DeepSpeed out
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    stages = ("control_training", "transfer", "recovered_training", "long_training")
    return [x["loss"] for stage in stages for x in recorded(out, stage)["history"] if "loss" in x]


@pytest.fixture(scope="module")
def one_process(material, tmp_path_factory) -> list[float]:
    out = tmp_path_factory.mktemp("one") / "out"
    return launched(material, out, "cpu", **EVEN)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        pytest.param("ddp_cpu", {}, marks=pytest.mark.slow),
        pytest.param("fsdp2_cpu", {"script": FSDP_ON_CPU}, marks=pytest.mark.slow),
        pytest.param("zero3_cpu", {"ddp_backend": "gloo"}, marks=pytest.mark.zero3),
    ],
)
def test_two_processes_have_the_loss_curves_of_one_with_the_same_batch(
    material, tmp_path, one_process, config, changes
):
    curve = launched(material, tmp_path / "out", config, **EVEN, per_device_train_batch_size=2, **changes)
    assert len(curve) == 18 + 6 + 5 + 4 and curve == pytest.approx(one_process, rel=2e-4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # in one piece, whatever training did to it
    assert {m.config.mechanism for m in hf_linattn.get_mechanisms(model).values()} == {"hybrid"}


@pytest.mark.slow
def test_two_processes_choose_the_heads_of_one_and_have_its_loss_curve(material, tmp_path):
    changes = {**EVEN, "layers": "auto", "softmax_share": 0.25, **HEADS}
    one, two = tmp_path / "one", tmp_path / "two"
    expected = launched(material, one, "cpu", **changes)
    curve = launched(material, two, "ddp_cpu", **changes, per_device_train_batch_size=2)
    assert recorded(one, "plan")["kept"] == recorded(two, "plan")["kept"] != []
    assert curve == pytest.approx(expected, rel=2e-4)


def test_models_are_loaded_whole_where_zero3_shards_them(material, tmp_path):
    sharding = Mock(is_zero3=lambda: True)  # as DeepSpeed's launcher has transformers know of it
    set_hf_deepspeed_config(sharding)
    assert is_deepspeed_zero3_enabled()
    parse_arguments(flags(material, tmp_path / "out"), DISTILLATION)
    assert not is_deepspeed_zero3_enabled()


def test_a_flag_takes_a_lent_control_back(tmp_path):
    lent = tmp_path / "recipe.yaml"
    lent.write_text("{model_name_or_path: gpt2, mechanism: linear, output_dir: out, control_dir: other, bf16: false}")
    assert parse_arguments([str(lent)]).recipe.control_dir == "other"
    assert parse_arguments([str(lent), "--control_dir", ""]).recipe.control_dir is None


def test_another_runs_control_serves_if_it_saw_the_same(material, whole, tmp_path):
    changes = {"control_dir": whole, "mechanism": "linear", "mechanism_options": None, "lora_rank": None}
    changes["control"] = "lora"
    without = {"calibration_tokens": 0, "transfer_tokens": 0, "window_dropout": 0}
    report = run(flags(material, tmp_path / "out", **changes, **without))
    assert report.perplexity.control == Report.load(whole).perplexity.control
    assert not (tmp_path / "out" / "control").exists() and report.stages[-1].tokens == 1792 - 32  # an epoch is 31 rows
    with pytest.raises(OptionError, match=r"ran with weight_decay=0\.01, this run has 0.1: its control"):
        run(flags(material, tmp_path / "other", **changes, **without, weight_decay=0.1))
    with pytest.raises(CheckpointError, match="has not finished its stage control_training; run the recipe of that"):
        run(flags(material, tmp_path / "third", **{**changes, **without, "control_dir": tmp_path}))
    assert not (tmp_path / "other").exists() and not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    ("changes", "trained", "expected"),
    [({"lora_rank": None}, "lora", "full"), ({"control": "full"}, "lora", "full"), ({}, "full", "lora")],
)
def test_another_runs_control_that_trained_something_else_is_taken_only_if_named(
    material, whole, tmp_path, changes, trained, expected
):
    lent = tmp_path / "lent"
    (lent / "stages").mkdir(parents=True)
    for stage in ("recipe", "control"):
        shutil.copy(whole / "stages" / f"{stage}.json", lent / "stages")
    result = recorded(whole, "control_training") | {"trained": trained}
    (lent / "stages/control_training.json").write_text(json.dumps(result))
    given = {"control_dir": lent, **changes}
    message = f"holds a control that trained '{trained}', where this run's would train '{expected}'"
    with pytest.raises(OptionError, match=message):
        run(flags(material, tmp_path / "out", **given))
    assert not (tmp_path / "out").exists()
    arguments = parse_arguments(flags(material, tmp_path / "out", **given | {"control": trained}), DISTILLATION)
    assert prepare(arguments).shared_control["control_training"] == result


def test_the_control_is_trained_as_the_converted_model_or_in_full_or_not_at_all(material, whole, tmp_path):
    def changed(folder: Path) -> set[str]:
        original = AutoModelForCausalLM.from_pretrained(material["model_name_or_path"]).state_dict()
        return {name for name, x in weights(folder).items() if not torch.equal(x, original[name])}

    assert Report.load(whole).training.control == recorded(whole, "control_training")["trained"] == "lora"
    assert all("attn.c_attn.weight" in name or "attn.c_proj.weight" in name for name in changed(whole / "control"))
    short = {"calibration_tokens": 0, "transfer_tokens": 0, "max_train_tokens": 256}
    full = run(flags(material, tmp_path / "full", control="full", **short))
    assert full.training.control == "full" and any("mlp" in name for name in changed(tmp_path / "full" / "control"))
    none = run(flags(material, tmp_path / "none", control="none", fidelity_windows=3, **short))
    assert none.perplexity.control is None and none.training.control_learning_rate is None
    assert none.perplexity.best == none.perplexity.original and none.training.control == "none"
    assert none.perplexity.recovered == full.perplexity.recovered, "the control changes nothing else"
    assert none.fidelity.control_positions == () and Report.load(tmp_path / "none") == none
    assert not (tmp_path / "none" / "control").exists()
    assert "| control |" not in (tmp_path / "none" / "report.md").read_text()
    with pytest.raises(CheckpointError, match="has not finished its stage control_training"):
        run(flags(material, tmp_path / "other", control_dir=tmp_path / "none", **short))


def test_a_last_stage_goes_on_with_longer_rows(material, whole, tmp_path, monkeypatch):
    seen = []
    real = finetuning.RecoveryTrainer.compute_loss

    def watch(trainer, model, inputs, *arguments, **options):
        if model.training:
            seen.append((tuple(inputs["input_ids"].shape), trainer.teacher and trainer.teacher.model is not None))
        return real(trainer, model, inputs, *arguments, **options)

    monkeypatch.setattr(finetuning.RecoveryTrainer, "compute_loss", watch)
    out = tmp_path / "out"
    changes = {"long_tokens": 384, "long_block_size": 48, "transfer_tokens": 384, "control_dir": whole}
    report = run(flags(material, out, **changes))
    assert [(stage.name, stage.tokens) for stage in report.stages][-2:] == [("recovered", 768), ("long", 384)]
    assert [shape for shape, _ in seen if shape[1] == 48] == [(2, 48)] * 4 and seen[-1] == ((2, 48), True)
    short, long = weights(out / "stages" / "recovered_training_model"), weights(out)
    assert short.keys() == long.keys() and any(not torch.equal(short[name], long[name]) for name in long)
    assert report.training.tokens == sum(stage.tokens for stage in report.stages)


def test_layers_are_chosen_by_what_they_cost(material, whole, tmp_path, monkeypatch):
    given = flags(material, tmp_path / "out", layers="auto", softmax_share=0.5, control_dir=whole)
    out, calls, real = tmp_path / "out", [], calibration.calibrate

    def watch(model, *arguments, **options):
        calls.append(len(hf_linattn.get_mechanisms(model)))
        return real(model, *arguments, **options)

    monkeypatch.setattr(calibration, "calibrate", watch)
    report = run(given)
    assert calls == [2], "all layers are fitted once, before they are chosen"
    fitted, alone = (load_file(out / "stages" / f"{name}.safetensors") for name in ("layers", "calibration"))
    assert alone and all(torch.equal(fitted[name], x) for name, x in alone.items()) and len(alone) < len(fitted)
    costs = list(recorded(out, "layers")["sensitivity"].values())
    chosen = costs.index(min(costs))
    assert report.options["layers"] == str(chosen) and report.sensitivity == tuple(costs)
    model = AutoModelForCausalLM.from_pretrained(out)
    names = [m.config.mechanism for m in hf_linattn.get_mechanisms(model).values()]
    assert names == ["hybrid" if index == chosen else "softmax" for index in range(2)]
    assert (out / "layers.png").is_file() and "layers.png" in (out / "report.md").read_text()
    assert run(given) == report, "a rerun chooses nothing anew"


def test_heads_are_chosen_by_a_search(material, tmp_path):
    """Of a Llama in bfloat16: what is trained in float32 is saved as it was loaded, and computes the same."""
    out, original = tmp_path / "out", tmp_path / "llama"
    make_model("llama", std=0.05).bfloat16().save_pretrained(original)
    make_tokenizer().save_pretrained(original)
    changes = {"model_name_or_path": str(original), "layers": "auto", "softmax_share": 0.25, **HEADS}
    report = run(flags(material, out, **changes))
    assert report.training.saved_dtype == "bfloat16"
    chosen = recorded(out, "plan")
    assert (chosen["unit"], chosen["signal"], chosen["replace"]["mechanism"]) == ("head", "divergence", "hybrid")
    assert report.options == {"plan": chosen["plan"]} and len(chosen["kept"]) == round(0.25 * sum(chosen["heads"]))
    model = AutoModelForCausalLM.from_pretrained(out)
    exact = [name for m in hf_linattn.get_mechanisms(model).values() for name in getattr(m, "members", {})]
    assert "softmax" in exact and "hybrid" in exact


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transfer_tokens": 1600}, r"max_train_tokens leaves -64 tokens \(1856 of the other stages are part"),
        ({"calibration_tokens": 250, "max_train_tokens": 1150}, r"leaves 126 tokens \(1024 of .*, less than one step"),
        ({"transfer_tokens": 60}, "transfer_tokens leaves 60 tokens, less than one step of 128"),
        ({"layer_search": "slope"}, "layer_search must be one of .*, with layers 'auto', or absent, got 'slope'"),
        ({"layers": "auto", "layer_search": "slop"}, "layer_search must be one of slope, .* got 'slop'"),
        ({"layer_unit": "heads"}, "layer_unit must be one of head, layer, got 'heads'"),
        ({"lora_rank": 0}, "lora_rank must be an integer >= 1, or absent, got 0"),
        ({"lora_rank": None, "lora_alpha": 4}, "lora_alpha must be absent where lora_rank is, got 4.0"),
        ({"window_dropout": 1.5}, "window_dropout must be at least 0 and below 1, got 1.5"),
        ({"mechanism": "performer", "mechanism_options": None}, "'performer' has no parameters of its own"),
        ({"mechanism": "hedgehog", "mechanism_options": None}, "window_dropout=0.5: the model has no hybrid"),
        ({"long_tokens": 256}, "long_block_size must be given with long_tokens, and only so, got None"),
        ({"long_tokens": 64, "long_block_size": 48}, "long_tokens=64 is less than one step of 96 tokens"),
        ({"long_tokens": 256, "recall_share": 0.1}, "long_block_size must be given with long_tokens, and only so"),
        ({"recall_share": 0.1}, "recall_share must be 0 without long_block_size, got 0.1"),
        ({"long_learning_rate": 0.1}, "long_learning_rate must be above 0, and absent where long_block_size is"),
        ({"dry_run": True}, "plan_steps must be at least 2, or 0 without dry_run, got 0"),
        ({"mechanism_rate": -1}, "mechanism_rate must be at least 0, got -1"),
        ({"position_windows": -1}, "position_windows must be at least 0, got -1"),
        ({"long_tokens": 256, "long_block_size": 32}, "long_block_size must be above block_size=32, got 32"),
        ({"long_tokens": 256, "long_block_size": 99}, "long_block_size=99 is beyond the 64 positions"),
        ({"block_size": 56, "fidelity_windows": 3}, "texts must be documents with at least max_length=56 tokens"),
        ({"long_windows": 1}, "long_windows=1, windows of 64 tokens in the test split: texts must be documents with"),
        ({"temperature": 0}, "temperature must be above 0, got 0"),
        ({**UNTAUGHT, "ce_weight": 0}, "ce_weight must be 1.0 without kl_weight or hidden_weight, as the .*got 0.0"),
        ({**UNTAUGHT, "temperature": 3}, "temperature must be 1.0 without kl_weight or hidden_weight"),
        ({**UNTAUGHT, "top_k": 7, "keep_logits": True}, "top_k must be None without kl_weight or hidden_weight"),
        ({**UNTAUGHT, "fading_teacher": True}, "fading_teacher must be False without kl_weight or hidden_weight"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_before_anything_is_written(material, tmp_path, changes, message):
    with pytest.raises(OptionError, match=message):
        run(flags(material, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()
