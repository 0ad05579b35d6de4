"""The output folder of a run: what every finished stage left, so that a rerun goes on where it stopped."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy

from hf_linattn.atomic_io import is_writable, write_json
from hf_linattn.cards import CARD_FILE
from hf_linattn.config import require
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.json_files import read_object
from hf_linattn.reading import one_line
from hf_linattn.report.card import EVAL_RESULTS_FILE
from hf_linattn.training.arguments import Arguments, FinetuningArguments
from hf_linattn.training.folder_lock import LOCK, take_folder
from hf_linattn.training.run_folders import ADAPTER, CONTROL, STAGES, WINDOW
from hf_linattn.training.same_run import DIGESTS, FORMERLY, difference, told_difference

logger = logging.getLogger(__name__)

RECIPE = "recipe"  # the record of the options the run was started with
# what says how good the model of a run is, until another takes its place
RESULTS = ("report.*", "evaluation*.json", CARD_FILE, EVAL_RESULTS_FILE)


class RunDirectory:
    """An output folder in which every finished stage leaves its result, so that a rerun goes on where it stopped.

    Args:
        path: the folder. training: says which process writes and how the others wait for it.
    """

    def __init__(self, path: str | Path, training: FinetuningArguments):
        self.path = Path(path)
        self.training = training
        self.taken: AcquireReturnProxy | None = None

    def check_apart(self, arguments: Arguments) -> None:
        """Raise `OptionError` if a run here would write over the model, the tokenizer or the control that it reads."""
        own, model = self.path.resolve(), arguments.model
        for name, place in {
            "model_name_or_path": model.model_name_or_path, "tokenizer_name": model.tokenizer_name,
            "control_dir": arguments.recipe.control_dir,
        }.items():  # fmt: skip
            if place and (read := Path(place)).exists() and read.resolve().is_relative_to(own):
                raise OptionError(
                    f"output_dir={str(self.path)!r} holds {name}={place!r}, which a run reads and could write over;"
                    " give another output_dir"
                )

    def check(self, overwrite: bool = False, resume: bool = False) -> None:
        """Raise what `open` raises of the folder alone, and write nothing."""
        fits = not self.training.should_save or is_writable(self.path)
        require("output_dir", str(self.path), fits, "the path of a folder that can be made and written to")
        if overwrite or self.finished(RECIPE) is not None:
            return
        if resume:
            raise CheckpointError(
                f"resume_from_checkpoint: {str(self.path)!r} holds no run of this recipe; leave it out"
            )
        content = sorted(filter(self._is_content, os.listdir(self.path))) if self.path.is_dir() else []
        if content:
            raise OptionError(
                f"output_dir={str(self.path)!r} holds {', '.join(content[:3])} but no run that could be continued;"
                " give another output_dir, or --overwrite_output_dir"
            )

    def open(self, options: Mapping[str, Any], overwrite: bool = False, resume: bool = False) -> None:
        """Start a run, or continue the one that was started here with the same options.

        No other process can write to the folder until `close`.

        Raises:
            OptionError: the folder cannot be written to, or holds something else, or a run with other options, or
                another process runs a recipe there.
            CheckpointError: `resume`, but there is nothing to resume.
        """
        with self.training.main_process_first(local=False):
            self.check(overwrite, resume)
            if self.training.should_save:
                self._keep_others_out()
                if overwrite and self._file(RECIPE).is_file():  # folders of others stay
                    self._clear()
            started = self.finished(RECIPE)
            if started is not None:
                self._check_options(started, json.loads(json.dumps(options)))
                logger.info("continuing the run in %s", self.path)
                for record in self.file("", "").glob("*.json"):  # a run may have been killed right after its record
                    self._drop_checkpoints(record.stem)
            else:
                self._begin(options)

    def close(self) -> None:
        """Let another process write to the folder."""
        if self.taken is not None:
            self.taken.lock.release(force=True)
            self.taken = None

    def finished(self, name: str) -> dict[str, Any] | None:
        """Return the recorded result of a stage, or None; a damaged record raises `CheckpointError`."""
        file = self._file(name)
        return read_object(file, "delete it to run that stage again") if file.is_file() else None

    def record(self, name: str, result: Mapping[str, Any]) -> None:
        """Write the result of a stage, whole or not at all, from the main process only."""
        if not self.training.should_save:
            return
        write_json(self._file(name), result)

    def once(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the result of a stage that one process computes while the others wait; recorded, so done once.

        Raises:
            CheckpointError: the main process has left no record: it failed, or wrote to a folder of another machine.
        """
        with self.training.main_process_first(local=False):
            if self.finished(name) is None and self.training.should_save:
                self.record(name, compute())
            result = self.finished(name)
        if result is None:
            raise CheckpointError(
                f"output_dir={str(self.path)!r} has no record of the stage {name}: the main process failed in it, or"
                " wrote to a folder of its own machine; give a folder that all machines share"
            )
        return result

    def finish(self, name: str, result: Mapping[str, Any]) -> None:
        """Record the result of a training stage and drop its checkpoints."""
        self.record(name, result)
        self._drop_checkpoints(name)

    def export_stages(
        self, names: Sequence[str], options: Mapping[str, Any], ignored: Collection[str], command: str | None = None
    ) -> dict[str, Any]:
        """Return the results of finished stages, by name, to a run with these options.

        Args:
            ignored: options that may differ. command: what runs the recipe of this folder, if that is known.

        Raises:
            CheckpointError: a stage is not finished here.
            OptionError: this run had other options, those in `ignored` apart.
        """
        own, results = self.finished(RECIPE), {name: self.finished(name) for name in names}
        for name, result in results.items():
            if own is None or result is None:
                known = "" if command is None else f". Its recipe is run by: {command}"
                raise CheckpointError(
                    f"{str(self.path)!r} has not finished its stage {name}; run the recipe of that folder first, or"
                    f" give another one{known}"
                )
        theirs, own = (
            {name: value for name, value in found.items() if name not in ignored}
            for found in (json.loads(json.dumps(options)), own or {})
        )
        option = difference(own, theirs)
        if option is not None:
            if option in DIGESTS or option in FORMERLY:
                said = f"holds a run {told_difference(option, own, theirs)}"
            else:
                said = f"ran with {option}={own.get(option)!r}, this run has {theirs.get(option)!r}"
            raise OptionError(
                f"{str(self.path)!r} {said}: its {names[0]} does not compare; give another folder, or none"
            )
        return results

    def checkpoints(self, name: str) -> Path:
        """Return the folder for the Trainer's checkpoints of a stage."""
        return self.file(name, "")

    def file(self, name: str, suffix: str) -> Path:
        """Return the path of a stage's file of that kind; `.json` is its result."""
        return self.path / STAGES / f"{name}{suffix}"

    def _file(self, name: str) -> Path:
        return self.file(name, ".json")

    def _is_content(self, name: str) -> bool:
        """Whether an entry of the folder is more than what a run leaves that was killed in its first write."""
        folder = self.path / name
        begun = name == STAGES and folder.is_dir()
        return not (begun and all(file.startswith(".") for file in os.listdir(folder)))

    def _drop_checkpoints(self, name: str) -> None:
        if self.training.should_save:
            shutil.rmtree(self.checkpoints(name), ignore_errors=True)

    def _keep_others_out(self) -> None:
        """Take the folder for this process."""
        try:
            self.taken = self.taken or take_folder("output_dir", self.path)
        except OSError as error:
            raise self._unwritable(error) from error

    def _clear(self) -> None:
        """Delete what a run has left, but for the lock that this process has."""
        for file in chain.from_iterable(map(self.path.glob, RESULTS)):
            file.unlink()
        for folder in (CONTROL, WINDOW, ADAPTER):
            shutil.rmtree(self.path / folder, ignore_errors=True)
        for entry in self.file("", "").iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK:
                entry.unlink()

    def _unwritable(self, error: OSError) -> OptionError:
        return OptionError(
            f"output_dir={str(self.path)!r} cannot be written to: {one_line(error)}; give another path"
        )

    def _begin(self, options: Mapping[str, Any]) -> None:
        """Record the options of a run: the first file in the folder, which `check` may have taken for writable."""
        try:
            self.record(RECIPE, options)
        except OSError as error:
            raise self._unwritable(error) from error

    def _check_options(self, started: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Refuse to continue a run with other options than it was started with."""
        name = difference(started, options)
        if name is not None:
            raise OptionError(
                f"output_dir={str(self.path)!r} holds a run {told_difference(name, started, options)}; give another"
                " output_dir, or --overwrite_output_dir"
            )
