"""How many exact heads hard keys save: plans by recall, with windows or with `hybrid` in the other heads.

    python -m benchmarks.studies.hard_key_plans SmolLM2-135M-Instruct/ books/      # the JSON under benchmarks/results

Nothing is trained; one plan is measured after `calibrate`, too. The heads are the steepest of the first choice of
`benchmarks.studies.choose_plan`, whose results are read; prompts and rows of text are its too. Beside each plan stands
that of windows of equal bytes. `--length`, given as often as wanted, says how long the prompts are. Results are
written as they come: a run that was stopped goes on.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from benchmarks.result_files import CALIBRATED, CHOSEN_PLAN_FILE, HARD_KEY_PLANS_FILE, ORIGINAL, RESULTS
from benchmarks.studies.choose_plan import LENGTH, TASKS, Plan, Study, steepest
from hf_linattn import PatchConfig, patch_model
from hf_linattn.advice.trial import patched
from hf_linattn.chosen_plan import ChosenPlan, PlanRecord
from hf_linattn.evaluation.memory import state_bytes_by_length

NUM_SINK_TOKENS = 4
HYBRID = {"linear": "hedgehog", "window_size": 64, "num_sink_tokens": NUM_SINK_TOKENS, "recall_error": "absolute"}
LONGER = {"window_size": 320, "linear_options": {"feature_dim": 16}}  # the bytes of a smaller state go to the window
PLANS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (5, 128, {}), (5, 256, {}), (9, 256, {}), (5, 96, LONGER),
)  # exact heads, hard keys in the others, and options of these  # fmt: skip
STATE_LENGTH = 4096  # at which bytes are equal
CHOICE = "seed 0"


def plan_with(record: PlanRecord, kept: int, mechanism: str, options: dict[str, Any]) -> ChosenPlan:
    """Return the plan that keeps the heads of the largest scores, and has a mechanism in all others."""
    replaced = {"mechanism": mechanism, "options": options}
    return ChosenPlan.of(replace(record, kept=sorted(steepest(record, kept)), replace=replaced))


def equal_window(size: dict[str, int], record: PlanRecord, kept: int) -> dict[str, int]:
    """Return the options of the largest `streaming` in the other heads whose keys and values fit into a plan's bytes.

    Args:
        size: the bytes of that plan and of softmax, as in `StateRow`.
    """
    heads = sum(record.heads)
    key_bytes = size["original"] // (STATE_LENGTH * heads)  # of one head, its value too
    tokens = (size["patched"] // key_bytes - kept * STATE_LENGTH) // (heads - kept)
    return {"window_size": tokens - NUM_SINK_TOKENS + 1, "num_sink_tokens": NUM_SINK_TOKENS}


def state_bytes(study: Study, name: str, plan: Plan | PatchConfig, length: int = STATE_LENGTH) -> dict[str, int]:
    """Return the bytes of the states of a plan and of softmax, counted unless that was done before."""

    def measure() -> dict[str, int]:
        with patched(study.model, plan) as model:
            return vars(state_bytes_by_length(model, [length])[0])

    return study.keep("state_bytes", name, measure)


def plans(study: Study, record: PlanRecord) -> Iterator[tuple[str, ChosenPlan, bool]]:
    """Yield each plan with hard keys, and that of equal bytes after it; and whether it is calibrated, too."""
    for kept, number, others in PLANS:
        name = f"{kept} heads, {number} hard keys"
        name += f" behind windows of {others['window_size']}" if others else ""
        plan = plan_with(record, kept, "hybrid", {**HYBRID, **others, "num_hard_keys": number})
        yield name, plan, bool(others)
        options = equal_window(state_bytes(study, name, plan), record, kept)
        name = f"{kept} heads, windows of {options['window_size']}"
        plan = plan_with(record, kept, "streaming", options)
        state_bytes(study, name, plan)
        yield name, plan, False


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of the model of the other study")],
    books: Annotated[Path, typer.Argument(help="folder with test.jsonl, a text on each line")],
    samples: Annotated[int, typer.Option(help="prompts of each kind")] = 20,
    rows: Annotated[int, typer.Option(help="rows of text for the perplexity")] = 16,
    length: Annotated[list[int], typer.Option(help="tokens of the prompts")] = [LENGTH],  # noqa: B006
    dtype: Annotated[str, typer.Option(help="of the weights")] = "bfloat16",
    chosen: Annotated[Path, typer.Option(help="the results of the other study")] = RESULTS / CHOSEN_PLAN_FILE,
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / HARD_KEY_PLANS_FILE,
) -> None:
    """Measure and write the JSON."""
    record = ChosenPlan.from_json(json.dumps(json.loads(chosen.read_text("utf-8"))["choices"][CHOICE])).record
    study = Study(model, books, getattr(torch, dtype), output, "benchmarks.studies.hard_key_plans")
    original = study.model
    measured: list[tuple[str, PreTrainedModel, Plan]] = [(ORIGINAL, original, None)]
    for name, plan, fits in plans(study, record):
        measured.append((name, original, plan))
        if fits:
            fitted = patch_model(copy.deepcopy(original), plan)
            study.calibrate(fitted)
            measured.append((f"{name}, {CALIBRATED}", fitted, None))
    for tokens, task in product(length, TASKS):
        for name, study.model, plan in measured:
            study.recall(name, plan, task, tokens, samples)
    for name, study.model, plan in measured:
        study.perplexity(name, plan, LENGTH, rows)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
