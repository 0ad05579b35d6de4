"""`hf-linattn compare`: what it measures, how it is shown, and where it stops."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import signal
import threading
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import GPT2Config
from typer.testing import CliRunner, Result

import hf_linattn
from hf_linattn.chosen_plan import ChosenPlan, PlanRecord
from hf_linattn.cli import app
from hf_linattn.cli.compare import compare as command
from hf_linattn.comparison import deadline, time_limit
from hf_linattn.comparison import measure as comparing
from hf_linattn.comparison.deadline import TimeIsUpError
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.linear import LinearMechanism
from tests.helpers import make_tokenizer, watch_models
from tests.models import make_model

ROW = 64  # positions of the tiny GPT-2
LENGTHS = ("--lengths", "16,24", "--max-length", "20", "--num-windows", "3", "--repeats", "1")


def run(*arguments: object, code: int = 0) -> Result:
    """Run a command; its result has standard output and standard error apart."""
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A tiny GPT-2 and a tiny BERT, and two texts."""
    folder = tmp_path_factory.mktemp("compare")
    for name in ("gpt2", "bert"):
        make_model(name, std=0.3).save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    make_model("bert", "ForSequenceClassification").save_pretrained(folder / "classifier")
    hf_linattn.patch_model(make_model("gpt2"), "linear").save_pretrained(folder / "converted")
    make_tokenizer().save_pretrained(folder / "converted")
    for name, step in (("test", 7), ("fit", 11)):
        words = " ".join(f"w{5 + (i * i + i // step) % 90}" for i in range(5 * ROW))
        (folder / f"{name}.txt").write_text(words, encoding="utf-8")
    return folder


def token_ids(file: Path) -> torch.Tensor:
    """The words of a text by their numbers."""
    return torch.tensor([int(word[1:]) for word in file.read_text().split()])


@torch.no_grad()
def perplexity(model, ids: torch.Tensor) -> float:
    """exp of the mean negative log-likelihood of all tokens but the first of each row [B, N], in float64."""
    logits = model(ids).logits[:, :-1].double().log_softmax(-1)
    return float(torch.exp(-logits.gather(-1, ids[:, 1:, None]).mean()))


def test_each_line_has_what_a_plan_comes_to_beside_softmax(place, tmp_path):
    files = ["--csv", tmp_path / "c.csv", "--png", tmp_path / "c.png"]
    given = ["local", '{"hedgehog": {"layers": 1}}', "--model", place / "gpt2", "--text", place / "test.txt", *LENGTHS]
    result = run(*given, "--calibrate", place / "fit.txt", *files)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines()]
    assert [row[:2] for row in table[2:]] == [
        ["softmax (original)", "24"], *([name, length] for name in given[:2] for length in ("16", "24")),
    ]  # fmt: skip
    rows = list(csv.DictReader(io.StringIO((tmp_path / "c.csv").read_text())))
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    test, fit = token_ids(place / "test.txt")[:60].view(3, 20), token_ids(place / "fit.txt").view(5, ROW)
    model = make_model("gpt2", std=0.3)
    softmax = perplexity(model, test)
    assert float(rows[0]["perplexity"]) == pytest.approx(softmax, rel=1e-5)
    hf_linattn.patch_model(model, "hedgehog", layers=1)
    untrained = perplexity(model, test)
    hf_linattn.calibrate(model, [{"input_ids": fit[:4]}, {"input_ids": fit[4:]}])
    for row in rows[3:]:
        assert float(row["perplexity"]) == pytest.approx(untrained, rel=1e-5)
        assert float(row["calibrated_perplexity"]) == pytest.approx(perplexity(model, test), rel=1e-4)
        assert float(row["ratio"]) == pytest.approx(untrained / softmax, rel=1e-4)
        assert float(row["ratio_low"]) < float(row["ratio"]) < float(row["ratio_high"])
        assert float(row["prompt_speedup"]) > 0 and float(row["token_speedup"]) > 0
    states = [int(row["original_state_bytes"]) for row in rows[3:]]
    assert states[1] - states[0] == 2 * 2 * 8 * model.config.n_embd * 4, "keys and values of 8 more tokens"
    assert rows[1]["calibrated_perplexity"] == "" and "untrained" not in rows[1], "local has nothing to fit"
    assert table[-1][2] == f"{untrained:,.2f}" and table[-1][-1] == f"{states[1]:,}"
    assert "2 of 2" in result.stderr and "|" not in result.stderr and "perplexity after calibrate" in result.stderr


