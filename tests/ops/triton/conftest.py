"""Small tiles for Triton's interpreter."""

from __future__ import annotations

import pytest

from hf_linattn.ops.triton import block_softmax, causal_sums


@pytest.fixture
def small_tiles(monkeypatch):
    """Several segments, tiles of keys, of features and of values, all with a rest, in a hundred tokens."""
    sizes = {"SEGMENT": 32, "ROWS": 16, "STATE_TILE": 16, "KEYS": 16, "VALUES": 16}
    for name, size in sizes.items():
        monkeypatch.setattr(causal_sums, name, size)
    monkeypatch.setattr(block_softmax, "TILE", 16)
    monkeypatch.setattr(block_softmax, "PARTS", 3)
