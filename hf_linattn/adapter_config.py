"""What marks a folder as an adapter of this library, for what reads it without importing PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .json_files import read_object

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
SAVE_AGAIN = "save the adapter again"
# the type of PEFT; PEFT fails on one that it does not know, with this name in its message
ADAPTER_TYPE = "an adapter of hf_linattn: import hf_linattn.training.adapter_files, or load it with its load_adapter"


def read_adapter_config(folder: Path) -> Mapping[str, Any] | None:
    """Return the config of an adapter of this library in a folder; None where there is none.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        return None
    config = read_object(file, SAVE_AGAIN)
    return config if config.get("peft_type") == ADAPTER_TYPE else None


def base_of(option: str, name: str) -> str | None:
    """Return the name of the model that an adapter of PEFT was made for; None where there is no adapter.

    Args:
        option: how errors call what names it. name: a folder, or a name on the Hub.

    Raises:
        CheckpointError: the file is damaged, or says no base.
    """
    from transformers.utils import find_adapter_config_file

    file = find_adapter_config_file(name)
    if file is None:
        return None
    config = read_object(Path(file), SAVE_AGAIN)
    if not (base := config.get("base_model_name_or_path")):
        raise CheckpointError(
            f"{option}={name!r} is an adapter that names no base; put the path or the name of the model that it was"
            f" trained on into {CONFIG_FILE}, as base_model_name_or_path"
        )
    return str(base)
