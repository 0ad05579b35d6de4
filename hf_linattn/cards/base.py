"""What a card takes from the model that was converted: its name on the Hub, its licence, its language."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import cached_file

from ..config import require
from ..reading import one_line

logger = logging.getLogger(__name__)

CARD = "README.md"
TAKEN = ("license", "license_name", "license_link", "language")  # fields of the metadata that hold for the result, too
LICENCE_FILES = ("LICENSE", "LICENSE.md", "LICENSE.txt")
IN_A_FILE = "other"  # the Hub's name for a licence that stands in a file


@dataclass(frozen=True)
class Base:
    """The model that was converted.

    Attributes:
        title: its name without a path. hub_id: its name on the Hub; None where that is not known.
        metadata: fields of its card that hold for the converted model.
        licence: a file of its folder; None: it has none.
    """

    title: str
    hub_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    licence: Path | None = None


def read_base(name: str, hub_id: str | None = None) -> Base:
    """Read what a card says of the base, from its folder or from its card on the Hub.

    Args:
        name: a folder, or a name on the Hub. hub_id: its name on the Hub, where `name` is a folder.

    Raises:
        OptionError: `hub_id` is no such name.
    """
    check_hub_id(hub_id)
    folder = Path(name)
    if not folder.is_dir():
        own = name if is_hub_id(name) else None
        return Base((hub_id or name).rpartition("/")[2], hub_id or own, _read_card(_fetch_card(name)))
    metadata = _read_card(folder / CARD)
    licence = next((folder / file for file in LICENCE_FILES if (folder / file).is_file()), None)
    if licence is not None and "license" not in metadata:
        metadata |= {"license": IN_A_FILE, "license_name": "license-of-the-base-model", "license_link": licence.name}
    return Base((hub_id or folder.resolve().name).rpartition("/")[2], hub_id, metadata, licence)


def is_hub_id(name: str) -> bool:
    """Return whether the Hub takes a name.

    >>> [is_hub_id(name) for name in ("gpt2", "me/gpt2", "./gpt2", "../gpt2", "/models/gpt2")]
    [True, True, False, False, False]
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def check_hub_id(hub_id: str | None) -> None:
    """Raise `OptionError` unless the name of a base is one on the Hub, or absent."""
    valid = hub_id is None or is_hub_id(hub_id)
    require("base_model", hub_id, valid, "a name on the Hub, like gpt2 or HuggingFaceTB/SmolLM2-135M")


def _fetch_card(name: str) -> Path | None:
    """Return the card of a model on the Hub; None where it has none, or cannot be asked, as a warning says."""
    try:
        found = cached_file(
            name, CARD, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
    except OSError as error:
        logger.warning("the card of %s cannot be read (%s), so the new card names no licence", name, one_line(error))
        return None
    return None if found is None else Path(found)


def _read_card(path: Path | None) -> dict[str, Any]:
    """Return what is taken from a card; nothing where there is none, or it cannot be read, as a warning says."""
    if path is None or not path.is_file():
        return {}
    try:
        found = metadata_load(path) or {}
    except (ValueError, yaml.YAMLError) as error:
        logger.warning("%s cannot be read (%s), so the card names no licence; mend it", path, one_line(error))
        return {}
    return {name: found[name] for name in TAKEN if found.get(name)}