def test_the_interval_is_over_texts_as_windows_of_one_are_alike(place, tmp_path):
    words = [" ".join(f"w{5 + (i * step) % 90}" for i in range(24)) for step in (7, 11)]
    for name, text in zip("ab", words, strict=True):
        (tmp_path / f"{name}.txt").write_text(" ".join([text] * 3), encoding="utf-8")
    files = [x for name in "ab" for x in ("--text", tmp_path / f"{name}.txt")]
    given = [place / "gpt2", *files, *LENGTHS, "--max-length", 24, "--num-windows", 6]
    (entry,) = json.loads(run("linear", "--json", "--model", *given).stdout)["entries"]
    model, losses = make_model("gpt2", std=0.3), []
    ids = torch.tensor([[int(word[1:]) for word in text.split()] for text in words])
    for patched in (False, True):
        model = hf_linattn.patch_model(model, "linear") if patched else model
        losses.append([math.log(perplexity(model, row[None])) for row in ids])
    a, b = (after - before for before, after in zip(*losses, strict=True))
    half = 12.7062047 * abs(a - b) / 2  # t s of two values, Student's t of one degree of freedom
    bounds = [math.log(entry["untrained"][name]) for name in ("low", "high")]
    assert bounds == pytest.approx([(a + b) / 2 - half, (a + b) / 2 + half], rel=1e-3)


def test_json_is_all_that_is_printed_and_says_how_it_was_measured(place, monkeypatch, tmp_path):
    full = Mock(side_effect=OSError("no space left on device"))
    monkeypatch.setattr(import_module("hf_linattn.cli.compare"), "write_text", full)
    result = run(
        "streaming", "--model", place / "gpt2", "--text", place / "test.txt", *LENGTHS, "--dtype", "bfloat16",
        "--threads", 1, "--json", "--csv", tmp_path / "c.csv", code=1,
    )  # fmt: skip
    document = json.loads(result.stdout)
    assert "no space left on device" in result.stderr, "what was measured is printed before it is written"
    assert document["provenance"]["dtype"] == "bfloat16" and document["provenance"]["num_threads"] == 1
    (entry,) = document["entries"]
    assert entry["name"] == "streaming" and entry["calibrated"] is None and not entry["stopped"]
    assert [row["length"] for row in entry["speed"]] == [16, 24] == [row["length"] for row in entry["memory"]]


def test_the_plan_of_a_file_is_one_like_others(place, tmp_path):
    """What `convert --keep` writes beside a model, with the record of its choice, is a list as data."""
    others = {"mechanism": "streaming", "options": {"window_size": 8}}
    plan = ChosenPlan.of(PlanRecord("GPT2LMHeadModel", [4, 4], "head", [[0, 1]], others, [], "slope", "recall"))
    given = ["--model", place / "gpt2", "--text", place / "test.txt", *LENGTHS, "--json", "--csv", tmp_path / "c.csv"]
    (entry,) = json.loads(run(plan.save(tmp_path / "plan.json"), *given).stdout)["entries"]
    assert entry["plan"] == list(plan) and entry["untrained"] and (tmp_path / "c.csv").exists()


def test_an_encoder_has_no_state_and_its_peaks_are_compared(place):
    shown = run("linear", "--model", place / "bert", "--text", place / "test.txt", *LENGTHS).stdout.splitlines()
    assert "peak bytes" in shown[0] and "token," not in shown[0] and "state" not in shown[0]
    assert "(" not in shown[3].replace("(original)", ""), "one value for all of the text has no interval"


def test_a_mechanism_that_another_package_registered_is_one_like_others(place, monkeypatch):
    monkeypatch.setattr(MECHANISMS, "_entries", dict(MECHANISMS._entries))
    third_party = type("ThirdPartyMechanism", (LinearMechanism,), {"__module__": "elsewhere"})
    config = type("ThirdPartyConfig", (LinearMechanism.config_class,), {"__module__": "elsewhere"})
    third_party.config_class = config
    hf_linattn.register_mechanism("third_party")(third_party)
    given = ["--model", place / "gpt2", "--text", place / "test.txt", *LENGTHS, "--json"]
    entries = json.loads(run("linear", "third_party", *given).stdout)["entries"]
    assert entries[0]["untrained"] == entries[1]["untrained"] and entries[1]["name"] == "third_party"


def test_a_plan_whose_time_is_up_keeps_what_was_measured_and_the_next_one_starts_anew(place, monkeypatch):
    measure, timers, left = comparing.measure_memory, [], watch_models(monkeypatch, "compare")

    def timer(seconds, ring):
        assert seconds == pytest.approx(3)
        timers.append(Mock(ring=ring))
        return timers[-1]

    def slow_at_first(*arguments, **options):
        if len(timers) == 1:
            timers[0].ring()
            start = time.perf_counter()
            while time.perf_counter() - start < 60:
                pass
        return measure(*arguments, **options)

    monkeypatch.setattr(deadline, "threading", SimpleNamespace(**{**vars(threading), "Timer": timer}))
    monkeypatch.setattr(comparing, "measure_memory", slow_at_first)
    given = ["local", "linear", "--model", place / "gpt2", "--text", place / "test.txt", *LENGTHS]
    result = run(*given, "--limit-minutes", 0.05, code=3)
    lines = result.stdout.splitlines()[3:]
    assert all(line.startswith("| local (stopped) |") and line.endswith("| - | - | - | - |") for line in lines[:2])
    assert all(line.split("|")[3].strip() != "-" for line in lines), "its perplexity was measured before"
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["linear", "linear"]
    assert "local: its 0.05 minutes are up" in result.stderr
    assert left == [0, 0, 0], "one model is in memory at a time"


