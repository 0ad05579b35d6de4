"""Generated recall among longer rows: what is learnt of it, how much of it there is, and that no test has it."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from hf_linattn.errors import OptionError
from hf_linattn.evaluation.recall import RECALL_TASKS, make_prompts
from hf_linattn.training import recall_rows
from hf_linattn.training.data import TrainingData, tokenize_and_pack
from hf_linattn.training.recall_rows import recall_prompts, recall_row, with_recall
from tests.evaluation.recall_reader import byte_tokenizer

LENGTH, ROWS = 4000, 9
TEXTS = [" ".join(f"word{(7 * i + shift) % 90}" for i in range(2500)) for shift in range(5)]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def data(tokenizer) -> TrainingData:
    rows = tokenize_and_pack(Dataset.from_dict({"text": TEXTS}), tokenizer, LENGTH, ROWS * LENGTH, add_bos_eos=False)
    return TrainingData(rows, rows)


def test_a_share_of_the_rows_asks_and_its_answers_are_learnt(data, tokenizer):
    mixed = with_recall(data, tokenizer, 0.34, TEXTS, seed=5)
    assert len(mixed.train) == ROWS and mixed.validation is data.validation
    changed = [i for i in range(ROWS) if not torch.equal(mixed.train[i]["input_ids"], data.train[i]["input_ids"])]
    assert len(changed) == 3
    for index in changed:
        row = mixed.train[index]
        assert all(len(row[name]) == LENGTH for name in row)
        starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
        assert starts[0] == 0 and len(starts) <= 2
        end = (*starts, LENGTH)[1]
        learnt = row["labels"][:end]
        kept = learnt != -100
        assert 0 < int(kept.sum()) < end / 3 and torch.equal(learnt[kept], row["input_ids"][:end][kept])
        assert bool(kept[-1]) and not bool(kept[: end // 2].any()), "the answer is the end"
        assert torch.equal(row["input_ids"][end:], data.train[index]["input_ids"][: LENGTH - end])
    again = with_recall(data, tokenizer, 0.34, TEXTS, seed=5)
    assert all(torch.equal(again.train[i]["input_ids"], mixed.train[i]["input_ids"]) for i in range(ROWS))


def test_the_tasks_come_in_turn_and_are_none_of_a_test(tokenizer):
    count = len(RECALL_TASKS) + 2
    prompts = recall_prompts(tokenizer, LENGTH, count, TEXTS, seed=0)
    assert [prompt.task for prompt in prompts] == [*RECALL_TASKS, *list(RECALL_TASKS)[:2]]
    assert all(len(prompt.prompt_ids) + len(prompt.answer_ids) <= LENGTH for prompt in prompts)
    tested = make_prompts("single_noise", tokenizer, LENGTH, count=2, seed=0, haystack=TEXTS)
    assert not {tuple(prompt.answer_ids) for prompt in tested} & {tuple(prompt.answer_ids) for prompt in prompts}


def test_needles_of_every_task_are_spread_over_the_depths(tokenizer, monkeypatch):
    own = {name: RECALL_TASKS[name] for name in ("single_noise", "multiple_choice")}
    monkeypatch.setattr(recall_rows, "RECALL_TASKS", own)
    prompts = recall_prompts(tokenizer, 900, 10, TEXTS, seed=0)
    for task in own:
        assert [prompt.depth for prompt in prompts if prompt.task == task] == [0.1, 0.3, 0.5, 0.7, 0.9]


@pytest.mark.parametrize("first", [0, 2])  # where the positions of the model begin
def test_what_is_left_of_a_row_is_text_that_does_not_see_the_prompt(tokenizer, first):
    (prompt,) = make_prompts("single_noise", tokenizer, 700, count=1)
    asked = len(prompt.prompt_ids) + len(prompt.answer_ids)
    ids, positions = torch.arange(asked + 4), torch.arange(asked + 4)
    positions[2:] -= 2  # two documents
    text = {"input_ids": ids, "position_ids": positions + first, "labels": ids.where(positions > 0, -100)}
    row = recall_row(prompt, text)
    assert row["input_ids"].tolist() == [*prompt.prompt_ids, *prompt.answer_ids, 0, 1, 2, 3]
    assert (row["position_ids"] - first).tolist() == [*range(asked), 0, 1, 0, 1]
    assert row["labels"].tolist() == [-100] * len(prompt.prompt_ids) + [*prompt.answer_ids, -100, 1, -100, 3]


def test_a_share_of_no_row_is_refused(data, tokenizer):
    with pytest.raises(OptionError, match=r"recall_share=0\.01 of 9 rows of 4000 tokens is none; raise it"):
        with_recall(data, tokenizer, 0.01, TEXTS)
