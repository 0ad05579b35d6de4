"""`hf-linattn bench`: speed and memory of a converted model beside its original attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..console_table import console_table
from ..errors import OptionError
from .common import STOPPED, Json, exit_on_error, note, read_model, require_converted, set_threads, show

if TYPE_CHECKING:
    from ..evaluation import MemoryRow, SpeedRow


def bench(
    model: Annotated[str, typer.Argument(help="a converted model: a folder, or a name on the Hub")],
    lengths: Annotated[str, typer.Option(help="tokens, separated by commas")] = "512,1024,2048,4096",
    batch_size: Annotated[int, typer.Option(help="sequences at once")] = 1,
    repeats: Annotated[int, typer.Option(help="timed runs of each variant")] = 5,
    limit_minutes: Annotated[
        float | None, typer.Option(help="minutes for all lengths; what was measured by then is shown")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: as saved")] = None,
    threads: Annotated[int | None, typer.Option(help="threads of the CPU; default: PyTorch's")] = None,
    as_json: Json = False,
) -> None:
    """Time a converted model beside the same weights with their own attention, and count bytes.

    Each length is said on standard error as soon as it is measured, the shortest first. Where memory runs out at one,
    those before it are shown.
    """
    speed: list[SpeedRow] = []
    memory: list[MemoryRow] = []
    with exit_on_error():
        from ..comparison import TimeIsUpError, time_limit

        set_threads(threads)
        wanted = numbers("lengths", lengths)
        loaded, stopped = read_model("model", model, dtype), False
        require_converted("model", model, loaded)
        try:
            with time_limit(limit_minutes):
                measure(loaded, wanted, {"batch_size": batch_size, "repeats": repeats}, speed, memory)
        except TimeIsUpError:
            note(f"the {limit_minutes:g} minutes are up after {len(speed)} of {len(wanted)} lengths")
            stopped = True
        except BaseException:  # as where memory runs out at the longest, or of Ctrl-C
            if speed:
                show_rows(model, speed, memory, True, as_json)
            raise
    show_rows(model, speed, memory, stopped, as_json)
    if stopped:
        raise typer.Exit(STOPPED)


def show_rows(
    model: str, speed: Sequence[SpeedRow], memory: Sequence[MemoryRow], stopped: bool, as_json: bool
) -> None:
    """Print what was measured; stopped: before all was."""
    document = {
        "model": model, "speed": [asdict(row) for row in speed], "memory": [asdict(row) for row in memory],
        "stopped": stopped,
    }  # fmt: skip
    show(document, as_json, table(speed, memory))


def measure(
    model: Any, lengths: Sequence[int], options: dict[str, int], speed: list[SpeedRow], memory: list[MemoryRow]
) -> None:
    """Measure one length after the other, and append what was found as soon as it is."""
    from ..evaluation import measure_memory, measure_speed
    from ..evaluation.speed import check_lengths

    for length in check_lengths(model, lengths):
        found = measure_memory(model, [length])
        speed += measure_speed(model, [length], **options)
        memory += found
        cells = zip(HEADS, row(speed[-1], memory[-1]), strict=True)
        note(", ".join(f"{head} {cell}" for head, cell in cells))


HEADS = ("tokens", "prompt x as fast", "token x as fast", "state bytes", "softmax's")


def row(speed: SpeedRow, memory: MemoryRow) -> list[str]:
    """Return the cells of one length."""
    decode = "-" if speed.decode_speedup is None else f"{speed.decode_speedup:.2f}"
    state = ["-" if count is None else f"{count:,}" for count in (memory.patched_state, memory.original_state)]
    return [f"{speed.length:,}", f"{speed.prefill_speedup:.2f}", decode, *state]


def table(speed: Sequence[SpeedRow], memory: Sequence[MemoryRow]) -> Table:
    """Return the table of all lengths that were measured."""
    found = console_table(*HEADS)
    for one, other in zip(speed, memory, strict=False):
        found.add_row(*row(one, other))
    return found


def numbers(option: str, text: str) -> list[int]:
    """Return whole numbers given on the command line."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"{option} must be numbers separated by commas, got {text!r}") from error
