"""The pieces of the fine-tune recipe: options, the search for a learning rate, the run directory, one training run."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from transformers import TrainerCallback
from transformers.training_args import ParallelMode

from hf_linattn import patch_model
from hf_linattn.errors import CheckpointError, DataError, OptionError
from hf_linattn.positions.tables import first_position
from hf_linattn.training import finetuning, trainers
from hf_linattn.training.arguments import (
    DISTILLATION,
    DataArguments,
    FinetuningArguments,
    parse_arguments,
    tokens_per_step,
)
from hf_linattn.training.arguments.trainer import report_idle
from hf_linattn.training.masking import PackedMaskingCollator
from hf_linattn.training.run_directory import RunDirectory
from hf_linattn.training.stages import recovery, stages_of
from hf_linattn.training.stages.training import TrainingPlan
from hf_linattn.training.task import CAUSAL, TextEncoder, task_of
from tests.helpers import make_tokenizer
from tests.models import VOCAB_SIZE, make_model

REQUIRED = ["--model_name_or_path", "some/model", "--mechanism", "linear", "--output_dir", "out"]


def make_text(words: int, seed: int) -> str:
    """Text of eight of the words, so that there is something to learn."""
    return " ".join(f"w{5 + (seed + 3 * i) % 8}" for i in range(words))


def make_data(model, documents: int = 12):
    splits = DatasetDict(
        {
            name: Dataset.from_dict({"text": [make_text(30, seed + i) for i in range(documents)]})
            for name, seed in {"train": 0, "validation": 100}.items()
        }
    )
    # of so few tokens enough are masked in every batch
    options = DataArguments(block_size=16, mlm_probability=0.4, eval_mlm_probability=0.4)
    return task_of(model).rows(splits, TextEncoder(make_tokenizer(), options), model, 512)


def make_training(path, **options) -> FinetuningArguments:
    options = {"per_device_train_batch_size": 4, "disable_tqdm": True, "use_cpu": True, **options}
    return FinetuningArguments(output_dir=str(path), **options)


# -- options ----------------------------------------------------------------------------------------------------------


def test_flags_override_the_yaml_file(tmp_path):
    config = tmp_path / "recipe.yaml"
    options = {
        "model_name_or_path": "some/model", "mechanism": "performer", "mechanism_options": {"num_features": 32},
        "learning_rates": [1e-4, 1e-3], "output_dir": "out", "seed": 3, "bf16": False, "test_file": None,
    }  # fmt: skip
    config.write_text(yaml.safe_dump(options))
    model, data, recipe, training, _ = parse_arguments([str(config), "--seed", "7", "--block_size", "128"])
    assert (training.seed, data.block_size, data.test_file, training.bf16) == (7, 128, None, False)
    performer = {"mechanism": "performer", "num_features": 32}
    assert model.patch_arguments() == {**performer, "layers": None, "chunk_feed_forward": None}
    assert recipe.learning_rates == [1e-4, 1e-3]


@pytest.mark.parametrize("name", ["save_strategy", "eval_strategy", "logging_strategy"])
def test_no_is_a_strategy_in_a_yaml_file_too(tmp_path, name):
    config = tmp_path / "recipe.yaml"
    config.write_text(f"{name}: no\nload_best_model_at_end: false\n")
    assert getattr(parse_arguments([str(config), *REQUIRED]).training, name) == "no"


def test_one_learning_rate_is_a_grid_of_one():
    assert parse_arguments([*REQUIRED, "--learning_rate", "2e-3"])[2].learning_rates == [2e-3]


def test_a_plan_takes_the_place_of_a_mechanism():
    plan = {"performer": "0", "softmax": [1]}
    arguments = parse_arguments(["--model_name_or_path", "m", "--plan", json.dumps(plan), "--output_dir", "out"])
    assert arguments[0].patch_arguments() == {"mechanism": plan, "layers": None, "chunk_feed_forward": None}


def test_tokens_per_step_counts_accumulation():
    _, data, _, training, _ = parse_arguments(
        [*REQUIRED, "--block_size", "64", "--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "2"]
    )
    assert tokens_per_step(data, training) == 64 * 3 * 2 * max(1, training.n_gpu)


def test_one_of_several_gpus_is_trained_on_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    report_idle.cache_clear()
    training = FinetuningArguments(output_dir=str(tmp_path), per_device_train_batch_size=3)
    for again in (training, dataclasses.replace(training, output_dir=str(tmp_path / "stage"))):
        assert (again.n_gpu, again.train_batch_size, again.parallel_mode) == (1, 3, ParallelMode.NOT_PARALLEL)
    assert [x for x in caplog.messages if "GPUs" in x] == [
        "2 GPUs are visible, and this process trains on one; for all of them run"
        " accelerate launch --config_file recipes/accelerate/ddp.yaml"
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--blok_size", "4"], "unknown option '--blok_size'; did you mean block_size"),
        (["--lora_rank", "4"], "unknown option '--lora_rank'; it is one of the recipe distill"),
        (["--window-size", "4"], """; it is one of a mechanism: give mechanism_options '{"window_size"""),
        (["--block_size", "1"], "block_size must be at least 2, got 1"),
        (["--block_size", "many"], "block_size"),
        (["--train_file", "a.txt", "b.txt"], r"train_file must be one value, got \['a.txt', 'b.txt'\]"),
        (["--train_file", "a.txt", "--blok_size", "4"], "unknown option '--blok_size'"),
        (["--max_steps", "5"], "max_steps=5"),
        (["--max_train_tokens", "10"], "max_train_tokens leaves 10 tokens, less than one step"),
        (["--learning_rate", "1e-3", "--learning_rates", "1e-3", "1e-2"], "give one of them"),
        (["--learning_rates", "1e-3", "-1"], "learning_rates"),
        (["--overwrite_output_dir", "true", "--resume_from_checkpoint", "True"], "deletes .* give one of them"),
        (["--kl_weight", "-1"], "kl_weight must be at least 0, got -1"),
        (["--eval_mlm_probability", "1"], "eval_mlm_probability must be between 0 and 1"),
        (["--mechanism_options", "{num_features"], "mechanism_options must be a JSON object"),
        (["--plan", "[1]"], "plan must be a JSON object"),
        (["--plan", '{"linear": 0}'], "either mechanism or plan"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--stride", "999"], "stride must be below"),
        (["--output_dir", ""], "output_dir must be"),
    ],
)
def test_options_that_cannot_be(flags, message):
    with pytest.raises(OptionError, match=message):
        parse_arguments([*REQUIRED, *flags])


