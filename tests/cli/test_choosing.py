"""How the command line comes to a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_cli import refuse

MISSPELT = [
    ["--mechanism", "streamin"], ["--keep", "0.1", "--mechanism", "streamin"], ["--plan", "plan.json"],
    ["--mechanism", "linear", "--cross-attention", "streamin"], ["--mechanism", '{"streamin": 0}'],
]  # fmt: skip


@pytest.mark.parametrize("given", MISSPELT, ids=" ".join)
def test_a_misspelt_mechanism_is_refused_before_a_model_is_looked_for(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text('{"streamin": 0}')
    assert "unknown mechanism 'streamin'; did you mean streaming" in refuse("convert", "./nothing", "out", *given)
