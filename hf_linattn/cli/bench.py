"""`hf-linattn bench`: speed and memory of a converted model beside its original attention."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from ..errors import OptionError
from .common import Json, exit_on_error, load, show, to_default_device


def bench(
    model: Annotated[str, typer.Argument(help="a converted model: a folder, or a name on the Hub")],
    lengths: Annotated[str, typer.Option(help="tokens, separated by commas")] = "512,1024,2048,4096",
    batch_size: Annotated[int, typer.Option(help="sequences at once")] = 1,
    repeats: Annotated[int, typer.Option(help="timed runs of each variant")] = 5,
    as_json: Json = False,
) -> None:
    """Time a converted model beside the same weights with their own attention, and count bytes."""
    with exit_on_error():
        from ..evaluation import measure_memory, measure_speed

        wanted = numbers("lengths", lengths)
        loaded = to_default_device(load(model))
        speed = measure_speed(loaded, wanted, batch_size=batch_size, repeats=repeats)
        memory = measure_memory(loaded, wanted)
    table = Table("tokens", "prefill, times faster", "decode, times faster", "state bytes", "original's")
    for row, size in zip(speed, memory, strict=True):
        decode = "-" if row.decode_speedup is None else f"{row.decode_speedup:.2f}"
        state = ["-" if b is None else f"{b:,}" for b in (size.patched_state, size.original_state)]
        table.add_row(f"{row.length:,}", f"{row.prefill_speedup:.2f}", decode, *state)
    document = {"model": model, "speed": [asdict(row) for row in speed], "memory": [asdict(row) for row in memory]}
    show(document, as_json, table)


def numbers(option: str, text: str) -> list[int]:
    """Return whole numbers given on the command line."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"{option} must be numbers separated by commas, got {text!r}") from error
