"""Which cases of a product of parameters are enough: a covering array."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import pytest

SELDOM = {"exhaustive", "slow", "gpu", "zero3", "quantised"}


def covering_array(cases: Sequence[Mapping[int, str]], strength: int) -> set[int]:
    """Return the numbers of cases that have every combination of values of any `strength` parameters.

    A greedy choice: the next case has most combinations that are missing, of these most of one parameter more, of
    these the rarest values.
    """
    needed, wider = ([set(combinations(sorted(x.items()), size)) for x in cases] for size in (strength, strength + 1))
    missing, chosen = set().union(*needed), set()
    seen: set[tuple[tuple[int, str], ...]] = set()
    used: Counter[tuple[int, str]] = Counter()

    def gain(number: int) -> tuple[int, int, int]:
        rarity = -sum(used[value] for value in cases[number].items())
        return len(needed[number] & missing), len(wider[number] - seen), rarity

    while missing:
        best = max(range(len(cases)), key=gain)
        chosen.add(best)
        missing -= needed[best]
        seen |= wider[best]
        used.update(cases[best].items())
    return chosen


def mark_exhaustive(items: Iterable[pytest.Item]) -> None:
    """Mark `exhaustive` the cases of a test marked `covering` that its covering array does without."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering") and not SELDOM & {mark.name for mark in item.iter_markers()}:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        (strength,) = cases[0].get_closest_marker("covering").args
        # a name for the values that each `parametrize`, or each fixture, gives a case
        kept = covering_array([dict(enumerate(case.callspec._idlist)) for case in cases], strength)
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.exhaustive)
