"""Prints, after the tests, how many checks of each invariant passed: mechanism x architecture x mode."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table


def pytest_terminal_summary(terminalreporter) -> None:
    passed: Counter[tuple[str, ...]] = Counter()
    total: Counter[tuple[str, ...]] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            key = dict(getattr(report, "user_properties", ())).get("invariant")
            if key is not None:
                total[tuple(key)] += 1
                passed[tuple(key)] += outcome == "passed"
    if not total:
        return
    invariants = sorted({key[3] for key in total}, key=lambda name: int(name.split()[0]))
    table = Table("mechanism", "architecture", "mode", *(name.split()[0] for name in invariants), title="invariants")
    for row in sorted({key[:3] for key in total}):
        counts = [(passed[*row, name], total[*row, name]) for name in invariants]
        table.add_row(*row, *(f"{good}/{of}" if of else "-" for good, of in counts))
    terminalreporter.section("invariants: passed / checked")
    Console(file=terminalreporter._tw._file, width=120).print(table)
    terminalreporter.write_line("; ".join(invariants))
