"""Which mechanisms are usable before any training: perplexity of a larger model right after `patch_model`.

    python -m benchmarks.studies.usable SmolLM2-135M-Instruct/ wikitext-2/        # benchmarks/results/usable.json

The first rows of 1,024 tokens of the raw test text of WikiText-2, each alone. Every mechanism has its defaults, and
those with a window beside the first tokens the widths of which the smallest that is usable is theirs. Usable is at
most 1.1 times the original.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.measure.provenance import collect_provenance
from benchmarks.result_files import ORIGINAL, RESULTS, USABLE_FILE, Document
from benchmarks.studies.zero_shot import patched
from hf_linattn import list_mechanisms
from hf_linattn.atomic_io import write_json
from hf_linattn.errors import DataError
from hf_linattn.evaluation.next_token import token_losses
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.training.task import load_model

FILE = "wiki.test.raw"
LENGTH, ROWS = 1024, 2
WINDOWS = [{"window_size": size, "num_sink_tokens": 4} for size in (64, 128, 256)]
OPTIONS: dict[str, list[dict[str, Any]]] = {"streaming": WINDOWS, "hybrid": WINDOWS}
CHARACTERS = 8  # of a token, more than there are: no more of the text is tokenised


def read_rows(model_path: str, wikitext: Path, count: int) -> Tensor:
    """Return the first rows [count, 1024] of the test text.

    Raises:
        DataError: there is no such file, or it is too short.
    """
    file, needed = wikitext / FILE, count * LENGTH
    if not file.is_file():
        raise DataError(f"{str(file)!r} does not exist; give the folder with {FILE}")
    text = file.read_text(encoding="utf-8")[: needed * CHARACTERS]
    ids = AutoTokenizer.from_pretrained(model_path)(text, return_tensors="pt", verbose=False)["input_ids"][0]
    if len(ids) < needed:
        raise DataError(f"{str(file)!r} has {len(ids)} tokens of the {needed} that are read; give the whole file")
    return ids[:needed].view(count, LENGTH)


def perplexity(model: PreTrainedModel, rows: Tensor) -> float:
    """Return the perplexity of rows [B, N], of every token but the first."""
    losses = torch.cat([token_losses(model, row[None]).losses for row in rows])
    return math.exp(float(losses.mean()))


def run(model_path: str, wikitext: Path, names: Sequence[str], count: int = ROWS) -> Iterator[Document]:
    """Measure every mechanism with a causal form; yield the JSON document after each, of all so far."""
    rows, model = read_rows(model_path, wikitext, count), load_model(model_path, torch.float32)
    causal = [name for name in names if "causal" in MECHANISMS.get(name).modes]
    cases = [(name, options) for name in causal for options in OPTIONS.get(name, [{}])]
    what = {"model": Path(model_path).name, "data": "raw test text of WikiText-2", "rows": count, "length": LENGTH}
    results: list[dict[str, Any]] = []
    for name, options in tqdm([(ORIGINAL, {}), *cases], desc="usable"):
        with patched(model, name, options):
            results.append({"mechanism": name, "options": options, "perplexity": perplexity(model, rows)})
        provenance = collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.studies.usable")
        yield {"provenance": provenance, "evaluation": what, "rows": results}


def main(
    model: Annotated[str, typer.Argument(help="folder of a causal language model")],
    wikitext: Annotated[Path, typer.Argument(help=f"folder with {FILE}")],
    mechanism: Annotated[list[str] | None, typer.Option(help="repeatable; by default every one")] = None,
    rows: Annotated[int, typer.Option(help="how many rows are read")] = ROWS,
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / USABLE_FILE,
) -> None:
    """Measure and write the JSON; `python -m docs.generate` makes the tables from it."""
    for results in run(model, wikitext, mechanism or list_mechanisms(), rows):
        write_json(output, results)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
