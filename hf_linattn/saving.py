"""`save_pretrained` of models that hold patched attention: marked as they are, and in place whole or not at all.

transformers writes config.json before the weights, and the config decides what the weights compute. A save that was
killed in between would pair two models, so the files are written to a folder of their own and moved into place at the
end, the config last; while they are moved the config in place says so, and loads as a `CheckpointError`.

transformers has no seam for this, nor one by which a part of a model could mark the config of the whole: importing
the library therefore wraps `PreTrainedModel.save_pretrained`. Models that have nothing to do with this library are
saved as ever.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from . import saved_config
from .atomic_io import mode_of_new_files, put_in_place, write_text
from .attention_call import mechanism_of
from .attention_modules import cross_attention_modules, self_attention_modules
from .config import make_config
from .errors import PatchError
from .patching import is_patched, patched_parts
from .pinning import MOVED
from .plan import PatchConfig
from .positions.parts import positions_of_parts

PLAIN_SAVE = PreTrainedModel.save_pretrained
SIGNATURE = inspect.signature(PLAIN_SAVE)
UPLOAD = "_upload_modified_files"  # the method of a model with which its save ends where push_to_hub is true
_SAVING: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()  # a save changes model and config
DISTRIBUTED = r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"


@functools.wraps(PLAIN_SAVE)
def save_pretrained(self: PreTrainedModel, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
    """Save a model so that it loads as what it computes; see transformers for the arguments.

    Raises:
        PatchError: the model is a part, with a config of its own, of one that is patched as a whole; the positions of
            a part were extended, which the config of the whole cannot say; attention layers were taken out, put in or
            moved since the model was patched.
        UnsupportedModelError: no Auto class would load it, as its config class is none that `AutoConfig` knows.
    """
    folder = Path(save_directory)
    if not (is_patched(self) or is_marked(folder)) or folder.is_file():
        with positions_of_parts(self):
            return PLAIN_SAVE(self, save_directory, *args, **kwargs)
    call = SIGNATURE.bind(self, save_directory, *args, **kwargs)
    if call.arguments.get("push_to_hub"):
        call.arguments.setdefault("kwargs", {}).setdefault("repo_id", folder.name)
    with _SAVING.setdefault(self, threading.RLock()):
        _save(call, folder)


def _save(call: inspect.BoundArguments, folder: Path) -> None:
    """Save a patched model, or one in place of a patched one; no other thread saves it meanwhile."""
    model = call.arguments["self"]
    described = describe_patches(model)
    if described is not None:
        saved_config.require_registered(model.config)
    with positions_of_parts(model), _marked(model, described):
        if call.arguments.get("distributed_checkpoint"):  # written by many processes at once, to go on training
            return PLAIN_SAVE(*call.args, **call.kwargs)
        with _whole(model, folder, call.arguments.get("variant")) as aside:
            call.arguments["save_directory"] = aside
            PLAIN_SAVE(*call.args, **call.kwargs)


def install() -> None:
    """Have every transformers model be saved by `save_pretrained` of this module."""
    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]


def describe_patches(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return what a config has to say of a model: the JSON form of its patch, or of its parts'; None if unpatched."""
    patches = patched_parts(model)
    for part, patch in patches.values():
        require_places(part, patch.config)
        require_options(part, patch.config)
    parts = {path: patch.config.to_dict() for path, (_, patch) in patches.items()}
    if parts:
        return parts[""] if "" in parts else {saved_config.PARTS: parts}
    if not is_patched(model):
        return None
    if not isinstance(model.config, saved_config.LinearizedConfigMixin):
        raise PatchError(
            f"{type(model).__name__} is part of a model that is patched as a whole, and its own config does not say"
            " so; save the whole, or unpatch_model(whole), patch_model(part, ...) and save the part"
        )
    require_places(model, PatchConfig.from_dict(model.config.hf_linattn))
    return model.config.hf_linattn


def require_places(model: PreTrainedModel, config: PatchConfig) -> None:
    """Raise `PatchError` unless each attention layer has the mechanism that a loaded model would have there."""
    served = [(self_attention_modules, config)]
    served += [] if config.cross is None else [(cross_attention_modules, config.cross)]
    for find, plan in served:
        found = [mechanism_of(module) for module in find(model).values()]
        places = [None if mechanism is None else (mechanism.layer.index, mechanism.config) for mechanism in found]
        if places != [(i, plan.layers.get(i, make_config("softmax", {}))) for i in range(plan.num_layers)]:
            raise PatchError(f"the attention layers of {type(model).__name__} {MOVED}")


