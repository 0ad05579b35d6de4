"""The plots show the numbers of the report, and touch nothing global."""

from __future__ import annotations

import ast
import dataclasses

import pytest

from hf_linattn.errors import OptionError
from hf_linattn.evaluation import MemoryRow, SpeedRow, Spread
from hf_linattn.report import (
    BytesPoint,
    Evaluation,
    Perplexities,
    Report,
    Training,
    WindowRow,
    bytes_figure,
    collect_provenance,
    points_of,
    save_plots,
)
from hf_linattn.report.plots import perplexity_figure, state_figure, time_figure
from tests.test_imports import ROOT, find_modules, imported

LENGTHS = (256, 512, 1024)


@pytest.fixture(scope="module")
def report():
    return Report(
        base_model="models/gpt2",
        mechanism="performer",
        data="bundled",
        perplexity=Perplexities(original=9.0, control=8.0, converted=30.0, recovered=10.0),
        evaluation=Evaluation(max_length=512, stride=256, num_tokens=1000),
        training=Training(2_000_000, 1e-3, 1e-3, (1e-3,), (1e-3,), 0),
        provenance=collect_provenance(0, "command"),
        speed=tuple(
            SpeedRow(
                length,
                2,
                Spread(1000.0, 500.0, 2000.0),
                Spread.of([512_000 / length]),
                Spread.of([2.0]),
                Spread.of([length / 256]),
            )
            for length in reversed(LENGTHS)
        ),
        memory=tuple(MemoryRow(length, length, length**2, 1000, 8 * length) for length in LENGTHS),
    )


def curves(axes) -> dict[str, list[tuple[float, float]]]:
    """Return label -> points of the curves in a panel."""
    return {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.lines}


def test_perplexity_bars(report):
    (axes,) = perplexity_figure(report).axes
    assert [bar.get_height() for bar in axes.patches] == [9.0, 8.0, 30.0, 10.0]
    assert [text.get_text() for text in axes.texts] == ["9.00", "8.00", "30.00", "10.00"]
    assert axes.get_yscale() == "linear" and axes.get_ylim()[0] == 0
    assert set(axes.lines[0].get_ydata()) == {8.0}  # the better softmax model
    assert "1.250" in axes.get_title()


def test_perplexities_far_apart_are_on_a_log_axis_from_one(report):
    far = dataclasses.replace(report, perplexity=Perplexities(9.0, 8.0, 3000.0, 10.0))
    (axes,) = perplexity_figure(far).axes
    assert axes.get_yscale() == "log" and axes.get_ylim()[0] == 1 and "log" in axes.get_ylabel()
    assert axes.get_ylim()[1] > 3000


def test_time_curves_and_crossover(report):
    prefill, decode = time_figure(report).axes
    assert (prefill.get_xscale(), prefill.get_yscale()) == ("log", "log")
    points = curves(prefill)
    # two sequences of n tokens at 1,000 tokens/s take 2 n ms; at 512,000 / n tokens/s, n^2 / 256 ms
    assert points["patched"] == [(n, pytest.approx(2.0 * n)) for n in LENGTHS]
    assert points["original (sdpa)"] == [(n, pytest.approx(n**2 / 256)) for n in LENGTHS]
    assert {x for x, _ in points["crossover"]} == {report.crossover_length} == {1024}
    assert curves(decode) == {
        "patched": [(n, 2.0) for n in LENGTHS],
        "original (sdpa)": [(n, n / 256) for n in LENGTHS],
    }
    assert "ms" in prefill.get_ylabel() and "ms" in decode.get_ylabel() and "tokens" in prefill.get_xlabel()


def test_the_range_of_the_repeats_is_shown(report):
    prefill, _ = time_figure(report).axes
    ranges = [collection.get_paths()[0].vertices[:, 1] for collection in prefill.collections]
    low, high = min(r.min() for r in ranges), max(r.max() for r in ranges)
    assert low == pytest.approx(256**2 / 256) and high == pytest.approx(2 * 1024 / 0.5)


