"""A Trainer's checkpoints on disk: which of them were written to their end, and where the training had come to."""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hf_linattn.atomic_io import write_json

logger = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state.json"  # what transformers writes last into a checkpoint
BEST = "best_model_checkpoint"  # in it
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model.bin",
    "adapter_model.bin", "pytorch_model_fsdp*", "global_step*",
)  # fmt: skip
OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer_*", "global_step*")
SHARDS = ("pytorch_model_fsdp_*", "optimizer_*")  # folders that torch's distributed checkpoint writes
ZIPPED = (".pt", ".pth", ".bin")  # as torch.save writes them, with a checksum for each part


def last_complete_checkpoint(folder: Path, processes: int = 1) -> str | None:
    """Return the newest checkpoint in a folder that was written to its end, or None; all others are passed over.

    Every file is read: a machine that stops, or a disk that is full, leaves files that are empty, short or missing.
    A checkpoint also needs the one that it names as the best so far, whose weights end the training. It names it by
    its path, which is written anew where the folder was moved.

    Args:
        processes: that take part in the training; each has its own random state.
    """
    matches = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*")]
    found = sorted(((int(match[1]), path) for match, path in matches if match is not None), reverse=True)
    for _, path in found:
        fault = next(faults(path, processes), None)
        if fault is None:
            _name_best(path)
            return str(path)
        logger.warning("%s is half-written (%s) and not used", path, fault)
    return None


def faults(path: Path, processes: int = 1) -> Iterator[str]:
    """Yield what is wrong with a checkpoint: files that are missing or damaged."""
    if not (path / TRAINER_STATE).is_file():
        yield f"no {TRAINER_STATE}"
        return
    yield from weight_faults(path)
    names = ["rng_state.pth"] if processes == 1 else [f"rng_state_{i}.pth" for i in range(processes)]
    sharded = any(path.glob("global_step*"))  # DeepSpeed's, which may hold the scheduler too
    for name in names if sharded else [*names, "scheduler.pt"]:
        if not (path / name).is_file():
            yield f"no {name}"
    if not any(any(path.glob(name)) for name in OPTIMIZER):
        yield f"no {OPTIMIZER[0]}"
    yield from damaged(path)
    try:
        best = best_checkpoint(path)
    except (ValueError, OSError):
        return  # named above
    if best not in (None, path):
        yield from (f"its best checkpoint {best} has {fault}" for fault in weight_faults(best))
        yield from (f"of its best checkpoint, {fault}" for fault in damaged(best))


def best_checkpoint(path: Path) -> Path | None:
    """Return the best checkpoint so far that one beside it names, wherever both were written; None: there is none."""
    best = read_state(path).get(BEST)
    return None if best is None else path.with_name(Path(best).name)


def weight_faults(path: Path) -> Iterator[str]:
    """Yield which weights a checkpoint lacks."""
    if not any(any(path.glob(name)) for name in WEIGHTS):
        yield "no adapter_model.safetensors" if (path / "adapter_config.json").is_file() else f"no {WEIGHTS[0]}"
    if any(path.glob("adapter_model.*")) and not (path / "adapter_config.json").is_file():
        yield "no adapter_config.json"
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):  # the last three: JSON that is no index
            yield f"{index.name} is damaged"
            return
        yield from (f"no {file}" for file in sorted(files) if not (path / file).is_file())
    for pattern in SHARDS:
        yield from (f"no .metadata in {shards.name}" for shards in path.glob(pattern) if _is_unfinished(shards))


def damaged(path: Path) -> Iterator[str]:
    """Yield which files in a checkpoint cannot be read to their end."""
    for file in sorted(path.rglob("*")):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):  # compares the length with that in the header
                    pass
            elif file.suffix in ZIPPED and file.is_file():
                with zipfile.ZipFile(file) as parts:
                    part = parts.testzip()
                if part is not None:
                    raise zipfile.BadZipFile(f"wrong checksum of {part}")
            elif file.name == TRAINER_STATE:
                read_state(path)
            elif file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
        except (SafetensorError, zipfile.BadZipFile, ValueError, OSError) as error:
            yield f"{file.name} is damaged: {error}"


def read_state(path: Path) -> dict[str, Any]:
    """Return the Trainer's state in a checkpoint; `ValueError` if it is none."""
    state = json.loads((path / TRAINER_STATE).read_text(encoding="utf-8"))
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        raise ValueError("it has no global_step")
    return state


def has_ended(state: dict[str, Any], max_steps: int) -> bool:
    """Return whether a training had taken its last step when this state was saved, or had been stopped before."""
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {})
    return state["global_step"] >= max_steps or bool(control.get("args", {}).get("should_training_stop"))


def _name_best(path: Path) -> None:
    """Have a checkpoint name its best one where that lies now."""
    best, state = best_checkpoint(path), read_state(path)
    if best is not None and str(best) != state[BEST]:
        write_json(path / TRAINER_STATE, state | {BEST: str(best)}, indent=2, sort_keys=True)


def _is_unfinished(shards: Path) -> bool:
    """Return whether a folder of torch's distributed checkpoint lacks the file that is written last."""
    return shards.is_dir() and not ((shards / ".metadata").is_file() and (shards / ".metadata").stat().st_size)
