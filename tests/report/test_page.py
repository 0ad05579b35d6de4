"""The page of a run: all of it in one file, nothing in it that a text could run, and a line for what a run lacks."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from hf_linattn import CheckpointError, ChosenPlan, patch_model
from hf_linattn.adapter_config import ADAPTER_TYPE, CONFIG_FILE
from hf_linattn.chosen_plan import PlanRecord
from hf_linattn.cli import app
from hf_linattn.evaluation import LongLosses, PositionRow
from hf_linattn.report import Accuracies, LongContext, MetricRow, TextSample, model_card, to_markdown
from hf_linattn.report.card import patches_in
from hf_linattn.report.page import page, read_evidence, save_page
from hf_linattn.report.page.evidence import losses_by_position, recalls
from tests.models import make_model
from tests.report.test_tables import report

__all__ = ["report"]

EVIL = '<script>alert(1)</script>\n```\n& "quoted" | {{ 1 + 1 }}'
LINKS = {"src", "href", "xlink:href", "data", "action", "poster", "srcset"}


class Read(HTMLParser):
    """What a page is made of: tags with their attributes, and the text in each section."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.sections: dict[str, str] = {}
        self.section = "head"
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs)["id"]

    def handle_data(self, data):
        self.sections[self.section] = self.sections.get(self.section, "") + data

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


def score(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def recall_row(length, depth, original, converted):
    facts = {"length": length, "chance": 0.1} | ({"depth": depth, "task": "kv"} if depth else {})
    values = {"original": score(original), "control": None, "converted": score(converted)}
    return {"suite": "recall", "name": "kv", "metric": "found", "num_items": 4, "facts": facts, **values}


@pytest.fixture(scope="module")
def full(report, tmp_path_factory):
    """A run with everything in it."""
    folder = tmp_path_factory.mktemp("run")
    patch_model(make_model("llama"), {"linear": 0}).save_pretrained(folder)
    (folder / "stages").mkdir()
    record = PlanRecord("Llama", [2, 2], "head", [[1, 0]], {"mechanism": "linear", "options": {}},
                        [[0.1, 0.2], [0.9, 0.3]], "slope", "recall")  # fmt: skip
    ChosenPlan.of(record).save(folder / "stages" / "plan.json")
    rows = [recall_row(512, None, 0.75, 0.5), *(recall_row(512, [i / 4, (i + 1) / 4], 0.75, i / 4) for i in range(4))]
    (folder / "evaluation-recall.json").write_text(json.dumps({"rows": rows}))
    read = LongLosses(
        256, 4, 2, (PositionRow(1, 63, 0.5, 3.0, 2.5, 3.5), PositionRow(64, 255, 0.6, 2.0, 1.5, 2.5)), (), ()
    )
    samples = (TextSample(EVIL, "truth", "by the original", None, "converted says", f"recovered {EVIL}"),)
    whole = replace(
        report, base_model=f"models/{EVIL}", sensitivity=(0.1, 0.2), options={"layers": "0"},
        long_context=LongContext(read, read), samples=samples,
    )  # fmt: skip
    whole.save(folder)
    return folder


def test_a_full_run_is_shown_whole(full, tmp_path):
    shown = Read(save_page(full, tmp_path / "page.html").read_text(encoding="utf-8"))
    assert list(shown.sections)[1:] == [
        "models",
        "positions",
        "recall",
        "speed",
        "memory",
        "layers",
        "samples",
        "training",
    ]
    assert "How to get" not in shown.sections["models"] and not any(
        "missing" in (x.get("class") or "") for x in shown.all("p")
    )
    drawn = shown.all("svg")
    assert len(drawn) == 6, "positions, prefill, decoding, state, peak, layers"
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in drawn)
    assert len(shown.all("title")) == 1 + 6
    for part, words in {
        "models": ["recovered", "10.00", "1.250"], "recall": ["75%", "0% to 25%", "512", "kv"],
        "positions": ["4 windows of 256 tokens", "3.000"], "speed": ["from 512 tokens on", "2.50"],
        "memory": ["3,333"], "layers": ["linear", "softmax", "0.9", "slope"],
        "samples": [EVIL, "truth", "what follows"], "training": ["2,000,000", "kl_weight=0.5"],
    }.items():  # fmt: skip
        assert [word for word in words if word not in shown.sections[part]] == [], part
    framed = [x for x in shown.all("td") if "framed" in (x.get("class") or "")]
    assert len(framed) == 1 and framed[0]["style"] == "--share: 1.000"


