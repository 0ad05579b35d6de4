"""The invariants every mechanism must keep, for anyone's mechanism."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..config import make_config, require, require_known
from ..console_table import console_table
from ..errors import UnsupportedModeError
from ..mechanisms import MECHANISMS, Mechanism
from .cross import CROSS_INVARIANTS
from .expectations import InvariantError
from .invariants import CAUSAL_ONLY, INVARIANTS
from .models import (
    ARCHITECTURES,
    CROSS_ARCHITECTURES,
    KEY_VALUE_HEADS,
    MODES,
    MORE_ARCHITECTURES,
    Case,
    FedCase,
    modes_of,
    random_tokens,
    tiny_model,
)

__all__ = [
    "ARCHITECTURES",
    "CROSS_ARCHITECTURES",
    "CROSS_INVARIANTS",
    "INVARIANTS",
    "MODES",
    "MORE_ARCHITECTURES",
    "Case",
    "Check",
    "InvariantError",
    "Report",
    "check_mechanism",
    "checks_of",
    "random_tokens",
    "tiny_model",
]


@dataclass
class Check:
    """One invariant of one case, and what came of it.

    `error` is None if it holds; `note`, if any, is what the table then says in place of that.
    """

    case: Case
    invariant: str
    error: str | None = None
    note: str | None = None

    def run(self) -> None:
        """Raise `InvariantError` if the invariant does not hold."""
        self.note = (CROSS_INVARIANTS if self.case.mode == "cross" else INVARIANTS)[self.invariant](self.case)


@dataclass
class Report:
    """All checks of one mechanism."""

    checks: list[Check]

    @property
    def failures(self) -> list[Check]:
        """The checks that do not hold."""
        return [check for check in self.checks if check.error is not None]

    def table(self) -> Table:
        """Return invariants x (architecture, mode) for `rich.print`."""
        columns = sorted({(c.case.architecture, c.case.mode) for c in self.checks})
        table = console_table("invariant", *(f"{architecture} {mode}" for architecture, mode in columns))
        for name in INVARIANTS:
            checks = [check for check in self.checks if check.invariant == name]
            cells = {(c.case.architecture, c.case.mode): c.error or c.note or "holds" for c in checks}
            table.add_row(name, *(cells.get(column, "-") for column in columns))
        return table


def checks_of(
    mechanism: str, architectures: Iterable[str] = (*ARCHITECTURES, *CROSS_ARCHITECTURES), **options: Any
) -> list[Check]:
    """Return every check that can exist for a registered mechanism, not yet run."""
    modes, architectures = MECHANISMS.get(mechanism).modes, list(architectures)
    for architecture in architectures:
        require_known("architecture", architecture, KEY_VALUE_HEADS)
    across = [
        Check(FedCase(mechanism, architecture, False, options), name)
        for architecture in architectures
        if architecture in CROSS_ARCHITECTURES and "cross" in modes
        for name in CROSS_INVARIANTS
    ]
    checks = across + [
        Check(FedCase(mechanism, architecture, mode == "causal", options), name)
        for architecture in architectures
        for mode in modes_of(architecture)
        if mode in modes and architecture not in CROSS_ARCHITECTURES
        for name in INVARIANTS
        if mode == "causal" or name not in CAUSAL_ONLY
    ]
    can_be = {(x.case.architecture, x.case.mode): _can_be(x.case) for x in checks} if options else {}
    return [x for x in checks if can_be.get((x.case.architecture, x.case.mode), True)] or checks


def _can_be(case: Case) -> bool:
    """Return whether options leave a mechanism this mode."""
    try:
        case.make()
    except UnsupportedModeError:
        return False
    return True


def check_mechanism(
    mechanism: str | type[Mechanism],
    architectures: Iterable[str] = (*ARCHITECTURES, *CROSS_ARCHITECTURES),
    **options: Any,
) -> Report:
    """Run the invariants on a mechanism, by its registered name or class, and report which hold.

    What a check raises is its error in the report; `run` of that check raises it again, with its traceback.

    Args:
        mechanism: a name of `list_mechanisms()` or a class decorated with `register_mechanism`.
        architectures: of "bert", "gpt2" and "llama" (grouped queries, rotary positions); "bart" and "whisper" for
            the mechanisms that have a cross form; and the causal ones of `MORE_ARCHITECTURES`.
        **options: options of the mechanism.

    Raises:
        UnknownNameError: no such mechanism or architecture.
        OptionError: no such option, or a class that is not registered.
        UnsupportedModeError: none of the architectures needs a form that the mechanism has.

    Examples:
        >>> from hf_linattn.testing import check_mechanism
        >>> check_mechanism("linear", architectures=["gpt2"]).failures  # doctest: +SKIP
        []
    """
    name = mechanism if isinstance(mechanism, str) else mechanism.config_class.mechanism
    registered = isinstance(mechanism, str) or (name in MECHANISMS.names() and MECHANISMS.get(name) is mechanism)
    require("mechanism", mechanism, registered, "a name, or a class that @register_mechanism(name) stands above")
    make_config(name, options)
    architectures = list(architectures)
    checks = checks_of(name, architectures, **options)
    if architectures and not checks:
        raise UnsupportedModeError(
            f"mechanism {name!r} has no form that {', '.join(architectures)} could ask for: it has"
            f" {', '.join(sorted(MECHANISMS.get(name).modes))}; give other architectures, such as {ARCHITECTURES[0]!r}"
        )
    for check in checks:
        try:
            check.run()
        except InvariantError as error:
            check.error = str(error)
        except Exception as error:  # whatever the mechanism's code raises, the other checks have their say
            check.error = f"{type(error).__name__}: {error}"
    return Report(checks)
