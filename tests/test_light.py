"""What starts without PyTorch and transformers: the package, the help, the list of mechanisms."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_linattn
from hf_linattn import mechanism_table
from hf_linattn.chosen_plan import ChosenPlan, PlanRecord
from hf_linattn.cli import app
from hf_linattn.ops.runtime import cpu as library
from tests.helpers import make_tokenizer
from tests.models import make_model

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "numpy")
EVAL = ["evaluate", "datasets", "matplotlib", "scipy", "sklearn"]  # what the extra [eval] brings
OTHER_EXTRAS = ["accelerate", "lm_eval", "peft", "psutil", "sentence_transformers"]
STREAMING = {"mechanism": "streaming", "options": {"window_size": 8, "num_sink_tokens": 1}}


def in_a_new_process(code: str) -> dict:
    """Run code that prints a JSON document, in a process that has imported nothing."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_help_version_and_list_import_neither_torch_nor_transformers():
    commands = ["--help", "--version", "list", "list hybrid --json", "list hybird", "convert --help"]
    found = in_a_new_process(f"""
import json, sys
from typer.testing import CliRunner
from hf_linattn.cli import app
codes = [CliRunner().invoke(app, command.split()).exit_code for command in {commands}]
print(json.dumps([codes, [name for name in {HEAVY} if name in sys.modules]]))
""")
    assert found == [[0, 0, 0, 0, 1, 0], []]


@pytest.mark.parametrize("first", ["hf_linattn", "transformers"])
def test_auto_config_knows_our_checkpoints_and_nothing_of_modeling_is_imported(first):
    second = {"hf_linattn": "transformers", "transformers": "hf_linattn"}[first]
    found = in_a_new_process(f"""
import json, sys
import {first}
light = [name for name in {HEAVY} if name in sys.modules]
if {first == "transformers"}:
    from transformers import AutoConfig
import {second}
from transformers import AutoConfig
config = AutoConfig.for_model("hf_linattn")
ours = sorted(name for name in sys.modules if name.startswith("hf_linattn"))
waiting = [finder.name for finder in sys.meta_path if type(finder).__module__ == "hf_linattn.auto_config"]
print(json.dumps([light, type(config).__name__, ours, "transformers.modeling_utils" in sys.modules, waiting]))
""")
    light, config, ours, modeling, waiting = found
    assert config == "HfLinattnConfig" and not modeling
    assert ours == ["hf_linattn", "hf_linattn.auto_config", "hf_linattn.checkpoint_config", "hf_linattn.errors"]
    assert first == "transformers" or light == []
    assert waiting == ["transformers.modeling_utils"]


def test_every_public_name_is_found_where_the_package_says():
    homes = [name for names in hf_linattn._HOMES.values() for name in names]
    assert sorted(homes) == sorted(hf_linattn.__all__) and set(hf_linattn.__all__) <= set(dir(hf_linattn))
    for name in hf_linattn.__all__:
        assert getattr(hf_linattn, name).__module__.startswith("hf_linattn.")
    with pytest.raises(AttributeError, match="has no attribute 'patch_modle'"):
        hf_linattn.patch_modle  # noqa: B018


def test_a_mechanism_whose_file_is_not_in_the_table_is_listed(monkeypatch):
    table = mechanism_table.rows()
    monkeypatch.setattr(mechanism_table, "files", lambda: ["new"])
    assert mechanism_table.rows() == json.loads(json.dumps(table))
    assert {row["family"] for row in table} == {
        "composite", "compressed", "exact", "linear", "sparse", "window and linear",
    }  # fmt: skip


def test_list_shows_a_line_for_each_mechanism_and_the_options_of_one():
    shown = CliRunner().invoke(app, ["list"], env={"COLUMNS": "60"}).stdout.splitlines()
    assert len(shown) == 1 + len(mechanism_table.rows()) + 6  # the head, and the families
    one = CliRunner().invoke(app, ["list", "performer"], env={"COLUMNS": "120"}).stdout
    assert all(word in one for word in ("num_features", "redraw_interval", " 256 ", "of constant size"))


