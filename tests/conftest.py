"""Settings every test runs under: nothing is fetched, one thread, no chatter, and a seed of its own per test.

Tests run side by side; with more threads each, they would wait for each other on small tensors.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers

from tests.covering import mark_exhaustive

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_exhaustive(items)


@pytest.fixture(autouse=True)
def seeded():
    """Start every test from the same global random state, whatever ran before it."""
    torch.manual_seed(0)
