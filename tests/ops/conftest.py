"""What holds for the tests of all operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN: an operation that leaves a number unwritten, or reads one, shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
