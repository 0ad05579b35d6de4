"""`--help` of every recipe, as a script and as a command: all options, each once, in groups."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_linattn.cli import app
from hf_linattn.training import pipeline
from hf_linattn.training.arguments import DISTILLATION, FINETUNING
from hf_linattn.training.arguments.help import GROUPS, ORDER, help_text
from recipes import pretrain

RECIPES = sorted(path.stem for path in Path(pretrain.__file__).parent.glob("*.py"))
KINDS = {"finetune": FINETUNING, "distill": DISTILLATION, "pretrain": (pretrain.PretrainArguments,)}


def check(printed: str, kinds) -> None:
    names = [f.name for kind in kinds for f in dataclasses.fields(kind) if f.init]
    assert sorted(re.findall(r"^  --(\w+)", printed, flags=re.MULTILINE)) == sorted(names)
    assert "Usage" in printed and len(re.findall(r"^\w[^:\n]*.*:$", printed, flags=re.MULTILINE)) >= 4


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_a_recipe_prints_every_option_in_groups(monkeypatch, capsys, recipe, flag):
    script = importlib.import_module(f"recipes.{recipe}")
    monkeypatch.setattr(sys, "argv", [recipe, flag])
    run = script.main if recipe == "pretrain" else lambda: pipeline.main([flag], KINDS[recipe], recipe)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
    check(capsys.readouterr().out, KINDS[recipe])


@pytest.mark.parametrize("name", ["finetune", "distill"])
def test_a_command_prints_the_options_of_its_recipe(name):
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    check(result.output, KINDS[name])


def test_every_group_of_the_help_has_options_and_a_percent_sign_is_printed_as_it_is():
    printed = help_text("distill", DISTILLATION)
    for title in ORDER:
        assert f"\n{title}:\n  --" in printed, title
    assert set(GROUPS) <= set(ORDER) and "%%" not in printed and "%(" not in printed
    option = dataclasses.field(default=1, metadata={"help": "By 20 % or 30%% at most, of %s."})
    kind = dataclasses.make_dataclass("RecipeArguments", [("share", int, option)])
    assert "By 20 % or 30% at most, of %s. Default: 1." in help_text("p", [kind])


@pytest.mark.parametrize("name", ["max_steps", "push_to_hub"])
def test_what_a_recipe_does_not_take_says_why(name):
    printed = help_text("distill", DISTILLATION)
    assert printed.index(ORDER[-1]) < printed.index(f"--{name} ")


def test_requests_to_the_hub_are_no_lines_of_the_log(monkeypatch, tmp_path):
    names = "hf_linattn.training", "httpx", "httpx2"  # the last two: of older and of newer huggingface_hub
    monkeypatch.setattr(pipeline, "prepare", lambda *run: run)
    monkeypatch.setattr(
        pipeline, "carry_out", lambda run, console: [logging.getLogger(x).isEnabledFor(logging.INFO) for x in names]
    )
    flags = ["--model_name_or_path", "me/model", "--mechanism", "linear", "--output_dir", str(tmp_path)]
    assert pipeline.main(flags, FINETUNING, "finetune") == [True, False, False]