def test_a_model_is_converted_without_the_extras_and_a_plan_chosen_and_a_suite_measured_with_eval_alone(tmp_path):
    make_model("gpt2", std=0.3).save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text(" ".join(f"w{5 + i * i % 90}" for i in range(99)))
    record = PlanRecord("GPT2LMHeadModel", [4, 4], "head", [[0, 1]], STREAMING, [[0.1] * 4] * 2, "slope", "recall")
    ChosenPlan.of(record).save(tmp_path / "plan.json")
    text, converted = tmp_path / "text.txt", f"convert {tmp_path / 'tiny'} {tmp_path}"
    commands = {
        "base": f"{converted}/base --mechanism linear",
        "picture": f"{converted}/picture --plan {tmp_path / 'plan.json'}",
        "chosen": f"{converted}/chosen --plan auto --signal divergence --length 0 --options {{\"window_size\":8}}"
        f" --text {text}",
        "suite": f"eval {tmp_path / 'tiny'} {text} --suite language --max-length 16 --output {tmp_path}/found.json",
    }
    found = in_a_new_process(f"""
import json, sys
from typer.testing import CliRunner
from hf_linattn.cli import app
sys.modules |= dict.fromkeys({[*EVAL, *OTHER_EXTRAS]})  # as if they were not installed
said = {{}}
for name, command in {commands}.items():
    if name == "chosen":
        for package in {EVAL}:
            del sys.modules[package]
    said[name] = CliRunner().invoke(app, command.split()).output
print(json.dumps(said))
""")
    assert "the decoding state is not measured: that needs evaluate" in found["base"]
    assert {"README.md", "model.safetensors"} <= {file.name for file in (tmp_path / "base").iterdir()}
    assert found["picture"].startswith("this command needs") and not (tmp_path / "picture").exists()
    files = {file.name for file in (tmp_path / "chosen").iterdir()}
    assert {"README.md", "plan.json", "plan.png"} <= files, found["chosen"]
    assert (tmp_path / "found.json").exists(), found["suite"]


def test_recipes_are_listed_shown_and_copied(tmp_path):
    run = partial(CliRunner().invoke, app)
    names = [row["name"] for row in json.loads(run(["recipes", "list", "--json"]).stdout)]
    assert {path.stem for path in (ROOT / "recipes" / "models").glob("*.yaml")} <= set(names)
    text = (ROOT / "recipes" / "models" / "smollm2-135m.yaml").read_text()
    assert run(["recipes", "show", "smollm2-135m"]).stdout == text
    assert run(["recipes", "copy", "accelerate/cpu", str(tmp_path / "new")]).exit_code == 0
    copied = tmp_path / "new" / "cpu.yaml"
    assert copied.read_text() == (ROOT / "recipes" / "accelerate" / "cpu.yaml").read_text()
    copied.write_text("mine")
    again = run(["recipes", "copy", "accelerate/cpu", str(tmp_path / "new")])
    assert again.exit_code == 1 and "has a cpu.yaml already" in again.output and copied.read_text() == "mine"
    assert "did you mean smollm2-135m" in run(["recipes", "show", "smollm2"]).output


def test_what_is_built_has_the_recipes_and_finds_them_outside_a_checkout(tmp_path):
    """The package is built without its C, into a folder of its own, and asked from another."""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "built")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    package = tmp_path / "built" / "hf_linattn"
    assert (package / "py.typed").exists() and not (package / "recipes" / "pretrained").exists()
    own = [path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*.yaml")]
    assert all((package / path).read_text() == (ROOT / path).read_text() for path in own)
    code = """
import json, sys, yaml
from hf_linattn.recipe_files import locate
options = yaml.safe_load(locate("recipe:smollm2-135m").read_text())
board = yaml.safe_load(locate(options["board"]).read_text())
print(json.dumps([options["model_name_or_path"], board["hybrid"]["mechanism"], "torch" in sys.modules]))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "built"), "HF_HUB_OFFLINE": "1"}
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout.splitlines()[-1]) == ["HuggingFaceTB/SmolLM2-135M-Instruct", "hybrid", False]


def test_a_checkout_without_its_c_says_so_once(monkeypatch, caplog, tmp_path):
    name = next(iter(library.VARIANTS))
    monkeypatch.setitem(library.VARIANTS, name, "_none")
    for folder, lines in ((ROOT, 1), (tmp_path, 0)):
        monkeypatch.setattr(library, "CHECKOUT", folder)
        library.load_variant.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hf_linattn"):
            assert library.load_variant(name) is None and library.load_variant(name) is None
        assert len(caplog.messages) == lines
        assert all("setup.py build_ext --inplace" in message and str(ROOT) in message for message in caplog.messages)
    library.load_variant.cache_clear()
