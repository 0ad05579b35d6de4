"""`hf-linattn push`: upload a converted model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..adapter_config import CONFIG_FILE, WEIGHTS_FILE, read_adapter_config
from ..atomic_io import write_text
from ..errors import CheckpointError
from ..json_files import read_object
from ..reading import reading
from ..training.run_folders import CONTROL, STAGES, WINDOW
from .common import Json, exit_on_error, show

SHARD = "[0-9]" * 5
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# of an earlier push, what transformers would load in place of a new model's weights, and onto them
EARLIER = [WHOLE, INDEX, f"model-{SHARD}-of-{SHARD}.safetensors"]
ADAPTER = [CONFIG_FILE, WEIGHTS_FILE]
# stages and comparison models of a recipe's run; and what a write that was killed left
LEFT_OUT = [*(f"{folder}/**" for folder in (STAGES, CONTROL, WINDOW)), ".[0-9]*"]


def push(
    folder: Annotated[Path, typer.Argument(help="a converted model, or an adapter of one")],
    repository: Annotated[str, typer.Argument(help="user/name on the Hub; made if it is not there")],
    private: Annotated[bool, typer.Option(help="make it private")] = False,
    message: Annotated[str, typer.Option(help="message of the commit")] = "Upload a model converted with hf_linattn",
    as_json: Json = False,
) -> None:
    """Upload a converted model, or its adapter, in one commit, all of it or nothing, with its model card.

    That of a model deletes the weights that an earlier one has at the top of the repository, and an adapter there.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    unreachable: Any = HfHubHTTPError.__mro__[1]  # of the package with which the client of the Hub speaks HTTP
    with exit_on_error():
        check_converted(folder)
        name_card(folder, repository)
        api = HfApi()
        try:
            api.create_repo(repository, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=message,
                ignore_patterns=LEFT_OUT, delete_patterns=replaced(folder),
            )  # fmt: skip
        except (unreachable, HFValidationError, OSError, RuntimeError) as error:  # the last: an upload broke off
            raise CheckpointError(f"repository={repository!r}: the Hub refused the upload: {error}") from error
    document = {"repository": repository, "commit": commit.oid, "url": commit.commit_url}
    show(document, as_json, f"pushed to {commit.commit_url}")


def replaced(folder: Path) -> list[str] | None:
    """Return patterns of what a push deletes: nothing for an adapter, no weights where those of a variant come."""
    if read_adapter_config(folder) is not None:
        return None
    return [*ADAPTER, *(EARLIER if any((folder / name).exists() for name in (WHOLE, INDEX)) else [])]


def name_card(folder: Path, repository: str) -> None:
    """Put the repository's name into the card, or write a card where there is none; a person's own stays as it is."""
    from ..cards import CARD_FILE, with_name

    card = folder / CARD_FILE
    if not card.exists():
        write_card(folder, repository)
        return
    with reading("folder", folder, f"save its {CARD_FILE} as UTF-8"):
        text = card.read_text(encoding="utf-8")
    if (named := with_name(text, repository)) != text:
        write_text(card, named)


def write_card(folder: Path, repository: str) -> None:
    """Write the card that follows from a recipe's report, or, without one, from what the config says."""
    from transformers import AutoConfig

    from ..cards import CARD_FILE, SENTENCES, Base, Conversion, conversion_card, loader_of, read_base
    from ..report import REPORT_FILE, Report, save_adapter_card, save_card
    from ..saved_config import read_patches
    from ..sentence_models import is_sentence_model

    if (adapter := read_adapter_config(folder)) is not None:
        if (folder / REPORT_FILE).is_file():
            save_adapter_card(Report.load(folder), folder, repository)
            return
        name, patches = adapter["base_model_name_or_path"], read_patches(adapter["hf_linattn"])
        with reading("base_model_name_or_path", name, "put the name of the base into adapter_config.json"):
            loader = loader_of(AutoConfig.from_pretrained(name))
        made = Conversion(read_base(name), loader, patches, untrained=False, adapter_of=name)
        write_text(folder / CARD_FILE, str(conversion_card(made, repository)))
        return
    if (folder / REPORT_FILE).is_file():
        save_card(Report.load(folder), folder, repository)
        return
    with reading("folder", folder, "give the folder of a converted model"):
        config = AutoConfig.from_pretrained(folder)
    loader = SENTENCES if is_sentence_model("folder", str(folder)) else loader_of(config)
    found = Conversion(Base(config.model_type), loader, read_patches(config.hf_linattn), untrained=False)
    write_text(folder / CARD_FILE, str(conversion_card(found, repository)))


def check_converted(folder: Path) -> None:
    """Raise `CheckpointError` unless a folder holds a converted model, or an adapter of one."""
    from ..saved_config import MODEL_TYPE, require_finished

    if read_adapter_config(folder) is not None:
        return

    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"folder={str(folder)!r} has no config.json; give the folder of a converted model")
    config = read_object(file, "save the model again")
    require_finished(config)
    if MODEL_TYPE not in config:
        raise CheckpointError(f"folder={str(folder)!r} holds a model that is not converted; run hf-linattn convert")
