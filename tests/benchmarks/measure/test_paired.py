"""Two checkouts beside each other: that they take turns, and what their interval is of."""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path

import pytest
import typer
from scipy import stats

from benchmarks.measure import paired

pytestmark = pytest.mark.tools
ROW = paired.Row("linear", "causal", "forward", 64)


class Clock:
    """Stands in for the process of a checkout, and takes the times it is given, in turns."""

    def __init__(self, *seconds: float):
        self.seconds, self.turns = seconds, count()

    def ask(self, do: str, **asked: object) -> float:
        return 1 if do == "prepare" else self.seconds[next(self.turns) % len(self.seconds)]


def test_the_interval_is_of_the_means_of_the_pairs() -> None:
    times = [(1.0, 1.1), (1.2, 1.3), (0.9, 1.0), (1.4, 1.2)]  # of this checkout, where the other one's are a second
    pairs = [(Clock(*own), Clock(1.0)) for own in times]
    found = paired.compare(ROW, pairs, options={}, backend="auto", rounds=8)
    means = [(math.log(a) + math.log(b)) / 2 for a, b in times]
    low, high = stats.t.interval(0.95, 3, stats.tmean(means), stats.sem(means))
    assert [found.ratio, found.low, found.high] == pytest.approx(
        [math.exp(x) for x in (stats.tmean(means), low, high)], rel=1e-4
    )
    assert found.rounds == 8


def test_two_checkouts_take_turns_at_the_same_rows() -> None:
    root = Path(__file__).resolve().parents[3]
    processes = paired.Checkout(root, threads=1), paired.Checkout(root, threads=1)
    rows = [row for row in paired.rows_of("linear", [64], ["forward", "decoding"]) if row.mode == "causal"]
    assert [row.direction for row in rows] == ["forward", "decoding"]
    for row in rows:
        pairs = [processes] * paired.PAIRS
        found = paired.compare(row, pairs, options={"feature_map": "elu"}, backend="auto", rounds=8)
        assert found.low < found.ratio < found.high and 0.2 < found.ratio < 5, "the same code beside itself"
    for process in processes:
        process.process.kill()
    with pytest.raises(ChildProcessError, match="prepare"):
        paired.compare(rows[0], [processes], options={}, backend="auto", rounds=8)
    with pytest.raises(typer.BadParameter, match="rounds must be a multiple of 4"):
        paired.main(root, rounds=10)
