"""What a short recovery adds to plans that leave a few heads exact: recall and perplexity of recipes' runs.

    python -m benchmarks.studies.recovered_plans SmolLM2-135M-Instruct/ books/ runs/smollm2-135m-heads

Prompts and rows of text are those of `benchmarks.studies.choose_plan`, whose results are read for the plan before any
training. Each run is the output folder of `recipes/distill.py`; its report says what it was trained with. Results are
written as they come: a run that was stopped goes on.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from benchmarks.result_files import CHOSEN_PLAN_FILE, ORIGINAL, RECOVERED_PLANS_FILE, RESULTS, read
from benchmarks.studies.choose_plan import FEWER_ROWS, LENGTH, LENGTHS, LONG_LENGTH, TASKS, Study
from benchmarks.studies.hard_key_plans import CHOICE
from benchmarks.tables.heads import UNTRAINED
from hf_linattn.chosen_plan import ChosenPlan
from hf_linattn.report import Report


def how_it_was_trained(folder: Path) -> dict[str, Any]:
    """Return a run's tokens, machine and teaching, its evaluations, and what it changed by position."""
    report, stages = Report.load(folder), folder / "stages"
    tried = [entry for entry in read(stages / "recovered_training.json")["history"] if "eval_loss" in entry]
    return {
        "tokens": report.training.tokens, "teaching": report.training.teaching, "device": report.provenance.device,
        "threads": report.provenance.num_threads, "learning_rate": report.training.recovered_learning_rate,
        "evaluations": [{"step": entry["step"], "loss": entry["eval_loss"]} for entry in tried],
        "positions": read(stages / "recovered_training_positions.json"),
    }  # fmt: skip


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of the original")],
    books: Annotated[Path, typer.Argument(help="folder with test.jsonl, a text on each line")],
    runs: Annotated[list[Path], typer.Argument(help="output folders of recipes; their names are the rows'")],
    samples: Annotated[int, typer.Option(help="prompts of each kind and length")] = 20,
    rows: Annotated[int, typer.Option(help="rows of text for the perplexity")] = 16,
    dtype: Annotated[str, typer.Option(help="of the weights")] = "bfloat16",
    chosen: Annotated[Path, typer.Option(help="the results of the other study")] = RESULTS / CHOSEN_PLAN_FILE,
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / RECOVERED_PLANS_FILE,
) -> None:
    """Measure and write the JSON."""
    untrained = ChosenPlan.from_json(json.dumps(read(chosen)["choices"][CHOICE]))
    study = Study(model, books, getattr(torch, dtype), output, "benchmarks.studies.recovered_plans")
    for length, count in ((LENGTH, rows), (LONG_LENGTH, rows // FEWER_ROWS)):
        for name, plan in ((ORIGINAL, None), (UNTRAINED, untrained)):
            study.perplexity(name, plan, length, count)
    for folder in runs:
        name = folder.name
        study.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        study.perplexity(name, None, LENGTH, rows)
        for length in LENGTHS:
            for task in TASKS:
                study.recall(name, None, task, length, samples)
        study.perplexity(name, None, LONG_LENGTH, rows // FEWER_ROWS)
        study.keep("runs", name, partial(how_it_was_trained, folder))
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
