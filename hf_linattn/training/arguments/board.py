"""The board of the recipes: rows of options, each a conversion of a model whose own file has the other options."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from hf_linattn.config import require, require_known
from hf_linattn.errors import OptionError
from hf_linattn.recipe_files import PREFIX, locate
from hf_linattn.training.arguments.flags import read_mapping

YAML_SUFFIXES = (".yaml", ".yml")
MODELS = "models"  # entry of a row: the models that have it on their board -> what is different there
PRIVATE = "_"  # begins the name of what rows share and is no row
# a command for the control has its own values of these
OF_ONE_RUN = frozenset({"row", "output_dir", "overwrite_output_dir", "resume_from_checkpoint"})
# where the text comes from: one kind of source among the flags takes the place of the other in the file
DATA_SET = frozenset({"dataset_name", "dataset_config_name"})
FILES = frozenset({"train_file", "validation_file", "test_file"})
# what is of the file's mechanism: a row that names another one, or a plan, has its own of these
OF_ONE_MECHANISM = frozenset({"mechanism", "plan", "mechanism_options", "window_dropout"})


class CommandLine:
    """`[config.yaml] [--flag value ...]`, whose file may be that of a model on a board: `--row` then chooses a row.

    Args:
        argv: the arguments; `recipe:NAME` is a file, too. `row` and `board` may be among the flags or in the file.
    """

    def __init__(self, argv: Sequence[str]):
        given = bool(argv) and (argv[0].startswith(PREFIX) or argv[0].endswith(YAML_SUFFIXES)) and argv[0][:2] != "--"
        self.file = locate(argv[0]) if given else None
        self.flags = list(argv[given:])
        self.shared = {} if self.file is None else read_mapping(self.file)
        parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
        for name in ("row", "board"):
            parser.add_argument(f"--{name}", default=self.shared.get(name))
        chosen, _ = parser.parse_known_args(self.flags)
        self.row: str | None = chosen.row
        self.board: str | None = chosen.board

    @cached_property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of the board, by name; none without a board."""
        content = {} if self.board is None else read_mapping(locate(self.board))
        for name, row in content.items():
            require(f"{name} of {self.board}", row, isinstance(row, Mapping), "a mapping of option names to values")
        return {name: row for name, row in content.items() if not name.startswith(PRIVATE)}

    def options(self) -> dict[str, Any]:
        """Return the options of the file, those of the chosen row over them, without a source that flags replace."""
        given = names_in(self.flags)
        replaced = (DATA_SET if given & FILES else frozenset()) | (FILES if given & DATA_SET else frozenset())
        return {name: value for name, value in self._options().items() if name not in replaced}

    def _options(self) -> dict[str, Any]:
        if self.row is None:
            return self.shared
        if self.board is None:
            raise OptionError(f"row={self.row!r} needs a board; name its file, as --board recipes/board.yaml")
        return self.options_of(self.row)

    def options_of(self, row: str) -> dict[str, Any]:
        """Return the options of the file, those of a row over them.

        What a row sets to null is left out; its name is put behind the `output_dir` of the file. A row of another
        mechanism than the file's takes none of `OF_ONE_MECHANISM` from there.

        Raises:
            UnknownNameError: the board has no such row.
        """
        require_known("row", row, self.rows)
        own = dict(self.rows[row])
        own |= (own.pop(MODELS, None) or {}).get(self.file and self.file.stem) or {}
        folders = {"output_dir": f"{self.shared['output_dir']}-{row}"} if "output_dir" in self.shared else {}
        merged = self._inherited(own) | folders | own
        return {name: value for name, value in merged.items() if value is not None}

    def _inherited(self, own: Mapping[str, Any]) -> dict[str, Any]:
        theirs, chosen = ((options.get("mechanism"), options.get("plan")) for options in (self.shared, own))
        left_out = OF_ONE_MECHANISM if any(chosen) and chosen != theirs else frozenset()
        return {name: value for name, value in self.shared.items() if name not in left_out}

    def on_board(self) -> list[str]:
        """Return the rows that the model of the file has on its board, those with a control of their own first."""
        model = self.file and self.file.stem
        names = [name for name, row in self.rows.items() if model in (row.get(MODELS) or {})]
        return sorted(names, key=lambda name: "control_dir" in self.options_of(name))

    def command_for(self, output_dir: str, program: str, ignored: Collection[str]) -> str | None:
        """Return the command of the row that writes to a folder, with the flags given here; None if there is none.

        Args:
            program: how it is started. ignored: options that the row has values of its own for.
        """
        for row in self.rows:
            if self.options_of(row).get("output_dir") == output_dir:
                flags = without(self.flags, OF_ONE_RUN.union(ignored))
                return f"{program} {shlex.join([str(self.file), '--row', row, *flags])}"
        return None


def names_in(flags: Sequence[str]) -> frozenset[str]:
    """Return the names of the options that are given.

    >>> sorted(names_in(["--seed", "1", "--block-size=128"]))
    ['block_size', 'seed']
    """
    return frozenset(flag[2:].partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--"))


def without(flags: Sequence[str], names: Collection[str]) -> list[str]:
    """Return flags without these options and their values.

    >>> without(["--seed", "1", "--learning-rates", "1e-3", "3e-3", "--block_size=128"], {"learning_rates"})
    ['--seed', '1', '--block_size=128']
    """
    kept, keeps = [], True
    for flag in flags:
        if flag.startswith("--"):
            keeps = names_in([flag]).isdisjoint(names)
        if keeps:
            kept.append(flag)
    return kept