def test_nothing_is_fetched_and_no_text_is_run(full):
    text = page(read_evidence(full))
    shown = Read(text)
    assert not shown.all("script") and "alert(1)</script>" not in text.replace("&lt;/script&gt;", "")
    assert not any(name.startswith("on") for _, attributes in shown.tags for name in attributes)
    links = {x[name] for _, x in shown.tags for name in LINKS & {*x}}
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert not re.findall(r"@import|url\((?!['\"]?#)", text)
    ids = [x["id"] for _, x in shown.tags if "id" in x]
    assert len(ids) == len({*ids}), "pictures share no id"
    used = {link[1:] for link in links if link.startswith("#")} | {*re.findall(r"url\(#([^)]+)\)", text)}
    assert used <= {*ids}


def test_a_run_that_lacks_everything_says_how_to_get_it(report, tmp_path):
    bare = replace(report, speed=(), memory=(), stages=(), windows=(), constant_bytes=None)
    bare.save(tmp_path)
    shown = Read(page(read_evidence(tmp_path)))
    assert not shown.all("svg") and "True" not in shown.sections["models"]
    for part, how in {
        "positions": f"hf-linattn eval {tmp_path} TEXT.txt --suite language --original models/gpt2",
        "recall": f"--original models/gpt2 --output {tmp_path}/evaluation-recall.json", "speed": "--speed_lengths",
        "memory": "--speed_lengths", "layers": "--layers auto", "samples": "--text_samples 3",
    }.items():  # fmt: skip
        assert how in shown.sections[part], part


def test_a_run_whose_adapters_lie_alone_says_to_merge_them_first(report, full, tmp_path):
    replace(report, long_context=None).save(tmp_path)
    patched = patches_in(full)[""].to_dict()
    (tmp_path / "adapter").mkdir()
    described = {"peft_type": ADAPTER_TYPE, "hf_linattn": patched}
    (tmp_path / "adapter" / CONFIG_FILE).write_text(json.dumps(described))
    shown = Read(page(read_evidence(tmp_path))).sections
    for part, words in {"positions": "merged TEXT.txt --suite language", "recall": "merged --lengths"}.items():
        assert f"load_adapter(original, '{tmp_path}/adapter').merge_and_unload()" in shown[part]
        assert f"hf-linattn eval {words}" in shown[part]
    assert "linear" in shown["layers"] and "softmax" in shown["layers"]


def test_files_of_suites_are_not_mixed(tmp_path, report):
    report.save(tmp_path)
    models = {"original": score(2.0), "control": None}

    def language(first, last, converted, **others):
        facts = {"first": first, "last": last}
        return {"suite": "language", "name": f"positions {first}", "metric": "loss", "num_items": 2, "facts": facts,
                "converted": score(converted), **models, **others}  # fmt: skip

    files = {
        "old": [language(1, 63, 3.0, control=score(9.0)), language(64, 99, 2.5), *kept("kv", 0.25)],
        "new": [language(1, 127, 1.5), *kept("kv", 0.75), *kept("noise", 0.5, original=None)],
    }
    for age, (name, rows) in enumerate(files.items()):
        file = tmp_path / f"evaluation-{name}.json"
        file.write_text(json.dumps({"rows": rows}))
        os.utime(file, (age, age))
    rows = read_evidence(tmp_path).rows
    assert {name: [x["loss"] for x in own] for name, own in losses_by_position(rows).items()} == {
        "original": [2.0], "recovered": [1.5],
    }  # fmt: skip
    original, recovered = recalls(rows)
    assert recovered.by_test == {("kv", 512): 0.75, ("noise", 512): 0.5} and {*original.by_test} == {("kv", 512)}
    assert recovered.by_depth == {((0.0, 0.25), 512): 0.75}, "means of the same tests, as the original's"
    os.utime(tmp_path / "evaluation-old.json", (9, 9))
    assert [x["loss"] for x in losses_by_position(read_evidence(tmp_path).rows)["recovered"]] == [3.0, 2.5]


