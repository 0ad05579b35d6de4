"""What is computed of recipes for models that do not lie here: sizes, and lines in layers and tokens."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.result_files import ROOT
from benchmarks.studies import recipe_plans
from benchmarks.studies.recipe_plans import (
    BYTES,
    SHAPES,
    Counted,
    config_of,
    extrapolated,
    in_words,
    parameters,
    run_of,
    state_bytes,
    without_longer_rows,
)
from hf_linattn.training.finetuning import fine_tune
from hf_linattn.training.price import price_of, size
from hf_linattn.training.speed import matrix_rate
from hf_linattn.training.stages import stages_of

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


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """What makes runs of a recipe, without its last stage, on two thin layers of its model."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = "llama-3.2-1b-24gb"
        shape = {**sizes, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 4000}
        model = recipe_plans.random_model(name, folder / "model", **shape)
        options = {
            "block_size": 128, "transfer_tokens": 1024, "max_train_tokens": 2048, "plan_steps": 2,
            "gradient_accumulation_steps": 1,
        }  # fmt: skip
        recipe = without_longer_rows(name, folder)
        yield lambda: run_of(recipe, model, folder / "out", **options)


def allocated(run, stage) -> int:
    """The bytes that PyTorch's allocator had given out at the worst moment of a whole training, beside the weights."""
    plan, model = stage.plan(run), run.task.trainee(run, stage.fresh(run))
    weights = size(model) + sum(map(size, getattr(model, "_model", ())))
    options = {"learning_rate": 1e-3, "max_steps": plan.max_steps, "teacher": stage.teacher(run)}
    matrix_rate("cpu", torch.bfloat16)  # is measured once, on matrices that are larger than these models
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        fine_tune(model, plan.data, plan.training, run.directory.path.with_name(stage.name), **options)
    events = [x for x in watched.profiler.kineto_results.events() if x.name() == "[memory]"]
    taken = torch.tensor([x.nbytes() for x in sorted(events, key=lambda x: x.start_ns())]).cumsum(0)
    return weights + int(taken.max())


@pytest.mark.parametrize("name", ["transfer", "recovered_training"])
def test_the_memory_of_a_plan_is_what_a_training_takes(small, name):
    run = small()
    planned = {stage.name: stage.peak_bytes for stage in price_of(run).stages}
    stage = next(stage for stage in stages_of(run.arguments) if stage.name == name)
    assert planned[name] == pytest.approx(allocated(run, stage), rel=0.15)


def test_bytes_are_the_same_with_products_left_out(small):
    whole = price_of(small())
    with recipe_plans.ProductsLeftOut():
        empty = price_of(small())
    for one, other in zip(whole.stages, empty.stages, strict=True):
        assert other.peak_bytes == pytest.approx(one.peak_bytes, rel=1e-3)
