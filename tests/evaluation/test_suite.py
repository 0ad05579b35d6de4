"""Suites: models side by side against numbers computed apart, windows of plans, and the command."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_linattn import OptionError, UnknownNameError, patch_model
from hf_linattn.cli import app
from hf_linattn.cli.eval import OPTIONS_OF, evaluate
from hf_linattn.evaluation.paired import paired_difference
from hf_linattn.evaluation.recall import recall
from hf_linattn.evaluation.side_by_side import SuiteReport, compare, task_means
from hf_linattn.evaluation.suite import SUITES, SuiteOptions, exact_window, measure, suite_names
from hf_linattn.evaluation.suite_table import means_table, suite_table
from tests.evaluation.test_harness import TASK_FILES, rows_of, task_dir, tokenizer, words
from tests.helpers import logits_of, make_tokenizer, watch_models
from tests.models import make_model

__all__ = ["task_dir", "tokenizer"]

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 7


def make_original(**options):
    return make_model("llama", std=0.4, max_position_embeddings=512, **options)


def make_converted(**options):
    return patch_model(make_original(**options), "local", window_size=WINDOW)


@pytest.fixture(scope="module")
def spelling():
    """The tokenizer of a bundled model, which can spell what `recall` asks for."""
    return AutoTokenizer.from_pretrained(ROOT / "recipes" / "pretrained" / "llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, spelling) -> dict[str, Path]:
    """An original, a control of other weights, and the original converted to a window of 7 tokens."""
    root, size = tmp_path_factory.mktemp("suite"), {"vocab_size": len(spelling)}
    models = {
        "original": make_original(**size),
        "control": make_original(seed=1, **size),
        "converted": make_converted(**size),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        spelling.save_pretrained(root / name)
    return {name: root / name for name in models}


@pytest.fixture(scope="module")
def options(task_dir) -> SuiteOptions:
    return SuiteOptions(
        texts=(words(70, 1), words(31, 2)), length=15, num_windows=5, tasks=("piqa", "lambada_openai"),
        task_files=TASK_FILES, task_dir=task_dir, limit=9, long_prompts=30, num_generated=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def models():
    return {"original": make_original(), "converted": make_converted()}


@pytest.fixture(scope="module")
def measured(models, options, tokenizer):
    return {role: measure(model, tokenizer, ["language", "tasks"], options) for role, model in models.items()}


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)], env={"COLUMNS": "250"})
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


@pytest.mark.parametrize(
    ("plan", "window"),
    [
        ({"local": {"layers": "0-1", "window_size": 9}}, 9),
        ({"local": {"layers": 0, "window_size": 9}}, 9),
        ({"local": {"layers": 0, "window_size": 9}, "streaming": {"layers": 1, "window_size": 12}}, 12),
        ({"hybrid": {"layers": "0-1", "window_size": 5}}, 5),
        ({"local": {"layers": "0-1", "heads": 0, "window_size": 6}}, 6),
        ({"local": {"layers": 0, "window_size": 9}, "linear": 1}, None),
        ({"local": {"layers": 0, "window_size": 9}, "atrous": {"layers": 1, "window_size": 9}}, None),
        ("linear", None),
    ],
)
def test_the_window_of_a_plan(plan, window):
    assert exact_window(patch_model(make_model("llama"), plan)) == window


def test_a_model_that_is_not_patched_has_no_window():
    assert exact_window(make_model("llama")) is None


def test_prompts_within_the_window_have_the_scores_of_the_original(options, tokenizer):
    """Why the share of longer prompts stands beside every number."""
    wide = patch_model(make_original(), "local", window_size=25)
    short = dataclasses.replace(options, long_prompts=None)
    models = {"original": make_original(), "converted": wide}
    measured = {role: measure(model, tokenizer, ["language", "tasks"], short) for role, model in models.items()}
    for row in compare(measured, exact_window(wide)):
        assert row.longer_than_window == 0
        assert row.converted.value == pytest.approx(row.original.value, rel=1e-4)
        assert row.differences[0].value == pytest.approx(0, abs=1e-4) and row.differences[0].ties == 1


def test_perplexities_side_by_side_are_what_each_model_has_alone(models, measured):
    text = compare(measured, WINDOW)[0]
    first, second = ([int(w[1:]) for w in words(*text).split()] for text in ((70, 1), (31, 2)))
    windows = torch.tensor([first[:15], second[:15], first[15:30], second[15:30], first[30:45]])
    losses = {}
    for role, model in models.items():
        scores = logits_of(model, windows).double().log_softmax(-1)[:, :-1]
        losses[role] = -scores.gather(-1, windows[:, 1:, None])[..., 0].mean(1)
        assert getattr(text, role).value == pytest.approx(float(losses[role].mean().exp()), rel=1e-4)
    gap = losses["converted"] - losses["original"]
    assert text.differences[0].value == pytest.approx(float(gap.mean()), abs=1e-4)
    assert text.differences[0].wins == pytest.approx(float((gap < 0).double().mean()))
    assert (text.num_items, text.prompt_tokens, text.longer_than_window) == (5, (15, 15, 15), 1.0)
    assert {x.groups for x in measured["converted"] if x.suite == "language"} == {(0, 1, 0, 1, 0)}, "the texts"


def test_loss_by_position_is_read_from_the_first_windows_of_all_texts(tokenizer):
    model, texts = make_original(), (words(280, 1), words(140, 2))
    found = measure(model, tokenizer, ["language"], SuiteOptions(texts=texts, length=130, num_windows=2))
    windows = torch.tensor([[int(w[1:]) for w in text.split()[:130]] for text in texts])
    losses = -logits_of(model, windows).double().log_softmax(-1)[:, :-1].gather(-1, windows[:, 1:, None])[..., 0]
    parts = {"text": (1, 130), "positions 0 to 63": (1, 64), "positions 64 to 127": (64, 128)}
    parts["positions 128 to 129"] = (128, 130)
    assert [x.name for x in found] == list(parts)
    for one, (first, end) in zip(found, parts.values(), strict=True):
        expected = [sum(float(row[i - 1]) for i in range(first, end)) / (end - first) for row in losses]
        assert one.values == pytest.approx(expected, rel=1e-4) and not one.higher_is_better


def test_windows_are_read_as_many_at_a_time_as_asked(options, tokenizer):
    sizes, model = [], make_original()
    model.model.register_forward_pre_hook(
        lambda _, args, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    for batch_size in (2, 5):
        measure(model, tokenizer, ["language"], dataclasses.replace(options, batch_size=batch_size))
    assert sizes == [2, 2, 1, 5]


def test_tasks_side_by_side_are_what_each_model_scores_alone(models, measured, tokenizer):
    piqa = next(row for row in compare(measured, WINDOW) if row.metric == "acc")
    right: dict[str, list[float]] = {role: [] for role in models}
    lengths = []
    for row in rows_of("piqa")[:9]:
        ids = tokenizer(f"Question: {row['goal']}\nAnswer:")["input_ids"]
        lengths.append(len(ids))
        for role, model in models.items():
            sums = []
            for choice in (row["sol1"], row["sol2"]):
                answer = tokenizer(choice)["input_ids"]
                logits = logits_of(model, torch.tensor([ids + answer])).double().log_softmax(-1)[0]
                sums.append(sum(float(logits[len(ids) + k - 1, token]) for k, token in enumerate(answer)))
            right[role].append(float((sums[1] > sums[0]) == row["label"]))
    pair = paired_difference("converted", "original", right["converted"], right["original"])
    assert pair.value == pytest.approx(statistics.mean(right["converted"]) - statistics.mean(right["original"]))
    assert piqa.converted.value == pytest.approx(statistics.mean(right["converted"]))
    assert piqa.differences[0] == pair
    worse = sum(a < b for a, b in zip(right["converted"], right["original"], strict=True))
    assert pair.losses == pytest.approx(worse / 9)
    assert piqa.longer_than_window == pytest.approx(sum(length > WINDOW for length in lengths) / 9)
    assert {x.name for x in measured["converted"] if x.metric == "agreement"} == {"piqa"}, "LAMBADA has one choice"
    assert 0 < piqa.longer_than_window < 1


def test_means_are_those_of_the_tasks_beside_chance(measured):
    rows = compare(measured, WINDOW)
    short, long = task_means(rows)
    assert not short.long_prompts and long.long_prompts
    own = {(x.name, x.metric): x for x in rows if not x.facts.get("long_prompts")}
    scores = {role: [getattr(own[key], role).value for key in (("piqa", "acc_norm"), ("lambada_openai", "acc"))]
              for role in measured}  # fmt: skip
    assert short.converted == pytest.approx(sum(scores["converted"]) / 2) and short.control is None
    above = (sum(scores["converted"]) - 0.5) / (sum(scores["original"]) - 0.5)
    assert short.above_chance == pytest.approx(above)
    assert short.win_and_tie == sum(a >= b for a, b in zip(scores["converted"], scores["original"], strict=True)) / 2
    assert all(min(row.prompt_tokens) > 30 for row in rows if row.facts.get("long_prompts"))
    assert {row.longer_than_window for row in rows if row.facts.get("long_prompts")} == {1.0}


def test_recall_is_what_its_own_function_returns(spelling):
    model = make_original(vocab_size=len(spelling))
    options = SuiteOptions(recall_tasks=("multiple_choice", "single_noise"), lengths=(256,), num_samples=3)
    rows = compare({"converted": measure(model, spelling, ["recall"], options)}, WINDOW)
    own = recall(model, spelling, options.recall_tasks, options.lengths, num_samples=3, progress=False)
    questions = {"multiple_choice": 4, "single_noise": 1}  # -> prompts of each
    expected = {(x["task"], metric): (x["num_samples"] // questions[x["task"]], x[metric]) for x in own
                if x["depth"] is None for metric in ("found", "first")}  # fmt: skip
    whole, parts = ([row for row in rows if ("depth" in row.facts) is wanted] for wanted in (False, True))
    assert {(row.name, row.metric): (row.num_items, row.converted.value) for row in whole} == expected
    assert [(row.facts["task"], row.facts["depth"], row.num_items, row.converted.value) for row in parts] == [
        (x["task"], x["depth"], x["num_samples"] // questions[x["task"]], x["found"])
        for x in own if x["depth"] is not None
    ]  # fmt: skip
    assert len(parts) > 1
    assert all(row.longer_than_window == 1 and 200 < row.prompt_tokens[0] < 256 for row in rows)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory, spelling) -> dict[str, Path]:
    """Models of 256 positions, of 512 and of any number."""
    root, size = tmp_path_factory.mktemp("unlike"), {"vocab_size": len(spelling)}
    models = {
        "256": make_model("gpt2", n_positions=256, **size),
        "512": make_model("gpt2", n_positions=512, **size),
        "any": make_original(**size),
        "any, then 256": patch_model(make_original(**size), "synthesizer", max_length=256),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        spelling.save_pretrained(root / name)
    return {name: root / name for name in models}


@pytest.mark.parametrize(("original", "converted"), [("256", "512"), ("512", "256"), ("any", "any, then 256")])
def test_models_of_unlike_positions_have_the_same_prompts(original, converted, unlike, tmp_path, monkeypatch):
    """Those that all have positions for, which is known before one is measured."""
    models = unlike[converted], "--original", unlike[original], "--output", tmp_path / "found.json"
    asked = "--recall", "single_noise", "--samples", 2, "--lengths"
    found = json.loads(run(*models, "--suite", "recall", *asked, 256, "--json"))
    assert all(row["original"] and max(row["prompt_tokens"]) < 256 for row in found["rows"])
    monkeypatch.setitem(SUITES, "recall", None)
    longer = run(*models, "--suite", "recall", *asked, "128,257", code=1)
    assert "lengths must be at most 256, the positions that the models have, got 257" in longer


def test_windows_have_all_positions_where_there_are_fewer_than_by_default(unlike, tmp_path):
    (tmp_path / "text.txt").write_text(words(600, 3))
    asked = unlike["256"], tmp_path / "text.txt", "--output", tmp_path / "found.json"
    rows = json.loads(run(*asked, "--suite", "language", "--original", unlike["512"], "--json"))["rows"]
    assert {tuple(row["prompt_tokens"]) for row in rows} == {(256, 256, 256)}
    assert "max_length must be an integer >= 2, got 1" in run(*asked, "--suite", "all", "--max-length", 1, code=1)
    longer = run(*asked, "--suite", "language", "--max-length", 257, code=1)
    assert "max_length must be at most 256, the positions that the models have, got 257" in longer
    assert json.loads(run(*asked[:2], "--json"))["num_tokens"] > 256


def test_models_measured_on_other_items_are_refused(options, tokenizer):
    model, fewer = make_model("llama", max_position_embeddings=256), dataclasses.replace(options, num_windows=2)
    measured = {
        "control": measure(model, tokenizer, ["language"], fewer),
        "converted": measure(model, tokenizer, ["language"], options),
    }
    with pytest.raises(OptionError, match="control was measured on other items than converted"):
        compare(measured, None)


def test_options_and_suites_are_checked(options, tokenizer):
    with pytest.raises(UnknownNameError, match=r"unknown suite 'task'; did you mean tasks\? Known: all, language, "):
        suite_names("task")
    assert suite_names("all") == list(SUITES)
    with pytest.raises(OptionError, match="texts must be text files to read, got 0"):
        measure(make_model("llama"), tokenizer, ["language"], SuiteOptions())
    longer = dataclasses.replace(options, length=65)
    with pytest.raises(OptionError, match="length must be at most 64, the positions that the models have, got 65"):
        measure(make_model("gpt2"), tokenizer, ["language"], longer)
    with pytest.raises(OptionError, match=r"^lengths must be at least \d+ for the task"):
        measure(make_model("llama"), tokenizer, ["recall"], dataclasses.replace(options, lengths=(5,)))
    with pytest.raises(OptionError, match="long_prompts must be at most 20, the positions that the models"):
        measure(make_model("llama"), tokenizer, ["tasks"], dataclasses.replace(options, positions=20))
    with pytest.raises(OptionError, match="suite needs a causal language model, got a masked one"):
        measure(make_model("bert"), tokenizer, ["language"], options)
    for name in ("length", "limit", "long_prompts", "num_windows", "batch_size", "num_samples"):
        with pytest.raises(OptionError, match=f"{name} must be"):
            SuiteOptions(**{name: 0})


def test_the_command_writes_what_it_shows(folders, task_dir, tmp_path, monkeypatch):
    left = watch_models(monkeypatch, "eval")
    text, output = tmp_path / "text.txt", tmp_path / "out" / "found.json"
    text.write_text(words(120, 3))
    beside = "--original", folders["original"], "--control", folders["control"]
    flags = "--task_dir", task_dir, "--task_files", TASK_FILES, "--tasks", "copa,rte", "--limit", 4, "--generated", 2
    made = "--recall", "single_text", "--lengths", 160, "--samples", 2
    shared = "--max-length", 16, "--long-prompts", 100, "--output", output
    shown = run(folders["converted"], text, "--suite", "all", *beside, *flags, *made, *shared)
    assert left == [0] * 6, "one model is in memory at a time"
    document = json.loads(output.read_text())
    assert document["window"] == WINDOW and document["provenance"]["command"].startswith("hf-linattn")
    fields = {field.name for field in dataclasses.fields(SuiteReport)}
    assert fields <= document.keys() and document["original"] == str(folders["original"])
    names = {row["name"] for row in document["rows"] if "depth" not in row["facts"]}
    assert "depths" not in shown, "these are for the page of a run"
    assert names == {"text", "positions 0 to 15", "single_text", "copa", "rte"}
    assert all(name in shown for name in names)
    for row in document["rows"]:
        pairs = [(x["of"], x["to"]) for x in row["differences"]]
        assert pairs == [("converted", "original"), ("converted", "control"), ("control", "original")]
        assert 0 <= row["longer_than_window"] <= 1
    answers = next(row["answers"] for row in document["rows"] if row["name"] == "rte" and row["answers"])
    assert list(answers) == ["original", "control", "converted"]
    assert [answer["generated"] is None for answer in answers["control"]] == [False, False, True, True]


def test_columns_of_models_that_are_not_given_stay_empty(folders, task_dir, tmp_path):
    flags = "--task_dir", task_dir, "--task_files", TASK_FILES, "--tasks", "copa", "--limit", 4, "--long-prompts", 0
    output = tmp_path / "found.json"
    found = json.loads(
        run(folders["converted"], "--suite", "tasks", *flags, "--generated", 0, "--output", output, "--json")
    )
    assert found == json.loads(output.read_text()) and found["original"] is found["control"] is None
    assert all(row["original"] is row["control"] is None and not row["differences"] for row in found["rows"])
    assert [row["metric"] for row in found["rows"]] == ["acc"] and found["means"][0]["of_original"] is None


def test_lengths_fit_the_positions_by_default(spelling, task_dir, tmp_path):
    """Of a model that has 512 of them: 1,024 tokens would be refused."""
    folder, text, output = tmp_path / "model", tmp_path / "text.txt", tmp_path / "found.json"
    make_model("gpt2", n_positions=512, vocab_size=len(spelling)).save_pretrained(folder)
    spelling.save_pretrained(folder)
    text.write_text(words(1500, 3))
    flags = "--task_dir", task_dir, "--task_files", TASK_FILES, "--tasks", "copa", "--limit", 2, "--generated", 0
    made = "--recall", "single_text", "--samples", 1, "--num-windows", 1
    found = json.loads(run(folder, text, "--suite", "all", *flags, *made, "--output", output, "--json"))["rows"]
    assert {row["facts"]["length"] for row in found if row["suite"] == "recall"} == {512}
    assert max(row["facts"].get("last", 0) for row in found) == 511, "windows of all positions"
    tasks = {row["facts"]["long_prompts"]: row["prompt_tokens"] for row in found if row["suite"] == "tasks"}
    assert min(tasks[True]) > 256 > max(tasks[False])


@pytest.mark.parametrize(
    ("suite", "flags", "message"),
    [
        ("recall", ("--max-length", 64), "max_length='64' is an option of perplexity, classifiers, embedding"),
        ("recall", ("--limit", 3), "limit='3' is an option of --suite tasks, not of --suite recall"),
        ("language", ("--samples", 3), "samples='3' is an option of --suite recall, not of --suite language"),
        ("language", ("--seed", 3), "seed='3' is an option of --suite recall and --suite tasks, not of"),
        ("tasks", (__file__,), f"files='{__file__}' is an option of .* and --suite recall, not of --suite tasks"),
        ("all", ("--stride", 3), "stride='3' is an option of perplexity, not of suites"),
    ],
)
def test_an_option_of_another_suite_is_refused(suite, flags, message, folders, tmp_path):
    output = tmp_path / "found.json"
    shown = run(folders["converted"], *flags, "--suite", suite, "--output", output, code=1)
    assert re.search(message.replace("(", r"\("), shown) and not output.exists()
    assert OPTIONS_OF.keys() <= inspect.signature(evaluate).parameters.keys()


def test_what_cannot_be_compared_is_refused_and_nothing_is_written(folders, task_dir, tmp_path):
    output = tmp_path / "found.json"
    flags = "--suite", "tasks", "--task_dir", task_dir, "--task_files", TASK_FILES, "--output", output
    other = make_tokenizer()
    other.add_tokens(["another"])
    make_model("llama").save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    model = folders["converted"]
    refused = run(model, *flags, "--control", tmp_path / "other", code=1)
    assert f"control='{tmp_path / 'other'}' has another tokenizer than model='{model}'" in refused
    assert "original='absent' cannot be read" in run(model, *flags, "--original", "absent", code=1)
    assert "unknown suite 'memory'" in run(model, "--suite", "memory", "--output", output, code=1)
    assert "unknown task 'pica'; did you mean piqa?" in run(model, *flags, "--tasks", "pica", code=1)
    assert "files must be text files" in run(model, "--suite", "language", "--output", output, code=1)
    assert "stride='4' is an option of perplexity, not of --suite tasks" in run(model, *flags, "--stride", 4, code=1)
    assert "metrics='f1' is an option of classifiers, not" in run(model, *flags, "--metrics", "f1", code=1)
    assert "output must be the path of a file" in run("absent", *flags, "--output", tmp_path, code=1)
    for option, flag in (("num_windows", "--num-windows"), ("limit", "--limit")):
        assert f"{option} must be an integer >= 0, got -1" in run(model, *flags, "--suite", "all", flag, -1, code=1)
    assert "unknown dtype 'float8'; did you mean float" in run(model, *flags, "--dtype", "float8", code=1)
    assert "files is empty; give at least one text file" in run(model, code=1)
    assert not output.exists()


def test_tables_show_every_row(measured):
    rows = tuple(compare(measured, WINDOW))
    report = SuiteReport("m", "o", None, WINDOW, rows, tuple(task_means(rows)))
    assert suite_table(report).row_count == len(rows) and means_table(report.means).row_count == 2


def test_a_table_of_two_models_is_read_in_a_console_of_80_columns(measured):
    two = {role: measured[role] for role in ("original", "converted")}
    rows = tuple(row for row in compare(two, WINDOW) if row.suite == "language")
    console = Console(record=True, width=80)
    console.print(suite_table(SuiteReport("m", "o", None, WINDOW, rows, ())))
    said = console.export_text()
    assert "control" not in said.split("95 %")[0] and f"items: {rows[0].num_items}" in said, "once for all rows"
    for row in rows:
        line = next(line for line in said.splitlines() if f"{row.name}: {row.metric}" in line)
        pair = row.differences[0]
        for value in (f"{row.converted.value:.3f}", f"{pair.value:+.3f}", f"{pair.win_and_tie:.0%}"):
            assert value in line, "…" not in line
