"""The exceptions: one base class, the built-in class each one refines, and the wording of suggestions."""

from __future__ import annotations

import pytest

import hf_linattn
from hf_linattn import errors

BUILT_IN = {
    "UnknownNameError": LookupError,
    "OptionError": ValueError,
    "PatchError": RuntimeError,
    "UnsupportedModelError": TypeError,
    "UnsupportedModeError": ValueError,
    "OperandError": ValueError,
    "BuildError": ImportError,
    "CheckpointError": ValueError,
    "DataError": ValueError,
    "DerivativeError": RuntimeError,
}


def test_every_exception_is_public_and_refines_a_built_in_one():
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined == {*BUILT_IN, "HfLinattnError"}
    for name, built_in in BUILT_IN.items():
        error = getattr(hf_linattn, name)
        assert issubclass(error, errors.HfLinattnError) and issubclass(error, built_in)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("perfomer", ["linear", "performer"], "; did you mean performer? Known: linear, performer"),
        ("lineer", ["linear", "linear2"], "; did you mean linear or linear2? Known: linear, linear2"),
        ("xyz", ["performer", "linear"], ". Known: linear, performer"),
        ("xyz", [], ". Known: none"),
    ],
)
def test_did_you_mean(name, known, expected):
    assert errors.did_you_mean(name, known) == expected
