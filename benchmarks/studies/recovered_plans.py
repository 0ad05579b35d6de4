"""What a short recovery adds to plans that leave a few heads exact: recall and perplexity of recipes' runs.

    python -m benchmarks.studies.recovered_plans SmolLM2-135M-Instruct/ books/ runs/smollm2-135m-heads

Prompts and rows of text are those of `benchmarks.studies.choose_plan`, whose results are read for its plan before any
training; of a run with another plan that is measured as well. Each run is the output folder of `recipes/distill.py`;
its report says what it was trained with. `--length` and `--task`, each given as often as wanted, say what is asked:
so `--length 4096 --samples 100` asks again what fewer prompts have answered at that length. Results are written as
they come: a run that was stopped goes on.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.result_files import CHOSEN_PLAN_FILE, ORIGINAL, RECOVERED_PLANS_FILE, RESULTS, read
from benchmarks.studies.choose_plan import FEWER_ROWS, KEEP, LENGTH, LENGTHS, LONG_LENGTH, TASKS, Study
from benchmarks.studies.hard_key_plans import CHOICE, state_bytes
from benchmarks.tables.heads import UNTRAINED
from hf_linattn import PatchConfig, get_patch_config
from hf_linattn.chosen_plan import ChosenPlan
from hf_linattn.report import Report

NAMES_THERE = {ORIGINAL: ORIGINAL, UNTRAINED: f"{KEEP} heads, {CHOICE}"}  # in the results of the other study


def how_it_was_trained(folder: Path) -> dict[str, Any]:
    """Return a run's tokens, machine and teaching, its evaluations, and what its stages changed by position."""
    report, stages = Report.load(folder), folder / "stages"
    longer = stages / "long_training.json"
    trained = read(stages / "recovered_training.json")
    tried, recipe = [entry for entry in trained["history"] if "eval_loss" in entry], read(stages / "recipe.json")
    return {
        "tokens": report.training.tokens, "teaching": report.training.teaching, "device": report.provenance.device,
        "threads": report.provenance.num_threads, "processes": recipe["world_size"],
        "learning_rate": report.training.recovered_learning_rate,
        "keeps_best": recipe["load_best_model_at_end"],
        "evaluations": [{"step": entry["step"], "loss": entry["eval_loss"]} for entry in tried],
        "seconds": trained["seconds"], "positions": read(stages / "recovered_training_positions.json"),
        "lengthened": None if not longer.is_file() else {
            **{name: read(longer)[name] for name in ("tokens", "seconds")},
            "positions": read(stages / "long_training_positions.json"),
        },
    }  # fmt: skip


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of the original")],
    books: Annotated[Path, typer.Argument(help="folder with test.jsonl, a text on each line")],
    runs: Annotated[list[Path], typer.Argument(help="output folders of recipes; their names are the rows'")],
    samples: Annotated[int, typer.Option(help="prompts of each kind and length")] = 20,
    rows: Annotated[int, typer.Option(help="rows of text for the perplexity")] = 16,
    length: Annotated[list[int], typer.Option(help="tokens of the prompts")] = list(LENGTHS),  # noqa: B006
    task: Annotated[list[str], typer.Option(help="kinds of recall")] = list(TASKS),  # noqa: B006
    dtype: Annotated[str, typer.Option(help="of the weights")] = "bfloat16",
    chosen: Annotated[Path, typer.Option(help="the results of the other study")] = RESULTS / CHOSEN_PLAN_FILE,
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / RECOVERED_PLANS_FILE,
) -> None:
    """Measure and write the JSON."""
    elsewhere = read(chosen)
    first = ChosenPlan.from_json(json.dumps(elsewhere["choices"][CHOICE]))
    study = Study(model, books, getattr(torch, dtype), output, "benchmarks.studies.recovered_plans")
    original = study.model
    known = PatchConfig.from_plan(first, len(first.record.heads))
    asked: list[tuple[str, PreTrainedModel, Any]] = [(ORIGINAL, original, None), (UNTRAINED, original, first)]
    trained: list[tuple[str, PreTrainedModel, Any]] = []
    for folder in runs:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        plan = get_patch_config(loaded)
        state_bytes(study, folder.name, plan)
        study.keep("runs", folder.name, partial(how_it_was_trained, folder))
        if plan != known:
            asked.append((f"{folder.name}, {UNTRAINED}", original, plan))
        trained.append((folder.name, loaded, None))
    for tokens, count in ((LENGTH, rows), (LONG_LENGTH, rows // FEWER_ROWS)):
        for name, study.model, plan in [*asked, *trained]:
            study.perplexity(name, plan, tokens, count)
    for tokens, kind in product(length, task):
        for name, study.model, plan in [*asked, *trained]:
            known_cell = elsewhere["recall"].get(f"{NAMES_THERE.get(name)} | {kind} | {tokens}")
            if known_cell is None or known_cell["num_samples"] < samples:
                study.recall(name, plan, kind, tokens, samples)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