def require_options(model: PreTrainedModel, config: PatchConfig) -> None:
    """Raise `PatchError` where options of mechanisms were changed since they were made, of which its config is."""
    said = vars(model.config).get("hf_linattn")
    if said is not None and said != config.to_dict():
        raise PatchError(
            f"options of the mechanisms of {type(model).__name__} were changed after patch_model, which a saved model"
            " would not say; unpatch_model(model), and patch it with the new options"
        )


def is_marked(folder: Path) -> bool:
    """Whether the folder has a checkpoint of this library."""
    try:
        data = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: no text, or no JSON
        return False
    return isinstance(data, dict) and data.get("model_type") == saved_config.MODEL_TYPE


@contextmanager
def _marked(model: PreTrainedModel, described: dict[str, Any] | None) -> Iterator[None]:
    """Have the config of a model say for a while what it has, and mark it where its own patch does not."""
    config: Any = model.config
    if described is None:
        yield
        return
    by_patch = isinstance(config, saved_config.LinearizedConfigMixin)
    before = vars(config).get(saved_config.MODEL_TYPE)  # such as EncoderDecoderConfig copies from the config of a part
    if not by_patch:
        saved_config.mark_config(config, described)
    vars(config)[saved_config.MODULES] = saved_config.modules_of(model)
    try:
        yield
    finally:
        del vars(config)[saved_config.MODULES]
        if by_patch:  # transformers has put the name of the model's class there
            config.architectures = saved_config.own_names(config.architectures)
        else:
            saved_config.unmark_config(config)
            vars(config).update({} if before is None else {saved_config.MODEL_TYPE: before})


@contextmanager
def _whole(model: PreTrainedModel, folder: Path, variant: str | None) -> Iterator[Path]:
    """Give a folder beside the old files to write to, and put what was written in their place if all went well.

    That is before an upload, which may fail, and uploads from there.
    """
    _clear(folder)
    aside = folder / f".{os.getpid()}.{socket.gethostname()}.saving"
    aside.mkdir(parents=True, exist_ok=True)
    unfinished = json.dumps(saved_config.unfinished(model.config), indent=2) + "\n"
    before = model._get_files_timestamps(folder)

    def upload(working_dir: Any, repo_id: str, files_timestamps: Any, **options: Any) -> Any:
        _put_in_place(aside, folder, variant, unfinished)
        shutil.rmtree(aside)
        return type(model)._upload_modified_files(model, folder, repo_id, before, **options)

    vars(model)[UPLOAD] = upload
    try:
        yield aside
        _put_in_place(aside, folder, variant, unfinished)
    finally:
        del vars(model)[UPLOAD]
        shutil.rmtree(aside, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Remove what saves of processes that were killed have left."""
    for left in folder.glob(f".*.{socket.gethostname()}.saving"):
        process = left.name.split(".")[1]
        if Path("/proc").is_dir() and process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)


def _put_in_place(aside: Path, folder: Path, variant: str | None, unfinished: str) -> None:
    """Move files into place; where a config is among them, it comes last, and `unfinished` stands in for it."""
    written = {path.relative_to(aside) for path in aside.rglob("*") if path.is_file()}
    if not written:  # all was put in place before an upload
        return
    config, mode = Path(CONFIG_NAME), mode_of_new_files(aside / "unfinished")
    if config in written:
        if (folder / config).exists():
            os.replace(write_text(aside / "unfinished", unfinished), folder / config)
        for old in folder.iterdir():
            if _is_weights(old.name, variant) and Path(old.name) not in written:
                old.unlink(missing_ok=True)
    for path in sorted(written, key=lambda path: (path == config, path)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        put_in_place(aside / path, folder / path, mode)


def _is_weights(name: str, variant: str | None) -> bool:
    """Whether a file is one of the weights, or their index, that a save with this variant replaces.

    Shards of a distributed checkpoint are: as long as there is one, transformers loads nothing else.
    """
    kind = "" if variant is None else re.escape(f".{variant}")
    whole = rf"model{kind}(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index{kind}\.json"
    return bool(re.fullmatch(rf"{whole}|{DISTRIBUTED}", name))
