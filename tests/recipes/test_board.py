"""The files of models and the rows of the board: what they say, how they go together, whose control a row has."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure.targets import BOARD_TARGETS
from benchmarks.result_files import board_reports
from benchmarks.tables.quality import RECIPE_NAME
from hf_linattn import patch_model
from hf_linattn.config import make_config
from hf_linattn.errors import CheckpointError, OptionError, UnknownNameError
from hf_linattn.evaluation import streaming_like
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.training import pipeline
from hf_linattn.training.arguments import DISTILLATION, FINETUNING, Arguments, parse_arguments
from hf_linattn.training.arguments.board import CommandLine, without
from hf_linattn.training.arguments.model import ModelArguments
from tests.recipes.test_finetune import ROOT, material

__all__ = ["material"]

MODELS = {path.stem: path for path in sorted((ROOT / "recipes/models").glob("*.yaml"))}
BUNDLED = ("gpt2", "llama", "bert")
KINDS = {"bert-finetune": FINETUNING}  # the options of all others are those of distill.py
WHOLE = [ROOT / "recipes" / name for name in ("quickstart.yaml", "imdb.yaml")]
BOARD = ROOT / "recipes/board.yaml"
LINES = {name: CommandLine([str(path), f"--board={BOARD}"]) for name, path in MODELS.items()}
ROWS = [(name, row) for name, line in LINES.items() for row in line.on_board()]


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)  # files name others from there


@cache
def read_row(model, row) -> Arguments:
    flags = [f"recipes/models/{model}.yaml", "--row", row, "--use_cpu", "True"]
    return parse_arguments(flags, KINDS.get(model, DISTILLATION))


@pytest.mark.parametrize(("model", "row"), ROWS)
def test_every_row_is_read_and_its_mechanisms_take_their_options(model, row):
    arguments = read_row(model, row)
    options, _, recipe, training, _ = arguments
    plan = options.plan or {options.mechanism: options.mechanism_options or {}}
    for name, given in plan.items():
        make_config(name, {option: value for option, value in given.items() if option != "layers"})
    assert Path(training.output_dir) == ROOT / "runs" / f"{model.removesuffix('-finetune')}-{row}"
    if recipe.control_dir:
        lending = read_row(model, recipe.control_dir.removeprefix(f"runs/{model}-"))
        assert lending.control_trains == arguments.control_trains  # or it names the other kind


@pytest.mark.parametrize("model", MODELS)
def test_a_model_may_be_given_any_row(model):
    known = {f.name for f in fields(ModelArguments)}
    for row in LINES[model].rows:
        merged = LINES[model].options_of(row)
        options = ModelArguments(**{name: value for name, value in merged.items() if name in known})
        plan = options.plan or {options.mechanism: options.mechanism_options or {}}
        for name, given in plan.items():
            make_config(name, {option: value for option, value in given.items() if option != "layers"})
        assert "hybrid" in plan or "window_dropout" not in merged, row


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_a_file_without_a_board_is_a_whole_recipe(path):
    options = parse_arguments([str(path), "--use_cpu", "True"], DISTILLATION).model
    make_config(options.mechanism, options.mechanism_options)


@pytest.mark.parametrize("model", BUNDLED)
def test_the_board_has_a_row_for_every_target_and_every_baseline(model):
    baselines = {"t2r", "lolcats", "lolcats-linear", "liger-style"}
    encoder = {"hybrid", "hybrid-lsh", "hedgehog", "performer", "local", "linformer", "lsh"}
    decoder = BOARD_TARGETS.keys() - {"hybrid-lsh"} | baselines  # their hybrid has a delta rule, which has an order
    rows = CommandLine([f"recipes/models/{model}.yaml"]).on_board()
    assert set(rows) >= (encoder if model == "bert" else decoder)
    assert rows[0] == "hybrid", "the others take over its control"
    for row in rows:
        options, data, recipe, *_ = parse_arguments([f"recipes/models/{model}.yaml", "--row", row], DISTILLATION)
        assert options.model_name_or_path == f"recipes/pretrained/{model}"
        assert recipe.max_train_tokens <= 2_000_000 and data.block_size >= 256
        shared = None if row == "hybrid" else f"runs/{model}-hybrid"
        assert recipe.control_dir == shared and (shared or len(recipe.control_learning_rates) > 1)


def test_every_result_of_the_board_has_its_row_and_the_options_of_it():
    lines = {model: CommandLine([str(path)]) for model, path in MODELS.items()}
    for name, report in board_reports().items():
        model, row = RECIPE_NAME.findall(name)[0]
        assert row in lines[model].on_board(), name
        given = lines[model].options_of(row)
        measured = {option: value for option, value in report["options"].items() if option != "layers"}
        assert measured == (given.get("plan") or given.get("mechanism_options") or {}), name


def test_a_window_with_the_bytes_of_another_row_has_them_in_the_dtype_of_its_checkpoint():
    hybrid, streaming = (read_row("smollm2-135m", row).model for row in ("hybrid", "streaming"))
    heads = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}  # SmolLM2-135M, in bfloat16
    config = LlamaConfig(**heads, num_hidden_layers=1, intermediate_size=8, vocab_size=50)
    model = patch_model(LlamaForCausalLM(config).bfloat16(), hybrid.mechanism, **hybrid.mechanism_options)
    assert streaming_like(model) == {streaming.mechanism: streaming.mechanism_options}


def test_what_is_recommended_for_a_recovery_was_recovered():
    recovered = {name for report in board_reports().values() for name in report["mechanism"].split("+")}
    rows = [line.split("|") for line in (ROOT / "docs/choose.md").read_text().splitlines() if line.startswith("| ")]
    named = {name for _, _, cell, *_ in rows if "recovered" in cell for name in re.findall("`([a-z_]+)`", cell)}
    assert len(named & set(MECHANISMS.names())) > 4 and not named & set(MECHANISMS.names()) - recovered


def test_rows_and_models_name_options_and_models_that_there_are():
    known = {f.name for kind in DISTILLATION for f in fields(kind)}
    for name, row in CommandLine([f"--board={BOARD}"]).rows.items():
        models = row.get("models", {})
        assert models.keys() <= MODELS.keys(), name
        given = {option for options in (row, *filter(None, models.values())) for option in options}
        assert given - {"models"} <= known, name


# -- how they go together ---------------------------------------------------------------------------------------------


@pytest.fixture
def mine(material, tmp_path):
    """Files of models with a board of three rows; the others take over the control of the first."""
    given = {**material, "output_dir": str(tmp_path / "run"), "block_size": 32, "max_train_tokens": 768}
    given |= {"learning_rates": [1e-3], "eval_steps": 0.5, "save_steps": 0.5, "disable_tqdm": True}
    given |= {"per_device_train_batch_size": 4, "kl_weight": 0.5, "control_dir": str(tmp_path / "run-first")}
    given |= {"board": str(tmp_path / "board.yaml"), "speed_lengths": [8], "plan_steps": 0}
    rows = {
        "_shared": {"seed": 5},
        "first": {"mechanism": "linear", "control_dir": None, "kl_weight": None},
        "second": {"mechanism": "local", "seed": 1, "models": {"mine": {"seed": 2}, "other": {"seed": 3}}},
        "third": {"mechanism": "gla", "models": {"mine": None}},
    }
    (tmp_path / "board.yaml").write_text(yaml.safe_dump(rows))
    for name in ("mine", "other", "unknown"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(given))
    return tmp_path


def test_a_row_overrides_the_file_and_a_flag_both(mine):
    first = parse_arguments([str(mine / "mine.yaml"), "--row=first", "--block_size", "64"])
    assert (first.model.mechanism, first.recipe.control_dir, first.recipe.kl_weight) == ("linear", None, 0.0)
    assert first.data.block_size == 64 and first.training.output_dir == str(mine / "run-first")
    files = {"mine": 2, "other": 3, "unknown": 1}
    seeds = {name: parse_arguments([str(mine / f"{name}.yaml"), "--row", "second"]).training.seed for name in files}
    assert seeds == files, "a model has options of its own, and any model any row"
    flags = ["--row", "second", "--seed", "7", "--output_dir", "there"]
    training = parse_arguments([str(mine / "mine.yaml"), *flags]).training
    assert (training.seed, Path(training.output_dir)) == (7, ROOT / "there")


def test_a_row_of_another_mechanism_takes_nothing_that_the_files_own_has(mine):
    given = yaml.safe_load((mine / "mine.yaml").read_text())
    own = {"mechanism_options": {"window_size": 8}, "window_dropout": 0.5}
    (mine / "mine.yaml").write_text(yaml.safe_dump({**given, "mechanism": "hybrid", **own}))
    rows = {
        "same": {"mechanism": "hybrid", "seed": 1},
        "unnamed": {"seed": 2},
        "other": {"mechanism": "linear"},
        "plan": {"plan": {"linear": {"layers": [0]}}},
        "its_own": {"mechanism": "fusion", "window_dropout": 0.1},
    }
    (mine / "board.yaml").write_text(yaml.safe_dump(rows))
    line = CommandLine([str(mine / "mine.yaml")])
    found = {row: {name: line.options_of(row).get(name) for name in ("mechanism", *own)} for row in rows}
    assert found["same"] == found["unnamed"] == {"mechanism": "hybrid", **own}
    assert found["other"] == {"mechanism": "linear", "mechanism_options": None, "window_dropout": None}
    assert found["plan"] == {"mechanism": None, "mechanism_options": None, "window_dropout": None}
    assert found["its_own"] == {"mechanism": "fusion", "mechanism_options": None, "window_dropout": 0.1}


def test_text_of_ones_own_takes_the_place_of_the_files_data_set():
    recipe = "recipes/models/smollm2-135m-heads.yaml"
    data = parse_arguments([recipe, "--train_file=book.txt"], DISTILLATION).data
    assert (data.dataset_name, data.train_file) == (None, "book.txt")
    assert parse_arguments([recipe], DISTILLATION).data.dataset_name == "emozilla/pg19"


@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_recipe_in_bfloat16_runs_on_a_machine_without_an_accelerator(monkeypatch, caplog, has_instructions):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)
    training = parse_arguments(["recipes/models/smollm2-135m-heads.yaml"], DISTILLATION).training
    assert training.bf16 is has_instructions and training.use_cpu
    assert ("bf16: float32 is taken" in caplog.text) is not has_instructions
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    assert not parse_arguments(["recipes/models/smollm2-135m-heads.yaml"], DISTILLATION).training.use_cpu


def test_rows_are_listed_with_what_trains_a_control_first(mine):
    assert CommandLine([str(mine / "mine.yaml")]).on_board() == ["second", "third"]
    (mine / "board.yaml").write_text("{b: {models: {mine}}, a: {models: {mine: {control_dir: null}}}}")
    assert CommandLine([str(mine / "mine.yaml")]).on_board() == ["a", "b"]


def test_a_row_that_cannot_be_found_is_an_error(mine):
    with pytest.raises(UnknownNameError, match=r"unknown row 'secnd'; did you mean second\? Known: first, second"):
        parse_arguments([str(mine / "mine.yaml"), "--row", "secnd"])
    with pytest.raises(UnknownNameError, match="unknown row '_shared'"):
        parse_arguments([str(mine / "mine.yaml"), "--row", "_shared"])
    with pytest.raises(OptionError, match=r"row='first' needs a board; name its file, as --board recipes/board.yaml"):
        parse_arguments(["--row", "first", "--output_dir", "out"])
    (mine / "board.yaml").write_text("first: 3")
    with pytest.raises(OptionError, match=r"first of .*board.yaml must be a mapping of option names to values, got 3"):
        parse_arguments([str(mine / "mine.yaml"), "--row", "first"])
    with pytest.raises(OptionError, match=r"give either mechanism or plan, got .* or a --row of a board"):
        parse_arguments([str(mine / "mine.yaml")])


def test_an_error_names_the_command_of_a_control_that_is_missing(mine):
    row = [str(mine / "mine.yaml"), "--row", "second", "--weight_decay", "0.1", "--seed", "3"]
    with pytest.raises(CheckpointError, match=r"or give another one. Its recipe is run by: recipe ") as caught:
        pipeline.main(row, DISTILLATION, "recipe")
    control = shlex.split(str(caught.value).partition("run by: ")[2])
    assert control == ["recipe", str(mine / "mine.yaml"), "--row", "first", "--weight_decay", "0.1"]
    trained = pipeline.main(control[1:], DISTILLATION, "recipe")
    assert pipeline.main(row, DISTILLATION, "recipe").perplexity.control == trained.perplexity.control


def test_flags_are_left_out_with_their_values():
    flags = ["--row", "a", "--learning_rates", "1e-3", "-1", "--fp16=True", "--output-dir=x", "--seed", "1"]
    assert without(flags, {"row", "learning_rates", "output_dir"}) == ["--fp16=True", "--seed", "1"]
    assert without(flags, ()) == flags


def test_a_recipe_or_a_board_in_another_encoding_is_named(tmp_path):
    file = tmp_path / "latin.yaml"
    file.write_text("seed: 1  # für mich\n", encoding="latin-1")
    for given in ([str(file)], ["--row", "first", "--board", str(file)]):
        with pytest.raises(OptionError, match=r"configuration file '.*latin\.yaml' is not UTF-8 .*; save it as UTF-8"):
            parse_arguments(given)
