"""The demonstration, asked by Gradio's own client: `make test-demo`."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linattn import patch_model
from tests.test_project import ROOT

pytestmark = pytest.mark.demo
LLAMA = ROOT / "recipes" / "pretrained" / "llama"
GIVEN: dict[str, Any] = {
    "prompt": "Return the", "mechanism": "hybrid", "length": 300, "tokens": 12, "fit": False, "text": "A server.",
}  # fmt: skip


@pytest.fixture(scope="module")
def app(pytestconfig: pytest.Config) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
        from examples.space import app

        yield app


def served(app: Any, name: str) -> Iterator[Any]:
    from gradio_client import Client

    page = app.page_of(name)
    _, url, _ = page.launch(prevent_thread_lock=True, server_name="127.0.0.1")
    try:
        yield Client(url, verbose=False)
    finally:
        page.close()


@pytest.fixture(scope="module")
def client(app: Any) -> Iterator[Any]:
    yield from served(app, str(LLAMA))


def talk(client: Any, **changes: Any) -> list[tuple[str, ...]]:
    """Return everything that the page shows, one after the other."""
    job = client.submit(**(GIVEN | changes), api_name="/talk")
    job.result(timeout=300)
    return job.outputs()


def bytes_in(numbers: str) -> int:
    return int(re.search(r"state \*\*([\d,]+) bytes", numbers)[1].replace(",", ""))


def continued(mechanism: str | None) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(LLAMA), AutoTokenizer.from_pretrained(LLAMA)
    words, own = (tokenizer(GIVEN[x], add_special_tokens=False)["input_ids"] for x in ("text", "prompt"))
    ids = torch.tensor([(words * GIVEN["length"])[: GIVEN["length"] - len(own)] + own])
    model = model if mechanism is None else patch_model(model, mechanism)
    written = model.generate(ids, max_new_tokens=GIVEN["tokens"], do_sample=False)
    return tokenizer.decode(written[0, GIVEN["length"] :], skip_special_tokens=True)


def test_both_models_write_what_they_write_alone_and_numbers_come_while_they_do(client):
    shown = talk(client)
    status, *last = shown[-1]
    assert status == "done"
    assert (last[0], last[2]) == (continued(None), continued("hybrid"))
    whiles = [row for row in shown if row[0] == "converted writes"]
    assert len({row[3] for row in whiles}) > 2 and all("tokens/s" in row[4] for row in whiles[1:-1])
    longer = talk(client, length=900)[-1]
    assert bytes_in(longer[4]) == bytes_in(last[3]) < bytes_in(last[1]) < bytes_in(longer[2])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": " "}, "prompt is empty; write something"),
        ({"prompt": "word " * 200, "length": 64}, "move the slider to the right"),
        ({"fit": True, "text": "short"}, "token"),
    ],
)
def test_what_cannot_be_done_is_said_in_the_page(client, changes, said):
    status = talk(client, **changes)[-1][0]
    assert status.startswith("**Not done:**") and said in status
    assert talk(client)[-1][0] == "done"


def test_a_fitted_mechanism_is_another_one(client):
    text = Path(ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    plain, fitted = (talk(client, mechanism="hedgehog", text=text, fit=fit)[-1] for fit in (False, True))
    assert (plain[0], fitted[0]) == ("done", "done") and plain[1] == fitted[1] and plain[3] != fitted[3]


def test_a_visitor_who_leaves_ends_the_generation(app, monkeypatch):
    pair, streamers, make = app.Pair(str(LLAMA)), [], app.Streamer
    monkeypatch.setattr(app, "Streamer", lambda tokenizer: streamers.append(make(tokenizer)) or streamers[0])
    writing = app.write(pair.original, pair.tokenizer, pair.inputs("Return the", 300, "A server."), 256)
    next(writing)
    threads = threading.active_count()
    writing.close()
    assert threading.active_count() == threads - 1 and streamers[0].count < 128


def test_a_context_begins_with_what_the_tokenizer_puts_before_a_text(app):
    pair = app.Pair(str(LLAMA))
    begin = pair.tokenizer.bos_token_id
    before = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    plain = pair.inputs("Return the", 100, "A server.")
    pair.tokenizer.backend_tokenizer.post_processor = before
    found = pair.inputs("Return the", 100, "A server.")
    assert found[0, 0] == begin != plain[0, 0] and found.shape == plain.shape
    own = len(pair.tokenizer("Return the", add_special_tokens=False)["input_ids"])
    assert found[0, 1:-own].equal(plain[0, : -own - 1]) and found[0, -own:].equal(plain[0, -own:])


def test_a_model_that_is_not_there_is_said_with_the_remedy(app, tmp_path):
    texts = [block.value for block in app.page_of(str(tmp_path / "none")).blocks.values() if hasattr(block, "value")]
    assert any("give --model, or the environment variable MODEL" in str(text) for text in texts)


def test_every_mechanism_that_is_offered_is_in_the_registry(app):
    from hf_linattn import list_mechanisms

    names = [name for _, name in app.choices()]
    assert names[:3] == sorted(app.FIRST) and {*names} < {*list_mechanisms()} and "lsh" in names