def test_no_crossover_no_line(report):
    slow = tuple(dataclasses.replace(row, patched_prefill=Spread.of([1.0])) for row in report.speed)
    prefill = time_figure(dataclasses.replace(report, speed=slow)).axes[0]
    assert "crossover" not in curves(prefill) and "no crossover" in prefill.get_title()


def test_state_curves(report):
    (axes,) = state_figure(report).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log") and "bytes" in axes.get_ylabel()
    assert curves(axes) == {
        "patched": [(n, 1000) for n in LENGTHS],
        "original": [(n, 8 * n) for n in LENGTHS],
    }


def test_perplexity_and_recall_against_bytes(report):
    points = [
        BytesPoint("gla", 4000, 12.0, 0.5), BytesPoint("window", 8000, 20.0, 0.25),
        BytesPoint("gla", 1000, 15.0, 0.125), BytesPoint("hybrid", 6000, 11.0),
    ]  # fmt: skip
    left, right = bytes_figure(points, "a model").axes
    curves = [(line.get_label(), [*line.get_xdata()], [*line.get_ydata()]) for line in left.get_lines()]
    assert curves == [("gla", [1000, 4000], [15.0, 12.0]), ("window", [8000], [20.0]), ("hybrid", [6000], [11.0])]
    assert [[*line.get_ydata()] for line in right.get_lines()] == [[0.125, 0.5], [0.25], []]
    assert left.get_lines()[1].get_linestyle() == "--" and left.get_xscale() == "log"
    assert len(bytes_figure(points[3:], "a model").axes) == 1, "recall is optional"
    for wrong in ([], [BytesPoint("linear", 0, 9.0)]):
        with pytest.raises(OptionError, match="points must be some, each with bytes"):
            bytes_figure(wrong, "a model")


def test_the_points_of_a_report(report):
    assert points_of(report) == []
    windows = (WindowRow(9, 4, 990, False, 40.0), WindowRow(9, 4, 980, True, 9.5))
    shown = points_of(dataclasses.replace(report, constant_bytes=1000, windows=windows))
    assert [(p.label, p.state_bytes, p.perplexity) for p in shown] == [
        ("performer, converted", 1000, 30.0), ("performer, recovered", 1000, 10.0),
        ("window, untrained", 990, 40.0), ("window, fine-tuned", 980, 9.5),
    ]  # fmt: skip


def test_every_figure_names_model_and_mechanism(report):
    for draw in (perplexity_figure, time_figure, state_figure):
        assert draw(report).get_suptitle().endswith(": gpt2, performer")


def test_save_plots(report, tmp_path):
    paths = save_plots(report, tmp_path)
    assert [path.name for path in paths] == ["perplexity.png", "time.png", "state.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_masked_model_has_no_state_plot_and_one_time_panel(report, tmp_path):
    masked = dataclasses.replace(
        report,
        speed=tuple(dataclasses.replace(row, patched_decode=None, original_decode=None) for row in report.speed),
        memory=tuple(dataclasses.replace(row, patched_state=None, original_state=None) for row in report.memory),
    )
    assert [path.name for path in save_plots(masked, tmp_path)] == ["perplexity.png", "time.png"]
    assert len(time_figure(masked).axes) == 1


def test_close_lengths_do_not_share_a_tick(report):
    dense = tuple(dataclasses.replace(report.speed[0], length=n) for n in (1000, 1024, 2048, 2100, 4096))
    prefill = time_figure(dataclasses.replace(report, speed=dense)).axes[0]
    assert list(prefill.get_xticks()) == [1000, 2048, 4096]


def test_pyplot_is_not_imported():
    """Its global state picks a display and keeps every figure alive."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in find_modules(ROOT).values()]
    names = {name for tree in trees for name, _ in imported(tree, "hf_linattn")}
    assert any(name.startswith("matplotlib.figure") for name in names)
    assert not any("pyplot" in name for name in names)