@pytest.mark.parametrize(
    ("error", "code"), [(torch.OutOfMemoryError("out of memory"), 1), (KeyboardInterrupt(), 130)], ids=["memory", "^C"]
)
def test_an_error_at_one_length_loses_nothing_that_was_measured_before(place, tmp_path, monkeypatch, error, code):
    measure, left = comparing.measure_speed, [None, None, None, error]  # all of local, and linear at one length
    failing = Mock(side_effect=lambda *arguments, **options: raise_or(left.pop(0), measure, *arguments, **options))
    monkeypatch.setattr(comparing, "measure_speed", failing)
    given = ["local", "linear", "--model", place / "gpt2", "--text", place / "test.txt", *LENGTHS, "--json"]
    result = run(*given, "--csv", tmp_path / "c.csv", "--png", tmp_path / "c.png", code=code)
    entries = json.loads(result.stdout)["entries"]
    assert [(entry["name"], len(entry["speed"]), entry["stopped"]) for entry in entries] == [
        ("local", 2, False), ("linear", 1, True),
    ]  # fmt: skip
    rows = list(csv.DictReader(io.StringIO((tmp_path / "c.csv").read_text())))
    assert [row["prompt_speedup"] != "" for row in rows[1:]] == [True, True, True, False]
    assert (tmp_path / "c.png").exists()
    assert code == 130 or result.stderr.splitlines()[-1].startswith("OutOfMemoryError: memory runs out"), result.stderr


def raise_or(error, function, *arguments, **options):
    """Raise an error, or call a function where there is none."""
    if error is not None:
        raise error
    return function(*arguments, **options)


@pytest.fixture
def ctrl_c_interrupts():
    """SIGINT as Python has it in a terminal; a process that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_time_is_up_in_the_middle_of_python_and_ctrl_c_is_what_it_was(ctrl_c_interrupts):
    with pytest.raises(TimeIsUpError), time_limit(0.001):
        while True:
            pass
    with pytest.raises(KeyboardInterrupt), time_limit(10):
        signal.raise_signal(signal.SIGINT)
    before = signal.getsignal(signal.SIGINT)
    with time_limit(10):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


REFUSED = {
    ("perfomer",): "did you mean performer",
    ("local", "linear", "local"): "attention: 'local' is given twice",
    ("missing.json",): "plan='missing.json' cannot be read",
    ("linear", "--lengths", "16,65"): "lengths must be 1 to 64, the positions of the model, got 65",
    ("linear", "--max-length", "65"): "max_length must be 2 to 64, the positions of the model, got 65",
    ("perfomer", "--model", "nothing"): "did you mean performer",
    ("linear", "--lengths", "1"): "lengths must be 2 or more where max_length is absent",
    ("linear", "--lengths", "a"): "lengths must be numbers",
    ("linear", "--limit-minutes", "0"): "limit_minutes must be a number of minutes above 0 and at most 1.5e+08, got 0",
    ("linear", "--limit-minutes", "inf"): "at most 1.5e+08, got inf",
    ("linear", "--threads", "100000"): "threads must be at most 1,024, got 100000",
    ("local", '{"synthesizer": {"max_length": 16}}', "--lengths", "8,24"): (
        'lengths must be 1 to 16, the positions of the model with {"synthesizer": {"max_length": 16}}, got 24'
    ),
    ("linear", "--csv", "."): "csv must be the path of a file, in a folder that can be written to, got '.'",
    ("linear", "--png", "test.txt/c.png"): "png must be the path of a file, in a folder that can be written to",
    ("linear", "--repeats", "0"): "repeats must be an integer >= 1, got 0",
    ("linear", "--dtype", "float8"): "unknown dtype 'float8'",
    ("linear", "--threads", "0"): "threads must be None or an integer >= 1, got 0",
    ("linear", "--calibration-tokens", "64"): "calibration_tokens must be absent where nothing is fitted; give calib",
    ("linear", "--calibrate", "test.txt"): "is given as text, too",
    ("linear", "--model", "classifier"): "BertForSequenceClassification has no causal or masked language-model",
    ("local", "--model", "converted"): "model='converted' is converted already; give the original",
    ("deltanet", "--model", "bert"): "mechanism 'deltanet' has no bidirectional form",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items(), ids=str)
def test_what_is_wrong_is_refused_before_anything_is_measured(place, monkeypatch, arguments, message):
    monkeypatch.chdir(place)
    monkeypatch.setattr(comparing, "measure_speed", SimpleNamespace())
    model = [] if "--model" in arguments else ["--model", "gpt2"]
    lengths = [] if "--lengths" in arguments else ["--lengths", "8"]
    result = run(*arguments, *model, *lengths, "--text", "test.txt", code=1)
    assert message in result.stderr and result.stdout == ""


def test_the_lengths_of_the_example_fit_its_model():
    (said,) = re.findall(r"--model gpt2 .*\s+--lengths ([\d,]+)", command.__doc__)
    assert max(map(int, said.split(","))) <= GPT2Config().n_positions
