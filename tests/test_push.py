"""Pushing to and loading from a stand-in for the Hub, through the real client, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_linattn import patch_model
from hf_linattn.training.adapters import add_adapters
from tests.helpers import make_tokenizer
from tests.hub_stand_in import Hub, hub_stand_in
from tests.models import make_model
from tests.report.test_tables import report

__all__ = ["report"]

IDS = torch.arange(5, 16)[None]


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    with hub_stand_in() as running:
        yield running


def client(hub: Hub, home: Path, *command: object, code: int = 0) -> str:
    """Run a command as a user of that Hub whose cache is empty, and return what it printed."""
    process = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True,
        env={**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_" + "a" * 34, "HF_HOME": str(home),
             "OMP_NUM_THREADS": str(torch.get_num_threads()),  # so that logits can be bit-equal
             "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
    )  # fmt: skip
    assert process.returncode == code, f"{process.stderr}\n{hub.requests}"
    return process.stderr if code else process.stdout


def python(hub: Hub, home: Path, script: str, *arguments: object, code: int = 0) -> str:
    return client(hub, home, "-c", script, *arguments, code=code)


LOAD = """
import sys, torch, transformers, hf_linattn
name, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
mechanisms = hf_linattn.get_mechanisms(model)
with torch.no_grad():
    torch.save(model(input_ids=torch.arange(5, 16)[None]).logits, out)
print(sorted({m.config.mechanism for m in mechanisms.values()}))
"""


def test_a_converted_model_is_pushed_by_the_command_and_loads_by_its_name(hub, tmp_path, report):
    model = patch_model(make_model("llama", std=0.3), "hedgehog").eval()
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "stages").mkdir()
    (tmp_path / "model" / "stages" / "control.json").write_text("{}")
    (tmp_path / "model" / ".123.config.json").write_text("half")
    replace(report, dataset_name="Salesforce/wikitext").save(tmp_path / "model")
    printed = client(hub, tmp_path / "a", "-m", "hf_linattn", "push", tmp_path / "model", "me/model", "--json")
    assert b'from_pretrained("me/model")' in hub.repositories["me/model"].files["README.md"]
    assert '"repository": "me/model"' in printed and hub.repositories["me/model"].commits == 1
    files = set(hub.repositories["me/model"].files)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files and not any("stages" in f for f in files)
    assert ".eval_results/hf_linattn.yaml" in files and ".123.config.json" not in files
    (tmp_path / "model" / "README.md").write_text("mine")
    client(hub, tmp_path / "a", "-m", "hf_linattn", "push", tmp_path / "model", "me/model")
    assert hub.repositories["me/model"].files["README.md"] == b"mine", "a card that a person wrote stays"
    assert "['hedgehog']" in python(hub, tmp_path / "b", LOAD, "me/model", tmp_path / "logits.pt")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits.pt"), model(input_ids=IDS).logits)


def test_an_adapter_alone_is_pushed_and_loads_onto_its_base(hub, tmp_path):
    base = patch_model(make_model("llama", std=0.3), "hedgehog")
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
    python(hub, tmp_path / "a", push, tmp_path)
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
    python(hub, tmp_path / "b", load, tmp_path / "logits.pt")
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


def test_an_upload_that_breaks_off_leaves_the_repository_as_it_was(hub, tmp_path):
    for seed in (0, 1):
        patch_model(make_model("gpt2", std=0.3, seed=seed), "linear").save_pretrained(tmp_path / str(seed))
    client(hub, tmp_path / "a", "-m", "hf_linattn", "push", tmp_path / "0", "me/model")
    before = dict(hub.repositories["me/model"].files)
    for hub.failing in ("PUT /lfs/", "POST .*/commit/"):
        message = client(hub, tmp_path / "a", "-m", "hf_linattn", "push", tmp_path / "1", "me/model", code=1)
        assert "repository='me/model': the Hub refused the upload" in message and "Traceback" not in message
        assert hub.repositories["me/model"].files == before and hub.repositories["me/model"].commits == 1
    hub.failing = ""
    client(hub, tmp_path / "a", "-m", "hf_linattn", "push", tmp_path / "1", "me/model")
    assert hub.repositories["me/model"].files["model.safetensors"] != before["model.safetensors"]
