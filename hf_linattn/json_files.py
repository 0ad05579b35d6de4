"""JSON files that hold an object, as configs and records do: read, or refused by their path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError


def read_object(file: Path, remedy: str) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        CheckpointError: it is not UTF-8, not JSON or no object; the message ends in the remedy.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of the text or of JSON
        raise CheckpointError(f"{str(file)!r} is damaged ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(file)!r} is damaged (a JSON {type(content).__name__}, not an object); {remedy}")
    return content
