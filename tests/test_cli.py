"""The command line: what is written, trained and said."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

import hf_linattn
from hf_linattn import list_mechanisms
from hf_linattn.chosen_plan import read_plan_file
from hf_linattn.cli import app
from hf_linattn.cli.common import read_texts
from hf_linattn.command_errors import exit_with_one_line
from hf_linattn.evaluation import perplexity
from hf_linattn.hub import load_checkpoint
from hf_linattn.ops.runtime import cpu as library
from hf_linattn.saved_config import unfinished
from hf_linattn.support.tiny import tiny_model
from hf_linattn.training import pipeline
from hf_linattn.training.files import load_file
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.recipes.conftest import quick_reports
from tests.recipes.test_finetune import command, material

__all__ = ["material", "quick_reports"]

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    "list", "support", "env", "advise", "compare", "convert", "finetune", "distill", "eval", "bench", "report", "push",
)  # fmt: skip


def run(*arguments: object) -> str:
    """Run a command in a process and return what it printed."""
    process = subprocess.run(
        [sys.executable, "-m", "hf_linattn", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return process.stdout


def answer(*arguments: object) -> str:
    """Return what a command says."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def refuse(*arguments: object) -> str:
    """Return the message of a command that is refused."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    return result.output


def conversion(folder: Path) -> list[object]:
    options = ["--mechanism", "linear", "--options", json.dumps({"decay": "learned"}), "--layers", 1]
    return ["convert", folder / "original", folder / "converted", *options, "--max-shard-size", "20KB", "--json"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """A tiny GPT-2, converted by the command."""
    folder = tmp_path_factory.mktemp("cli")
    make_model("gpt2", std=0.2).save_pretrained(folder / "original")
    make_tokenizer().save_pretrained(folder / "original")
    document = json.loads(answer(*conversion(folder)))
    assert (document["layers"], document["converted_layers"]) == (2, 1)
    assert document["processors"] == ["tokenizer_config.json"]
    return folder / "converted"


def test_help_names_every_command_and_each_has_its_own():
    printed = answer("--help")
    for name in COMMANDS:
        assert f" {name} " in printed, name
        result = CliRunner().invoke(app, [name, "--help"])
        assert result.exit_code == 0 and "Usage" in result.output
    files = {command.name: command.callback.__module__ for command in app.registered_commands}
    assert files == {name: f"hf_linattn.cli.{name}" for name in COMMANDS}


def test_list_has_every_mechanism():
    rows = json.loads(answer("list", "--json"))
    assert [row["name"] for row in rows] == list_mechanisms()
    assert {row["name"]: row["constant_state"] for row in rows}["performer"]
    shown = answer("list")
    assert all(name in shown for name in list_mechanisms())


def test_support_says_what_holds():
    document = json.loads(answer("support", "llama", "--json"))
    assert [row["status"] for row in document["architectures"]] == ["patched"]


def test_env_has_the_versions():
    found = json.loads(answer("env", "--json"))
    assert found["hf_linattn"] == hf_linattn.__version__ and found["torch"] == torch.__version__
    assert found["native"] is library.available()
    assert found["backend"] == "auto"


def test_env_says_what_auto_takes_on_each_gpu_and_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    found = json.loads(answer("env", "--json"))
    assert (found["cuda"], found["auto"]) == (["NVIDIA L4"], ["torch (the GPU is no Hopper)"])


def test_env_says_which_backends_a_model_takes(converted):
    found = json.loads(answer("env", "--model", converted, "--json"))["backends"]
    assert [row["mechanism"] for row in found["layers"]] == ["softmax", "linear"]
    assert {row["forward"] for row in found["layers"]} == {"torch", "cpu" if library.available() else "torch"}
    reason = {"pass": "decode", "operation": "linear", "backend": "triton", "reason": "heads on 'cpu'", "layers": [1]}
    assert reason in found["passed over"]
    assert "one token, linear: not triton (heads on 'cpu'), layer 1" in answer("env", "--model", converted)


def test_env_asks_about_as_many_tokens_as_the_table_of_positions_serves(tmp_path):
    hf_linattn.patch_model(make_model("roberta"), "linear").save_pretrained(tmp_path)  # its config says two more
    assert json.loads(answer("env", "--model", tmp_path, "--json"))["backends"]["layers"]


@pytest.mark.exhaustive  # it takes seconds to start
def test_a_process_prints_and_writes_the_same(converted, tmp_path):
    shutil.copytree(converted.parent / "original", tmp_path / "original")
    printed = run(*conversion(tmp_path))
    assert json.loads(printed)["converted_layers"] == 1
    for file in converted.glob("*.safetensors"):
        assert (tmp_path / "converted" / file.name).read_bytes() == file.read_bytes()


def test_convert_saves_what_patch_model_makes(converted):
    model = AutoModelForCausalLM.from_pretrained(converted)
    expected = hf_linattn.patch_model(make_model("gpt2", std=0.2), "linear", layers=1, decay="learned")
    ids = torch.randint(5, 90, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    assert len(list(converted.glob("*.safetensors"))) > 1, "in shards"
    assert AutoTokenizer.from_pretrained(converted).pad_token == "[PAD]"


def test_convert_makes_the_position_table_longer(converted, tmp_path):
    places = (converted.parent / "original", tmp_path / "longer")
    said = answer("convert", *places, "--mechanism", "linear", "--max_positions", 100)
    assert "--mechanism linear --max_positions 100 --block_size 100 --train_file" in said, "rows reach the new places"
    model = AutoModelForCausalLM.from_pretrained(places[1])
    assert model.config.n_positions == len(model.transformer.wpe.weight) == 100
    assert AutoTokenizer.from_pretrained(places[1]).model_max_length == 100
    assert model(torch.ones(1, 100, dtype=torch.long)).logits.isfinite().all()


def test_convert_takes_any_architecture_and_needs_no_tokenizer(tmp_path):
    make_model("bert", "Model").save_pretrained(tmp_path / "original")
    places = tmp_path / "original", tmp_path / "out"
    document = json.loads(answer("convert", *places, "--mechanism", "linear", "--json"))
    assert document["model_class"] == "BertModel" and not document["processors"]
    assert hf_linattn.is_patched(AutoModel.from_pretrained(tmp_path / "out"))


@pytest.fixture(scope="module")
def chosen(tmp_path_factory) -> Path:
    """A tiny BERT, of which a plan was chosen by the command, beside its text."""
    folder = tmp_path_factory.mktemp("chosen")
    make_model("bert", std=0.3).save_pretrained(folder / "original")
    make_tokenizer().save_pretrained(folder / "original")
    (folder / "text.txt").write_text(" ".join(f"w{5 + i * i % 90}" for i in range(40)), encoding="utf-8")
    options = json.dumps({"window_size": 3, "num_sink_tokens": 1, "block_size": 4})
    document = json.loads(answer(
        "convert", folder / "original", folder / "out", "--keep", "0.25", "--mechanism", "streaming", "--options",
        options, "--text", folder / "text.txt", "--json",
    ))  # fmt: skip
    assert document["signal"] == "divergence" and "left to right" in document["reason"]
    assert len(document["kept"]) == 2 and document["converted_layers"] == 2
    return folder


def test_convert_chooses_a_plan_and_saves_it_beside_the_model(chosen, tmp_path):
    plan = hf_linattn.ChosenPlan.load(chosen / "out" / "plan.json")
    assert (chosen / "out" / "plan.png").read_bytes().startswith(b"\x89PNG")
    said = answer("convert", chosen / "original", tmp_path / "again", "--plan", chosen / "out" / "plan.json")
    places = " ".join(f"{layer}.{head}" for layer, head in plan.record.kept)
    assert f"2 of 8 key/value heads stay exact (layer.head): {places}; chosen by divergence (slope)" in said
    ids, expected = torch.randint(5, 90, (2, 9)), hf_linattn.patch_model(make_model("bert", std=0.3), plan)
    for folder in (chosen / "out", tmp_path / "again"):
        with torch.no_grad():
            assert torch.equal(AutoModelForMaskedLM.from_pretrained(folder)(ids).logits, expected(ids).logits)


def test_convert_refuses_what_is_no_way_to_a_plan(chosen, converted, tmp_path):
    places, plan = (chosen / "original", tmp_path / "out"), chosen / "out" / "plan.json"
    assert "mechanism is not given; name one, or have a plan chosen" in refuse("convert", *places)
    assert "leave mechanism and keep out" in refuse("convert", *places, "--plan", plan, "--keep", "0.1")
    assert "leave it out where keep or plan" in refuse("convert", *places, "--layers", "0", "--keep", "0.1")
    assert "a share like 0.1 or a number like 9, got 'few'" in refuse("convert", *places, "--keep", "few")
    several = refuse("convert", *places, "--keep", "2", "--mechanism", '{"linear": 0}')
    assert "the name of one mechanism where keep chooses" in several
    assert "from 1 to 7 of the model's 8 key/value heads" in refuse("convert", *places, "--keep", "8")
    assert "give batches of text" in refuse("convert", *places, "--keep", "2")
    other = refuse("convert", converted.parent / "original", tmp_path / "out", "--keep", "2")
    assert "lengths must be given for a model of 64 positions" in other
    assert not (tmp_path / "out").exists()


def test_finetune_and_distill_are_the_recipes(material, tmp_path):
    flags = command(material, tmp_path / "tuned", learning_rates="1e-3", lr_search_tokens=None, speed_lengths="8")
    report = json.loads(answer("finetune", *flags, "--json"))
    assert report["mechanism"] == "performer" and report["provenance"]["command"].startswith("hf-linattn finetune --")
    flags = command(
        material, tmp_path / "taught", learning_rates="1e-3", lr_search_tokens=None, speed_lengths="8",
        mechanism="hedgehog", mechanism_options=None, transfer_tokens=256, kl_weight=1.0,
    )  # fmt: skip
    report = json.loads(answer("distill", *flags, "--json"))
    assert [stage["name"] for stage in report["stages"]] == ["converted", "transfer", "recovered"]
    shown = " ".join(answer("report", tmp_path / "taught").split())
    assert "hedgehog instead of softmax" in shown and f"{report['perplexity']['recovered']:,.2f}" in shown
    assert json.loads(answer("report", tmp_path / "taught", "--json")) == report
    assert "unknown option '--kl_wait'" in refuse("distill", *flags, "--kl_wait", "1")


def test_eval_gives_the_perplexity(converted, tmp_path):
    texts = [" ".join(f"w{5 + (seed + 3 * i) % 20}" for i in range(40)) for seed in (0, 7)]
    files = [tmp_path / f"{i}.txt" for i in range(2)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    found = json.loads(answer("eval", converted, *files, "--max-length", 16, "--json"))
    expected = perplexity(load_checkpoint(str(converted)), make_tokenizer(), texts, max_length=16)
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-5)
    assert found["num_tokens"] == expected["num_tokens"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    again = answer("eval", converted, rows, "--text_column", "body", "--max-length", 16, "--json")
    assert json.loads(again) == found, "each row is a document"
    assert f"files: {str(rows)!r} has no column 'text', but body; rename the one" in refuse("eval", converted, rows)
    unused = refuse("eval", converted, *files, "--original", converted.parent / "original")
    assert "is an option of suites (--suite) and embedding models, not of perplexity; leave it out" in unused


def test_eval_names_a_model_whose_loss_is_no_number(tmp_path):
    broken = make_model("gpt2")
    broken.transformer.h[1].mlp.c_fc.weight.data[0] = torch.nan
    broken.save_pretrained(tmp_path / "broken")
    make_tokenizer().save_pretrained(tmp_path / "broken")
    (tmp_path / "text.txt").write_text("w5 " * 40)
    for options in ((), ("--suite", "language", "--output", tmp_path / "evaluation.json")):
        said = refuse("eval", tmp_path / "broken", tmp_path / "text.txt", "--max-length", 16, *options)
        assert f"{str(tmp_path / 'broken')!r} is nan" in said and "transformer.h.1.mlp.c_fc.weight" in said


def test_bench_times_both(converted):
    document = json.loads(answer("bench", converted, "--lengths", "8,24", "--repeats", 2, "--json"))
    assert [row["length"] for row in document["speed"]] == [8, 24]
    assert all(row["patched_prefill"]["median"] > 0 for row in document["speed"])
    assert document["memory"][0]["patched_state"] > 0


MORE_THAN_TEXT = {
    "vit": "ViTModel reads pixel_values and no text alone",
    "whisper": "WhisperForConditionalGeneration reads input_features and no text alone",
    "bart": "BartForConditionalGeneration is an encoder-decoder, of which text alone is half of the input",
}


@pytest.mark.parametrize("kind", MORE_THAN_TEXT)
def test_what_reads_more_than_text_is_refused_where_text_alone_is_given(kind, tmp_path):
    places = tmp_path / "original", tmp_path / "converted"
    model, reason = tiny_model(kind), MORE_THAN_TEXT[kind]
    model.save_pretrained(places[0])
    make_tokenizer().save_pretrained(places[0])
    hf_linattn.patch_model(model, "linear").save_pretrained(places[1])
    (tmp_path / "text.txt").write_text("w5 " * 40)
    assert reason in refuse("bench", places[1], "--lengths", 8)
    for text in ((), ("--text", tmp_path / "text.txt")):
        said = refuse("convert", places[0], tmp_path / "out", "--keep", 1, *text)
        assert f"{reason}; leave keep and plan auto out" in said
    if kind == "bart":
        assert json.loads(answer("env", "--model", places[1], "--json"))["backends"]["layers"]
    else:
        assert f"{reason}; call hf_linattn.explain_backend" in refuse("env", "--model", places[1])


def test_what_is_wrong_is_said_in_one_line_with_exit_code_1(converted, tmp_path, monkeypatch, capsys):
    original = converted.parent / "original"
    assert "did you mean performer" in refuse("convert", original, tmp_path / "out", "--mechanism", "perfomer")
    assert not (tmp_path / "out").exists()
    assert "is not an empty folder" in refuse("convert", original, converted, "--mechanism", "linear")
    assert "is converted already" in refuse("convert", converted, tmp_path / "out", "--mechanism", "linear")
    wrong = refuse("convert", original, tmp_path / "out", "--mechanism", "linear", "--options", "decay=learned")
    assert "options must be a JSON object, got 'decay=learned'" in wrong
    assert "lengths must be numbers" in refuse("bench", converted, "--lengths", "8;9")
    assert "is not converted; give a folder that hf-linattn convert" in refuse("bench", original, "--lengths", "8")
    assert "Error: samples must be an integer >=" in refuse("eval", converted, "--suite", "recall", "--samples", 0)
    assert "files must be text files to read" in refuse("eval", converted, "--suite", "language")
    said = refuse("report", tmp_path)
    assert f"folder={str(tmp_path)!r} " in said and "report.json'; give the output directory of a recipe" in said
    assert "holds a model that is not converted" in refuse("push", original, "me/model")
    assert "has no config.json" in refuse("push", tmp_path, "me/model")
    (tmp_path / "config.json").write_text(json.dumps(unfinished(AutoConfig.from_pretrained(original))))
    assert "of this checkpoint was interrupted" in refuse("push", tmp_path, "me/model")
    arguments = ["convert", str(original), str(tmp_path / "out"), "--mechanism", "perfomer"]
    monkeypatch.setattr(sys, "argv", ["hf_linattn", *arguments])
    with pytest.raises(SystemExit, match="1"):
        runpy.run_module("hf_linattn", run_name="__main__")
    said = capsys.readouterr().err
    assert "did you mean performer" in said and "Traceback" not in said
    assert CliRunner().invoke(app, ["convert", "--nonsense"]).exit_code == 2


RECIPE = ("--mechanism", "linear", "--output_dir", "out", "--use_cpu", "True")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "absent/model", "out", "--mechanism", "linear"), "model='absent/model' cannot be read"),
        (("eval", "no such name", "text.txt"), "model='no such name' cannot be read"),
        (("bench", "text.txt"), "model='text.txt' cannot be read"),
        (("finetune", "--model_name_or_path", "text.txt", *RECIPE), "model_name_or_path='text.txt' cannot be read"),
        (("distill", "--model_name_or_path", "absent/m", *RECIPE), "model_name_or_path='absent/m' cannot be read"),
        (("distill", "--model_name_or_path", "model", "--report_to", "wandbb", *RECIPE), "report_to='wandbb'"),
        (("distill", "--model_name_or_path", "model", "--bf16", "1", "--fp16", "1", *RECIPE), "fp16 and bf16"),
        (("finetune", "--model_name_or_path", "model", *RECIPE), "'model' has none of .*give another tokenizer_name$"),
        (("eval", "model", "text.txt"), "model='model' has none of the files .*vocab.json.* one beside the model$"),
        (("eval", "text.txt", "model"), "model='text.txt' is a file; the model comes first"),
        (("eval", "model", "whole"), "files='whole' is a folder; give one of the files in it"),
        (
            ("finetune", "--model_name_or_path", "whole", "--dataset_name", "absent/data", *RECIPE),
            "dataset_name='absent/data' cannot be read",
        ),
        (("finetune", "--model_name_or_path", "whole", "--train_file", "whole", *RECIPE), "'whole' is a folder"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_said_in_one_line_that_names_the_option(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    make_model("gpt2", n_positions=512).save_pretrained("model")
    make_model("gpt2", n_positions=512).save_pretrained("whole")
    make_tokenizer().save_pretrained("whole")
    Path("text.txt").write_text("w5 w6")
    said = refuse(*arguments).strip().splitlines()[-1]
    assert re.search(message, said) and re.match(r"(OptionError|CheckpointError|DataError): ", said), said
    assert not Path("out").exists()


@pytest.mark.parametrize("error", [OSError("no space left\n on device"), ValueError("wrong"), ConnectionError("gone")])
def test_any_error_of_what_is_read_and_written_ends_a_command_with_one_line(monkeypatch, error):
    monkeypatch.setattr(pipeline, "main", Mock(side_effect=error))
    said = refuse("finetune").strip()
    assert said.startswith(f"{type(error).__name__}: ") and "\n" not in said and "; look at" in said
    with pytest.raises(SystemExit, match=r"; look at .* HF_LINATTN_TRACEBACK=1"), exit_with_one_line():
        raise error
    monkeypatch.setenv("HF_LINATTN_TRACEBACK", "1")
    with pytest.raises(type(error)), exit_with_one_line():
        raise error
    assert isinstance(CliRunner().invoke(app, ["finetune"]).exception, type(error))


def test_an_interrupted_recipe_ends_without_a_traceback(monkeypatch):
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended, exit_with_one_line():  # the second would end pytest
        raise KeyboardInterrupt
    assert isinstance(ended.value, SystemExit) and ended.value.code == 130 and ended.value.__suppress_context__
    monkeypatch.setenv("HF_LINATTN_TRACEBACK", "1")
    with pytest.raises(KeyboardInterrupt), exit_with_one_line():
        raise KeyboardInterrupt


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to\n allocate 2.00 GiB."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes."),
    MemoryError("Unable to allocate 2.00 GiB for an array")])  # fmt: skip
def test_memory_that_runs_out_ends_a_command_with_one_line_and_no_other_fault_does(monkeypatch, error):
    monkeypatch.setattr(pipeline, "main", Mock(side_effect=error))
    said = refuse("finetune").strip()
    assert said.startswith(f"{type(error).__name__}: memory runs out, at a tensor of 2.15 GB; give a smaller length")
    assert "\n" not in said
    fault = RuntimeError("shapes do not match")
    monkeypatch.setattr(pipeline, "main", Mock(side_effect=fault))
    assert CliRunner().invoke(app, ["finetune"]).exception is fault


def test_the_mark_that_notepad_puts_before_a_text_is_not_read(tmp_path):
    text, plan = tmp_path / "text.txt", tmp_path / "plan.json"
    text.write_text("w5 w6", encoding="utf-8-sig")
    plan.write_text('{"linear": 0}', encoding="utf-8-sig")
    assert read_texts([text]) == list(load_file("files", text)["text"]) == ["w5 w6"]
    assert read_plan_file(plan) == {"linear": 0}
