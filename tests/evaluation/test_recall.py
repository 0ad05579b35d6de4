"""Recall: prompts that hold their answer where they say, and scores that tell who can read them from who cannot."""

from __future__ import annotations

import hashlib
import json
import random
import re

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_linattn import patch_model
from hf_linattn.evaluation.recall import (
    RECALL_TASKS,
    RecallPrompt,
    answer_prompts,
    make_prompts,
    recall,
    share_found,
)
from tests.evaluation.recall_reader import ReaderModel, bundled_tokenizer, byte_tokenizer, read_answer

LENGTH = 1024
SLACK = {"phone_book": 30, "common_words": 90, "frequent_words": 40}  # tokens of a piece of context; 20 elsewhere
# of the prompts below with a token for each byte: they are the same on every machine
PINNED = "9474815fe136c318099f198f3d0cbdeaa0cf2c8091c04e739e42eb3ea5e28dd7"


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[RecallPrompt]]:
    return {task: make_prompts(task, bundled_tokenizer(), LENGTH, count=3, seed=7) for task in RECALL_TASKS}


@pytest.fixture(scope="module")
def small_llama() -> LlamaForCausalLM:
    """An untrained Llama with the bundled tokenizer's tokens, far from uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(bundled_tokenizer()), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096, initializer_range=0.3,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("task", RECALL_TASKS)
def test_a_copier_finds_every_answer(prompts, task):
    tokenizer, some = bundled_tokenizer(), prompts[task]
    answers = answer_prompts(ReaderModel(tokenizer, some), tokenizer, some, batch_size=3, progress=False)
    assert [answer["found"] for answer in answers] == [1.0] * len(some)
    assert [answer["rank"] for answer in answers] == [1] * len(some)
    assert all(answer["log_likelihood"] > -0.01 for answer in answers)


@pytest.mark.parametrize("task", RECALL_TASKS)
def test_a_reader_that_sees_less_than_the_distance_finds_nothing(prompts, task):
    tokenizer = bundled_tokenizer()
    for prompt in prompts[task]:
        assert share_found(prompt, read_answer(prompt, tokenizer, prompt.distance - 1)) == 0
        assert share_found(prompt, read_answer(prompt, tokenizer)) == 1


@pytest.mark.parametrize("task", RECALL_TASKS)
def test_prompts_are_as_long_as_asked_for(prompts, task):
    totals = [len(prompt.prompt_ids) + len(prompt.answer_ids) for prompt in prompts[task]]
    assert max(totals) <= LENGTH
    assert min(totals) > LENGTH - SLACK.get(task, 20)


@pytest.mark.parametrize("task", ["single_noise", "single_text", "single_uuid", "multi_key", "phone_book", "copying"])
def test_needles_lie_at_depths_spread_evenly(task):
    some = make_prompts(task, bundled_tokenizer(), LENGTH, count=8)
    assert [prompt.depth for prompt in some] == [(i + 0.5) / 8 for i in range(8)]
    shown = [1 - prompt.distance / len(prompt.prompt_ids) for prompt in some]
    assert np.allclose(shown, [prompt.depth for prompt in some], atol=0.12)  # instructions and question around it


@pytest.mark.parametrize(
    "text",
    ["sea and sand " * 400, "\u79cb\u6536\u51ac\u85cf" * 400, "\u79cb\u6536\u51ac\u85cf\u3002" * 400],
    ids=["no full stop", "no space", "full stops of another script"],
)
def test_needles_lie_at_depths_spread_evenly_in_a_text_without_our_sentences(text):
    some = make_prompts("single_text", bundled_tokenizer(), LENGTH, count=4, haystack=[text])
    shown = [1 - prompt.distance / len(prompt.prompt_ids) for prompt in some]
    assert np.allclose(shown, [prompt.depth for prompt in some], atol=0.12)
    haystack = bundled_tokenizer().decode(some[0].prompt_ids).split("\n")[1]
    before, needle, after = re.split(r"( ?One of the .*?\d\. ?)", haystack)
    assert needle and f"{before}{' ' * (' ' in text)}{after}" in text * 2  # nothing else comes between its words


def test_prompts_are_the_same_everywhere():
    digest = hashlib.sha256()
    tokenizer = byte_tokenizer()
    for task in RECALL_TASKS:
        for prompt in make_prompts(task, tokenizer, 5000, count=1, seed=3):
            texts = [tokenizer.decode(ids) for ids in (prompt.prompt_ids, prompt.answer_ids, *prompt.wrong_ids)]
            digest.update(json.dumps(texts).encode())
    assert digest.hexdigest() == PINNED


def test_prompts_depend_on_the_seed_and_on_nothing_else(prompts):
    random.seed(5)
    again = make_prompts("multi_key", bundled_tokenizer(), LENGTH, count=3, seed=7)
    assert again == prompts["multi_key"]
    assert again != make_prompts("multi_key", bundled_tokenizer(), LENGTH, count=3, seed=8)


@pytest.mark.parametrize("task", RECALL_TASKS)
def test_wrong_answers_are_wrong_and_of_the_same_form(prompts, task):
    tokenizer = bundled_tokenizer()
    for prompt in prompts[task]:
        right, *wrong = (tokenizer.decode(ids).strip() for ids in (prompt.answer_ids, *prompt.wrong_ids))
        assert len({right, *wrong}) == (4 if task == "multiple_choice" else 8)
        forms = {re.sub(r"[A-Z]", "A", re.sub(r"\d", "1", re.sub(r"[a-z0-9]+(?=-)|\b[a-z]+\b", "a", text)))
                 if task != "single_uuid" else len(text) for text in (right, *wrong)}  # fmt: skip
        assert len(forms) == 1, forms


def test_every_question_is_asked_with_each_rotation(prompts):
    some = prompts["multiple_choice"]
    for question in (some[i : i + 4] for i in range(0, len(some), 4)):
        assert sorted(prompt.answers[0] for prompt in question) == ["A", "B", "C", "D"]
        values = {prompt.choices["ABCD".index(prompt.answers[0])] for prompt in question}
        assert len(values) == 1 and len({frozenset(prompt.choices) for prompt in question}) == 1


def test_a_random_answerer_is_at_chance(small_llama):
    tokenizer = bundled_tokenizer()
    first, expected, variance, found = 0.0, 0.0, 0.0, 0.0
    for task in RECALL_TASKS:
        (row, *_) = recall(
            small_llama, tokenizer, [task], [LENGTH], num_samples=1 if task == "multiple_choice" else 4, batch_size=4,
            progress=False,
        )  # fmt: skip
        count, chance = row["num_samples"], row["chance"]
        first, expected = first + row["first"] * count, expected + chance * count
        variance += count * chance * (1 - chance)
        found += row["found"] if task != "multiple_choice" else 0
    assert abs(first - expected) < 2.5 * variance**0.5
    assert found / (len(RECALL_TASKS) - 1) < 0.02


def test_a_window_that_ends_behind_the_needle_hides_it(small_llama):
    tokenizer, window = bundled_tokenizer(), 32
    some = [p for p in make_prompts("single_noise", tokenizer, 512, count=6) if p.distance > 2 * window + 8]
    assert len(some) >= 4
    model = LlamaForCausalLM(small_llama.config).eval()
    model.load_state_dict(small_llama.state_dict())
    changed = [swap_value(prompt) for prompt in some]
    options = {"batch_size": 4, "progress": False}
    seen = [answer_prompts(model, tokenizer, batch, **options) for batch in (some, changed)]
    assert all(a["log_likelihood"] != b["log_likelihood"] for a, b in zip(*seen, strict=True))
    patch_model(model, "local", window_size=window, block_size=window)
    seen = [answer_prompts(model, tokenizer, batch, **options) for batch in (some, changed)]
    assert seen[0] == seen[1]
    assert np.mean([answer["found"] for answer in seen[0]]) <= 0.05


def swap_value(prompt: RecallPrompt) -> RecallPrompt:
    """Return the prompt with other tokens where its value stands, and the same answer and distance."""
    ids, answer = list(prompt.prompt_ids), prompt.answer_ids
    (at,) = (i for i in range(len(ids)) if ids[i : i + len(answer)] == answer)
    ids[at : at + len(answer)] = [(token + 1) % 2000 for token in answer]
    return RecallPrompt(**{**vars(prompt), "prompt_ids": ids})
