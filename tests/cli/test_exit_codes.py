"""What every command keeps to: exit codes, streams, JSON, completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from safetensors import SafetensorError
from typer.testing import CliRunner

from hf_linattn import evaluation
from hf_linattn.cli import app
from hf_linattn.cli import list as listing
from hf_linattn.cli.common import EXIT_CODES, show
from hf_linattn.command_errors import exit_with_one_line
from tests.helpers import make_tokenizer
from tests.models import make_model

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: object):
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def commands() -> list[tuple[list[str], typer.core.TyperCommand]]:
    """Every command with the words that call it."""
    found, groups = [], [([], typer.main.get_command(app))]
    for words, group in groups:  # which grows
        for name, command in group.commands.items():
            place = groups if hasattr(command, "commands") else found
            place.append(([*words, name], command))
    return found


def test_every_command_takes_json_and_says_what_its_options_are_for():
    assert len(commands()) >= 15
    for words, command in commands():
        assert "--json" in {flag for parameter in command.params for flag in parameter.opts}, words
        assert all(parameter.help for parameter in command.params if parameter.name != "help"), words


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A tiny GPT-2, and the same converted."""
    folder = tmp_path_factory.mktemp("codes")
    make_model("gpt2").save_pretrained(folder / "original")
    make_tokenizer().save_pretrained(folder / "original")
    done = run("convert", folder / "original", folder / "model", "--mechanism", "linear", "--length", 0)
    assert done.exit_code == 0, done.output
    return folder


def test_the_codes_are_those_that_help_and_page_name(place, monkeypatch):
    assert run("list").exit_code == 0
    assert run("list", "hybird").exit_code == 1 and run("env", "--model", "absent/model").exit_code == 1
    assert run("convert", "--nonsense").exit_code == 2

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "rows", interrupt)
    assert run("list").exit_code == 130
    said, page = run("--help").stdout, (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in " ".join(said.split()), code
        assert f"| {code} | {meaning} |" in page, code
    assert set(EXIT_CODES) == {0, 1, 2, 3, 130}


def test_bench_shows_what_was_measured_before_its_time_was_up(place, monkeypatch):
    bench, asked = import_module("hf_linattn.cli.bench"), []
    plain = bench.measure

    def slow_at_the_second(model, lengths, options, speed, sizes):
        plain(model, lengths[:1], options, speed, sizes)
        asked.append(len(speed))
        while True:
            pass

    monkeypatch.setattr(bench, "measure", slow_at_the_second)
    arguments = ["bench", place / "model", "--lengths", "8,16", "--repeats", 1, "--threads", 1]
    result = run(*arguments, "--limit-minutes", 0.05, "--json")
    assert result.exit_code == 3 and asked == [1]
    document = json.loads(result.stdout)
    assert document["stopped"] and [row["length"] for row in document["speed"]] == [8]
    assert "tokens 8, prompt x as fast" in result.stderr and "up after 1 of 2 lengths" in result.stderr


@pytest.mark.parametrize(("lengths", "shown"), [("8,16", [8]), ("16", None)])
def test_bench_shows_what_was_measured_before_memory_ran_out(place, monkeypatch, lengths, shown):
    measure = evaluation.measure_speed

    def small(model, lengths, **options):
        if lengths[0] > 8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2000000000 bytes.")
        return measure(model, lengths, **options)

    monkeypatch.setattr(evaluation, "measure_speed", small)
    result = run("bench", place / "model", "--lengths", lengths, "--repeats", 1, "--json")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("RuntimeError: memory runs out, at a tensor of 2.00 GB; give")
    document = json.loads(result.stdout or "null")
    assert (document and [row["length"] for row in document["speed"]]) == shown
    assert document is None or (document["stopped"] and len(document["memory"]) == 1)


def test_results_go_to_standard_output_and_all_else_to_standard_error(place, tmp_path):
    result = run("convert", place / "original", tmp_path / "out", "--mechanism", "linear", "--length", 8)
    assert "saved to" in result.stdout and "measuring" in result.stderr and "measuring" not in result.stdout
    document = run("convert", place / "original", tmp_path / "json", "--mechanism", "linear", "--length", 8, "--json")
    assert json.loads(document.stdout)["state"]["length"] == 8
    refused = run("convert", place / "original", place / "model", "--mechanism", "linear")
    assert refused.stdout == "" and refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "word", "expected"),
    [("hf-linattn li", 1, {"list"}), ("hf-linattn list gated", 2, {"gated_deltanet"}),
     ("hf-linattn recipes show smollm2-135m-4", 3, {"smollm2-135m-4-heads"}),
     ("hf-linattn convert a b --mechanism perf", 5, {"performer"})],
)  # fmt: skip
def test_a_shell_completes_commands_mechanisms_and_recipes(line, word, expected):
    asked = {"_HF_LINATTN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(word)}
    code = "from hf_linattn.cli import app; app(prog_name='hf-linattn')"
    environment = {**os.environ, **asked, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_what_nobody_reads_is_written_all_the_same(tmp_path, monkeypatch, as_json):
    """A pipe into a command that has ended stops the printing, not what hours have measured."""
    closed = Mock(side_effect=SystemExit(1))
    monkeypatch.setattr("rich.console.Console.print", closed)
    monkeypatch.setattr("typer.echo", lambda text, err=False: None if err else closed())
    with pytest.raises(SystemExit):
        show({"rows": [1]}, as_json, "a table", file=tmp_path / "result.json")
    assert closed.called and json.loads((tmp_path / "result.json").read_text()) == {"rows": [1]}


UNWRITTEN = "[enforce fail at inline_container.cc:672] . unexpected pos 153728 vs 153620"


@pytest.mark.parametrize("error", [SafetensorError("No space left on device"), RuntimeError(UNWRITTEN)])
def test_a_full_disk_ends_a_command_with_one_line(error):
    """What safetensors and torch.save raise there are no OSErrors; any other RuntimeError keeps its traceback."""
    with pytest.raises(SystemExit, match=f"{type(error).__name__}: .*; look at the path, .* space on the disk"):
        with exit_with_one_line():
            raise error
    with pytest.raises(RuntimeError, match="a fault"), exit_with_one_line():
        raise RuntimeError("a fault")
