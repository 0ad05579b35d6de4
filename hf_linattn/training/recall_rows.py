"""Rows of generated recall among the longer rows of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hf_linattn.errors import OptionError
from hf_linattn.evaluation.recall import RECALL_TASKS, RecallPrompt, make_prompts
from hf_linattn.training.data import IGNORED_LABEL, TrainingData

FIRST_SEED = 2**31  # tests are made with seeds below


def with_recall(
    data: TrainingData, tokenizer: PreTrainedTokenizerBase, share: float, haystack: Sequence[str], seed: int = 0
) -> TrainingData:
    """Return data in which a share of the training rows are prompts of recall with their answers, the tasks in turn.

    A row is one prompt of nearly its length, of which the answer alone is learnt, and the beginning of the text that
    it takes the place of, as a document of its own. The depths of the needles are spread evenly.

    Args:
        data: packed rows of one length. share: of the rows, above 0 and below 1, rounded to whole rows.
        haystack: texts that needles are hidden in, of the training split. seed: of the rows taken and of the prompts.

    Raises:
        OptionError: the share is less than a row, or rows are too short for a task.
        DataError: the haystack is too short, or the tokenizer cannot spell an answer.
    """
    rows, length = data.train, len(data.train[0]["input_ids"])
    count = round(share * len(rows))
    if not count:
        raise OptionError(
            f"recall_share={share:g} of {len(rows)} rows of {length} tokens is none; raise it or long_tokens"
        )
    order = np.random.default_rng(seed).permutation(len(rows))[:count]
    prompts = recall_prompts(tokenizer, length, count, haystack, seed)
    columns = {name: [torch.as_tensor(x) for x in rows[name]] for name in ("input_ids", "position_ids", "labels")}
    for index, prompt in zip(order.tolist(), prompts, strict=True):
        given = {name: column[index] for name, column in columns.items()}
        for name, row in recall_row(prompt, given).items():
            columns[name][index] = row
    mixed = Dataset.from_dict({name: [row.numpy() for row in column] for name, column in columns.items()})
    return replace(data, train=mixed.with_format("torch"))


def recall_prompts(
    tokenizer: PreTrainedTokenizerBase, length: int, count: int, haystack: Sequence[str], seed: int
) -> list[RecallPrompt]:
    """Return `count` prompts of all tasks in turn, each a question of its own, none of which is in a test.

    Of a multiple choice the places of the options turn from question to question.
    """
    each, made = -(-count // len(RECALL_TASKS)), list[list[RecallPrompt]]()
    for name, task in RECALL_TASKS.items():
        asked = make_prompts(name, tokenizer, length, count=each, seed=FIRST_SEED + seed, haystack=haystack)
        made.append([asked[i * task.rotations + i % task.rotations] for i in range(each)])
    return [prompt for prompts in zip(*made, strict=True) for prompt in prompts][:count]


def recall_row(prompt: RecallPrompt, text: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a row of as many tokens as the row `text`: the prompt with its answer, then the beginning of the text."""
    asked = torch.tensor([*prompt.prompt_ids, *prompt.answer_ids])
    labels = asked.clone()
    labels[: len(prompt.prompt_ids)] = IGNORED_LABEL
    positions = torch.arange(len(asked)) + text["position_ids"].min()  # which restart where a text begins
    own = {"input_ids": asked, "position_ids": positions, "labels": labels}
    return {name: torch.cat([x, text[name][: len(text[name]) - len(asked)]]) for name, x in own.items()}
