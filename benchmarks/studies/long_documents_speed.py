"""What a long document costs a classifier: seconds and peak memory beside softmax with the same longer table.

    python -m benchmarks.studies.long_documents_speed all-MiniLM-L6-v2/ documents/author20_test.jsonl

and again with `--dtype bfloat16 --output benchmarks/results/long_documents_speed_bfloat16.json`. Documents are joined
up to each length. The models take turns on the same one; memory is what a forward holds at once beyond weights and
input, counted tensor by tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from benchmarks.measure.provenance import collect_provenance
from benchmarks.measure.stopwatch import SOFTMAX, Plan, Stopwatch, Timing
from benchmarks.result_files import LONG_DOCUMENTS_SPEED_FILE, RESULTS, Document
from hf_linattn import extend_positions, patch_model
from hf_linattn.atomic_io import write_json
from hf_linattn.errors import DataError
from hf_linattn.evaluation.memory import LiveBytes

LENGTHS = (512, 2048, 4096, 8192)
MECHANISMS: Mapping[str, Mapping[str, Any]] = {
    "linear": {}, "performer": {}, "hedgehog": {}, "hybrid": {}, "longformer": {}, "local": {}, "linformer": {},
    "lsh": {},
}  # fmt: skip
TIMES = Plan((), (), (), budget=10.0, min_repeats=3, max_repeats=9)


def joined(tokenizer: Any, file: Path, length: int) -> Tensor:
    """Return the first `length` tokens [1, length] of documents joined."""
    texts = (json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines())
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= length:
            break
    if len(ids) < length - 2:
        raise DataError(f"{str(file)!r} has {len(ids)} tokens of the {length} that are read; give more documents")
    return torch.tensor([[tokenizer.cls_token_id, *ids[: length - 2], tokenizer.sep_token_id]])


def load(
    model: str, length: int, dtype: torch.dtype, mechanism: str | None = None, **options: Any
) -> PreTrainedModel:
    """Return a classifier with a table of `length` positions; None: with its own attention."""
    found = AutoModelForSequenceClassification.from_pretrained(model, dtype=dtype).eval()
    if length > found.config.max_position_embeddings:
        extend_positions(found, length)
    return found if mechanism is None else patch_model(found, mechanism, **options)


def peak_bytes(model: PreTrainedModel, document: Tensor) -> int:
    """Return the bytes that a forward holds at once."""
    with LiveBytes() as count:
        model(document)
    return count.peak


@torch.no_grad()
def measure(models: Mapping[str, PreTrainedModel], document: Tensor, stopwatch: Stopwatch) -> list[Document]:
    """Time the models in turns, and return each one's seconds and bytes, and the ratios to softmax."""
    seconds = stopwatch.compare({name: partial(model, document) for name, model in models.items()})
    times = {name: Timing.of(found) for name, found in seconds.items()}
    peaks = {name: peak_bytes(model, document) for name, model in models.items()}
    return [
        {
            "tokens": document.shape[1], "row": name, "milliseconds": vars(times[name]), "peak_bytes": peaks[name],
            "times_faster": times[SOFTMAX].median / times[name].median, "memory": peaks[name] / peaks[SOFTMAX],
        }
        for name in models
    ]  # fmt: skip


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of an encoder")],
    documents: Annotated[Path, typer.Argument(help="JSON lines with a `text`")],
    length: Annotated[list[int] | None, typer.Option(help="tokens; repeatable")] = None,
    mechanism: Annotated[list[str] | None, typer.Option(help="repeatable; by default all")] = None,
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / LONG_DOCUMENTS_SPEED_FILE,
    dtype: Annotated[str, typer.Option(help="of the weights: float32 or bfloat16")] = "float32",
) -> None:
    """Measure and write the JSON."""
    lengths: Sequence[int] = length or LENGTHS
    exact: torch.dtype = getattr(torch, dtype)
    stopwatch, tokenizer = Stopwatch(torch.device("cpu"), TIMES), AutoTokenizer.from_pretrained(model)
    models = {SOFTMAX: load(model, max(lengths), exact)}
    models |= {name: load(model, max(lengths), exact, name, **MECHANISMS[name]) for name in mechanism or MECHANISMS}
    rows: list[Document] = []
    for tokens in tqdm(lengths, desc="lengths"):
        rows += measure(models, joined(tokenizer, documents, tokens), stopwatch)
    provenance = collect_provenance(torch.device("cpu"), exact, "benchmarks.studies.long_documents_speed")
    document = {"provenance": provenance, "model": Path(model).name, "rows": rows}
    write_json(output, document)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
