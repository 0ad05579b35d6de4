"""What a run that begins anew deletes in its folder, and what it never touches."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate import PartialState

from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.report import Report
from hf_linattn.training.arguments import parse_arguments
from hf_linattn.training.preparation import prepare
from hf_linattn.training.run_directory import RunDirectory
from tests.models import make_model
from tests.training.test_finetuning import REQUIRED, make_training

OWN = (
    "stages/converted.json", "adapter/own.txt", "report.json", "report.md", "evaluation-language.json", "README.md",
    ".eval_results/hf_linattn.yaml",
)  # fmt: skip
OTHERS = ("notes.txt", "data/evaluation.json", "page.html")


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def test_a_run_begun_anew_leaves_no_result_of_the_one_before(tmp_path):
    directory = RunDirectory(tmp_path, make_training(tmp_path))
    directory.open({"seed": 0})
    write(tmp_path, *OWN, *OTHERS)
    directory.open({"seed": 1}, overwrite=True)
    assert not any((tmp_path / name).exists() for name in OWN) and all((tmp_path / name).exists() for name in OTHERS)
    assert directory.finished("recipe") == {"seed": 1}


def test_of_a_folder_that_holds_no_run_nothing_is_deleted(tmp_path):
    write(tmp_path, *OWN, *OTHERS)
    RunDirectory(tmp_path, make_training(tmp_path)).open({"seed": 1}, overwrite=True)
    assert all((tmp_path / name).exists() for name in (*OWN, *OTHERS))


def test_a_run_that_was_killed_in_its_first_write_is_begun_again(tmp_path):
    write(tmp_path, "stages/.123.recipe.json")
    directory = RunDirectory(tmp_path, make_training(tmp_path))
    directory.open({"seed": 1})
    assert directory.finished("recipe") == {"seed": 1}
    write(tmp_path / "other", "stages/converted.json")
    with pytest.raises(OptionError, match="holds stages but no run that could be continued"):
        RunDirectory(tmp_path / "other", make_training(tmp_path / "other")).open({"seed": 1})


def test_two_processes_do_not_run_a_recipe_in_one_folder(tmp_path, monkeypatch):
    """The folder is free again when the first one closes it, or dies, even by kill -9."""
    monkeypatch.setattr("hf_linattn.training.folder_lock.LOCK_SECONDS", 0.0)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            first = RunDirectory(tmp_path, make_training(tmp_path))
            first.open({"seed": 0})
            os.write(writing, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1), "the first process could not open the folder"
    second = RunDirectory(tmp_path, make_training(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    try:
        for overwrite in (False, True):
            with pytest.raises(OptionError, match=r"^output_dir=.* is written to by another process .* give another"):
                second.open({"seed": 0}, overwrite)
            assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    second.open({"seed": 0})
    second.close()
    third = RunDirectory(tmp_path, make_training(tmp_path))
    third.open({"seed": 1}, overwrite=True)
    assert third.finished("recipe") == {"seed": 1}


def test_checkpoints_of_a_stage_whose_run_was_killed_after_its_record_go(tmp_path):
    directory = RunDirectory(tmp_path, make_training(tmp_path))
    directory.open({"seed": 0})
    write(tmp_path, "stages/trained.json", "stages/trained/checkpoint-1/a", "stages/other/checkpoint-1/a")
    directory.close()
    RunDirectory(tmp_path, make_training(tmp_path)).open({"seed": 0})
    assert not (tmp_path / "stages/trained").exists() and (tmp_path / "stages/other/checkpoint-1/a").is_file()


def test_a_stage_without_a_record_of_the_main_process_stops_the_others(tmp_path):
    """As where that process failed in it, or machines do not share the folder."""
    directory = RunDirectory(tmp_path, make_training(tmp_path))
    directory.training = SimpleNamespace(should_save=False, main_process_first=lambda local: nullcontext())
    with pytest.raises(CheckpointError, match=r"has no record of the stage converted: .* that all machines share"):
        directory.once("converted", Mock(side_effect=AssertionError("of the main process alone")))
    write(tmp_path, "stages/converted.json")
    assert directory.once("converted", dict) == {}


@pytest.mark.parametrize("name", ["model_name_or_path", "tokenizer_name", "control_dir"])
@pytest.mark.parametrize("inside", [".", "control"])
def test_a_run_does_not_write_over_what_it_reads(tmp_path, monkeypatch, name, inside):
    monkeypatch.chdir(tmp_path)
    make_model("gpt2").save_pretrained(Path("out", inside))
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    flags = [*REQUIRED, "--use_cpu", "true", "--output_dir", "out/../out", "--overwrite_output_dir", "true"]
    flags += [f"--{name}", str(tmp_path / "out" / inside)] + (["--control", "full"] if name == "control_dir" else [])
    with pytest.raises(OptionError, match=f"output_dir='.*out' holds {name}=.* give another output_dir"):
        prepare(parse_arguments(flags))
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


def test_a_report_that_is_not_there_yet_is_that_of_a_run_which_goes_on(tmp_path):
    RunDirectory(tmp_path, make_training(tmp_path)).open({"seed": 0})
    with pytest.raises(CheckpointError, match="its run is not finished: give the command of its recipe again, which"):
        Report.load(tmp_path)


def test_processes_on_cpus_wait_as_long_as_they_are_told_to(tmp_path, monkeypatch):
    """The time after which a process that waits for the others gives up is that of the process group."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    children = []
    for rank in ("0", "1"):
        children.append(os.fork())
        if not children[-1]:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            PartialState._reset_state()  # that of the tests before
            kept = 1
            try:
                assert make_training(tmp_path, ddp_timeout=77).world_size == 2
                torch.distributed.barrier()  # the first one that ends takes the meeting place of the others with it
                waits = torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout
                kept = int(waits != timedelta(seconds=77))
            finally:
                os._exit(kept)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
