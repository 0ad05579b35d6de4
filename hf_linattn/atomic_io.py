"""Atomic file writes: a reader sees the old file or the new one, never half of one. Where files can be written."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_writable(folder: Path) -> bool:
    """Return whether a folder can be written to, or one that is not there yet be made."""
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.exists(place))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def write_whole(path: Path, write: Callable[[Path], Any]) -> Path:
    """Let `write` fill a temporary file beside `path`, then put it in its place, whole or not at all.

    The file can be read by whom the umask lets, whatever `write` made of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        mode = mode_of_new_files(temporary)
        write(temporary)
        put_in_place(temporary, path, mode)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def mode_of_new_files(path: Path) -> int:
    """Make an empty file, and return the mode that the umask gives it."""
    path.touch()
    return stat.S_IMODE(path.stat().st_mode)


def put_in_place(temporary: Path, path: Path, mode: int) -> None:
    """Move a file to `path` with this mode: safetensors writes files that their owner alone can read."""
    if stat.S_IMODE(temporary.stat().st_mode) != mode:
        temporary.chmod(mode)
    os.replace(temporary, path)


def write_text(path: Path, text: str) -> Path:
    """Write a text file, whole or not at all."""
    return write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: Any, indent: int = 1, sort_keys: bool = False) -> Path:
    """Write a JSON file, whole or not at all."""
    return write_text(path, json.dumps(data, indent=indent, sort_keys=sort_keys) + "\n")
