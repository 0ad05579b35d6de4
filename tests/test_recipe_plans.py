"""What is computed of recipes for models that do not lie here: sizes, and lines in layers and tokens."""

from __future__ import annotations

import pytest

from benchmarks.result_files import ROOT
from benchmarks.studies.recipe_plans import (
    BYTES,
    SHAPES,
    Counted,
    config_of,
    extrapolated,
    in_words,
    parameters,
    state_bytes,
)

pytestmark = pytest.mark.tools

# as their publishers say
PUBLISHED = {"llama-3.2-1b-24gb": 1_235_814_400, "qwen3-0.6b": 596_049_920, "llama-8b-lora-24gb": 8_030_261_248}


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)  # files name others from there


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_has_the_parameters_that_the_model_is_published_with(name):
    assert parameters(config_of(name)) == PUBLISHED[name]
    text = (ROOT / "recipes" / "models" / f"{name}.yaml").read_text()
    assert f"# Computed, not measured: {in_words(name)}\n" in text


def test_a_step_grows_by_its_tokens_and_by_one_state_for_each_further_layer():
    name, config = "qwen3-0.6b", config_of("qwen3-0.6b")
    short, long = Counted(1000, 64, 5_000), Counted(1000, 128, 8_200)
    found = extrapolated(name, short, long, 1024, copies=1)
    states = (config.num_hidden_layers - 2) * config.hidden_size * 2 * 1024
    assert found["step_bytes"] == 5_000 + 50 * (1024 - 64) + states
    assert found["trained_parameters"] == 500 * 28
    assert found["peak_bytes"] == BYTES * PUBLISHED[name] + state_bytes(14_000) + found["step_bytes"]
