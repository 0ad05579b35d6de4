"""The study of one compiled graph for decoding, at a tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.studies import compiled_decoding
from benchmarks.tables.speed import graphs_section

pytestmark = pytest.mark.tools


def test_a_step_is_timed_as_one_graph_and_by_its_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, compile_whole = [], torch.compile
    see = lambda graph, inputs: graphs.append(graph) or graph  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda step, **options: compile_whole(step, backend=see, **options))
    compiled_decoding.main(tmp_path / "results.json", ["linear"], 20, "quick")
    document = json.loads((tmp_path / "results.json").read_text())
    (row,) = document["rows"]
    assert [*document["options"]] == ["linear"]
    eager, compiled, products = (row[name]["median"] for name in ("eager", "compiled", "products"))
    assert len(graphs) == 1 and row["ratio"] == compiled / eager and products < eager
    assert row["ratio_beyond_products"] == pytest.approx((compiled - products) / (eager - products))
    assert f"| `linear` | {eager:.3g} | {compiled:.3g} | {products:.3g} |" in graphs_section(document)
