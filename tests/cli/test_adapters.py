"""A folder with an adapter stands where a command takes a model: its base is read, the adapter merged into it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from hf_linattn import patch_model
from hf_linattn.adapter_config import CONFIG_FILE
from hf_linattn.hub import load_checkpoint
from hf_linattn.training.adapter_files import save_adapter
from hf_linattn.training.adapters import add_adapters
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.test_cli import answer, refuse

TEXT = " ".join(f"w{5 + 3 * i % 20}" for i in range(60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama with its tokenizer, an adapter of it, what both compute together, and a text."""
    folder = tmp_path_factory.mktemp("adapters")
    make_model("llama", std=0.3).save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    adapted = add_adapters(patch_model(make_model("llama", std=0.3), "hybrid", layers="1", window_size=4), rank=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_adapter(adapted, folder / "adapter", str(folder / "base"))
    merged = adapted.merge_and_unload().eval()
    merged.save_pretrained(folder / "merged")
    make_tokenizer().save_pretrained(folder / "merged")
    (folder / "text.txt").write_text(TEXT)
    return folder


def test_an_adapter_is_scored_as_the_model_that_it_makes_of_its_base(folder):
    def scored(name):
        return json.loads(answer("eval", folder / name, folder / "text.txt", "--max-length", 32, "--json"))

    found, expected, base = scored("adapter"), scored("merged"), scored("base")
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-5)
    assert found["perplexity"] != pytest.approx(base["perplexity"], rel=1e-2)
    assert found["model"] == str(folder / "adapter")
    timed = json.loads(answer("bench", folder / "adapter", "--lengths", 8, "--repeats", 2, "--json"))
    assert timed["speed"][0]["patched_prefill"]["median"] > 0


def test_an_adapter_stands_beside_its_base_in_a_suite(folder, tmp_path):
    document = json.loads(answer(
        "eval", folder / "adapter", folder / "text.txt", "--suite", "language", "--original", folder / "base",
        "--max-length", 32, "--output", tmp_path / "found.json", "--json",
    ))  # fmt: skip
    row = next(row for row in document["rows"] if row["metric"] == "perplexity")
    for role, name in (("converted", "merged"), ("original", "base")):
        alone = json.loads(answer(
            "eval", folder / name, folder / "text.txt", "--suite", "language", "--max-length", 32, "--output",
            tmp_path / f"{name}.json", "--json",
        ))  # fmt: skip
        same = next(other for other in alone["rows"] if other["metric"] == "perplexity")
        assert row[role]["value"] == pytest.approx(same["converted"]["value"], rel=1e-5)


def test_an_adapter_of_peft_alone_is_merged_into_the_converted_model_that_it_was_trained_on(folder, tmp_path):
    def scored(name):
        return json.loads(answer("eval", name, folder / "text.txt", "--max-length", 32, "--json"))["perplexity"]

    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(load_checkpoint(str(folder / "merged")), config)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "whole")
    make_tokenizer().save_pretrained(tmp_path / "whole")
    assert scored(tmp_path / "adapter") == pytest.approx(scored(tmp_path / "whole"), rel=1e-5)
    assert scored(tmp_path / "adapter") != pytest.approx(scored(folder / "merged"), rel=1e-3)


def test_what_was_made_of_an_adapter_is_recovered_once_that_is_merged(folder, tmp_path):
    adapted = get_peft_model(load_checkpoint(str(folder / "base")), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    shown = answer("convert", tmp_path / "adapter", tmp_path / "out", "--mechanism", "linear", "--length", 0)
    assert "recover: hf-linattn" not in shown and "recover it, merge the adapter" in " ".join(shown.split())


def test_an_adapter_that_cannot_be_merged_is_refused(folder, tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(load_checkpoint(str(folder / "base")), config).save_pretrained(tmp_path)
    said = refuse("eval", tmp_path, folder / "text.txt")
    assert f"{str(tmp_path)!r} is an adapter of type PROMPT_TUNING, which cannot be merged" in said


def test_an_adapter_of_another_model_is_refused(folder, tmp_path):
    get_peft_model(make_model("gpt2"), LoraConfig(r=2, target_modules=["c_attn"])).save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, "base_model_name_or_path": str(folder / "base")}))
    assert f"path={str(tmp_path)!r} belongs to another model: " in refuse("eval", tmp_path, folder / "text.txt")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (None, "is an adapter that names no base; put the path or the name"),
        ("gone/elsewhere", "the base of model='{folder}'='gone/elsewhere' cannot be read: "),
    ],
)
def test_a_base_that_cannot_be_read_is_said(base, message, folder, tmp_path):
    config = json.loads((folder / "adapter" / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, "base_model_name_or_path": base}))
    said = refuse("eval", tmp_path, folder / "text.txt")
    assert message.format(folder=tmp_path) in said and CONFIG_FILE in said
