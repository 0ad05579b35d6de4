"""Blocks of Python that need what a reader of the page has by then: a model, text, a run. They run on bundled models.

Those of README, CONTRIBUTING and the pages in `PAGES_THAT_RUN` are in test_project.py, the guides in test_guides.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import hf_linattn
from hf_linattn import is_patched, patch_model, testing, unpatch_model
from hf_linattn.training.adapter_files import save_adapter
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.corpus import standard_library_corpus
from tests.readme_commands import NAME
from tests.test_guides import RUNS
from tests.test_project import PAGES, PAGES_THAT_RUN, ROOT, code_blocks, relative

LLAMA, BERT = (ROOT / "recipes" / "pretrained" / name for name in ("llama", "bert"))
# tokens of the recipe on recipes/README.md -> of its trial
SMALLER = {
    "32_768": "1_024", "700_000": "4_096", "100_000": "4_096", "200_000": "4_096", "block_size=512": "block_size=128",
    "block_size=4096": "block_size=256",
}  # fmt: skip

pytestmark = pytest.mark.slow


def a_llama(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model that recalls nothing, so that its plans are chosen by text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(LLAMA), AutoTokenizer.from_pretrained(LLAMA)
    tokens = torch.randint(2, 2048, (4, 400), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": tokens}]
    by_text = {"signal": "divergence", "batches": rows}
    monkeypatch.setattr(hf_linattn, "choose_plan", partial(hf_linattn.choose_plan, **by_text))
    return {"model": model, "tokenizer": tokenizer, "rows": rows}


def a_bert(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"model": AutoModelForMaskedLM.from_pretrained(BERT), "tokenizer": AutoTokenizer.from_pretrained(BERT)}


def one_architecture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(testing, "check_mechanism", partial(testing.check_mechanism, architectures=["llama"]))
    return {}


def a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The name of the Hub, books, and an adapter that a run left."""
    (folder / NAME).parent.mkdir()
    (folder / NAME).symlink_to(LLAMA)
    texts = standard_library_corpus()["train"]["text"][:60]
    (folder / "books.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    model = add_adapters(patch_model(AutoModelForCausalLM.from_pretrained(LLAMA), "hybrid"), rank=2)
    save_adapter(model, folder / "runs" / "mine" / "adapter", base=NAME)
    return {}


# page -> what its reader has
GIVEN: dict[str, Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]] = {
    "docs/heads.md": a_llama, "docs/longer-inputs.md": a_bert,
    "docs/invariants.md": one_architecture, "recipes/README.md": a_run,
}  # fmt: skip
# pages with tests of their own
ELSEWHERE = {"CONTRIBUTING.md", "docs/extending.md", *PAGES_THAT_RUN, *(f"docs/{guide}.md" for guide in RUNS)}


@pytest.mark.parametrize("page", GIVEN)
def test_python_of_a_page_runs(page, tmp_path, monkeypatch):
    names = GIVEN[page](tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    for block in code_blocks(page, "python"):
        for large, small in SMALLER.items():
            block = block.replace(large, small)
        if "model" in names and is_patched(names["model"]):  # each block converts the original
            names["model"] = unpatch_model(names["model"])
        exec(compile(block, page, "exec"), names)


def test_no_page_has_python_that_no_test_runs():
    found = {relative(page) for page in PAGES if re.search("^```python", page.read_text(encoding="utf-8"), re.M)}
    assert found == {*GIVEN, *ELSEWHERE}