# -- the search -------------------------------------------------------------------------------------------------------


def test_the_lowest_validation_loss_wins_and_divergence_loses():
    assert recovery.select_learning_rate({1e-4: 2.0, 1e-3: 1.5, 1e-2: None, 1e-1: math.nan}) == 1e-3
    with pytest.raises(OptionError, match="diverged with each"):
        recovery.select_learning_rate({1e-3: None, 1e-2: math.inf})


def test_a_stage_searches_by_validation_loss(tmp_path, monkeypatch):
    losses = {1e-4: 3.0, 1e-3: 2.0, 1e-2: 2.5}
    runs = []

    def fake(model, data, training, folder, *, learning_rate, max_steps, **options):
        runs.append((learning_rate, max_steps, training.save_strategy != "no"))
        loss = losses[learning_rate]
        return finetuning.Trained({"learning_rate": learning_rate, "eval_loss": loss, "steps": max_steps})

    class Training(recovery.ModelTraining):
        name = "recovered"

        def plan(self, context):
            return TrainingPlan(data, training, list(losses), 9, 3)

        def make_model(self, context):
            return make()

        def folder(self, context):
            return tmp_path / "model"

    monkeypatch.setattr(recovery, "fine_tune", fake)
    training = make_training(tmp_path)
    make = lambda: patch_model(make_model("gpt2"), "linear")  # noqa: E731
    data = make_data(make())
    context = Mock(directory=RunDirectory(tmp_path, training))
    context.arguments.training, context.saved_dtype, context.task = training, torch.float32, CAUSAL
    result = Training().run(context)
    assert runs == [(1e-4, 3, False), (1e-3, 3, False), (1e-2, 3, False), (1e-3, 9, True)]
    assert result["learning_rate"] == 1e-3
    assert Training().run(context) == result, "a recorded stage is not run again"
    assert len(runs) == 4


def test_every_stage_comes_behind_those_that_it_reads():
    transfer = ["--transfer_tokens", "9999", "--calibration_tokens", "9", "--layers", "auto"]
    longer = ["--long_tokens", "9999", "--long_block_size", "512", "--control", "window"]
    arguments = parse_arguments([*REQUIRED, *transfer, *longer], DISTILLATION)
    arguments.data.document_window = 512  # which classifiers alone have
    names = [stage.name for stage in stages_of(arguments)]
    assert len(names) == len(set(names)) == 18
    for i, stage in enumerate(stages_of(arguments)):
        assert set(stage.inputs) <= set(names[:i]), stage.name
    arguments.recipe.control_dir = "other"
    assert [stage.name for stage in stages_of(arguments)] == names, "records have the names that they always had"


