"""`hf-linattn eval`: perplexity on text files, or suites of tests beside the original and a control."""

from __future__ import annotations

import dataclasses
import gc
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..config import given_as, require, require_count
from ..errors import CheckpointError, DataError, OptionError
from ..reading import read_tokenizer, require_file
from ..recipe_files import locate
from .bench import numbers
from .common import (
    Json,
    check_writable,
    exit_on_error,
    read_language_model,
    read_texts,
    require_same_tokens,
    show,
)
from .eval_classifier import (
    DocumentStride,
    DocumentWindow,
    LabelColumn,
    Metrics,
    PairColumn,
    RowOptions,
    TextColumn,
    classifier_scores,
    is_classifier,
)
from .eval_embeddings import embedding_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..evaluation.suite import SuiteOptions

LENGTH, SUITE_LENGTH = 512, 1024  # tokens of a window, where none are asked for and there are as many positions
LONG_PROMPTS = 1000  # or half the positions
OUTPUT = Path("evaluation.json")
Answer = TypeVar("Answer")
TaskDir = Annotated[
    Path | None, typer.Option("--task_dir", "--task-dir", help="suite: JSON lines of tasks; default: the Hub")
]
TaskFiles = Annotated[Path, typer.Option("--task_files", "--task-files", help="suite: a folder of task files")]
LongPrompts = Annotated[
    int | None,
    typer.Option(
        help="suite: tasks also with examples, until prompts have more tokens than this; 0: not; default: 1000, or"
        " half the positions"
    ),
]
Lengths = Annotated[
    str | None, typer.Option(help="suite: tokens of generated tests, by commas; default: 1024, or all positions")
]
# kind of evaluation -> how errors call it
KINDS = {
    "perplexity": "perplexity", "classifier": "classifiers", "embeddings": "embedding models",
    "suite": "suites (--suite)", "language": "--suite language", "recall": "--suite recall", "tasks": "--suite tasks",
}  # fmt: skip
ROW_SCORES = {"classifier": classifier_scores, "embeddings": embedding_scores}
# options of some kinds alone; all others are of every kind
OPTIONS_OF = {
    **dict.fromkeys(("control", "output"), ("suite",)),
    **dict.fromkeys(("recall", "lengths", "samples"), ("recall",)),
    **dict.fromkeys(("task_dir", "task_files", "tasks", "limit", "long_prompts", "generated"), ("tasks",)),
    **dict.fromkeys(("files", "text_column"), ("perplexity", "classifier", "embeddings", "language", "recall")),
    "max_length": ("perplexity", "classifier", "embeddings", "language"),
    "num_windows": ("language",),
    "seed": ("recall", "tasks"),
    **dict.fromkeys(("text_pair_column", "document_window", "document_stride"), ("classifier", "embeddings")),
    **dict.fromkeys(("label_column", "metrics"), ("classifier",)),
    "original": ("suite", "embeddings"),
    "stride": ("perplexity",),
}  # fmt: skip


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="a folder, or a name on the Hub, of a model or of an adapter")],
    files: Annotated[list[Path] | None, typer.Argument(help="documents; of .jsonl, .csv, ... each row is one")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="tokens per window; default: 512, in suites 1024, or all positions")
    ] = None,
    stride: Annotated[int | None, typer.Option(help="by how many tokens windows advance; default: half")] = None,
    batch_size: Annotated[int, typer.Option(help="windows, or prompts, at once")] = 8,
    suite: Annotated[str | None, typer.Option(help="language, recall, tasks or all, in place of perplexity")] = None,
    original: Annotated[str | None, typer.Option(help="suite, embeddings: the model before conversion")] = None,
    control: Annotated[str | None, typer.Option(help="suite: the original, trained on the same tokens")] = None,
    task_dir: TaskDir = None,
    task_files: TaskFiles = Path("recipes/tasks"),
    tasks: Annotated[str | None, typer.Option(help="suite: names of tasks, by commas; default: all files")] = None,
    limit: Annotated[int, typer.Option(help="suite: first items of each task; 0: all")] = 200,
    long_prompts: LongPrompts = None,
    generated: Annotated[int | None, typer.Option(help="suite: items whose answer is generated; default: all")] = None,
    num_windows: Annotated[int, typer.Option(help="suite: first windows of the text; 0: all")] = 32,
    recall: Annotated[str | None, typer.Option(help="suite: generated tests, by commas; default: all")] = None,
    lengths: Lengths = None,
    samples: Annotated[int, typer.Option(help="suite: prompts of each generated test and length")] = 20,
    seed: Annotated[int, typer.Option(help="suite: chooses examples and generated tests")] = 0,
    text_column: TextColumn = "text",
    text_pair_column: PairColumn = None,
    label_column: LabelColumn = "label",
    metrics: Metrics = None,
    document_window: DocumentWindow = None,
    document_stride: DocumentStride = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: as saved")] = None,
    output: Annotated[Path, typer.Option(help="suite: the JSON file that is written")] = OUTPUT,
    as_json: Json = False,
) -> None:
    """Measure a model: perplexity on text files, a suite, a classifier's metrics on rows, or what embeddings find."""
    columns = text_column, text_pair_column, label_column
    read = RowOptions(*columns, names(metrics), document_window, document_stride, original)
    with exit_on_error(), given_as(num_samples="samples", num_generated="generated", texts="files"):
        check_places(model, files or ())
        kind, *suites = kinds_of(model, suite)
        check_options(context, kind, suites)
        texts = [] if kind in ROW_SCORES else read_texts(files or (), column=text_column)
        if kind in ROW_SCORES:
            document, *shown = ROW_SCORES[kind](model, files or [], max_length, batch_size, dtype, read)
        elif suite is None:
            document, *shown = text_perplexity(model, texts, max_length, stride, batch_size, dtype, not as_json)
        else:
            check_writable("output", output)
            require_count("num_windows", num_windows, least=0)  # 0, and not None as in Python, is all
            require_count("limit", limit, least=0)
            options = suite_options(
                texts=tuple(texts), num_samples=samples, num_windows=num_windows or None, recall_tasks=names(recall),
                tasks=names(tasks), limit=limit or None, task_files=locate(task_files), task_dir=task_dir,
                num_generated=generated, batch_size=batch_size, seed=seed, progress=not as_json,
            )  # fmt: skip
            of_tests = None if lengths is None else tuple(numbers("lengths", lengths))
            asked = {"length": max_length, "lengths": of_tests, "long_prompts": long_prompts}
            beside = {"original": original, "control": control}
            paths = {role: path for role, path in beside.items() if path} | {"converted": model}
            document, *shown = run_suite(suite, paths, options, dtype, asked)
    show(document, as_json, *shown, file=output if suite is not None else None)


