"""Atomic file writes: a reader sees the old file or the new one, never half of one. Where files can be written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_writable(folder: Path) -> bool:
    """Return whether a folder can be written to, or one that is not there yet be made."""
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.exists(place))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def write_whole(path: Path, write: Callable[[Path], Any]) -> Path:
    """Let `write` fill a temporary file beside `path`, then put it in its place, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a text file, whole or not at all."""
    return write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: Any, indent: int = 1, sort_keys: bool = False) -> Path:
    """Write a JSON file, whole or not at all."""
    return write_text(path, json.dumps(data, indent=indent, sort_keys=sort_keys) + "\n")