# -- one run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "mechanism"),
    [("gpt2", "performer"), ("bert", "linear"), pytest.param("llama", "linear", marks=pytest.mark.exhaustive)],
)
def test_fine_tuning_lowers_the_validation_loss_and_keeps_the_best(tmp_path, architecture, mechanism):
    model = patch_model(make_model(architecture, std=0.05), mechanism)
    data = make_data(model)
    result, _ = finetuning.fine_tune(model, data, make_training(tmp_path), tmp_path, learning_rate=3e-3, max_steps=24)
    losses = [entry["eval_loss"] for entry in result["history"] if "eval_loss" in entry]
    assert result["eval_loss"] == min(losses) < 0.95 * math.log(VOCAB_SIZE)
    batch = data.evaluation_collator([data.validation[i] for i in range(len(data.validation))])
    model.eval()
    with torch.no_grad():
        loss = model(**batch).loss.item()
    assert loss == pytest.approx(result["eval_loss"], rel=1e-3), "the model holds other weights than the best ones"
    assert getattr(model.config, "use_cache", True), "the Trainer's use_cache=False would be saved"


def test_a_model_trained_in_mixed_precision_computes_in_its_own_afterwards(tmp_path):
    """What is saved is compared with the model in memory, bit for bit."""
    model = patch_model(make_model("llama"), "linear")
    data, training = make_data(model), make_training(tmp_path, bf16=True)
    finetuning.fine_tune(model, data, training, tmp_path / "run", learning_rate=1e-3, max_steps=2)
    model.save_pretrained(tmp_path / "saved")
    recovery.verify_saved(model, tmp_path / "saved", torch.as_tensor(data.validation[0]["input_ids"])[None], CAUSAL)


def test_a_diverging_run_stops_early_and_has_no_loss(tmp_path):
    model = patch_model(make_model("gpt2"), "linear")
    with torch.no_grad():
        model.transformer.wte.weight.fill_(math.nan)
    training = finetuning.without_checkpoints(make_training(tmp_path, logging_steps=1))
    result, _ = finetuning.fine_tune(model, make_data(model), training, tmp_path, learning_rate=1e-3, max_steps=30)
    assert result["eval_loss"] is None and (result["steps"], result["not_finite"]) == (0, 1)
    json.dumps(result, allow_nan=False)


def test_the_rows_of_masked_models_are_masked_alike_in_every_evaluation(tmp_path):
    model = patch_model(make_model("bert"), "softmax")
    trainer = trainers.RecoveryTrainer(model, make_training(tmp_path), make_data(model))
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    assert isinstance(trainer.data_collator, PackedMaskingCollator)


@pytest.mark.parametrize(("architecture", "first"), [("gpt2", 0), ("opt", 0), ("bert", 0), ("roberta", 2)])
def test_the_first_position_is_the_one_the_model_itself_gives(architecture, first):
    model = make_model(architecture)
    assert first_position(model) == first
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        own = model(input_ids=ids).logits
        given = model(input_ids=ids, position_ids=torch.arange(8)[None] + first).logits
    torch.testing.assert_close(given, own)
    if first:
        assert int(make_data(model).train["position_ids"][:].min()) == first