def check_places(model: str, files: Sequence[Path]) -> None:
    """Raise an error unless the model is no file, and the files are there."""
    if Path(model).is_file():
        raise CheckpointError(f"model={model!r} is a file; the model comes first, a folder or a name, then the files")
    for file in files:
        require_file("files", file)


def kinds_of(model: str, suite: str | None) -> list[str]:
    """Return the kind of an evaluation: that of the model, or that of suites and behind it which are asked for."""
    from ..sentence_models import is_sentence_model

    if suite is not None:
        from ..evaluation.suite import suite_names

        return ["suite", *suite_names(suite)]
    if is_sentence_model("model", model):
        return ["embeddings"]
    return ["classifier" if is_classifier(model) else "perplexity"]


def check_options(context: typer.Context, kind: str, suites: Sequence[str]) -> None:
    """Raise `OptionError` where the command line has an option of other kinds of evaluation, or of other suites."""
    own = KINDS[suites[0] if len(suites) == 1 else kind]
    for name, theirs in OPTIONS_OF.items():
        source, value = context.get_parameter_source(name), context.params[name]
        if {kind, *suites}.isdisjoint(theirs) and source is not None and source.name == "COMMANDLINE":
            given = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            *others, last = (KINDS[one] for one in theirs)
            known = f"{', '.join(others)} and {last}" if others else last
            raise OptionError(f"{name}={given!r} is an option of {known}, not of {own}; leave it out")


def suite_options(**given: Any) -> SuiteOptions:
    """Return the options of a suite, which are read with PyTorch at hand."""
    from ..evaluation.suite import SuiteOptions

    return SuiteOptions(**given)


def names(text: str | None) -> tuple[str, ...]:
    """Return names given on the command line; none for all."""
    return tuple(text.split(",")) if text else ()


