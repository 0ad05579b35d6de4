"""Whether a stage made any position worse than it found it: the numbers, the refusal, and where checks are made."""

from __future__ import annotations

import json
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from hf_linattn.errors import OptionError
from hf_linattn.evaluation import PositionRow
from hf_linattn.evaluation.next_token import TokenLosses
from hf_linattn.training.arguments import parse_arguments
from hf_linattn.training.arguments.parsing import DISTILLATION
from hf_linattn.training.stages import positions, stages_of
from hf_linattn.training.stages.positions import PositionCheck, changes, checked_length, is_worse
from tests.models import make_model
from tests.recipes.test_distill import flags, run
from tests.recipes.test_finetune import material, recorded

__all__ = ["material"]


def made(losses: torch.Tensor) -> TokenLosses:
    return TokenLosses(torch.zeros(len(losses), 256), losses, torch.zeros_like(losses), torch.arange(len(losses)))


def test_a_bucket_is_worse_where_its_mean_change_is_above_zero_beyond_chance():
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(6, 255, generator=generator, dtype=torch.float64)
    change = torch.zeros(6, 255, dtype=torch.float64)
    change[:, 63:127], change[:, 127:] = -0.5, 0.25  # positions 64 to 127, and 128 to 255
    change[0, :63], change[1, :63] = 1.0, -0.9  # above zero on the mean, by one document alone
    rows = changes(made(before), made(before + change))
    assert [(row.first, row.last) for row in rows] == [(1, 63), (64, 127), (128, 255)]
    assert [row.loss for row in rows] == pytest.approx([0.1 / 6, -0.5, 0.25])
    assert [is_worse(row) for row in rows] == [False, False, True]


def test_in_a_single_document_tokens_say_what_is_chance():
    change = torch.randn(1, 255, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    change[:, :63] += 0.05 - change[:, :63].mean()
    change[:, 127:] += 0.5
    still = torch.zeros(1, 255, dtype=torch.float64)
    rows = changes(made(still), made(change))
    assert rows[0].loss == pytest.approx(0.05) and [is_worse(row) for row in rows] == [False, False, True]
    assert [is_worse(PositionRow(1, 63, 0.0, mean, mean / 2, 1.0)) for mean in (0.004, 0.006)] == [False, True]
    last = change[0, 127:].numpy()
    expected = last.mean() - 1.96 * last.std(ddof=1) / len(last) ** 0.5
    assert rows[2].low == pytest.approx(expected) and rows[2].low + rows[2].high == pytest.approx(2 * last.mean())


def test_windows_are_four_rows_long_as_far_as_there_are_positions():
    arguments = SimpleNamespace(
        data=SimpleNamespace(block_size=32), distillation=SimpleNamespace(long_block_size=48)
    )
    lengths = [checked_length(arguments, *rest) for rest in ((None, False), (None, True), (64, False), (150, True))]
    assert lengths == [128, 192, 64, 150]


def long_text(folder, documents: int = 3) -> str:
    texts = [" ".join(f"w{5 + (document + 3 * i) % 8}" for i in range(70)) for document in range(documents)]
    file = folder / "validation.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


def test_every_stage_is_checked_and_one_that_does_harm_is_refused_and_kept(material, tmp_path, monkeypatch):
    out, file = tmp_path / "out", long_text(tmp_path)
    options = {"control": "none", "validation_file": file, "max_train_tokens": 1280, "transfer_tokens": 384}
    given = flags(material, out, position_windows=3, **options)
    names = [stage.name for stage in stages_of(parse_arguments(given, DISTILLATION))]
    checked = ["calibration", "transfer", "recovered_training"]
    assert [names[names.index(name) + 1] for name in checked] == [f"{name}_positions" for name in checked]
    # no stage is asked whether it learns in so few steps: what is compared here is where the answer goes
    real = positions.changes
    monkeypatch.setattr(positions, "is_worse", lambda row: False)
    seen = []

    def watch(before, after):
        seen.append((before.losses, after.losses))
        return real(before, after)

    monkeypatch.setattr(positions, "changes", watch)
    run(given)
    assert all(before.shape == (3, 63) for before, _ in seen), "64 positions, not 4 times 32"
    for (_, after), (before, _) in pairwise(seen):
        assert before is after, "each stage starts where the one before ended, which is not measured twice"
    done = recorded(out, "recovered_training_positions")
    assert [row["first"] for row in done["change"]] == [1]
    (out / "stages" / "recovered_training_positions.json").unlink()
    ended = seen[-1]
    monkeypatch.setattr(positions, "is_worse", lambda row: True)
    with pytest.raises(OptionError, match=r"block_size=32: the stage recovered_training made positions 1 to 63 worse"):
        run(given)
    assert (out / "model.safetensors").exists() and recorded(out, "recovered_training")
    assert torch.equal(seen[-1][0], ended[0]), "a rerun measures anew what it starts from, and finds the same"
    run(flags(material, out, position_windows=0, **options))  # goes on


def test_one_model_at_a_time_is_on_the_device(monkeypatch):
    alive, losses = weakref.WeakSet(), made(torch.zeros(2, 255, dtype=torch.float64))
    monkeypatch.setattr(positions, "held_out", lambda run, length: (length, None))
    monkeypatch.setattr(positions, "token_losses", lambda model, windows, documents: losses)
    given = ["--model_name_or_path", "m", "--output_dir", "o", "--mechanism", "linear"]
    arguments = parse_arguments(given, DISTILLATION)

    def load(run):
        assert not alive
        model = make_model("gpt2")
        model.itself = [model]  # a ring, which no count of references ends
        alive.add(model)
        return model

    run = SimpleNamespace(position_losses={}, arguments=arguments)
    assert PositionCheck("calibration", "converted", load, load).compute(run)["windows"] == 2
    assert {*run.position_losses} == {("calibration", False)}


def test_held_out_text_that_is_too_short_is_refused_before_anything(material, tmp_path):
    with pytest.raises(OptionError, match=r"position_windows=2, windows of 64 .*with position_windows 0"):
        run(flags(material, tmp_path / "out", position_windows=2))
    assert not (tmp_path / "out").exists()
    assert PositionCheck("x", "y", None, None).name == "x_positions"
