"""Models that a study trains once and later rows read."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedModel


def save_whole(model: PreTrainedModel, folder: Path) -> None:
    """Save a model into a folder that is there whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".saving-") as scratch:
        model.save_pretrained(Path(scratch) / folder.name)
        shutil.rmtree(folder, ignore_errors=True)
        (Path(scratch) / folder.name).rename(folder)
