"""`hf-linattn advise`: which plan fits a model, its text and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape

from ..console_table import console_table
from ..reading import read_tokenizer
from .common import Json, Model, exit_on_error, read_model, read_texts, show


def advise(
    model: Model,
    text: Annotated[list[Path], typer.Option(help="text files of the kind the model is for, a document each")],
    length: Annotated[int, typer.Option(help="tokens of the inputs that it is for")] = 2048,
    recovery_tokens: Annotated[int, typer.Option(help="of the recovery whose time is estimated")] = 10_000_000,
    prompts: Annotated[int, typer.Option(help="recall prompts of that length")] = 10,
    as_json: Json = False,
) -> None:
    """Try candidate plans on a model: what each keeps after `calibrate`, its state, its speed here, its recovery.

    `hf-linattn advise gpt2 --text book.txt --length 1000` ends with the command that makes the recommended plan.
    """
    with exit_on_error():
        from ..advice import Settings
        from ..advice import advise as find

        texts = read_texts(text, "text")
        loaded = read_model("model", model, None)
        settings = Settings(recovery_tokens=recovery_tokens, prompts=prompts)
        found = find(loaded, read_tokenizer("model", model), texts, length, settings=settings, progress=not as_json)
    table = console_table(
        "plan", "loss", "recall", "state", "prompt", "token", "hours", numbers=True, box=box.SIMPLE, padding=0,
        show_edge=False, title=f"{model} at {length:,} tokens",
        caption=f"loss: nats more than softmax's {found.original_loss:.3f}; recall: of prompts, softmax has"
        f" {found.original_recall:.0%}; state: of softmax's bytes; prompt, token: times as fast; hours: of the"
        f" recovery by LoRA in {str(loaded.dtype).removeprefix('torch.')}; -: not measured of what recalls too little",
    )  # fmt: skip
    for trial in found.trials:
        speed, seconds = trial.speed, found.recovery_seconds(trial)
        costs = (speed and speed.prefill_speedup, speed and speed.decode_speedup, seconds and seconds / 3600)
        loss = f"{trial.loss_increase:+.3f} ±{trial.loss_error:.3f}"
        table.add_row(
            trial.name, loss, f"{trial.recall * trial.prompts:.3g} of {trial.prompts}",
            f"{trial.state_bytes / trial.original_state_bytes:.1%}",
            *("-" if cost is None else f"{cost:.{digits}f}" for cost, digits in zip(costs, (2, 2, 1), strict=True)),
            style="green" if trial.name == found.recommended else None,
        )  # fmt: skip
    command = found.command(model, files=[str(file) for file in text])
    document = {"model": model, **found.document(), "command": command}
    show(document, as_json, table, f"recommended: {found.recommended}", escape(command))