def test_each_test_is_as_heavy_as_any_other():
    """Multiple choice has four items for each question."""
    rows = [{**row, "num_items": count} for name, count, share in (("kv", 5, 0.0), ("noise", 20, 1.0))
            for row in kept(name, share)]  # fmt: skip
    assert recalls(rows)[1].by_depth == {((0.0, 0.25), 512): 0.5}


def test_prompts_of_recall_are_no_longer_than_the_positions(report, tmp_path):
    report.save(tmp_path)
    fitting = ({"n_positions": 1024}, "512,1024"), ({"max_position_embeddings": 64}, "64"), ({}, "512,1024,2048")
    for config, lengths in (*fitting, *(({"base_config": config}, lengths) for config, lengths in fitting)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert f"--lengths {lengths} --suite" in Read(page(read_evidence(tmp_path))).sections["recall"]


def kept(name, share, **others):
    rows = recall_row(512, None, 0.5, share), recall_row(512, [0.0, 0.25], 0.5, share)
    tasks = {} if name == "kv" else {"facts": {**rows[1]["facts"], "task": name}}
    return [{**rows[0], "name": name, **others}, {**rows[1], "name": f"{name}, depths", **tasks, **others}]


def test_a_classifier_has_its_metrics_first_and_no_section_of_language_models(report, tmp_path):
    rows = (MetricRow("accuracy", 0.9, 0.91, 0.5, 0.895),)
    sample = TextSample("a text", "good", "good", None, "bad", "good")
    replace(report, accuracy=Accuracies(0.9, 0.91, 0.5, 0.895), metrics=rows, samples=(sample,)).save(tmp_path)
    shown = Read(page(read_evidence(tmp_path)))
    assert "recall" not in shown.sections and "positions" not in shown.sections
    models = shown.sections["models"]
    assert models.index("accuracy") < models.index("test perplexity") and "89.5%" in models
    assert "the label" in shown.sections["samples"]
    embedding = replace(report, evaluation=replace(report.evaluation, problem="embedding"), samples=())
    embedding.save(tmp_path)
    shown = Read(page(read_evidence(tmp_path)))
    assert list(shown.sections)[1:] == ["models", "speed", "memory", "layers", "samples", "training"]


def test_the_command_writes_the_page_and_refuses_a_file_that_is_no_suite(report, tmp_path):
    report.save(tmp_path)
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert "wrote" in result.stderr and "recovered" in result.stdout and (tmp_path / "page.html").is_file()
    refused = CliRunner().invoke(app, ["report", str(tmp_path), "--html", str(tmp_path)])
    assert refused.exit_code == 1 and "html must be the path of a file, in a folder" in refused.stderr
    (tmp_path / "evaluation.json").write_text("[1]")
    (tmp_path / "page.html").unlink()
    with pytest.raises(CheckpointError, match=r"evaluation.json' has no rows of a suite .* or move the file away"):
        save_page(tmp_path, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_samples_in_markdown_end_where_they_should(report):
    samples = tuple(TextSample(f"{EVIL} {i}", "t", "o", None, "c", "r````") for i in range(3))
    for text in (to_markdown(replace(report, samples=samples)), model_card(replace(report, samples=samples)).text):
        blocks = re.findall(r"^(`{5})text\n(.*?)^\1$", text, flags=re.MULTILINE | re.DOTALL)
        assert len(blocks) == 2 and all(EVIL in body and "[recovered] r````" in body for _, body in blocks)
    assert "Sample output" not in to_markdown(report)
