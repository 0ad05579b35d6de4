"""`hf-linattn compare`: mechanisms side by side on one model: quality, speed and memory."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..atomic_io import write_text
from ..errors import OptionError
from ..plan import Plan, name_or_plan, require_registered
from ..reading import read_tokenizer
from .bench import numbers
from .common import (
    CALIBRATION_TOKENS,
    STOPPED,
    CalibrationTokens,
    Json,
    check_calibration_tokens,
    check_writable,
    exit_on_error,
    note,
    read_language_model,
    read_texts,
    require_original,
    set_threads,
    show,
)
from .completion import mechanism_names

if TYPE_CHECKING:
    from ..comparison import Comparison, Material


Names = Annotated[
    list[str],
    typer.Argument(help="mechanisms, plans as JSON, or JSON files with plans", autocompletion=mechanism_names),
]
Texts = Annotated[list[Path], typer.Option(help="a text file that perplexity is measured on; may be given again")]
Calibrate = Annotated[
    list[Path] | None,
    typer.Option(help="another text file: measure also after `calibrate` on it; may be given again"),
]
Limit = Annotated[float | None, typer.Option(help="minutes for each mechanism; what was measured by then is shown")]


def compare(
    attention: Names,
    model: Annotated[str, typer.Option(help="the original: a folder, or the name of a model on the Hub")],
    text: Texts,
    lengths: Annotated[str, typer.Option(help="tokens for speed and memory, by commas")] = "512,1024,2048",
    calibrate: Calibrate = None,
    calibration_tokens: CalibrationTokens = CALIBRATION_TOKENS,
    max_length: Annotated[int | None, typer.Option(help="tokens per window of text; default: longest length")] = None,
    num_windows: Annotated[int, typer.Option(help="windows of text; a masked model reads all")] = 4,
    batch_size: Annotated[int, typer.Option(help="sequences at once, of the timings")] = 1,
    repeats: Annotated[int, typer.Option(help="timed runs of each")] = 3,
    limit_minutes: Limit = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: as saved")] = None,
    threads: Annotated[int | None, typer.Option(help="threads of the CPU; default: PyTorch's")] = None,
    csv: Annotated[Path | None, typer.Option(help="also write a CSV file")] = None,
    png: Annotated[Path | None, typer.Option(help="also draw a picture into this file")] = None,
    seed: Annotated[int, typer.Option(help="of the random tokens of the timings")] = 0,
    as_json: Json = False,
) -> None:
    """Measure mechanisms side by side: perplexity, speed and memory, each beside softmax in the same run.

    `hf-linattn compare streaming hybrid '{"linear": {"decay": "learned"}}' --model gpt2 --text test.txt
    --lengths 512,1024` prints a table in Markdown, each line as soon as it is measured. Mechanisms of installed
    packages are named like any other.
    """
    with exit_on_error():
        from ..comparison import ComparisonOptions

        set_threads(threads)
        check_writable("csv", csv)
        check_writable("png", png)
        check_calibration_tokens(calibrate or (), calibration_tokens)
        check_apart(text, calibrate or ())
        plans = {name: read_attention(name) for name in attention}
        if len(plans) < len(attention):
            twice = next(name for name in plans if attention.count(name) > 1)
            raise OptionError(f"attention: {twice!r} is given twice, and a table has one row of each; leave one out")
        fitted = tuple(read_texts(calibrate or (), "calibrate"))
        options = ComparisonOptions(
            tuple(numbers("lengths", lengths)), max_length, num_windows, fitted, calibration_tokens, batch_size,
            repeats, limit_minutes=limit_minutes, seed=seed,
        )  # fmt: skip
        load = partial(read_language_model, "model", model, dtype)
        found, material, provenance = read_softmax(model, load, plans, read_texts(text, "text"), options)
        try:
            measure(found, load, plans, material, as_json)
        finally:  # also of an error, as where memory runs out, and of Ctrl-C: hours may have gone into it
            if found.entries:
                keep(found, {"model": model, "provenance": provenance}, as_json, csv, png)
    if any(entry.stopped for entry in found.entries):
        raise typer.Exit(STOPPED)


def check_apart(texts: Sequence[Path], calibrate: Sequence[Path]) -> None:
    """Raise `OptionError` where perplexity would be measured on what was fitted to."""
    same = {file.resolve() for file in texts} & {file.resolve() for file in calibrate}
    if same:
        name = str(min(same))
        raise OptionError(f"calibrate={name!r} is given as text, too; give text that nothing was fitted to")


def read_attention(name: str) -> Plan:
    """Return a mechanism's name, a plan in JSON, or the plan of a file."""
    from ..chosen_plan import PLAN_SUFFIX, read_plan_file

    if name.endswith(PLAN_SUFFIX):
        return read_plan_file(Path(name))
    named: Plan = name_or_plan("attention", name)
    require_registered(named)
    return named


def read_softmax(
    model: str, load: Callable[[], Any], plans: dict[str, Plan], texts: list[str], options: Any
) -> tuple[Comparison, Material, dict[str, Any]]:
    """Check the plans and measure the original; return what plans are added to and measured on, and the provenance."""
    from .. import comparison
    from ..report import collect_provenance

    loaded, tokenizer = load(), read_tokenizer("model", model)
    require_original("model", model, loaded)
    note("reading the text with softmax")
    material = comparison.read_original(loaded, tokenizer, texts, plans, options)
    found = comparison.Comparison(options, material.quality, loaded.can_generate())
    provenance = collect_provenance(
        options.seed, f"hf-linattn {shlex.join(sys.argv[1:])}", device=loaded.device, dtype=loaded.dtype
    )
    return found, material, dataclasses.asdict(provenance)


def measure(
    found: Comparison, load: Callable[[], Any], plans: dict[str, Plan], material: Material, as_json: bool
) -> None:
    """Compare, and print lines of the table as they come, unless JSON is asked for."""
    from .. import comparison

    say_lines(comparison.head_lines(found), as_json)
    for entry in comparison.compare(load, plans, material, found.options, note):
        found.entries.append(entry)
        say_lines(comparison.markdown_lines(found, entry), as_json)


def say_lines(lines: list[str], as_json: bool) -> None:
    """Print lines of the table, unless JSON is asked for."""
    if not as_json:
        typer.echo("\n".join(lines))


def keep(found: Comparison, beside: dict[str, Any], as_json: bool, csv: Path | None, png: Path | None) -> None:
    """Print what was found as JSON if that is asked for, and write the files."""
    try:
        if as_json:
            show({**beside, **found.document()}, as_json)
    finally:  # a pipe that nobody reads any more costs no file
        write_files(found, csv, png, Path(beside["model"]).name)


def write_files(found: Comparison, csv: Path | None, png: Path | None, title: str) -> None:
    """Write what was asked for beside the table."""
    from ..comparison import comparison_figure, csv_text
    from ..report.plots import save_figure

    if csv is not None:
        write_text(csv, csv_text(found))
    if png is not None:
        save_figure(comparison_figure(found, title), png)
