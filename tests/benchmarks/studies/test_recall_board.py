"""The board of models that look far back: its rows, that it goes on where it stopped, and its table."""

from __future__ import annotations

import pytest
import torch
import typer

from benchmarks.result_files import read
from benchmarks.studies import recall_board
from benchmarks.tables.recall_board import recall_board_section
from tests.evaluation.recall_reader import bundled_tokenizer
from tests.models import make_model

pytestmark = pytest.mark.tools
ROWS = ("softmax", "hedgehog", "local")
SMALL = {"LENGTH": 64, "BATCH_TOKENS": 128, "CALIBRATION_BATCHES": 1, "SAMPLES": 2, "MODELS": ("tiny",)}


@pytest.fixture
def teachers(tmp_path, monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(recall_board, name, value)
    tokenizer = bundled_tokenizer()
    model = make_model("llama", max_position_embeddings=640, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "teachers" / "tiny")
    tokenizer.save_pretrained(tmp_path / "teachers" / "tiny")
    return tmp_path / "teachers"


def test_rows_are_taught_alike_and_the_board_goes_on_with_what_its_file_lacks(teachers, tmp_path, monkeypatch):
    monkeypatch.setattr(recall_board, "ROWS", {name: recall_board.ROWS[name] for name in ROWS})
    seen, real = [], recall_board.Original.teach

    def interrupted(original, model, tokens, rate):
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        if len(seen) == 1:
            seen.append("interrupted")
            raise KeyboardInterrupt
        real(original, model, tokens, rate)
        changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
        seen.append((len(changed) > len(before) // 2, tokens, rate))

    monkeypatch.setattr(recall_board.Original, "teach", interrupted)
    output = tmp_path / "board.json"
    with pytest.raises(KeyboardInterrupt):
        recall_board.main(teachers, output, 256, 1e-3, 10.0)
    recall_board.main(teachers, output, 256, 1e-3, 10.0)
    assert seen == [(True, 256, 1e-3), "interrupted", (True, 256, 1e-3), (True, 256, 1e-3)]
    document = read(output)
    softmax, hedgehog, _ = document["rows"]
    assert tuple(row["name"] for row in document["rows"]) == ROWS and len(document["runs"]) == 2
    assert "calibrated" in hedgehog and "calibrated" not in softmax
    assert softmax["converted"] == document["originals"]["tiny"]  # softmax is the original
    assert softmax["trained"]["mixture_loss"] != softmax["converted"]["mixture_loss"]
    losses = {row["name"]: sum(row["trained"]["mixture_loss"]) / 8 for row in document["rows"]}
    text = recall_board_section(document)
    assert f"| tiny | hedgehog | {hedgehog['state_bytes']:,} | 0% |" in text and "| 1.000 |" in text
    best = min(*losses.values(), sum(document["originals"]["tiny"]["mixture_loss"]) / 8)
    ratio = torch.tensor(losses["hedgehog"] - best).exp()
    assert f"{ratio:.3f}" in text
    assert output.with_name("recall_board.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_teachers_is_refused_with_the_command_that_trains_one(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"neither of llama-recall, .*--architecture llama-recall"):
        recall_board.main(tmp_path, tmp_path / "board.json", 256, 1e-3, 10.0)
    assert not (tmp_path / "board.json").exists()


GIVEN = [name for name in recall_board.ROWS if not name.startswith("a quarter")]  # the others are chosen by recall


@pytest.mark.parametrize("name", GIVEN)
def test_every_row_is_a_plan_for_a_copy_of_the_original(teachers, name):
    original, ids = recall_board.Original(teachers / "tiny"), torch.arange(1, 65)[None]
    before = original.model(ids).logits
    found = original.converted(recall_board.ROWS[name])(ids).logits
    assert bool(found.isfinite().all()) and torch.equal(original.model(ids).logits, before)
    assert torch.equal(found, before) == (name == "softmax")
