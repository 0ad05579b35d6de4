"""`hf-linattn support`: which architectures of transformers can be patched."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from .common import Json, check_writable, exit_on_error, quiet_logging, show


def support(
    model_types: Annotated[list[str] | None, typer.Argument(help="model types such as qwen3; none: all")] = None,
    mechanism: Annotated[str, typer.Option(help="name of the mechanism to patch with")] = "linear",
    output: Annotated[Path | None, typer.Option(help="also write the JSON to this file")] = None,
    as_json: Json = False,
) -> None:
    """Patch a small random model of each architecture of transformers and say what holds."""
    import torch
    import transformers

    from ..support import architectures, check_architecture, support_table

    with exit_on_error(), quiet_logging():
        check_writable("output", output)
        names = track(model_types or list(architectures()), "checking", console=Console(stderr=True), transient=True)
        found = [check_architecture(name, mechanism) for name in names]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    document = {**versions, "mechanism": mechanism, "architectures": [asdict(row) for row in found]}
    counts = Counter(row.status for row in found).most_common()
    said = ", ".join(f"{count} {status}" for status, count in counts)
    show(document, as_json, support_table(found), said, file=output)
