"""What a training keeps beside its checkpoints."""

from __future__ import annotations

import os
import signal

import pytest
from datasets import Dataset

from hf_linattn.errors import OptionError
from hf_linattn.training.pretraining.kept import alone_in, same_run_or_new, text_with_documentation


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


def test_two_processes_do_not_train_in_one_folder(tmp_path, monkeypatch):
    """The folder is free again after the block of the first one, or when it dies, even by kill -9."""
    monkeypatch.setattr("hf_linattn.training.folder_lock.LOCK_SECONDS", 0.0)
    folder, (reading, writing) = str(tmp_path / "kept"), os.pipe()
    child = os.fork()
    if not child:
        try:
            with alone_in(folder):
                os.write(writing, b"1")
                signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1), "the first process could not take the folder"
        with pytest.raises(OptionError, match=r"^checkpoint_dir=.* is written to by another process .* another check"):
            alone_in(folder)
        with alone_in(None):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for _ in range(2):
        with alone_in(folder):
            pass
