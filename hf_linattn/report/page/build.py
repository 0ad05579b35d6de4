"""What stands on the page, section by section, and the page itself."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...atomic_io import write_text
from ...cards import layers_in_words, measured_sentence
from ...training.run_folders import ADAPTER
from .. import tables
from ..card import measured, task_of_report
from ..samples import TextSample
from ..schema import Report
from .charts import Picture, pictures_of, positions_picture
from .evidence import Evidence, losses_by_position, read_evidence, recalls

HERE = Path(__file__).resolve().parent
ANSWERS = {
    "text-generation": "what follows", "fill-mask": "the masked token", "text-classification": "the label",
    "sentence-similarity": "the text to be found",
}  # fmt: skip
LENGTHS = 512, 1024, 2048  # of the prompts of recall, as far as there are positions for them
MERGED = "merged"
ALONE = (
    "Adapters lie here without a model, so make it first: load_adapter(original, {adapter!r}).merge_and_unload()"
    f" from hf_linattn.training, saved with the tokenizer to {MERGED}."
)


@dataclass(frozen=True)
class Table:
    """Cells below heads.

    Attributes:
        names: how many columns, from the first, are words. described: whether the second stands below the first.
        marked: first cell of the row that stands out.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    caption: str = ""
    described: bool = False
    marked: str = ""

    def measured(self) -> Table:
        """Return the table without columns in which nothing was measured."""
        kept = [place for place in range(len(self.heads)) if any(row[place] != "-" for row in self.rows)]
        rows = [[row[place] for place in kept] for row in self.rows]
        return replace(self, heads=[self.heads[place] for place in kept], rows=rows)


@dataclass(frozen=True)
class HeatMap:
    """Numbers from 0 to 1 as colours, with their text: a row for each label. framed: places that stand out."""

    caption: str
    corner: str
    heads: Sequence[str]
    labels: Sequence[str]
    cells: Sequence[Sequence[tuple[float, str] | None]]
    framed: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        details: tables that are folded. samples: texts of a report; expected: what is asked of a model after each.
        missing: how to get what a run lacks, a sentence and a command.
    """

    name: str
    title: str
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    maps: Sequence[HeatMap] = ()
    pictures: Sequence[Picture] = ()
    details: Sequence[Table] = ()
    samples: Sequence[TextSample] = ()
    expected: str = ""
    missing: tuple[str, str] | None = None


def page(evidence: Evidence) -> str:
    """Return the page of a run as HTML: styles and pictures are in it, nothing is fetched and nothing is run."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    report = evidence.report
    return environment.get_template("page.html").render(
        title=f"{Path(report.base_model).name or report.base_model}: {report.mechanism} instead of softmax",
        sentence=measured_sentence(measured(report)) or f"{tables.verdict(report)}.",
        report=report,
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        sections=sections(evidence),
    )


