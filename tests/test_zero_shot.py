"""What is measured before any training: the baseline, the table, and that no mechanism is left out."""

from __future__ import annotations

import pytest
import torch

from benchmarks import calibration, tables, zero_shot
from hf_linattn import get_mechanisms, is_patched, list_mechanisms
from hf_linattn.evaluation import perplexity
from hf_linattn.testing import Case
from tests.helpers import logits_of, make_tokenizer, make_tokens
from tests.models import make_model

TEXTS = [" ".join(f"w{5 + (7 * i * i + start) % 90}" for i in range(50)) for start in (0, 3)]


def score(model: torch.nn.Module) -> float:
    return perplexity(model, make_tokenizer(), TEXTS, max_length=32, progress=False)["perplexity"]


def document_of(rows: list[tuple[str, float, float]]) -> tables.Document:
    return {"rows": [{"mechanism": m, "options": {}, "perplexity": {"gpt2": a, "llama": b}} for m, a, b in rows]}


def served(mechanism: str) -> set[str]:
    """The bundled models that a mechanism can serve: `deltanet` is causal only."""
    return set(zero_shot.MODELS) - ({"bert"} if mechanism == "deltanet" else set())


def test_the_committed_results_cover_every_mechanism():
    rows = tables.read(tables.RESULTS / tables.ZERO_SHOT_FILE)["rows"]
    measured = [{name: row[name] for name in ("mechanism", "options")} for row in rows]
    assert measured == zero_shot.candidates(list_mechanisms()), "run `make zero-shot`"
    assert all(set(row["perplexity"]) == served(row["mechanism"]) for row in rows)


def test_options_are_those_of_registered_mechanisms():
    assert set(zero_shot.OPTIONS) <= set(list_mechanisms())


@pytest.mark.parametrize("causal", [True, False])
def test_the_baseline_is_the_mean_of_the_values_a_query_may_see(causal: bool):
    case = Case("softmax", "llama", causal)
    query, key, value = case.heads(9)
    model = zero_shot.mean_of_values(make_model("llama" if causal else "bert", num_key_value_heads=2))
    mechanism = next(iter(get_mechanisms(model).values()))
    got, _ = mechanism(query, key, value)
    value = value.repeat_interleave(2, 1)
    count = torch.arange(1, 10)[:, None]
    want = value.cumsum(2) / count if causal else value.mean(2, keepdim=True).expand_as(value)
    torch.testing.assert_close(got, want)


def test_what_is_exact_scores_like_the_original_and_the_models_are_left_as_they_were():
    models = {name: make_model(name) for name in ("bert", "gpt2", "llama")}
    before = {name: logits_of(model, make_tokens(2, 20)) for name, model in models.items()}
    names = ["softmax", "local", "linear", "deltanet"]
    rows = zero_shot.measure({name: (model, score) for name, model in models.items()}, names)
    assert all(set(row["perplexity"]) == served(row["mechanism"]) for row in rows)
    found = {(row["mechanism"], name): value for row in rows for name, value in row["perplexity"].items()}
    for name, model in models.items():
        assert not is_patched(model) and torch.equal(logits_of(model, make_tokens(2, 20)), before[name])
        assert found[tables.ORIGINAL, name] == pytest.approx(score(model))
        for exact in ("softmax", "local"):  # the window is wider than the texts' windows
            assert found[exact, name] == pytest.approx(found[tables.ORIGINAL, name], rel=1e-4)
        for other in (tables.MEAN_OF_VALUES, "linear"):
            assert found[other, name] != pytest.approx(found[tables.ORIGINAL, name], rel=1e-3)


def test_worse_than_the_mean_of_the_values_on_one_model_needs_recovery():
    document = document_of(
        [("original", 9, 9), (tables.MEAN_OF_VALUES, 100, 200), ("a", 99, 199), ("b", 50, 201), ("c", 100, 200)]
    )
    assert tables.needs_recovery(document) == {"b": [""]}
    lines = tables.zero_shot_table(document).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == ["", "", "no", "yes", "no"]
    del document["rows"][3]["perplexity"]["llama"]  # which it does not serve
    assert "| `b` |  | 50.0 |  | no |" in tables.zero_shot_table(document)


def test_the_way_of_a_calibration_is_measured_in_log_perplexity_to_the_better_of_original_and_control():
    result = {"original": 25.0, "zero_shot": 400.0, "calibrated": 80.0, "seconds": 7.4}
    row = {"mechanism": "hedgehog", "options": {"decay": "learned"}, "models": {"gpt2": result, "llama": result}}
    reports = {f"{name}-linear": {"perplexity": {"control": c}} for name, c in (("gpt2", 16.0), ("llama", 90.0))}
    gpt2, llama = tables.calibration_table({"rows": [row]}, reports).splitlines()[2:]
    assert gpt2 == "| GPT-2 | `hedgehog` | `decay='learned'` | 400.0 | 80.0 | 16.0 | 50% | 7 |"  # 5-fold of 25-fold
    assert llama == "| Llama | `hedgehog` | `decay='learned'` | 400.0 | 80.0 | 25.0 | 58% | 7 |"
    row["models"] = {"gpt2": result | {"calibrated": 400.1}}
    assert "| 400.0 | 400.1 | 16.0 | 0% |" in tables.calibration_table({"rows": [row]}, reports)  # and not -0%


def test_the_committed_calibrations_are_those_that_are_measured():
    rows = tables.read(tables.RESULTS / tables.CALIBRATION_FILE)["rows"]
    assert [(row["mechanism"], row["options"]) for row in rows] == calibration.ROWS, "run `make calibration`"
    assert all(set(row["models"]) == set(calibration.MODELS) for row in rows)


def test_calibration_is_measured_on_unseen_text(monkeypatch):
    monkeypatch.setattr(calibration, "BATCHES", 2)
    monkeypatch.setattr(calibration, "BATCH_SIZE", 4)
    monkeypatch.setattr(calibration, "MODELS", {"llama": zero_shot.MODELS["llama"]})
    document = calibration.run([("hedgehog", {})], documents=1)
    (row,) = document["rows"]
    result = row["models"]["llama"]
    assert result["original"] < result["calibrated"] < result["zero_shot"]
    assert document["calibration"] == {"tokens": 2 * 4 * calibration.LENGTH, "batches": 2}
    assert [len(errors) for errors in result["layer_errors"]] == [2] * 4
