"""What states of equal bytes recall before any training: windows, the delta rule, windows with hard keys.

    python -m benchmarks.studies.equal_bytes SmolLM2-135M-Instruct/ books/      # results/equal_bytes_smollm2.json

All layers and heads get the same, as it comes and after `calibrate`, which reads validation books. The smallest size
is that of the bare delta rule, the others are twice, four and eight times as large; beside its memory the delta rule
has a count. Prompts have four times as many tokens as the window of these bytes. Recall is of prompts of the seed of
`benchmarks.studies.choose_plan`, perplexity of rows of the test books. Results are written as they come: a run that
was stopped goes on, and measures again what had other numbers of prompts or rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from benchmarks.result_files import AS_IT_COMES, CALIBRATED, EQUAL_BYTES_FILE, ORIGINAL, RESULTS, Document
from benchmarks.studies.choose_plan import LENGTH, TASKS, Plan, Study
from hf_linattn import get_mechanisms
from hf_linattn.advice.trial import patched
from hf_linattn.calibration import what_is_fitted
from hf_linattn.evaluation import streaming_for
from hf_linattn.evaluation.memory import state_bytes_by_length

SIZES = {49_152: 256, 98_304: 512, 196_608: 1024, 393_216: 2048}  # bytes of a layer -> tokens of the prompts
# of `hybrid`: the window's blocks take about half of the bytes, and the state few, so that hard keys have the rest
HYBRID = {"num_sink_tokens": 4, "recall_error": "absolute", "linear_options": {"feature_dim": 16}}
WINDOWS = {98_304: 1, 196_608: 64, 393_216: 256}
STATE_LENGTH = 4096  # at which bytes are counted
FIRST_KEYS = 64  # of the plan that says what a hard key takes


def plans(model: PreTrainedModel, size: int) -> Iterator[tuple[str, Plan]]:
    """Yield the plans whose states take about `size` bytes a layer: windows and hard keys at most that."""
    (window,) = streaming_for(model, bytes=size * model.config.num_hidden_layers).values()
    yield f"windows of {window['window_size']}", {"streaming": window}
    smallest = min(SIZES)
    yield f"delta rule, {size // smallest}", {"gated_deltanet": {"expand_key": size // smallest}}
    if size in WINDOWS:
        options = {**HYBRID, "window_size": WINDOWS[size]}
        number = hard_keys_within(model, options, size)
        yield f"windows and {number} hard keys", {"hybrid": {**options, "num_hard_keys": number}}


def hard_keys_within(model: PreTrainedModel, options: dict[str, Any], size: int) -> int:
    """Return the most hard keys with which a state of `hybrid` takes at most `size` bytes a layer."""
    first, second = (
        layer_bytes(model, {"hybrid": {**options, "num_hard_keys": number}}) for number in (FIRST_KEYS, 2 * FIRST_KEYS)
    )
    return FIRST_KEYS + math.floor((size - first) * FIRST_KEYS / (second - first))


def layer_bytes(model: PreTrainedModel, plan: Plan) -> float:
    """Return the bytes of a layer's state."""
    with patched(model, plan) as converted:
        (row,) = state_bytes_by_length(converted, [STATE_LENGTH])
        return row.patched / len(get_mechanisms(converted))


def measure(study: Study, plan: Plan, length: int, samples: int, rows: int, calibrated: bool) -> Document | None:
    """Return the bytes of a layer's state, the answers to each kind of prompts and the perplexity of a plan.

    Of a mechanism that has nothing to fit, None where it is to be calibrated.
    """
    with patched(study.model, plan) as model:
        if calibrated:
            if not what_is_fitted(get_mechanisms(model)):
                return None
            study.calibrate(model)
        found = {task: study.answers(model, task, length, samples) for task in TASKS[:2]}
        losses = study.losses(model, str(plan), LENGTH, rows)
    return {
        "length": length, "plan": plan, "recall": found, "losses": losses, "samples": samples, "rows": rows,
    }  # fmt: skip


def forget_others(found: Document, asked: dict[str, int]) -> None:
    """Drop what was measured with other numbers of prompts or rows than are asked for."""
    for stage in (AS_IT_COMES, CALIBRATED):
        results = found.get(stage, {})
        for key, row in list(results.items()):
            if row is not None and any(row[name] != number for name, number in asked.items()):
                del results[key]


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of a causal language model")],
    books: Annotated[Path, typer.Argument(help="folder with validation.jsonl and test.jsonl, a text on each line")],
    samples: Annotated[int, typer.Option(help="prompts of each kind")] = 50,
    rows: Annotated[int, typer.Option(help="rows of text for the perplexity")] = 16,
    dtype: Annotated[str, typer.Option(help="of the weights")] = "bfloat16",
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / EQUAL_BYTES_FILE,
) -> None:
    """Measure and write the JSON."""
    study = Study(model, books, getattr(torch, dtype), output, "benchmarks.studies.equal_bytes")
    forget_others(study.found, {"samples": samples, "rows": rows})
    for size, length in sorted(SIZES.items(), reverse=True):
        of_all = partial(measure, study, length=length, samples=samples, rows=rows)
        study.keep(AS_IT_COMES, f"{size} | {ORIGINAL}", partial(of_all, None, calibrated=False))
        for name, plan in plans(study.model, size):
            study.keep("state_bytes", f"{size} | {name}", partial(layer_bytes, study.model, plan))
            for stage in (AS_IT_COMES, CALIBRATED):
                whether = stage == CALIBRATED
                study.keep(stage, f"{size} | {name}", partial(of_all, plan, calibrated=whether))
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
