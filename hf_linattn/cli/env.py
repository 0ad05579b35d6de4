"""`hf-linattn env`: versions, devices, and which backends a model takes."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from ..console_table import console_table
from ..versions import installed_version
from .common import Json, exit_on_error, load, require_converted, show, to_default_device

if TYPE_CHECKING:
    from ..explain import BackendReport

PACKAGES = (
    "torch", "transformers", "huggingface_hub", "safetensors", "accelerate", "datasets", "peft", "evaluate",
)  # fmt: skip


# names in JSON that a person reads otherwise
NAMES = {"cuda": "GPUs", "auto": "backend of each GPU", "native": "operations in C"}
WORDS = {True: "yes", False: "no: they run in PyTorch, more slowly; reinstall where there is a C compiler"}
NO_GPU = "none"
LENGTH = 512  # tokens that a model is asked about, if it takes as many

Explained = Annotated[
    str | None,
    typer.Option(
        "--model", help="a patched model of text, a folder or a name on the Hub: which backends its layers take"
    ),
]


def env(model: Explained = None, as_json: Json = False) -> None:
    """Show versions and devices, for a bug report, and which backends the layers of a model take here."""
    import torch

    from ..ops.dispatch import DEFAULT_BACKEND
    from ..ops.runtime import cpu as library

    with exit_on_error():
        report = None if model is None else explain(model)
    found: dict[str, Any] = {"hf_linattn": __version__, "python": platform.python_version()}
    found |= {package: installed_version(package) for package in PACKAGES}
    found["platform"] = platform.platform()
    found["cuda"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["auto"] = [automatic(i) for i in range(torch.cuda.device_count())]
    found["threads"] = torch.get_num_threads()
    found["native"] = library.available()
    found["backend"] = DEFAULT_BACKEND
    table = console_table("what", "value")
    for name, value in found.items():
        table.add_row(*in_words(name, value))
    if report is None:
        show(found, as_json, table)
    else:
        show(found | {"backends": report.document()}, as_json, table, str(report))


def in_words(name: str, value: Any) -> tuple[str, str]:
    """Return what is found and its value as a person reads them."""
    if isinstance(value, bool):
        value = WORDS[value]
    elif isinstance(value, list):
        value = ", ".join(value) or NO_GPU
    return NAMES.get(name, name), "not installed" if value is None else str(value)


def automatic(index: int) -> str:
    """Return which backend "auto" takes on a GPU, and why no faster one."""
    import torch

    from ..ops.dispatch import no_triton

    reason = no_triton(torch.device("cuda", index))
    return "triton" if reason is None else f"torch ({reason})"


def explain(name: str) -> BackendReport:
    """Load a patched model and return which backends it takes for a row of `LENGTH` tokens, or for fewer.

    Raises:
        UnsupportedModelError: it reads no tokens, as models of pictures and of speech.
        OptionError: it is not converted.
    """
    import torch

    from ..architecture import require_token_ids
    from ..explain import explain_backend
    from ..positions.tables import known_positions

    model = to_default_device(load(name))
    require_converted("model", name, model)
    require_token_ids(model, "call hf_linattn.explain_backend(model, inputs) with what it takes", alone=False)
    length = min(LENGTH, known_positions(model) or LENGTH)
    inputs = {"input_ids": torch.ones(1, length, dtype=torch.long, device=model.device)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return explain_backend(model, inputs)
