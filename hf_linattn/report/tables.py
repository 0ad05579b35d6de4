"""The report as tables: for the console (rich) and as Markdown (`report.md`)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from rich.table import Table

from ..atomic_io import write_text
from ..console_table import console_table
from ..evaluation import Fidelity, PositionRow, RecurrenceRow, SpeedRow, Spread
from ..markdown import markdown_table
from .four_models import Scores
from .plots import PLOTS, save_plots
from .samples import sample_section
from .schema import DISTANCES, EMBEDDING, LongContext, Report, WindowRow
from .teaching import listed, teaching_rows

MARKDOWN_FILE = "report.md"
STAGE_HEADS = ["stage", "training tokens", "seconds", "tokens/s", "of matrix rate"]
MODELS = {
    "original": "pretrained, softmax attention",
    "control": "pretrained, softmax attention, fine-tuned on the same text",
    "converted": "{mechanism}, before recovery",
    "recovered": "{mechanism}, fine-tuned",
}
READINGS = {
    "cut": "pretrained, its own positions: the first {length:,} tokens",
    "windows": "pretrained, its own positions: windows of {length:,} tokens every {stride:,}, {pooled}",
}
WINDOWED = {EMBEDDING: "embeddings averaged by tokens"}  # by the problem: what is made of windows
PERPLEXITIES = {  # by the problem of a classifier: what stands under that name
    "regression": " The perplexity is exp of the mean squared error.",  # in older reports
    "multi_label_classification": " The perplexity is that of one label, yes or no.",
}
SHARES = ("accuracy", "macro_f1", "micro_f1", "recall_at_1", "recall_at_10")  # metrics that are shown in percent
RETRIEVED = (
    "{count:,} texts of the test split, halves or pairs, each cut to {length:,} tokens: one is looked for by the other"
    " among all of them. The perplexity is that of the right one, in a softmax over 20 times all cosines; `cosine` is"
    " the mean cosine of whole texts' embeddings to those of the original that teaches."
)
CONVERTED = ("converted", "recovered")
SPEED_NOTE = "Medians of repeats that alternate between the two in one run; in brackets the smallest and the largest."
MEMORY_NOTE = "One sequence, without the weights."
MEMORY_HEADS = ["tokens", "state bytes", "original", "peak bytes of a forward", "original"]
WINDOW_NOTE = "Decoding state of one sequence in these layers, in a bfloat16 model."
RECALL_NOTE = "generated recall was trained on: tests of the same kinds are no longer untouched"
HELD_OUT = "; it has no test split: test texts were held out of its training split"
READERS = ("recovered", "original", "control")  # of one text


def four_model_table(report: Report) -> Table:
    """Return the four models side by side, for `rich.print`: perplexity, and its ratio to the better softmax model."""
    rows = model_rows(report)
    what = [f"{name}: {described}" for name, described, *_ in rows]  # below: numbers leave no room
    table = console_table(
        "model", *score_heads(report), numbers=True, caption="\n".join([verdict(report), *what]),
        title=f"{report.base_model}: {report.mechanism} instead of softmax", caption_justify="left",
    )  # fmt: skip
    for name, _, *scores in rows:
        table.add_row(name, *scores, style="green" if name == "recovered" else None)
    return table


def stage_table(report: Report) -> Table:
    """Return the way from converted to recovered, for `rich.print`."""
    table = console_table(*stage_heads(report), numbers=True, title="after each stage")
    for row in stage_rows(report):
        table.add_row(*row)
    return table


def to_markdown(report: Report) -> str:
    """Return the text of `report.md`: the four models, speed, memory, training, where the numbers come from."""
    return "\n\n".join([f"# {report.base_model}: {report.mechanism} instead of softmax", *sections(report)]) + "\n"


def sections(report: Report) -> list[str]:
    """Return what `report.md` and the model card have in common, below the title."""
    return [
        verdict(report),
        _score_title(report),
        _model_table(report),
        how_measured(report),
        f"![perplexity]({PLOTS['perplexity']})",
        *(_window_section(report) if report.windows else []),
        *(_stage_section(report) if report.stages else []),
        *(["## Layers", f"![layers]({PLOTS['layers']})"] if report.sensitivity else []),
        *(_fidelity_section(report.fidelity) if report.fidelity else []),
        *(_long_section(report.long_context) if report.long_context else []),
        *(_speed_section(report) if report.speed else []),
        *(_memory_section(report) if report.memory else []),
        *(sample_section(report.samples)),
        "## Training",
        markdown_table(["what", "value"], training_rows(report), "ll"),
        "## Where the numbers come from",
        markdown_table(["what", "value"], provenance_rows(report), "ll"),
        f"```sh\n{report.provenance.command}\n```",
    ]


def save_report(report: Report, directory: str | os.PathLike[str]) -> list[Path]:
    """Write `report.json`, `report.md` and the plots into a directory, each whole or not at all; return the paths."""
    markdown = to_markdown(report)
    return [
        report.save(directory),
        write_text(Path(directory) / MARKDOWN_FILE, markdown),
        *save_plots(report, directory),
    ]


def _score_title(report: Report) -> str:
    if report.evaluation.problem == EMBEDDING:
        return "## Retrieval"
    title = "Perplexity" if report.squared_error is None else "Mean squared error"
    return f"## Accuracy and {title.lower()}" if report.accuracy else f"## {title}"


def verdict(report: Report) -> str:
    """Return how the recovered model stands to the better softmax model."""
    better = "original" if report.scores.original == report.scores.best else "control"
    return f"recovered / best ({better}) = {report.ratio:.3f}"


def model_rows(report: Report) -> list[list[str]]:
    """Return the cells of the models below the heads `model`, `what it is` and `score_heads`."""
    rows, found = [], report.scores
    for name, description in MODELS.items():
        value = getattr(found, name)
        if value is None:
            continue
        what = description.format(mechanism=report.mechanism)
        scores = [_score(row.metric, getattr(row, name)) for row in report.metrics]
        if report.accuracy and not scores:  # of an older report
            scores = [f"{getattr(report.accuracy, name):.1%}"]
        rows.append([name, what, *scores, *_beside_best(found, value)])
    for read in report.readings:
        pooled = WINDOWED.get(report.evaluation.problem or "", "logits pooled by tokens")
        what = READINGS[read.reading].format(length=read.max_length, stride=read.stride or 0, pooled=pooled)
        scores = [_score(row.metric, read.metrics.get(row.metric)) for row in report.metrics]
        rows.append([f"original, {read.reading}", what, *scores, *_beside_best(found, getattr(read, found.name))])
    return rows


def _beside_best(scores: Scores, value: float) -> list[str]:
    """Return the cells of a score, and of how many times the best one it is."""
    return [f"{value:{scores.form}}", f"{scores.beside_best(value):,.3f}"]


def score_heads(report: Report) -> list[str]:
    """Return the columns of a score: metrics first, where they are what a model is for."""
    metrics = [row.metric.replace("_", " ") for row in report.metrics]  # older reports have the accuracy alone
    return [*(metrics or ["accuracy"] * (report.accuracy is not None)), report.scores.label, "x best"]


def _score(metric: str, value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if metric in SHARES else f"{value:.3f}"


def _model_table(report: Report) -> str:
    heads = ["model", "what it is", *score_heads(report)]
    return markdown_table(heads, model_rows(report), "ll" + "r" * (len(heads) - 2))


def how_measured(report: Report) -> str:
    """Return on what the scores were measured, in a sentence or two."""
    how = report.evaluation
    if how.problem == EMBEDDING:
        return RETRIEVED.format(count=how.num_tokens, length=how.max_length)
    if report.accuracy or report.metrics:
        note = PERPLEXITIES.get(how.problem or "", "") if report.perplexity else ""
        read = f"{how.num_tokens:,} texts of the test split, cut to {how.max_length:,} tokens; one prediction each."
        return read + note
    stride = "masked tokens" if how.stride is None else f"stride {how.stride:,}"
    read = "conversations" if how.answers else "documents"
    cut = "" if how.document_tokens is None else f", of each document the first {how.document_tokens:,}"
    whole = "" if how.num_documents is None else f"{how.num_documents:,} {read} of "
    of = f"the answers in {whole}the test split" if how.answers else f"{whole}the test split"
    return f"{how.num_tokens:,} scored tokens of {of}{cut}, windows of {how.max_length:,}, {stride}."


def _window_section(report: Report) -> list[str]:
    table = markdown_table(window_heads(report), window_rows(report), "lrrr")
    return ["## Beside windows of the same bytes", table, WINDOW_NOTE, f"![bytes]({PLOTS['bytes']})"]


def window_heads(report: Report) -> list[str]:
    """Return the heads of the table of windows."""
    return ["attention of the converted layers", "state bytes", report.scores.label, "x best"]


def window_rows(report: Report) -> list[list[str]]:
    """Return the cells below `window_heads`."""
    own = report.scores
    compared = [(_window_name(row), row.state_bytes, getattr(row, own.name)) for row in report.windows]
    if (count := report.constant_bytes) is not None:
        compared = [(f"{report.mechanism}, {name}", count, getattr(own, name)) for name in CONVERTED] + compared
    return [[name, f"{count:,}", *_beside_best(own, value)] for name, count, value in compared]


def _window_name(row: WindowRow) -> str:
    trained = "fine-tuned" if row.trained else "untrained"
    return f"window of {row.window_size:,} and {row.num_sink_tokens} sink tokens, {trained}"


def _stage_section(report: Report) -> list[str]:
    return ["## Stages", markdown_table(stage_heads(report), stage_rows(report), "lrrrrr")]


def stage_heads(report: Report) -> list[str]:
    """Return the heads of the table of stages."""
    return [*STAGE_HEADS, "validation loss" if report.evaluation.problem in DISTANCES else "validation perplexity"]


def stage_rows(report: Report) -> list[list[str]]:
    """Return the cells below `stage_heads`."""
    distance = report.evaluation.problem in DISTANCES
    return [
        [
            stage.name, f"{stage.tokens:,}", f"{stage.seconds:,.0f}",
            "" if stage.tokens_per_second is None else f"{stage.tokens_per_second:,.0f}",
            "" if stage.matrix_share is None else f"{stage.matrix_share:.0%}",
            f"{stage.validation_loss:.4f}" if distance else f"{math.exp(stage.validation_loss):,.2f}",
        ]
        for stage in report.stages
    ]


def _fidelity_section(fidelity: Fidelity) -> list[str]:
    read = [rows for rows in (fidelity.positions, fidelity.original_positions, fidelity.control_positions) if rows]
    positions = [
        [f"{rows[0].first} to {rows[0].last}", *(f"{row.accuracy:.1%}" for row in rows)]
        for rows in zip(*read, strict=True)
    ]
    readers = READERS[: len(read)]
    written = [
        [name, f"{text.perplexity:.2f}", f"{text.repetition:.1%}", f"{text.agreement:.1%}"]
        for name, text in (
            ("recovered, greedy", fidelity.greedy),
            ("original, greedy", fidelity.original_greedy),
            ("recovered, sampled", fidelity.sampled),
            ("original, sampled", fidelity.original_sampled),
        )
    ]
    heads = ["continuations", "perplexity of the original", "repeated 4-grams", "as the original's greedy"]
    share = []
    if fidelity.linear_share is not None and fidelity.perplexity_without_linear is not None:
        share = [
            f"{fidelity.linear_share:.1%} of the attention weight goes to keys beyond windows and sinks; without it"
            f" the test perplexity is {fidelity.perplexity_without_linear:,.2f}."
        ]
    return [
        "## Beside the original",
        markdown_table(["positions: accuracy", *readers], positions, "l" + "r" * len(readers)),
        *(_recurrence_table(fidelity) if fidelity.recurrences else []),
        markdown_table(heads, written, "lrrr"),
        *share,
    ]


def _recurrence_table(fidelity: Fidelity) -> list[str]:
    kinds = (fidelity.recurrences, fidelity.original_recurrences, fidelity.control_recurrences)
    read = [rows for rows in kinds if rows]
    heads = ["places since the same two tokens stood together: nats per token", "tokens", *READERS[: len(read)]]
    return [_loss_table(heads, read)]


def _long_section(context: LongContext) -> list[str]:
    """Three tables of losses, one column a model."""
    read = [model for model in (context.recovered, context.original, context.control) if model]
    readers, own = READERS[: len(read)], context.recovered
    tables = [_loss_table(["positions", *readers], [model.positions for model in read])]
    for what, rows in (
        ("places since the same token", [model.recurrences for model in read]),
        ("places since the same two tokens", [model.pairs for model in read]),
    ):
        tables.append(_loss_table([what, "tokens", *readers], rows))
    note = (
        f"Nats per token on {own.windows:,} windows of {own.length:,} tokens, of {own.documents:,} documents of the"
        " test split; in brackets the 95 % interval of a bootstrap over the documents."
    )
    return ["## Long documents", note, *tables]


def _loss_table(heads: Sequence[str], read: Sequence[Sequence[PositionRow | RecurrenceRow]]) -> str:
    rows = [
        [_span(rows[0]), *([f"{rows[0].count:,}"] if isinstance(rows[0], RecurrenceRow) else []), *map(_loss, rows)]
        for rows in zip(*read, strict=True)
    ]
    return markdown_table(heads, rows, "l" + "r" * (len(heads) - 1))


def _loss(row: PositionRow | RecurrenceRow) -> str:
    return f"{row.loss:.3f}" if row.low is None else f"{row.loss:.3f} ({row.low:.3f} to {row.high:.3f})"


def _span(row: PositionRow | RecurrenceRow) -> str:
    return f"{row.first:,} to {row.last:,}" if row.last else "new"


def _speed_section(report: Report) -> list[str]:
    heads = speed_heads(report)
    table = markdown_table(heads, [speed_row(row) for row in report.speed], "r" * len(heads))
    return ["## Speed", speed_verdict(report), table, SPEED_NOTE, f"![time]({PLOTS['time']})"]


def speed_verdict(report: Report) -> str:
    """Return which model reads faster, in a sentence."""
    crossover = report.crossover_length
    if crossover:
        return f"The patched model reads faster than the original from {crossover:,} tokens on."
    longest = max(row.length for row in report.speed)
    return f"The original reads faster at {longest:,} tokens, the longest length measured."


def speed_heads(report: Report) -> list[str]:
    """Return what stands above `speed_row`."""
    original = f"original ({report.speed[0].original_attention})"
    quantities = ("prefill tokens/s", "decode ms/token")
    return ["tokens", "batch", *(head for q in quantities for head in (q, original, "times faster"))]


def speed_row(row: SpeedRow) -> list[str]:
    """Return the cells of one length."""
    return [
        f"{row.length:,}",
        str(row.batch_size),
        _spread(row.patched_prefill, ",.0f"),
        _spread(row.original_prefill, ",.0f"),
        f"{row.prefill_speedup:.2f}",
        _spread(row.patched_decode, ".2f"),
        _spread(row.original_decode, ".2f"),
        "-" if row.decode_speedup is None else f"{row.decode_speedup:.2f}",
    ]


def _spread(spread: Spread | None, form: str) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:{form}} ({spread.minimum:{form}} to {spread.maximum:{form}})"


def _memory_section(report: Report) -> list[str]:
    plot = [f"![state]({PLOTS['state']})"] if report.has_state else []
    table = markdown_table(MEMORY_HEADS, memory_rows(report), "r" * len(MEMORY_HEADS))
    return ["## Memory", table, MEMORY_NOTE, *plot]


def memory_rows(report: Report) -> list[list[str]]:
    """Return the cells below `MEMORY_HEADS`."""
    values = ("length", "patched_state", "original_state", "patched_peak", "original_peak")
    return [["-" if getattr(row, v) is None else f"{getattr(row, v):,}" for v in values] for row in report.memory]


def training_rows(report: Report) -> list[list[str]]:
    """Return what the training was, by name."""
    training = report.training
    read = {"recovered": training.tokens, "control": training.control_tokens}
    return [
        ["data", report.data + HELD_OUT * report.evaluation.held_out],
        ["options", listed(report.options) or "defaults"],
        *([f"training tokens of {name}", f"{tokens:,}"] for name, tokens in read.items() if tokens is not None),
        ["what is trained of the control", training.control],
        ["dtype of the saved weights", training.saved_dtype or "as trained"],
        ["learning rate of recovered", f"{training.recovered_learning_rate:g}"],
        ["learning rate of control", _listed(r for r in [training.control_learning_rate] if r is not None)],
        ["learning rates tried for recovered", _listed(training.learning_rate_grid)],
        ["learning rates tried for control", _listed(training.control_learning_rate_grid)],
        ["training tokens of each trial", f"{training.search_tokens:,}"],
        *([["recall", RECALL_NOTE]] if training.teaching.get("recall_share") else []),
        *teaching_rows(report),
    ]


def _listed(rates: Iterable[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def provenance_rows(report: Report) -> list[list[str]]:
    """All but the command, which stands below in a block of its own."""
    names = [f.name for f in fields(report.provenance) if f.name != "command"]
    return [[name, str(getattr(report.provenance, name))] for name in names]
