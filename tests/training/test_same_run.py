"""When two starts of a recipe are the same run: options of every kind, and the content of model and data."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from datasets import Dataset

from hf_linattn.errors import OptionError
from hf_linattn.training.arguments import (
    Arguments,
    DataArguments,
    DistillationArguments,
    FinetuningArguments,
    ModelArguments,
    RecipeArguments,
    parse_arguments,
)
from hf_linattn.training.memory_limits import naming_memory, smaller_batch
from hf_linattn.training.run_directory import RunDirectory
from hf_linattn.training.same_run import (
    BATCHES,
    COMPARED,
    FREE,
    SCORED,
    TESTED,
    difference,
    model_digest,
    rows_digest,
    training_options,
)
from hf_linattn.training.task import CAUSAL, CLASSIFICATION, TextEncoder
from hf_linattn.training.training_run import TrainingRun
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.training.test_finetuning import REQUIRED, make_training

OTHERS = {
    "lr_scheduler_kwargs": {"num_cycles": 3}, "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0,
    "optim_args": "foreach=False", "optim": "sgd", "seed": 1, "adam_beta2": 0.5,
    "gradient_accumulation_steps": 2, "max_grad_norm": 3.0, "load_best_model_at_end": False, "eval_steps": 0.0625,
    "dataloader_drop_last": True, "full_determinism": True, "train_sampling_strategy": "sequential",
    "early_stopping_patience": 3, "warmup_steps": 7, "weight_decay": 0.3, "per_device_train_batch_size": 3,
}  # fmt: skip
MAY_DIFFER = {"logging_steps": 0.5, "save_steps": 0.25, "report_to": "none", "save_total_limit": 4, "run_name": "x",
              "disable_tqdm": False, "per_device_eval_batch_size": 3, "gradient_checkpointing": True}  # fmt: skip


def test_every_option_of_a_training_is_compared_but_the_free_ones(tmp_path):
    names = {f.name for f in dataclasses.fields(FinetuningArguments) if f.init}
    recorded = training_options(make_training(tmp_path))
    assert recorded.keys() == names - FREE | {"world_size", "train_batch_size"}
    assert json.loads(json.dumps(recorded)) == recorded


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_is_not_continued_with_another_option(tmp_path, name):
    started, now = (training_options(make_training(tmp_path, **options)) for options in ({}, {name: OTHERS[name]}))
    assert difference(started, now) == name
    RunDirectory(tmp_path, make_training(tmp_path)).open(started)
    with pytest.raises(OptionError, match=f"holds a run with {name}=.*give another output_dir"):
        RunDirectory(tmp_path, make_training(tmp_path)).open(now)


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_a_run_is_continued_with_what_changes_no_number(tmp_path, name):
    assert name in FREE
    started, now = (training_options(make_training(tmp_path, **x)) for x in ({}, {name: MAY_DIFFER[name]}))
    assert difference(started, now) is None


def test_a_step_may_be_divided_into_other_batches_if_it_has_as_many_rows(tmp_path):
    def recorded(batch: int, accumulated: int, **rows) -> dict:
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
        return training_options(make_training(tmp_path, **options)) | rows

    assert difference(recorded(4, 1), recorded(2, 2)) is None
    assert difference(recorded(4, 1), recorded(2, 1)) == "per_device_train_batch_size"
    for started in ({}, {COMPARED: True}):  # older runs did not record it
        assert difference(recorded(4, 1, **started), recorded(2, 2, **{COMPARED: True})) in BATCHES
        assert difference(recorded(4, 1, **started), recorded(4, 1, **{COMPARED: True})) is None
    longer = {"block_size": 512, "long_block_size": 2048}
    assert difference(recorded(8, 1, **longer), recorded(4, 2, **longer)) is None
    # of the longer rows one is the least, which then are twice as many in a step
    assert difference(recorded(4, 1, **longer), recorded(2, 2, **longer)) == "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("batch", "longer", "expected"), [(8, None, (4, 2)), (8, 1024, (4, 2)), (12, 2048, (4, 3)), (8, 4096, None)]
)
def test_a_run_goes_on_with_the_smaller_batches_that_are_named_where_memory_ran_out(tmp_path, batch, longer, expected):
    rows = {"block_size": 512, "long_block_size": longer}
    started, now = (
        make_training(tmp_path, **dict(zip(BATCHES, made, strict=False)))
        for made in ((batch, 1), expected or (batch // 2, 2))
    )
    distillation = DistillationArguments(long_block_size=longer, long_tokens=8 * (longer or 0))
    found = smaller_batch(Arguments(None, DataArguments(block_size=512), None, started, distillation))
    assert found == expected
    assert (difference(training_options(started) | rows, training_options(now) | rows) is None) is bool(expected)


def test_a_report_that_ran_out_of_memory_goes_on_with_shorter_texts_to_time(tmp_path):
    recipe = RecipeArguments(speed_lengths=[256, 2048])
    model = ModelArguments(model_name_or_path="m", mechanism="linear")
    others = make_training(tmp_path), DistillationArguments()
    arguments = Arguments(model, DataArguments(), recipe, *others)
    with pytest.raises(OptionError, match=r"stage report runs .* with speed_lengths below 2048, or per_device_eval"):
        with naming_memory("report", arguments):
            raise MemoryError("Unable to allocate 16 GiB")
    with pytest.raises(OptionError, match="with gradient_checkpointing true, or per_device_eval_batch_size"):
        with naming_memory("recovered_training", arguments, divisible=False):
            raise MemoryError("Unable to allocate 16 GiB")
    assert difference({"speed_lengths": [256, 2048], "seed": 1}, {"seed": 1}) is None, "older runs recorded it"


def test_the_option_that_was_given_is_named_before_what_follows_from_it():
    started = {"max_train_tokens": 768, "lr_search_tokens": 115, "learning_rates": [1e-3]}
    assert difference(started, started | {"max_train_tokens": 896, "lr_search_tokens": 134}) == "max_train_tokens"
    assert difference(started, started | {"lr_search_tokens": 134}) == "lr_search_tokens"
    rates = {"learning_rates": [1e-3], "control_learning_rates": [1e-3]}
    assert difference(rates, {name: [2e-3] for name in rates}) == "learning_rates"


def test_an_option_that_a_newer_version_added_counts_as_its_default(tmp_path):
    now = training_options(make_training(tmp_path))
    started = {name: value for name, value in now.items() if name not in ("label_smoothing_factor", "optim")}
    assert difference(started, now) is None
    assert difference(started, now | {"label_smoothing_factor": 0.1}) == "label_smoothing_factor"


def test_options_of_this_library_that_an_older_run_did_not_record_had_their_defaults():
    now = {"control": "full", "completion_only": False, "recall_share": 0.0, "long_learning_rate": None, "seed": 1}
    older = {"control": None, "seed": 1}
    assert difference(older, now) is None and difference({"seed": 1}, now) is None
    assert difference(older, {**now, "recall_share": 0.1}) == "recall_share"
    # what older runs trained beside LoRA was all weights: to go on, --control full says so
    assert difference(older, {**now, "control": "lora"}) == "control"


@pytest.mark.parametrize(
    ("digest", "options", "message"),
    [
        ("train_digest", {"train_file": "a.txt"}, r"the training rows were others \(train_file='a.txt'\)"),
        ("test_digest", {"dataset_name": "d"}, r"the test texts were others \(dataset_name='d'\)"),
        ("model_digest", {"model_name_or_path": "m"}, r"the weights of the model were .*name_or_path='m'"),
    ],
)
def test_other_content_is_refused_in_terms_of_the_options(tmp_path, digest, options, message):
    run = RunDirectory(tmp_path, make_training(tmp_path))
    run.open({**options, digest: "1"})
    run.open({**options, digest: "1"})
    with pytest.raises(OptionError, match=message):
        run.open({**options, digest: "2"})
    run.record("control", {})
    with pytest.raises(OptionError, match=f"holds a run on other content: {message}.*does not compare"):
        run.export_stages(["control"], {**options, digest: "2"}, ())
    run.record("recipe", options)  # as a version before this one did
    with pytest.raises(OptionError, match="did not record the content"):
        run.open({**options, digest: "2"})


def test_a_run_that_tested_the_first_documents_does_not_go_on_with_others(tmp_path):
    older = training_options(make_training(tmp_path))
    run = RunDirectory(tmp_path, make_training(tmp_path))
    run.open(older)
    with pytest.raises(OptionError, match=r"holds a run that scored the beginning of the test split, .* output_dir"):
        run.open(older | TESTED)
    texts, encoder = Dataset.from_dict({"text": ["w7"] * 8}), TextEncoder(make_tokenizer(), DataArguments())
    tested = encoder.options.tested
    for task in (CAUSAL, CLASSIFICATION):
        assert not task.tests_some(encoder, texts)
        assert task.tests_some(encoder._replace(options=DataArguments(max_test_documents=3)), texts)
    assert not CAUSAL.tests_some(encoder._replace(options=DataArguments(max_test_tokens=16, stride=1)), texts)
    assert CAUSAL.tests_some(encoder._replace(options=DataArguments(max_test_tokens=4, block_size=8)), texts)
    encoder.options.max_test_documents = 3
    assert [row["row"] for row in tested(Dataset.from_dict({"row": range(8)}))] == [0, 2, 5]


def test_a_run_that_scored_whole_conversations_does_not_go_on_with_scores_of_answers(tmp_path):
    def options(*flags: str) -> dict:
        arguments = parse_arguments([*REQUIRED, "--use_cpu", "true", *flags])
        return TrainingRun(arguments, "", None, None, CAUSAL, {}, None, None, 0, []).options

    assert options().keys().isdisjoint(SCORED)
    now = options("--completion_only", "true")
    older = {name: value for name, value in now.items() if name not in SCORED}
    run = RunDirectory(tmp_path, make_training(tmp_path))
    run.open(older)
    run.record("control", {})
    said = "holds a run that scored whole conversations, where this version scores their answers alone"
    with pytest.raises(OptionError, match=f"{said}; give another output_dir"):
        run.open(now)
    with pytest.raises(OptionError, match=f"{said}: its control does not compare"):
        run.export_stages(["control"], now, ())
    assert difference(older, options()) == "completion_only"


COLUMNS = [
    {"input_ids": [[1, 2], [3, 4]], "labels": [[1, -100], [3, 4]]},
    {"input_ids": [[1, 2], [3, 5]], "labels": [[1, -100], [3, 4]]},
    {"input_ids": [[3, 4], [1, 2]], "labels": [[3, 4], [1, -100]]},
    {"input_ids": [[1, 2, 3], [4]], "labels": [0, 1]},
    {"input_ids": [[1, 2], [3, 4]], "labels": [0, 1]},
    {"text": ["ab", "c"]},
    {"text": ["a", "bc"]},
    {"text": ["ab", "c"], "label": ["x", "y"]},
]


def test_rows_have_the_same_digest_if_and_only_if_they_are_the_same():
    digests = [rows_digest(Dataset.from_dict(columns)) for columns in COLUMNS]
    assert len(set(digests)) == len(COLUMNS)
    assert digests == [rows_digest(Dataset.from_dict(columns).with_format("torch")) for columns in COLUMNS]
    twice = Dataset.from_dict({"text": ["ab", "c", "ab", "c"]})
    assert rows_digest(twice.select([0, 3])) == digests[5], "however the rows came together"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_has_another_digest_after_any_change_of_a_weight(dtype):
    model = make_model("gpt2").to(dtype)
    before = model_digest(model)
    assert before == model_digest(make_model("gpt2").to(dtype))
    weight = next(reversed(list(model.parameters())))
    with torch.no_grad():
        weight.flatten()[-1] += 1
    assert model_digest(model) != before
