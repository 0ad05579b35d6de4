"""Every invariant for every registered mechanism, on every architecture, in every mode that can exist."""

from __future__ import annotations

import pytest

from hf_linattn import list_mechanisms
from hf_linattn.testing import Check, checks_of

# beside the defaults of each mechanism, which are always tested
VARIANTS = {
    "linear": [{"feature_map": "relu"}, {"decay": "learned"}],
    "linformer": [{"num_slots": 7, "block_size": 16, "sharing": "none", "positions_per_slot": 3}],
    "performer": [{"kernel": "hyperbolic", "num_features": 19}, {"kernel": "relu", "decay": "learned"}],
}
CHECKS = [
    check
    for mechanism in list_mechanisms()
    for options in [{}, *VARIANTS.get(mechanism, [])]
    for check in checks_of(mechanism, **options)
]


def label(check: Check) -> str:
    """Return mechanism[options]-architecture-mode-invariant."""
    options = ",".join(f"{k}={v}" for k, v in check.case.options.items())
    return f"{check.case.mechanism}[{options}]-{check.case.architecture}-{check.case.mode}-{check.invariant}"


@pytest.mark.parametrize("check", CHECKS, ids=label)
def test_invariant(check: Check, record_property) -> None:
    record_property("invariant", (check.case.mechanism, check.case.architecture, check.case.mode, check.invariant))
    check.run()
