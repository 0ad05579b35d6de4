"""`hf-linattn push`: upload a converted model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..adapter_config import CONFIG_FILE, WEIGHTS_FILE, base_of, read_adapter_config
from ..atomic_io import write_text
from ..errors import CheckpointError, OptionError
from ..json_files import read_object
from ..reading import has_tokenizer, reading, without_tokenizer
from ..training.run_folders import CONTROL, STAGES, WINDOW
from .common import Json, exit_on_error, note, show
from .conversion_words import without_place

if TYPE_CHECKING:
    from huggingface_hub import HfApi

GIVE_CONVERTED = "give the folder of a converted model"
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
    private: Annotated[bool, typer.Option(help="make it private; a public one that is there is refused")] = False,
    message: Annotated[str, typer.Option(help="message of the commit")] = "Upload a model converted with hf_linattn",
    as_json: Json = False,
) -> None:
    """Upload a converted model, or its adapter, in one commit, all of it or nothing, with its model card.

    That of a model deletes the weights that an earlier one has at the top of the repository, and an adapter there.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    unreachable: Any = HfHubHTTPError.__mro__[1]  # of the package with which the client of the Hub speaks HTTP
    with exit_on_error():
        check_names(folder, repository)
        check_converted(folder)
        warn_without_tokenizer(folder)
        named = named_files(folder, repository)
        api = HfApi()
        try:
            api.create_repo(repository, private=private, exist_ok=True)
            if private and not api.model_info(repository).private:  # one that was there stays as it was
                raise OptionError(
                    f"--private: {repository!r} is there already, and public; make it private on the Hub, or give"
                    " another name"
                )
            commit = api.create_commit(repository, operations(api, folder, repository, named), commit_message=message)
        except (unreachable, OSError, RuntimeError) as error:  # the last: an upload broke off
            raise CheckpointError(f"repository={repository!r}: the Hub refused the upload: {error}") from error
        for file, text in named.items():  # now that the Hub has them: an error changes nothing
            write_text(folder / file, text)
    document = {"repository": repository, "commit": commit.oid, "url": commit.commit_url}
    show(document, as_json, f"pushed to {commit.commit_url}")


def check_names(folder: Path, repository: str) -> None:
    """Raise an error unless there is such a folder, and the repository can have this name."""
    from ..cards import is_hub_id

    if not folder.is_dir():
        first = "the folder comes first, then the name on the Hub" if Path(repository).is_dir() else GIVE_CONVERTED
        raise CheckpointError(f"folder={str(folder)!r}: there is no such folder; {first}")
    if not is_hub_id(repository):
        raise OptionError(f"repository={repository!r} is no name on the Hub; give user/name")


def warn_without_tokenizer(folder: Path) -> None:
    """Warn of a model of text that is uploaded without a tokenizer; an adapter has that of its base."""
    from transformers import AutoConfig

    from ..saved_config import auto_classes, class_names, own_name

    if read_adapter_config(folder) is not None:
        return
    with reading("folder", folder, GIVE_CONVERTED):
        config = AutoConfig.from_pretrained(folder)
    made = [cls for _, cls in auto_classes(type(config)) if own_name(cls) in class_names(config)]
    if any(cls.main_input_name == "input_ids" for cls in made) and not has_tokenizer(str(folder)):
        note(without_tokenizer("folder", str(folder)))


def operations(api: HfApi, folder: Path, repository: str, named: Mapping[str, str]) -> list[Any]:
    """Return what a commit does: it adds the files of a folder, some with another text, and deletes what they replace.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects

    paths = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()]
    kept = filter_repo_objects(paths, ignore_patterns=[*LEFT_OUT, *DEFAULT_IGNORE_PATTERNS])
    files: dict[str, Any] = {path: folder / path for path in kept}
    files |= {path: text.encode() for path, text in named.items()}
    patterns = replaced(folder)
    there = [] if patterns is None else filter_repo_objects(api.list_repo_files(repository), allow_patterns=patterns)
    return [
        *(CommitOperationDelete(path) for path in there if path not in files),
        *(CommitOperationAdd(path, content) for path, content in files.items()),
    ]


def replaced(folder: Path) -> list[str] | None:
    """Return patterns of what a push deletes: nothing for an adapter, no weights where those of a variant come."""
    if read_adapter_config(folder) is not None:
        return None
    return [*ADAPTER, *(EARLIER if any((folder / name).exists() for name in (WHOLE, INDEX)) else [])]


def named_files(folder: Path, repository: str) -> dict[str, str]:
    """Return the texts that a push changes: the card with the repository's name, or a card where there is none.

    A person's own card stays as it is.
    """
    from ..cards import CARD_FILE, with_name

    card = folder / CARD_FILE
    if not card.exists():
        return new_card(folder, repository)
    with reading("folder", folder, f"save its {CARD_FILE} as UTF-8"):
        text = card.read_text(encoding="utf-8")
    named = with_name(text, repository)
    return {} if named == text else {CARD_FILE: named}


def new_card(folder: Path, repository: str) -> dict[str, str]:
    """Return the card that follows from a recipe's report, or, without one, from what the config says."""
    from transformers import AutoConfig

    from ..cards import CARD_FILE, SENTENCES, Base, Conversion, conversion_card, loader_of, read_base
    from ..report import REPORT_FILE, Report
    from ..report.card import adapter_card, card_files
    from ..saved_config import read_patches
    from ..sentence_models import is_sentence_model

    report = Report.load(folder, option="folder") if (folder / REPORT_FILE).is_file() else None
    if (adapter := read_adapter_config(folder)) is not None:
        if report is not None:
            return {CARD_FILE: str(adapter_card(report, folder, repository))}
        name: Any = base_of("folder", str(folder))
        patches = read_patches(adapter["hf_linattn"])
        with reading("base_model_name_or_path", name, "put the name of the base into adapter_config.json"):
            loader = loader_of(AutoConfig.from_pretrained(name))
        made = Conversion(read_base(name), loader, patches, untrained=False, adapter_of=without_place(name, name))
        return {CARD_FILE: str(conversion_card(made, repository))}
    if report is not None:
        return card_files(report, folder, repository)
    with reading("folder", folder, GIVE_CONVERTED):
        config = AutoConfig.from_pretrained(folder)
    loader = SENTENCES if is_sentence_model("folder", str(folder)) else loader_of(config)
    found = Conversion(Base(config.model_type), loader, read_patches(config.hf_linattn), untrained=False)
    return {CARD_FILE: str(conversion_card(found, repository))}


def check_converted(folder: Path) -> None:
    """Raise `CheckpointError` unless a folder holds a converted model, or an adapter of one."""
    from ..saved_config import MODEL_TYPE, require_finished

    if read_adapter_config(folder) is not None:
        return

    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"folder={str(folder)!r} has no config.json; {GIVE_CONVERTED}")
    config = read_object(file, "save the model again")
    require_finished(config)
    if MODEL_TYPE not in config:
        raise CheckpointError(f"folder={str(folder)!r} holds a model that is not converted; run hf-linattn convert")
