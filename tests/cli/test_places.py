"""What every command says of a file of text, and of a model, where there is nothing."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from hf_linattn.cli import app
from tests.models import make_model

RECIPE = ("--mechanism", "linear", "--output_dir", "out", "--use_cpu", "True")


def refuse(*arguments: str) -> str:
    """Return the message of a command that is refused."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    return result.output


ABSENT = {
    ("eval", "whole", "none.txt"): "files",
    ("eval", "whole", "none.txt", "--suite", "language"): "files",
    ("convert", "whole", "out", "--plan", "auto", "--text", "none.txt"): "text",
    ("convert", "whole", "out", "--mechanism", "linear", "--calibrate", "none.txt"): "calibrate",
    ("advise", "whole", "--text", "none.txt"): "text",
    ("compare", "linear", "--model", "whole", "--text", "none.txt"): "text",
    ("finetune", "--model_name_or_path", "whole", "--test_file", "none.txt", *RECIPE): "test_file",
}


@pytest.mark.parametrize("arguments", ABSENT, ids=" ".join)
def test_a_text_file_that_is_absent_is_named_alike_before_a_model_is_read(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", Mock(side_effect=AssertionError))
    make_model("gpt2").config.save_pretrained("whole")
    expected = f"DataError: {ABSENT[arguments]}='none.txt' does not exist; give the path of a file\n"
    assert refuse(*arguments) == expected


LINEAR = ("--mechanism", "linear")
NOWHERE = [
    ("{here}/whoel", "model", ("convert", "NAME", "out", *LINEAR)),
    ("a/b/c", "model", ("convert", "NAME", "out", *LINEAR)),
    ("../{there}/whoel", "model", ("eval", "NAME", "text.txt")), ("./nothing", "model", ("bench", "NAME")),
    ("{here}/whoel", "model_name_or_path", ("distill", "--model_name_or_path", "NAME", *RECIPE)),
    ("{here}/whoel", "tokenizer_name",
     ("distill", "--model_name_or_path", "whole", "--tokenizer_name", "NAME", *RECIPE)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "option", "command"), NOWHERE)
def test_a_path_that_leads_nowhere_is_said_once_with_the_folder_that_is_near(
    tmp_path, monkeypatch, name, option, command
):
    monkeypatch.chdir(tmp_path)
    make_model("gpt2", n_positions=512).save_pretrained("whole")
    Path("text.txt").write_text("w5 w6")
    name = name.format(here=tmp_path, there=tmp_path.name)
    near = f"did you mean {name.replace('whoel', 'whole')!r}?"
    remedy = near if "whoel" in name else "give a folder with a saved model, or the name of one on the Hub"
    said = refuse(*(name if word == "NAME" else word for word in command))
    assert said == f"CheckpointError: {option}={name!r}: there is no such folder; {remedy}\n"
