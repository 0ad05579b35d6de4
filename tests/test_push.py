"""Pushing to and loading from a stand-in for the Hub, through the real client, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hf_linattn import patch_model
from hf_linattn.training.adapter_files import save_adapter
from hf_linattn.training.adapters import add_adapters
from tests.helpers import make_tokenizer
from tests.hub_stand_in import Hub, hub_stand_in
from tests.models import make_model
from tests.report.test_tables import report

__all__ = ["report"]

IDS = torch.arange(5, 16)[None]
CARDS = {".eval_results/hf_linattn.yaml"}
HEADS = {"hedgehog": {"layers": 0}, "hybrid": {"layers": 1, "heads": 0, "window_size": 4}}  # the others stay exact


# Runs what it reads from standard input, line by line: a command of the library, or a script; says how it ended.
PROGRAM = """
import contextlib, io, json, sys, traceback
from typer.testing import CliRunner
from hf_linattn.cli import app
answers = sys.stdout
for line in sys.stdin:
    command = json.loads(line)
    printed, code = io.StringIO(), 0
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        with contextlib.redirect_stdout(printed):
            try:
                exec(command[1], {"__name__": "__main__"})
            except Exception:
                traceback.print_exc(file=printed)
                code = 1
        output = printed.getvalue()
    else:
        result = CliRunner().invoke(app, command)
        output, code = result.output, result.exit_code
    print(json.dumps([code, output]), file=answers, flush=True)
"""


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """A user of that Hub whose cache is empty."""
    return {
        **os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_" + "a" * 34, "HF_HOME": str(home),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # so that logits can be bit-equal
        "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip


@dataclass
class User:
    """A process of its own, which starts once for all tests, and what it sees of a Hub."""

    hub: Hub
    process: subprocess.Popen[str]

    def run(self, *command: object, code: int = 0) -> str:
        """Run a command of the library, or a script after "-c", and return what it printed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(list(map(str, command))), file=self.process.stdin, flush=True)
        ended, printed = json.loads(self.process.stdout.readline())
        assert ended == code, f"{printed}\n{self.hub.requests}"
        return printed


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[User]:
    with hub_stand_in() as hub:
        home, pipe = tmp_path_factory.mktemp("home"), subprocess.PIPE
        command = [sys.executable, "-c", PROGRAM]
        with subprocess.Popen(command, env=environment(hub, home), stdin=pipe, stdout=pipe, text=True) as process:
            yield User(hub, process)
            assert process.stdin is not None
            process.stdin.close()


@pytest.fixture
def user(running) -> User:
    """A user of an empty Hub."""
    running.hub.failing = ""
    for kept in (running.hub.repositories, running.hub.uploads, running.hub.requests):
        kept.clear()
    return running


@pytest.fixture
def hub(user) -> Hub:
    return user.hub


LOAD = """
import sys, torch, transformers, hf_linattn
name, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
mechanisms = hf_linattn.get_mechanisms(model)
with torch.no_grad():
    torch.save(model(input_ids=torch.arange(5, 16)[None]).logits, out)
print(sorted({m.config.mechanism for m in mechanisms.values()}))
"""


def test_a_converted_model_is_pushed_by_the_command_and_loads_by_its_name(user, hub, tmp_path, report):
    model = patch_model(make_model("llama", std=0.3), HEADS).eval()
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    for left in ("stages/control.json", "control/model.safetensors", "window/model.safetensors"):
        (tmp_path / "model" / left).parent.mkdir()
        (tmp_path / "model" / left).write_text("{}")
    (tmp_path / "model" / ".123.config.json").write_text("half")
    replace(report, dataset_name="Salesforce/wikitext").save(tmp_path / "model")
    printed = user.run("push", tmp_path / "model", "me/model", "--json")
    assert b'from_pretrained("me/model")' in hub.repositories["me/model"].files["README.md"]
    assert '"repository": "me/model"' in printed and hub.repositories["me/model"].commits == 1
    files = set(hub.repositories["me/model"].files)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files and not any("/" in f for f in files - CARDS)
    assert CARDS <= files and ".123.config.json" not in files
    (tmp_path / "model" / "README.md").write_text("mine")
    user.run("push", tmp_path / "model", "me/model")
    assert hub.repositories["me/model"].files["README.md"] == b"mine", "a card that a person wrote stays"
    assert "['by_head', 'hedgehog']" in user.run("-c", LOAD, "me/model", tmp_path / "logits.pt")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits.pt"), model(input_ids=IDS).logits)


