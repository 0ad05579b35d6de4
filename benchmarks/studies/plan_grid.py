"""How many heads stay exact, and how long the others' windows are: recall, text and bytes of each pair.

    python -m benchmarks.studies.plan_grid SmolLM2-135M-Instruct/ books/   # benchmarks/results/plan_grid/MODEL.json

Nothing is trained. For each window a tenth of the heads is chosen, and a quarter of the layers; other shares of the
heads are the steepest by the same scores. Beside these stand the windows alone. Prompts are of another seed than those
of the choice. `calibrate` would change nothing: neither exact heads nor windows have what it fits. Results are written
as they come: a run that was stopped goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.result_files import ORIGINAL, PLAN_GRID, RESULTS
from benchmarks.studies.choose_plan import TASKS, Plan, Study
from benchmarks.studies.hard_key_plans import state_bytes
from hf_linattn.advice.candidates import SHARES, most_layers, with_share_kept
from hf_linattn.advice.trial import patched
from hf_linattn.evaluation.next_token import token_losses
from hf_linattn.evaluation.positions import doubling_edges

COMMAND = "benchmarks.studies.plan_grid"
WINDOWS, NUM_SINK_TOKENS = (64, 128, 256, 512), 4
SHARE = 0.1  # of the heads, that are chosen
BUCKET = 1024  # positions of a text whose loss is averaged; every later bucket is twice as long
TEXT_LENGTH, PROMPT_LENGTH = 8192, 2048


def plans(study: Study, length: int) -> Iterator[tuple[str, Plan]]:
    """Yield name -> plan, window by window."""
    yield ORIGINAL, None
    for window in WINDOWS:
        replace = {"streaming": {"window_size": window, "num_sink_tokens": NUM_SINK_TOKENS}}
        yield f"windows of {window}", replace
        chosen = study.choose(f"heads, {window}", keep=SHARE, replace=replace, lengths=(length,))
        for share in SHARES:
            plan = with_share_kept(chosen, share)
            yield f"{_counted(plan.record.num_kept, 'head')}, windows of {window}", plan
        num_layers = len(chosen.record.heads)
        kept = num_layers - len(most_layers(num_layers))
        plan = study.choose(f"layers, {window}", keep=kept, unit="layer", replace=replace, lengths=(length,))
        yield f"{_counted(kept, 'layer')}, windows of {window}", plan


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def losses_by_position(study: Study, plan: Plan, length: int, count: int) -> dict[str, Any]:
    """Return the loss on rows of the test books, in nats: of all tokens, and by buckets of positions."""
    with patched(study.model, plan) as model:
        rows = torch.cat([token_losses(model, row).losses for row in study.rows("test", length, count)])
    edges = doubling_edges(length, BUCKET)
    losses = [float(rows[:, first:last].mean()) for first, last in pairwise(edges)]  # of the next token: one less
    return {"rows": len(rows), "edges": edges, "losses": losses, "loss": float(rows.mean())}


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of a causal language model")],
    books: Annotated[Path, typer.Argument(help="folder with test.jsonl, a text on each line")],
    samples: Annotated[int, typer.Option(help="prompts of each kind")] = 20,
    rows: Annotated[int, typer.Option(help="rows of text")] = 8,
    length: Annotated[int, typer.Option(help="tokens of a prompt")] = PROMPT_LENGTH,
    text_length: Annotated[int, typer.Option(help="tokens of a row of text")] = TEXT_LENGTH,
    dtype: Annotated[str, typer.Option(help="of the weights")] = "bfloat16",
    folder: Annotated[Path, typer.Option(help="of the JSON files")] = RESULTS / PLAN_GRID,
) -> None:
    """Choose, measure, and write the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{Path(model).name}.json"
    study = Study(model, books, getattr(torch, dtype), output, COMMAND)
    for name, plan in plans(study, length):
        state_bytes(study, name, plan or "softmax", text_length)
        study.keep("positions", name, partial(losses_by_position, study, plan, text_length, rows))
        for task in TASKS:
            study.recall(name, plan, task, length, samples)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