class Interrupt(TrainerCallback):
    """What a person pressing ^C, or a machine that is taken away, does to a run."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 7:
            raise KeyboardInterrupt


# a causal one is interrupted in test_checkpoints, and in every stage of a recipe
@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_an_interrupted_run_ends_where_an_unbroken_one_does(tmp_path, masked):
    def train(folder, callbacks=()):
        model = patch_model(make_model("bert" if masked else "gpt2"), "performer", num_features=16)
        training = make_training(tmp_path)
        result, _ = finetuning.fine_tune(
            model, make_data(model), training, folder, learning_rate=3e-3, max_steps=12, callbacks=callbacks
        )
        return result["eval_loss"], model.state_dict()

    loss, weights = train(tmp_path / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "broken", [Interrupt()])
    half_written = tmp_path / "broken" / "checkpoint-11"
    half_written.mkdir()
    (half_written / "model.safetensors").write_bytes(b"half")
    resumed_loss, resumed_weights = train(tmp_path / "broken")
    assert resumed_loss == loss
    assert all(torch.equal(resumed_weights[name], weights[name]) for name in weights)


# -- the folder -------------------------------------------------------------------------------------------------------


def test_a_stage_is_computed_once(tmp_path):
    run = RunDirectory(tmp_path, make_training(tmp_path))
    assert run.once("speed", lambda: {"rows": [1, 2]}) == {"rows": [1, 2]}
    assert run.once("speed", lambda: pytest.fail("computed again")) == {"rows": [1, 2]}
    (tmp_path / "stages" / "speed.json").write_text('{"rows": [1')
    with pytest.raises(CheckpointError, match=r"speed\.json.* is damaged"):
        run.finished("speed")


def test_an_output_folder_is_continued_only_with_the_same_options(tmp_path):
    run = RunDirectory(tmp_path / "out", make_training(tmp_path / "out"))
    run.open({"seed": 0, "betas": (0.9, 0.99)})
    run.record("original", {"loss": 1.0})
    run.open({"seed": 0, "betas": (0.9, 0.99)}, resume=True)
    with pytest.raises(OptionError, match="holds a run with seed=0, got 1"):
        run.open({"seed": 1, "betas": (0.9, 0.99)})
    assert run.finished("original") == {"loss": 1.0}
    (run.path / "adapter").mkdir()
    run.open({"seed": 1}, overwrite=True)
    assert run.finished("original") is None and not (run.path / "adapter").exists()


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    run = RunDirectory(tmp_path, make_training(tmp_path))
    with pytest.raises(OptionError, match=r"holds checkpoint-5 but no run .*--overwrite_output_dir"):
        run.open({})
    with pytest.raises(CheckpointError, match="no run of this recipe"):
        run.open({}, resume=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-5"]


def test_text_that_fills_no_row(tmp_path):
    splits = DatasetDict({name: Dataset.from_dict({"text": ["w5 w6"]}) for name in ("train", "validation")})
    with pytest.raises(DataError, match="less than one row"):
        CAUSAL.rows(splits, TextEncoder(make_tokenizer(), DataArguments(block_size=32)), make_model("gpt2"), 512)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_validation_loss_is_the_mean_over_predicted_tokens(name):
    model = patch_model(make_model(name, std=0.3), "linear")
    data = make_data(model)
    total, count = 0.0, 0
    for row in data.validation:
        batch = data.evaluation_collator([row])
        with torch.no_grad():
            logits = model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits.double()
        logits, labels = (logits, batch["labels"]) if name == "bert" else (logits[:, :-1], batch["labels"][:, 1:])
        chosen = labels >= 0
        total -= float(logits.log_softmax(-1)[chosen].gather(1, labels[chosen][:, None]).sum())
        count += int(chosen.sum())
    assert finetuning.validation_loss(model.train(), data, 3) == pytest.approx(total / count, rel=1e-5)
    assert model.training


@pytest.mark.parametrize("at_once", [False, True])
def test_a_batch_of_the_validation_without_a_masked_token_counts_nothing(monkeypatch, at_once):
    model = patch_model(make_model("bert", std=0.3), "linear")
    data = make_data(model)
    empty, masking = data.validation[1]["input_ids"], data.evaluation_collator

    def collator(rows):
        batch = masking(rows)
        batch["labels"][[bool(torch.equal(row["input_ids"], empty)) for row in rows]] = -100
        return batch

    if at_once:
        monkeypatch.setattr(finetuning, "separate_head", lambda model: None)
    data = dataclasses.replace(data, evaluation_collator=collator)
    whole, by_row = (finetuning.validation_loss(model, data, size) for size in (len(data.validation), 1))
    assert by_row == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_trainer_weighs_tokens_alike_whatever_the_batches_of_a_validation(tmp_path, at_once):
    model = patch_model(make_model("gpt2", std=0.6), "linear")
    data = make_data(model)
    rows = [{name: x.clone() for name, x in data.validation[i].items()} for i in range(3)]
    for row, learnt in zip(rows, (1, 15, 5), strict=True):
        row["labels"][: 16 - learnt] = -100
    columns = {name: [row[name].tolist() for row in rows] for name in rows[0]}
    data = dataclasses.replace(data, validation=Dataset.from_dict(columns).with_format("torch"))
    expected = finetuning.validation_loss(model, data, 1)
    options = {"remove_unused_columns": False, "prediction_loss_only": not at_once}
    for size, dropped in ((1, False), (2, False), (3, False), (2, True), (4, True)):
        options |= {"per_device_eval_batch_size": size, "dataloader_drop_last": dropped}
        trainer = trainers.RecoveryTrainer(model, make_training(tmp_path, **options), data)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
        assert trainer.args.dataloader_drop_last == dropped, "of the training rows"


def test_rows_that_fill_up_a_last_batch_count_in_no_process(tmp_path):
    trainer = trainers.RecoveryTrainer(model := make_model("gpt2"), make_training(tmp_path), make_data(model))
    for remainder, end, expected in ((3, True, [3, 0]), (5, True, [4, 1]), (0, True, [4, 4]), (5, False, [4, 4])):
        state = SimpleNamespace(end_of_dataloader=end, remainder=remainder)
        found = []
        for process in range(2):
            trainer.accelerator = SimpleNamespace(gradient_state=state, process_index=process)
            found.append(trainer._own_rows(4))
        assert found == expected