def test_an_adapter_alone_is_pushed_and_loads_onto_its_base(user, hub, tmp_path):
    base = patch_model(make_model("llama", std=0.3), HEADS)
    base.save_pretrained(tmp_path / "base")
    adapted = add_adapters(base, rank=2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        expected = adapted.eval()(input_ids=IDS).logits
    adapted.peft_config["default"].base_model_name_or_path = "me/base"
    adapted.save_pretrained(tmp_path / "adapter")
    push = """
import sys
from huggingface_hub import HfApi
api = HfApi()
for folder, name in (("base", "me/base"), ("adapter", "me/adapter")):
    api.create_repo(name)
    api.upload_folder(repo_id=name, folder_path=f"{sys.argv[1]}/{folder}")
"""
    user.run("-c", push, tmp_path)
    adapter = hub.repositories["me/adapter"].files
    assert "model.safetensors" not in adapter
    assert len(adapter["adapter_model.safetensors"]) < len(hub.repositories["me/base"].files["model.safetensors"])
    load = """
import sys, torch, hf_linattn
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("me/base"), "me/adapter").eval()
with torch.no_grad():
    torch.save(model(input_ids=torch.arange(5, 16)[None]).logits, sys.argv[1])
"""
    user.run("-c", load, tmp_path / "logits.pt")
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


def test_an_adapter_of_this_library_is_pushed_with_its_card_and_nothing_loads_it_onto_softmax(user, hub, tmp_path):
    make_model("llama", std=0.3).save_pretrained(tmp_path / "base")
    adapted = add_adapters(patch_model(make_model("llama", std=0.3), "hedgehog"), rank=2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
        expected = adapted.eval()(input_ids=IDS).logits
    save_adapter(adapted, tmp_path / "adapter", str(tmp_path / "base"))
    printed = user.run("push", tmp_path / "adapter", "me/own")
    assert "pushed to" in printed and hub.repositories["me/own"].commits == 1
    files = hub.repositories["me/own"].files
    card = files["README.md"].decode()
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert 'load_adapter(AutoModelForCausalLM.from_pretrained(base), "me/own")' in card and "`hedgehog`" in card
    assert 'base = "base"' in card and str(tmp_path) not in card, "all can read the card"
    file = tmp_path / "adapter" / "adapter_config.json"
    said = file.read_text()
    file.write_text(said.replace(f'"{tmp_path / "base"}"', "null"))
    (tmp_path / "adapter" / "README.md").unlink(missing_ok=True)
    assert "is an adapter that names no base; put the path" in user.run("push", file.parent, "me/none", code=1)
    file.write_text(said)
    (tmp_path / "adapter" / "README.md").write_text(card.replace("me/own", "own"))
    user.run("push", tmp_path / "adapter", "me/renamed")
    assert hub.repositories["me/renamed"].files["README.md"].decode() == card.replace("me/own", "me/renamed")
    load = """
import sys, torch
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""
    plain = "from peft import PeftModel\nPeftModel.from_pretrained(base, 'me/own')"
    message = user.run("-c", load + plain, tmp_path / "base", code=1)
    assert "import hf_linattn.training.adapter_files, or load it with its load_adapter" in message
    own = """
from hf_linattn.training import load_adapter
with torch.no_grad():
    torch.save(load_adapter(base, "me/own")(input_ids=torch.arange(5, 16)[None]).logits, sys.argv[2])
"""
    user.run("-c", load + own, tmp_path / "base", tmp_path / "logits.pt")
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


def test_an_upload_that_breaks_off_leaves_the_repository_as_it_was(user, hub, tmp_path):
    for seed in (0, 1):
        patch_model(make_model("gpt2", std=0.3, seed=seed), "linear").save_pretrained(tmp_path / str(seed))
    user.run("push", tmp_path / "0", "me/model")
    before = dict(hub.repositories["me/model"].files)
    for hub.failing in ("PUT /lfs/", "POST .*/commit/"):
        message = user.run("push", tmp_path / "1", "me/model", code=1)
        assert "repository='me/model': the Hub refused the upload" in message and "Traceback" not in message
        assert hub.repositories["me/model"].files == before and hub.repositories["me/model"].commits == 1
        assert not (tmp_path / "1" / "README.md").exists(), "nor is a card written"
    hub.failing = ""
    user.run("push", tmp_path / "1", "me/model")
    assert hub.repositories["me/model"].files["README.md"] == (tmp_path / "1" / "README.md").read_bytes()
    assert hub.repositories["me/model"].files["model.safetensors"] != before["model.safetensors"]


def test_a_private_push_into_a_public_repository_is_refused(user, hub, tmp_path):
    patch_model(make_model("gpt2"), "linear").save_pretrained(tmp_path / "model")
    user.run("push", tmp_path / "model", "me/public")
    message = user.run("push", tmp_path / "model", "me/public", "--private", code=1)
    assert "--private: 'me/public' is there already, and public" in message
    assert hub.repositories["me/public"].commits == 1
    for _ in range(2):
        user.run("push", tmp_path / "model", "me/hidden", "--private")
    assert hub.repositories["me/hidden"].private and hub.repositories["me/hidden"].commits == 2


def test_no_weights_of_an_earlier_push_stay_beside_those_of_a_model(user, hub, tmp_path):
    for size in ("1MB", "30KB"):
        patch_model(make_model("gpt2"), "linear").save_pretrained(tmp_path / size, max_shard_size=size)
    others = {"models/model.safetensors", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    for number, size in enumerate(("1MB", "30KB", "1MB")):
        user.run("push", tmp_path / size, "me/model")
        files = hub.repositories["me/model"].files
        assert set(files) == {file.name for file in (tmp_path / size).iterdir()} | (others if number else set())
        files |= dict.fromkeys(["adapter_config.json", "adapter_model.safetensors", *others], b"{}")
    patch_model(make_model("gpt2"), "linear").save_pretrained(tmp_path / "half", variant="half")
    user.run("push", tmp_path / "half", "me/model")
    assert {"model.safetensors", "model.half.safetensors"} <= set(hub.repositories["me/model"].files)


SAVE = """
import sys, hf_linattn
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.save_pretrained(sys.argv[2], push_to_hub=True, repo_id="me/saved", commit_message="mine")
"""


def test_a_save_whose_upload_fails_is_complete_in_its_folder(user, hub, tmp_path):
    patch_model(make_model("gpt2", std=0.3), "linear").save_pretrained(tmp_path / "model")
    hub.failing = "POST .*/repos/create"
    user.run("-c", SAVE, tmp_path / "model", tmp_path / "out", code=1)
    assert not list((tmp_path / "out").iterdir())
    (tmp_path / "out" / "notes.txt").write_text("mine")
    hub.failing = "POST .*/commit/"
    user.run("-c", SAVE, tmp_path / "model", tmp_path / "out", code=1)
    files = {file.name for file in (tmp_path / "model").iterdir()} | {"README.md"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == files | {"notes.txt"}
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    hub.failing = ""
    user.run("-c", SAVE, tmp_path / "model", tmp_path / "out")
    assert set(hub.repositories["me/saved"].files) == files and hub.repositories["me/saved"].commits == 1
    assert {file.name for file in (tmp_path / "out").iterdir()} == files | {"notes.txt"}
