"""Settings every test runs under: nothing is fetched, one thread, no chatter, and a seed of its own per test.

Tests run side by side; with more threads each, they would wait for each other on small tensors.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # threads to load weights by take longer than tiny weights

import pytest

from tests.covering import mark_exhaustive
from tests.invariants.table import pytest_terminal_summary  # noqa: F401 - a hook


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs the tests comes here, and what hands them out does not."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    mark_exhaustive(items)


@pytest.fixture(autouse=True)
def seeded():
    """Start every test from the same global random state, whatever ran before it."""
    import torch

    torch.manual_seed(0)