def save_page(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write the page of a run, whole or not at all, and return its path.

    Raises:
        CheckpointError: the folder has no report, or a file beside it cannot be read.
    """
    return write_text(Path(path), page(read_evidence(folder)))


def sections(evidence: Evidence) -> list[Section]:
    """Return the parts of the page, in their order; what makes no sense for the model is left out."""
    pictures = pictures_of(evidence.report)
    task = task_of_report(evidence.report)
    read = [positions(evidence), recall(evidence)] if task == "text-generation" else []
    return [
        models(evidence.report),
        *read,
        speed(evidence.report, pictures["speed"]),
        memory(evidence.report, pictures["memory"]),
        layers(evidence, pictures["layers"]),
        *([samples(evidence.report)] if task in ANSWERS else []),
        training(evidence.report),
    ]


def models(report: Report) -> Section:
    """The four models, a classifier's metrics first."""
    heads = ["model", "what it is", *tables.score_heads(report)]
    shown = [Table(heads, tables.model_rows(report), 1, "Four models on the same texts", True, "recovered")]
    if report.windows:
        caption = f"Beside windows of the same bytes. {tables.WINDOW_NOTE}"
        shown.append(Table(tables.window_heads(report), tables.window_rows(report), 1, caption))
    return Section("models", "Quality", [tables.how_measured(report)], shown)


def positions(evidence: Evidence) -> Section:
    """Perplexity by position: on long documents, else as a suite measured it, else within the rows of the training."""
    report, title = evidence.report, "Perplexity by position"
    fidelity, context, suite = report.fidelity, report.long_context, losses_by_position(evidence.rows)
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    if context is not None:
        read = {name: getattr(context, name) for name in ("original", "control", "recovered")}
        rows = {name: list(map(asdict, own.positions)) for name, own in read.items() if own is not None}
        note = f"{context.recovered.windows:,} windows of {context.recovered.length:,} tokens of the test split."
    elif suite:
        rows, note = suite, "Windows of the texts that `hf-linattn eval --suite language` was given."
    elif fidelity is not None:
        named = {"original": fidelity.original_positions, "control": fidelity.control_positions}
        named["recovered"] = fidelity.positions
        rows = {name: list(map(asdict, own)) for name, own in named.items() if own}
        note = (
            f"Windows of {report.evaluation.max_length:,} tokens of the test split, as long as the rows of training."
        )
    else:
        lacks = "This run did not measure it. Give it a text:"
        return Section("positions", title, missing=unevaluated(evidence, lacks, "language", "TEXT.txt"))
    picture = positions_picture(rows)
    shaded = (
        "The shade is the 95 % interval."
        if any(row["low"] is not None for own in rows.values() for row in own)
        else ""
    )
    return Section(
        "positions", title, [f"{note} {shaded}".strip()], pictures=[picture], details=[position_table(rows)]
    )


def position_table(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """The numbers behind the picture: nats per token."""
    first = next(iter(rows.values()))
    cells = [
        [f"{row['first']:,} to {row['last']:,}", *(f"{own[place]['loss']:.3f}" for own in rows.values())]
        for place, row in enumerate(first)
    ]
    return Table(["positions", *rows], cells, 1, "Nats per token")


def recall(evidence: Evidence) -> Section:
    """What is found of what stands in long prompts, by depth and length."""
    found = recalls(evidence.rows)
    title = "Recall by depth and length"
    if not found:
        lacks, most = "This run did not measure it. It takes minutes:", evidence.positions or max(LENGTHS)
        fitting = ",".join(str(length) for length in LENGTHS if length <= most) or str(most)
        return Section("recall", title, missing=unevaluated(evidence, lacks, "recall", "--lengths", fitting))
    maps = []
    for own in found:
        depths, lengths = sorted({depth for depth, _ in own.by_depth}), sorted({length for _, length in own.by_depth})
        cells = [[shade(own.by_depth.get((depth, length))) for length in lengths] for depth in depths]
        labels = [f"{low:.0%} to {high:.0%}" for low, high in depths]
        if cells:
            maps.append(HeatMap(own.model, "depth", [f"{length:,}" for length in lengths], labels, cells))
    note = "Share of the answers in what a model wrote, mean over the tests. The depth is where the fact stands."
    places = sorted({place for own in found for place in own.by_test})
    rows = [
        [test, f"{length:,}", *(share(own.by_test.get((test, length))) for own in found)] for test, length in places
    ]
    return Section("recall", title, [note], maps=maps, details=[
        Table(["test", "tokens", *(own.model for own in found)], rows, 1, "Test by test")
    ])  # fmt: skip


def unevaluated(evidence: Evidence, lacks: str, suite: str, *words: str) -> tuple[str, str]:
    """How to run a suite, whose rows go beside the report; words: what else it is given."""
    folder = evidence.folder
    if evidence.alone:
        lacks = f"{lacks} {ALONE.format(adapter=str(folder / ADAPTER))}"
    given = ["eval", MERGED if evidence.alone else folder, *words, "--suite", suite]
    beside = ["--original", evidence.report.base_model, "--output", folder / f"evaluation-{suite}.json"]
    return lacks, command(*given, *beside)


def shade(value: float | None) -> tuple[float, str] | None:
    """Return a cell of a heat map."""
    return None if value is None else (value, f"{value:.0%}")


def share(value: float | None) -> str:
    """Return a share as text."""
    return "-" if value is None else f"{value:.0%}"


def speed(report: Report, pictures: Sequence[Picture]) -> Section:
    """Time against length."""
    if not report.speed:
        return Section("speed", "Speed", missing=unmeasured(report, "speed"))
    table = Table(
        tables.speed_heads(report), [tables.speed_row(row) for row in report.speed], 0, tables.SPEED_NOTE
    ).measured()
    return Section("speed", "Speed", [tables.speed_verdict(report)], pictures=pictures, details=[table])


def memory(report: Report, pictures: Sequence[Picture]) -> Section:
    """Bytes against length."""
    if not report.memory:
        return Section("memory", "Memory", missing=unmeasured(report, "memory"))
    table = Table(tables.MEMORY_HEADS, tables.memory_rows(report), 0, "In bytes").measured()
    return Section("memory", "Memory", [tables.MEMORY_NOTE], pictures=pictures, details=[table])


def unmeasured(report: Report, what: str) -> tuple[str, str]:
    """How to get speed and memory, which a run measures at the lengths that its model has positions for."""
    return f"This run measured no {what}. Its recipe does with this option:", "--speed_lengths 256 512 1024"


def layers(evidence: Evidence, pictures: Sequence[Picture]) -> Section:
    """What serves which layers and heads, and what each costs."""
    plan = evidence.plan
    lines, shown, maps = [], [], []
    if evidence.patches is not None:
        rows = layers_in_words(evidence.patches)
        shown.append(Table(["attention", "layers"], rows, 2, "Which attention serves which layers"))
    if plan is not None:
        record = plan.record
        unit = "key/value head" if record.unit == "head" else "layer"
        lines.append(
            f"Chosen by the search {record.search} on {record.signal}. The darker, the more a {unit} matters; framed"
            " ones keep softmax."
        )
        maps.append(plan_map(evidence))
    if not pictures and plan is None:
        lacks = "The cost of a layer was not measured. The recipe does, and keeps softmax in the dearest ones, with:"
        return Section("layers", "Layers", lines, shown, missing=(lacks, "--layers auto"))
    return Section("layers", "Layers", lines, shown, maps, pictures)


def plan_map(evidence: Evidence) -> HeatMap:
    """The scores of a choice: heads from top to bottom, layers from left to right."""
    record = evidence.plan.record  # type: ignore[union-attr]  # asked for where there is one
    highest = max(max(column) for column in record.scores)
    heads = max(map(len, record.scores))
    scores = [[column[head] if head < len(column) else None for column in record.scores] for head in range(heads)]
    cells = [
        [
            None if score is None else (max(0.0, score / highest) if highest > 0 else 0.0, f"{score:.2g}")
            for score in row
        ]
        for row in scores
    ]
    framed = frozenset((head if record.unit == "head" else 0, layer) for layer, head in record.kept)
    labels = [str(head) for head in range(heads)] if record.unit == "head" else ["all"]
    return HeatMap(
        "Score by layer and key/value head", "head", [str(n) for n in range(len(scores[0]))], labels, cells, framed
    )


def samples(report: Report) -> Section:
    """Test texts and what each model makes of them."""
    if not report.samples:
        how = ("This run kept none. Its recipe does with this option:", "--text_samples 3")
        return Section("samples", "Text samples", missing=how)
    note = "Texts of the test split, as each model answers them."
    return Section("samples", "Text samples", [note], samples=report.samples, expected=ANSWERS[task_of_report(report)])


def training(report: Report) -> Section:
    """The way from converted to recovered, what was trained, and where the numbers come from."""
    stages = []
    if report.stages:
        stages = [Table(tables.stage_heads(report), tables.stage_rows(report), 1, "After each stage")]
    facts = [
        Table(["what", "value"], tables.training_rows(report), 2, "Training"),
        Table(["what", "value"], tables.provenance_rows(report), 2, "Where the numbers come from"),
    ]
    return Section("training", "Training", [], stages, details=facts)


def command(*words: object) -> str:
    """Return a command of this library as a shell reads it."""
    return "hf-linattn " + shlex.join(map(str, words))
