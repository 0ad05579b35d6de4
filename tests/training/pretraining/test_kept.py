"""What a training keeps beside its checkpoints."""

from __future__ import annotations

import pytest
from datasets import Dataset

from hf_linattn.errors import OptionError
from hf_linattn.training.pretraining.kept import same_run_or_new, text_with_documentation


def test_a_run_that_goes_on_has_the_text_it_began_with(tmp_path):
    given, folder = Dataset.from_dict({"text": ["first"], "module": ["one"]}), str(tmp_path / "kept")
    text = text_with_documentation(given, ["typer"], folder)
    assert text["text"][0] == "first" and len(text) > 5 and text.column_names == ["text"]
    for packages in (["typer"], ["removed_since"]):
        assert text_with_documentation(given, packages, folder)["text"] == text["text"]
    assert text_with_documentation(given, ["typer"], None)["text"] == text["text"]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["text"]


def test_a_run_with_other_options_or_text_is_refused(tmp_path):
    options = {"seed": 0, "train_tokens": 64, "train_digest": "a"}
    same_run_or_new(tmp_path, options)
    same_run_or_new(tmp_path, options)
    with pytest.raises(OptionError, match="holds a run with train_tokens=64, got 65; give another folder"):
        same_run_or_new(tmp_path, options | {"train_tokens": 65})
    with pytest.raises(OptionError, match="holds a run on other content: the training rows were others"):
        same_run_or_new(tmp_path, options | {"train_digest": "b"})
