"""What a model recalls of long prompts: single needles in noise in many samples, all other tasks in fewer.

    python -m benchmarks.studies.recall SmolLM2-135M-Instruct/        # benchmarks/results/recall_smollm2.json

Every task and length is a row, written batch by batch; a run that is started again goes on where the last one
stopped. A row says how long it took, on which processor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import torch
import typer
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.measure.provenance import collect_provenance, has_amx, processor_name
from benchmarks.result_files import RECALL_FILE, RESULTS, Document, resume
from hf_linattn.atomic_io import write_json
from hf_linattn.evaluation.recall import RECALL_TASKS, answer_prompts, make_prompts, recall_rows
from hf_linattn.training.task import load_model

FIRST = "single_noise"
FIRST_LENGTHS, FIRST_SAMPLES = (512, 1024, 2048, 4096), 100
LENGTHS, SAMPLES = (1024, 2048), 20
TOKENS = 8192  # of a batch


@dataclass(frozen=True)
class Case:
    """A row to measure. samples: how many questions."""

    task: str
    length: int
    samples: int
    dtype: str
    chat: bool


FIELDS = tuple(field.name for field in fields(Case))


def find_cases(
    tasks: list[str] | None, lengths: list[int] | None, samples: int | None, dtype: str, chat: bool
) -> list[Case]:
    """Return the rows that are asked for: those of the table where nothing is said."""
    table = [(FIRST, length, FIRST_SAMPLES) for length in FIRST_LENGTHS]
    table += [(task, length, SAMPLES) for length in LENGTHS for task in RECALL_TASKS if task != FIRST]
    if lengths:
        number = {task: FIRST_SAMPLES if task == FIRST else SAMPLES for task in RECALL_TASKS}
        table = [(task, length, number[task]) for length in lengths for task in RECALL_TASKS]
    chosen = [(task, length, samples or count) for task, length, count in table if not tasks or task in tasks]
    return [Case(task, length, count, dtype, chat) for task, length, count in chosen]


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, case: Case, row: Document
) -> Iterator[Document]:
    """Go on with the row of a case, empty where it begins; yield it after each batch, with all answers so far.

    The last one has what they come to, and of the answers the first three.
    """
    batch_size = max(1, TOKENS // case.length)
    prompts = make_prompts(case.task, tokenizer, case.length, count=case.samples, chat=case.chat)
    answers, seconds = list(row.get("answers", [])), row.get("seconds", 0.0)
    where = {"device": processor_name(), "amx": has_amx(), "threads": torch.get_num_threads()}
    while len(answers) < len(prompts):
        started = time.perf_counter()
        some = prompts[len(answers) : len(answers) + batch_size]
        answers += answer_prompts(model, tokenizer, some, batch_size=batch_size, progress=False)
        seconds += time.perf_counter() - started
        row = {**asdict(case), **where, "seconds": round(seconds, 1)}
        yield {**row, "answers": answers}
    yield {**row, "rows": recall_rows(answers), "examples": answers[:3]}


def run(model_path: str, wanted: list[Case], document: Document, limit: float = math.inf) -> Iterator[Document]:
    """Measure the cases that the document lacks, for `limit` seconds; yield it after each batch."""
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = {Case(**{name: row[name] for name in FIELDS}): row for row in document.get("rows", [])}
    missing = [case for case in wanted if "rows" not in rows.get(case, {})]
    if not missing:
        return
    model = load_model(model_path, getattr(torch, missing[0].dtype))
    for case in tqdm(missing, desc="recall"):
        for row in measure(model, tokenizer, case, rows.get(case, {})):
            rows[case] = row
            provenance = collect_provenance(torch.device("cpu"), model.dtype, "benchmarks.studies.recall")
            yield {"provenance": provenance, "model": Path(model_path).name, "rows": list(rows.values())}
            if time.perf_counter() - started > limit:
                return


def main(
    model: Annotated[str, typer.Argument(help="folder of a causal language model")],
    task: Annotated[list[str] | None, typer.Option(help="repeatable; by default every one")] = None,
    length: Annotated[list[int] | None, typer.Option(help="repeatable; tokens of prompt and answer")] = None,
    samples: Annotated[int | None, typer.Option(help="questions for each row")] = None,
    dtype: Annotated[str, typer.Option(help="of the weights")] = "bfloat16",
    chat: Annotated[bool, typer.Option(help="prompts through the chat template")] = False,
    limit: Annotated[float, typer.Option(help="seconds after which no other batch begins")] = math.inf,
    output: Annotated[Path, typer.Option(help="the JSON file, which is added to")] = RESULTS / RECALL_FILE,
) -> None:
    """Measure what the file lacks, and write it after each row."""
    document = resume(output, {"model": Path(model).name}, {"rows": []})
    for results in run(model, find_cases(task, length, samples, dtype, chat), document, limit):
        write_json(output, results)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
