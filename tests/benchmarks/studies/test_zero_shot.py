"""What is measured before any training: the baseline, the table, and that no mechanism is left out."""

from __future__ import annotations

import pytest
import torch

from benchmarks.result_files import CALIBRATION_FILE, MEAN_OF_VALUES, ORIGINAL, RESULTS, ZERO_SHOT_FILE, Document, read
from benchmarks.studies import calibration, usable, zero_shot
from benchmarks.tables import quality
from hf_linattn import DataError, get_mechanisms, is_patched, list_mechanisms
from hf_linattn.evaluation import perplexity
from tests.helpers import logits_of, make_tokenizer, make_tokens
from tests.models import make_model

pytestmark = pytest.mark.tools

TEXTS = [" ".join(f"w{5 + (7 * i * i + start) % 90}" for i in range(50)) for start in (0, 3)]


def score(model: torch.nn.Module) -> float:
    return perplexity(model, make_tokenizer(), TEXTS, max_length=32, progress=False)["perplexity"]


def document_of(rows: list[tuple[str, float, float]]) -> Document:
    return {"rows": [{"mechanism": m, "options": {}, "perplexity": {"gpt2": a, "llama": b}} for m, a, b in rows]}


def served(mechanism: str) -> set[str]:
    """The bundled models that a mechanism can serve: the delta rule is causal only."""
    return set(zero_shot.MODELS) - ({"bert"} if mechanism in ("deltanet", "gated_deltanet") else set())


def test_the_committed_results_cover_every_mechanism():
    rows = read(RESULTS / ZERO_SHOT_FILE)["rows"]
    measured = [{name: row[name] for name in ("mechanism", "options")} for row in rows]
    assert measured == zero_shot.candidates(list_mechanisms()), "run `make zero-shot`"
    assert all(set(row["perplexity"]) == served(row["mechanism"]) for row in rows)


def test_options_are_those_of_registered_mechanisms():
    assert set(zero_shot.OPTIONS) <= set(list_mechanisms())


@pytest.mark.parametrize("causal", [True, False])
def test_the_baseline_is_the_mean_of_the_values_a_query_may_see(causal: bool):
    model = zero_shot.mean_of_values(make_model("llama" if causal else "bert", num_key_value_heads=2))
    mechanism = next(iter(get_mechanisms(model).values()))
    query, key, value = (torch.randn(2, heads, 9, mechanism.layer.head_dim) for heads in (4, 2, 2))
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
        assert found[ORIGINAL, name] == pytest.approx(score(model))
        for exact in ("softmax", "local"):  # the window is wider than the texts' windows
            assert found[exact, name] == pytest.approx(found[ORIGINAL, name], rel=1e-4)
        for other in (MEAN_OF_VALUES, "linear"):
            assert found[other, name] != pytest.approx(found[ORIGINAL, name], rel=1e-3)


def test_usable_untrained_is_at_most_a_tenth_above_the_original_with_the_defaults():
    rows = [("original", {}, 20.0), ("streaming", {"window_size": 64}, 30.0)]
    rows += [("streaming", {"window_size": 256}, 22.0)]
    rows += [("hybrid", {"window_size": 256, "num_sink_tokens": 4}, 22.1), ("local", {}, 20.0)]
    larger = {"rows": [dict(zip(("mechanism", "options", "perplexity"), row, strict=True)) for row in rows]}
    verdicts = quality.usable(larger)
    assert verdicts == {"streaming": "yes", "hybrid": "no", "local": "yes"}
    lines = quality.usable_table(larger).splitlines()[2:]
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [(row[0], *row[3:]) for row in shown] == [
        ("original", "1.000", ""), ("`streaming`", "1.500", "no"), ("`streaming`", "1.100", "yes"),
        ("`hybrid`", "1.105", "no"), ("`local`", "1.000", "yes"),
    ]  # fmt: skip
    document = document_of([("original", 9, 9), (MEAN_OF_VALUES, 100, 200), ("streaming", 99, 199), ("lsh", 9, 9)])
    lines = quality.zero_shot_table(document, verdicts).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == ["", "", "yes", ""]
    del document["rows"][2]["perplexity"]["llama"]  # which it does not serve
    assert "| `streaming` |  | 99.0 |  | yes |" in quality.zero_shot_table(document, verdicts)


def test_the_larger_model_is_read_row_by_row_and_left_as_it_was(tmp_path, monkeypatch):
    """Each row alone, every token but the first; the file must be long enough."""
    model, tokenizer = make_model("llama"), make_tokenizer()
    monkeypatch.setattr(usable, "LENGTH", 16)
    monkeypatch.setattr(usable, "load_model", lambda *_: model)
    monkeypatch.setattr(usable.AutoTokenizer, "from_pretrained", lambda *_: tokenizer)
    (tmp_path / usable.FILE).write_text(" ".join(TEXTS))
    *_, results = usable.run("a-model", tmp_path, ["streaming", "linear"], count=3)
    rows = usable.read_rows("a-model", tmp_path, 3)
    want = torch.nn.functional.cross_entropy(logits_of(model, rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).exp()
    got = [(row["mechanism"], row["options"].get("window_size")) for row in results["rows"]]
    assert got == [("original", None), ("streaming", 64), ("streaming", 128), ("streaming", 256), ("linear", None)]
    assert not is_patched(model)
    *exact, other = [row["perplexity"] for row in results["rows"]]
    assert exact == pytest.approx([float(want)] * 4, rel=1e-4) and other != pytest.approx(float(want), rel=1e-4)
    with pytest.raises(DataError, match="give the whole file"):
        usable.read_rows("a-model", tmp_path, 100)
    with pytest.raises(DataError, match="does not exist"):
        usable.read_rows("a-model", tmp_path / "none", 1)


def test_the_way_of_a_calibration_is_measured_in_log_perplexity_to_the_better_of_original_and_control():
    result = {"original": 25.0, "zero_shot": 400.0, "calibrated": 80.0, "seconds": 7.4}
    row = {"mechanism": "hedgehog", "options": {"decay": "learned"}, "models": {"gpt2": result, "llama": result}}
    reports = {f"{name}-linear": {"perplexity": {"control": c}} for name, c in (("gpt2", 16.0), ("llama", 90.0))}
    gpt2, llama = quality.calibration_table({"rows": [row]}, reports).splitlines()[2:]
    assert gpt2 == "| GPT-2 | `hedgehog` | `decay='learned'` | 400.0 | 80.0 | 16.0 | 50% | 7 |"  # 5-fold of 25-fold
    assert llama == "| Llama | `hedgehog` | `decay='learned'` | 400.0 | 80.0 | 25.0 | 58% | 7 |"
    row["models"] = {"gpt2": result | {"calibrated": 400.1}}
    assert "| 400.0 | 400.1 | 16.0 | 0% |" in quality.calibration_table({"rows": [row]}, reports)  # and not -0%


def test_the_committed_calibrations_are_those_that_are_measured():
    rows = read(RESULTS / CALIBRATION_FILE)["rows"]
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
