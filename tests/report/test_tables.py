"""The tables say what the report holds."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from hf_linattn.evaluation import LongLosses, MemoryRow, PositionRow, RecurrenceRow, SpeedRow, Spread
from hf_linattn.report import (
    Evaluation,
    LongContext,
    Perplexities,
    Report,
    Stage,
    Training,
    WindowRow,
    collect_provenance,
    four_model_table,
    save_report,
    to_markdown,
)


@pytest.fixture(scope="module")
def report():
    slow, fast = Spread(1000.0, 900.0, 1100.0), Spread(2000.0, 1550.0, 3000.0)
    return Report(
        base_model="models/gpt2",
        mechanism="performer",
        data="bundled",
        options={"num_features": 128},
        perplexity=Perplexities(original=9.0, control=8.0, converted=1234.5, recovered=10.0),
        evaluation=Evaluation(max_length=512, stride=256, num_tokens=98_765),
        training=Training(2_000_000, 1e-3, 3e-4, (1e-3,), (3e-4, 1e-3), 100_000, {"kl_weight": 0.5}),
        stages=(Stage("converted", 0, 0.0, 7.0), Stage("recovered", 2_000_000, 1234.5, 2.0, 1812.4, 0.314)),
        provenance=collect_provenance(7, "accelerate launch recipes/finetune.py --seed 7"),
        speed=(
            SpeedRow(256, 1, slow, fast, Spread(2.0, 1.0, 3.0), Spread(1.0, 0.5, 1.5)),
            SpeedRow(512, 1, fast, slow, Spread(2.0, 1.0, 3.0), Spread(5.0, 4.0, 6.0)),
        ),
        memory=(MemoryRow(256, 1111, 2222, 10, 20), MemoryRow(512, 3333, 4444, 10, 40)),
        constant_bytes=5_000,
        windows=(WindowRow(77, 4, 4_990, False, 40.0), WindowRow(76, 4, 4_930, True, 9.6)),
    )


def cells(markdown: str, first: str) -> list[str]:
    """Return the cells of the one Markdown row that starts with the cell `first`."""
    rows = [line for line in markdown.splitlines() if line.startswith(f"| {first} |")]
    assert len(rows) == 1
    return [cell.strip() for cell in rows[0].strip("|").split("|")]


def test_four_model_table(report):
    table = four_model_table(report)
    assert [list(column.cells) for column in table.columns] == [
        ["original", "control", "converted", "recovered"],
        ["9.00", "8.00", "1,234.50", "10.00"],
        ["1.125", "1.000", "154.312", "1.250"],
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    shown = " ".join(console.file.getvalue().split())
    assert "recovered / best (control) = 1.250" in shown and "…" not in shown
    assert "control: pretrained, softmax attention, fine-tuned on the same text" in shown


def test_the_better_softmax_model_is_named(report):
    swapped = dataclasses.replace(report, perplexity=Perplexities(8.0, 9.0, 50.0, 12.0))
    assert "recovered / best (original) = 1.500" in to_markdown(swapped)


def test_markdown_has_the_four_models(report):
    markdown = to_markdown(report)
    models = markdown.split("## Stages")[0]
    assert cells(models, "control")[2:] == ["8.00", "1.000"]
    assert cells(models, "recovered")[2:] == ["10.00", "1.250"]
    assert "98,765 scored tokens of the test split, windows of 512, stride 256." in markdown
    answers = dataclasses.replace(report, evaluation=dataclasses.replace(report.evaluation, answers=True))
    assert "98,765 scored tokens of the answers in the test split, windows" in to_markdown(answers)
    some = dataclasses.replace(answers, evaluation=dataclasses.replace(answers.evaluation, num_documents=1234))
    assert "of the answers in 1,234 conversations of the test split, windows" in to_markdown(some)
    limits = {"num_documents": 512, "document_tokens": 256}
    fewer = dataclasses.replace(report, evaluation=dataclasses.replace(report.evaluation, **limits))
    assert "of 512 documents of the test split, of each document the first 256, windows" in to_markdown(fewer)


def test_markdown_has_the_losses_on_long_documents(report):
    def read(loss, low=None, high=None):
        rows = (RecurrenceRow(0, 0, 1234, loss, low, high), RecurrenceRow(65, 128, 56, loss + 1, low, high))
        return LongLosses(4096, 16, 9, (PositionRow(1, 63, 0.5, loss - 1, low, high),), rows, rows[:1])

    context = LongContext(read(3.0, 2.5, 3.5), read(2.9), read(2.8))
    markdown = to_markdown(dataclasses.replace(report, long_context=context)).split("## Long documents")[1]
    assert "16 windows of 4,096 tokens, of 9 documents" in markdown
    assert cells(markdown, "1 to 63")[1:] == ["2.000 (2.500 to 3.500)", "1.900", "1.800"]
    assert cells(markdown, "65 to 128")[1:] == ["56", "4.000 (2.500 to 3.500)", "3.900", "3.800"]
    assert markdown.count("| new | 1,234 |") == 2
    two = to_markdown(dataclasses.replace(report, long_context=context.__class__(read(3.0), read(2.9))))
    assert "| positions | recovered | original |\n" in two


def test_markdown_has_the_windows_of_equal_bytes(report):
    section = to_markdown(report).split("## Beside windows of the same bytes")[1].split("## ")[0]
    assert cells(section, "performer, converted")[1:] == ["5,000", "1,234.50", "154.312"]
    assert cells(section, "performer, recovered")[1:] == ["5,000", "10.00", "1.250"]
    assert cells(section, "window of 77 and 4 sink tokens, untrained")[1:] == ["4,990", "40.00", "5.000"]
    assert cells(section, "window of 76 and 4 sink tokens, fine-tuned")[1:] == ["4,930", "9.60", "1.200"]
    assert "windows of the same bytes" not in to_markdown(dataclasses.replace(report, windows=()))
    growing = to_markdown(dataclasses.replace(report, constant_bytes=None))  # beside another run's windows
    section = growing.split("## Beside windows of the same bytes")[1].split("## ")[0]
    assert "performer" not in section and cells(section, "window of 76 and 4 sink tokens, fine-tuned")[1] == "4,930"


def test_markdown_has_the_stages_in_perplexity(report):
    stages = to_markdown(report).split("## Stages")[1].split("## Speed")[0]
    assert cells(stages, "converted") == ["converted", "0", "0", "", "", "1,096.63"]
    assert cells(stages, "recovered") == ["recovered", "2,000,000", "1,234", "1,812", "31%", "7.39"]
    assert "kl_weight=0.5" in cells(to_markdown(report), "how the original taught it")[1]


def test_markdown_has_speed_as_ratios(report):
    speed = to_markdown(report).split("## Speed")[1].split("## Memory")[0]
    assert "faster than the original from 512 tokens on" in speed
    assert "original (sdpa)" in speed
    assert cells(speed, "512") == [
        "512",
        "1",
        "2,000 (1,550 to 3,000)",
        "1,000 (900 to 1,100)",
        "2.00",
        "2.00 (1.00 to 3.00)",
        "5.00 (4.00 to 6.00)",
        "2.50",
    ]


def test_markdown_has_memory(report):
    memory = to_markdown(report).split("## Memory")[1].split("## Training")[0]
    assert cells(memory, "512") == ["512", "10", "40", "3,333", "4,444"]


def test_markdown_says_where_the_numbers_come_from(report):
    markdown = to_markdown(report)
    for value in (report.provenance.torch, report.provenance.device, report.provenance.date, "num_features=128"):
        assert value in markdown
    assert "```sh\naccelerate launch recipes/finetune.py --seed 7\n```" in markdown


def test_what_was_not_measured_is_left_out(report):
    bare = to_markdown(dataclasses.replace(report, speed=(), memory=()))
    assert "## Speed" not in bare and "## Memory" not in bare and "time.png" not in bare
    masked = dataclasses.replace(
        report,
        evaluation=Evaluation(max_length=512, num_tokens=10),
        speed=(SpeedRow(256, 1, *[Spread(1.0, 1.0, 1.0)] * 2),),
        memory=(MemoryRow(256, 1, 2),),
    )
    markdown = to_markdown(masked)
    assert "masked tokens" in markdown and "state.png" not in markdown
    assert "The original reads faster at 256 tokens" in markdown
    speed, memory = markdown.split("## Speed")[1].split("## Memory")
    assert cells(speed, "256")[-3:] == ["-"] * 3
    assert cells(memory, "256")[1:] == ["-", "-", "1", "2"]


def test_a_pipe_in_a_value_does_not_break_the_table(report):
    markdown = to_markdown(dataclasses.replace(report, data="a|b"))
    assert "| data | a\\|b |" in markdown


def test_save_report_writes_everything(report, tmp_path):
    paths = save_report(report, tmp_path)
    names = ["bytes.png", "perplexity.png", "report.json", "report.md", "state.png", "time.png"]
    assert sorted(path.name for path in paths) == names == sorted(path.name for path in tmp_path.iterdir())
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == to_markdown(report)
    assert json.loads((tmp_path / "report.json").read_text())["ratio"] == 1.25
