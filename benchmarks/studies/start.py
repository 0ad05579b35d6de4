"""What it takes to start: seconds on the processor of a new process, for imports and for commands that need no model.

    python -m benchmarks.studies.start                         # benchmarks/results/start.json and its table

A number is the median over processes, with files of compiled Python in place. The clock counts for nothing: other work
on the machine makes it slower, and takes little of a process's own time.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.measure.provenance import collect_provenance
from benchmarks.render import write_tables
from benchmarks.result_files import RESULTS, START_FILE
from hf_linattn.atomic_io import write_json

AUTO_CONFIG = "from transformers import AutoConfig"
COMMAND = "from hf_linattn.cli import app; app({}, standalone_mode=False)"
# what is started -> its code
STARTED = {
    "`python -c pass`": "pass",
    "`import hf_linattn`": "import hf_linattn",
    f"`{AUTO_CONFIG}`": AUTO_CONFIG,
    f"`{AUTO_CONFIG}; import hf_linattn`": f"{AUTO_CONFIG}; import hf_linattn",
    "`hf-linattn --help`": COMMAND.format(["--help"]),
    "`hf-linattn --version`": COMMAND.format(["--version"]),
    "`hf-linattn list`": COMMAND.format(["list"]),
    "`hf-linattn convert --help`": COMMAND.format(["convert", "--help"]),
}


def seconds(code: str) -> float:
    """Return what a new process that runs code takes of the processor, in seconds; an error if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(
    repeats: Annotated[int, typer.Option(help="processes of each")] = 7,
    output: Annotated[Path, typer.Option(help="the JSON file that is written")] = RESULTS / START_FILE,
) -> None:
    for code in STARTED.values():
        seconds(code)  # the first compiles
    medians = {name: statistics.median(map(seconds, [code] * repeats)) for name, code in STARTED.items()}
    rows = [{"started": name, "seconds": median} for name, median in medians.items()]
    source = collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.studies.start")
    write_json(output, {"provenance": source, "repeats": repeats, "rows": rows})
    write_tables()


if __name__ == "__main__":
    typer.run(main)
