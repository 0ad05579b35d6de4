"""The command line of a recipe: a YAML file as flags, options that are not known, values that transformers refuses."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from hf_linattn.config import require
from hf_linattn.errors import HfLinattnError, OptionError
from hf_linattn.mechanism_table import with_option
from hf_linattn.reading import one_line

SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where PyYAML has libyaml


class ConfigLoader(SAFE_LOADER):
    """Reads YAML in which no name stands twice: of two values one would be lost."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


@contextmanager
def refusing(flags: Sequence[str]) -> Iterator[None]:
    """Turn what argparse and transformers' TrainingArguments raise for these flags into `OptionError`, in one line.

    Some of them say a value and not whose it is; the option is added.
    """
    try:
        yield
    except HfLinattnError:
        raise
    except argparse.ArgumentError as error:
        raise OptionError(str(error)) from error
    except (ValueError, TypeError, ImportError, OSError) as error:
        said = one_line(error)
        given = [(flag[2:], value) for flag, value in pairwise(flags) if flag.startswith("--")]
        if isinstance(error, json.JSONDecodeError):
            named = [f"{name}={value}" for name, value in given if value == error.doc]
        else:
            said_of = [(name, value) for name, value in given if len(value) > 4 and value in said and name not in said]
            named = [f"{name}={value}" for name, value in said_of]
        source = f" ({', '.join(named)})" if named else ""
        raise OptionError(f"the options of the training do not fit together: {said}{source}; change one") from error


def plain_name(flag: str) -> str:
    """Return the name of the option that a flag sets.

    >>> plain_name("--learning-rate=1e-3")
    'learning_rate'
    """
    return flag.lstrip("-").partition("=")[0].replace("-", "_")


def unknown_option(name: object, known: set[str], of_distill: Set[str] = frozenset()) -> OptionError:
    """Name the nearest options; all of them would be a page. of_distill: those that `distill` has beside."""
    plain = plain_name(str(name))
    if plain in of_distill:
        return OptionError(f"unknown option {name!r}; it is one of the recipe distill, in place of finetune")
    if "mechanism_options" in known and with_option(plain):
        shown = json.dumps({plain: "..."})
        return OptionError(f"unknown option {name!r}; it is one of a mechanism: give mechanism_options '{shown}'")
    nearest = difflib.get_close_matches(plain, known, n=3)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    return OptionError(f"unknown option {name!r}{hint} (--help lists them all)")


def unread_word(word: str, flags: Sequence[str], known: set[str], of_distill: Set[str]) -> OptionError:
    """Say why no option takes a word of the command line: one before it has its value, or none has this name."""
    option = ""
    values: list[str] = []
    for part in flags:
        if part.startswith("--"):
            option, values = plain_name(part), []
            continue
        values.append(part)
        if part == word and option and len(values) == 2:  # what is left over begins with a second value
            return OptionError(f"{option} must be one value, got {values}")
    return unknown_option(word, known, of_distill)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=ConfigLoader)
    except UnicodeDecodeError as error:
        raise OptionError(f"the configuration file {str(path)!r} is not UTF-8 ({error}); save it as UTF-8") from error
    except (OSError, yaml.YAMLError) as error:
        raise OptionError(f"the configuration file {str(path)!r} cannot be read: {one_line(error)}") from error
    require(str(path), content, isinstance(content, Mapping), "a mapping of option names to values")
    return dict(content)


def flags_of(options: Mapping[str, Any], known: set[str], of_distill: Set[str] = frozenset()) -> list[str]:
    """Turn options into flags; several values come as a list, a tuple, a range or a set."""
    flags: list[str] = []
    for name, value in options.items():
        if name not in known:
            raise unknown_option(name, known, of_distill)
        if value is False and name.endswith("_strategy"):
            value = "no"  # which YAML reads as False
        if value is not None:
            value = sorted(value) if isinstance(value, Set) else value
            several = isinstance(value, Sequence) and not isinstance(value, str)
            data = several and any(isinstance(v, Mapping) for v in value)  # one value, not several
            values = value if several and not data else [value]
            flags += [f"--{name}", *(json.dumps(v) if data or isinstance(v, Mapping) else str(v) for v in values)]
    return flags
