"""What holds for tests and doctests alike.

Nothing of the library is imported here: what hands out the tests of `pytest -n` needs none of it, and those
that run them start as much earlier.
"""

from __future__ import annotations

import gc
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when PyTorch imports Triton; `make gpu` sets it to 0

import pytest


def pytest_unconfigure() -> None:
    """Let Python free at its end what was there before, too: the types of Triton would be listed as leaked."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def left_by_other_files():
    """Leave what was there before the tests of a file to itself: every `Trainer.train` would search it for garbage.

    That is a second each time where many graphs were traced and many models imported before.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def registries_as_before():
    """Forget what a test or an example registers: the others, in whatever order they run, know the library's own."""
    from hf_linattn.feature_maps import FEATURE_MAPS
    from hf_linattn.mechanisms import MECHANISMS

    known = [(registry, registry.names(), dict(registry._entries)) for registry in (MECHANISMS, FEATURE_MAPS)]
    yield
    for registry, _, entries in known:
        registry._entries.clear()
        registry._entries.update(entries)
