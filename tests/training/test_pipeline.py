"""What a recipe looks at first, and what it says when it is stopped."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from hf_linattn.errors import DataError
from hf_linattn.training import pipeline, preparation
from tests.recipes.test_distill import flags, run
from tests.recipes.test_finetune import material

__all__ = ["material"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), ('{"text": ', "is not valid json"), ('{"body": "a"}', "text_column='text' is not a ")],
    ids=["absent", "broken", "columns"],
)
def test_mistakes_in_files_come_before_those_in_the_budget_and_before_the_model(
    material, tmp_path, monkeypatch, content, message
):
    monkeypatch.setattr(preparation, "load_task", Mock(side_effect=AssertionError))
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message):
        run(flags(material, tmp_path / "out", train_file=file, max_train_tokens=10))


@pytest.mark.parametrize(("overwrite", "words"), [(False, ""), (True, " without overwrite_output_dir")])
def test_ctrl_c_says_that_the_run_goes_on(monkeypatch, caplog, overwrite, words):
    stage = Mock(run=Mock(side_effect=KeyboardInterrupt))
    stage.name = "transfer"
    monkeypatch.setattr(pipeline, "stages_of", lambda arguments: [stage])
    context = Mock(results={})
    context.arguments.recipe.overwrite_output_dir = overwrite
    context.directory.path = Path("runs/out")
    with pytest.raises(KeyboardInterrupt):
        pipeline.run_recipe(context)
    said = f"stopped in stage 1 of 1, transfer; the same command{words} goes on from there, in runs/out"
    assert caplog.messages[-1] == said
