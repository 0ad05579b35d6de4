"""A converted checkpoint under lm-evaluation-harness, by the harness's own model class."""

from __future__ import annotations

import json

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from hf_linattn import patch_model
from tests.helpers import logits_of, make_tokenizer
from tests.models import make_model

ROWS = [
    {"question": "w7 w31 w12", "choices": ["w54", "w9 w60"], "answer": 1},
    {"question": "w20 w21", "choices": ["w22 w23 w24", "w80"], "answer": 0},
    {"question": "w5", "choices": ["w90 w91", "w92 w93"], "answer": 0},
]
TASK = {
    "task": "continuations",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_harness_scores_a_checkpoint_as_its_model_does(tmp_path, name):
    model, tokenizer = patch_model(make_model(name), "hedgehog"), make_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(rows)}}}
    (tmp_path / "continuations.yaml").write_text(json.dumps(task))
    found = simple_evaluate(
        "hf", {"pretrained": str(tmp_path / "model"), "trust_remote_code": True}, tasks=["continuations"],
        batch_size=2, device="cpu", task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )  # fmt: skip
    right = 0
    for row, sample in zip(ROWS, found["samples"]["continuations"], strict=True):
        expected = []
        for choice in row["choices"]:
            texts = row["question"], choice
            question, answer = (tokenizer(text, return_tensors="pt")["input_ids"] for text in texts)
            scores = logits_of(model, torch.cat([question, answer], 1)).log_softmax(-1)[0, question.shape[1] - 1 : -1]
            expected.append(float(scores.gather(-1, answer[0][:, None]).sum()))
        assert [pair[0] for pair in sample["filtered_resps"]] == pytest.approx(expected, abs=1e-4)
        right += expected[row["answer"]] == max(expected)
    assert found["results"]["continuations"]["acc,none"] == pytest.approx(right / len(ROWS))
