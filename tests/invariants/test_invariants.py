"""Every invariant for every registered mechanism, on every architecture, in every mode that can exist."""

from __future__ import annotations

import pytest

from hf_linattn import list_mechanisms
from hf_linattn.testing import Check, checks_of

# beside the defaults of each mechanism, which are always tested
VARIANTS = {
    "linear": [{"feature_map": "relu"}, {"decay": "learned"}],
    "lsh": [
        {"num_buckets": 4, "bucket_size": 8},
        {"num_buckets": 4, "bucket_size": 8, "num_rounds": 3, "shared_qk": True},
    ],
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