def text_perplexity(
    model: str, texts: list[str], max_length: int | None, stride: int | None, batch_size: int, dtype: str | None,
    progress: bool,
) -> tuple[Any, ...]:
    """Return the JSON document, and what is shown in its place."""
    from ..evaluation import perplexity, position_limit

    if not texts:
        raise DataError("files is empty; give at least one text file, or a suite")
    loaded = read_language_model("model", model, dtype)
    length = min(LENGTH, position_limit(loaded) or LENGTH) if max_length is None else max_length
    found = perplexity(
        loaded, read_tokenizer("model", model), texts, max_length=length, stride=stride,
        batch_size=batch_size, progress=progress,
    )  # fmt: skip
    shown = f"perplexity {found['perplexity']:.4f} over {found['num_tokens']:,} tokens"
    return {"model": model, **found}, shown


def run_suite(
    suite: str, paths: dict[str, str], options: SuiteOptions, dtype: str | None, asked: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the JSON document, and what is shown in its place; one model is in memory at a time.

    asked: the lengths of `options` that were given; None: those of `default_lengths`.
    """
    from ..evaluation import side_by_side
    from ..evaluation import suite as suites
    from ..evaluation.suite_table import means_table, suite_table
    from ..report.schema import collect_provenance

    chosen = suites.suite_names(suite)
    start, tokenizer = time.perf_counter(), read_tokenizer("model", paths["converted"])
    for role, path in paths.items():
        if role != "converted":
            require_same_tokens(role, path, read_tokenizer(role, path), paths["converted"], tokenizer)
    # before hours go into the measurements: prompts that one model has positions for are those of all
    facts = {role: ask(role, path, dtype, facts_of) for role, path in paths.items()}
    limit = suites.fewest(*(limit for limit, _, _ in facts.values()))
    length = asked["length"]
    if length is not None and limit is not None and "language" in chosen:
        require("max_length", length, length <= limit, f"at most {limit}, the positions that the models have")
    lengths = default_lengths(limit) | {name: value for name, value in asked.items() if value is not None}
    lengths["long_prompts"] = lengths["long_prompts"] or None
    with given_as(length="max_length"):
        options = dataclasses.replace(options, positions=limit, **lengths)
    _, window, place = facts["converted"]
    provenance = collect_provenance(options.seed, f"hf-linattn {shlex.join(sys.argv[1:])}", **place)
    measured = {
        role: ask(role, path, dtype, lambda x: suites.measure(x, tokenizer, chosen, options))
        for role, path in paths.items()
    }
    rows = side_by_side.compare(measured, window)
    report = side_by_side.SuiteReport(
        model=paths["converted"], original=paths.get("original"), control=paths.get("control"), window=window,
        rows=tuple(rows), means=tuple(side_by_side.task_means(rows)),
    )  # fmt: skip
    document = {
        **report.to_dict(),
        "seconds": time.perf_counter() - start,
        "provenance": dataclasses.asdict(provenance),
    }
    means = [means_table(report.means)] if report.means else []
    return document, suite_table(report), *means


def default_lengths(limit: int | None) -> dict[str, Any]:
    """Return the lengths that a suite has by default, of models with as many positions; None: any number.

    >>> default_lengths(512)
    {'length': 512, 'lengths': (512,), 'long_prompts': 256}
    """
    length = SUITE_LENGTH if limit is None else min(SUITE_LENGTH, limit)
    prompts = LONG_PROMPTS if limit is None else min(LONG_PROMPTS, limit // 2)
    return {"length": length, "lengths": (length,), "long_prompts": prompts}


def ask(role: str, path: str, dtype: str | None, question: Callable[[PreTrainedModel], Answer]) -> Answer:
    """Return what a function says of a model, which is in memory for that long."""
    loaded = read_language_model("model" if role == "converted" else role, path, dtype)
    answer = question(loaded)
    del loaded
    gc.collect()  # before the next one is read; modules may refer to each other in a ring
    return answer


def facts_of(model: PreTrainedModel) -> tuple[int | None, int | None, dict[str, Any]]:
    """Return the positions of a model, the window within which it equals softmax, and where it lies in which dtype."""
    from ..evaluation import position_limit
    from ..evaluation.suite import exact_window

    return position_limit(model), exact_window(model), {"device": model.device, "dtype": model.dtype}
