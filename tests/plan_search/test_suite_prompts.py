"""The prompts that a plan is chosen by: which are asked, of which lengths, and which are refused."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from hf_linattn import DataError, OptionError, choose_plan
from hf_linattn.evaluation.recall import RECALL_TASKS
from hf_linattn.evaluation.recall import make_prompts as suite_prompts
from hf_linattn.plan_search.options import SearchOptions
from hf_linattn.plan_search.suite_prompts import _suite
from tests.helpers import make_tokenizer, make_tokens
from tests.plan_search.retriever import WINDOW, choose, make_prompt, make_prompts, make_retriever

TEXT = [{"input_ids": make_tokens(2, 12) % 30}]


def test_prompts_longer_than_the_positions_and_answers_without_tokens_are_refused():
    long = SimpleNamespace(task="find", length=64, prompt_ids=[7] * 64, answer_ids=[1])
    with pytest.raises(OptionError, match=r"a prompt of 'find' has 65 tokens with its answer, .* has 64 positions"):
        choose(make_retriever(), 1, prompts=[long])
    tokenizer = make_tokenizer()
    unknown = SimpleNamespace(task="find", length=8, prompt_ids=[7] * 8, answer_ids=[tokenizer.unk_token_id])
    with pytest.raises(DataError, match="has no tokens for the answer of a prompt of 'find'"):
        choose_plan(make_retriever(), tokenizer, 1, prompts=[unknown])


def test_prompts_within_the_window_say_nothing():
    size = WINDOW["streaming"]["window_size"]
    short = [make_prompt(seed, size) for seed in range(2)]
    with pytest.raises(DataError, match=rf"prompts: the longest prompt has {size} tokens, and up to"):
        choose(make_retriever(), 1, prompts=short)
    long = make_prompts()[:2]  # fewer than count alone where they are lost
    want, got = (choose(make_retriever(), 1, prompts=prompts).record for prompts in (long, short + long))
    assert (got.scores, got.examples) == (want.scores, want.examples)


@pytest.mark.parametrize(
    ("answered", "lengths"), [(2048, [2048]), (512, [2048, 1024, 512]), (0, [2048, 1024, 512, 256])]
)
def test_shorter_prompts_choose_where_the_model_does_not_answer_the_longest(monkeypatch, caplog, answered, lengths):
    """As a model does that was trained on shorter rows than it has positions for."""
    model, written, ours = make_retriever(), [], make_prompts()
    model.config.max_position_embeddings = 4096
    suite = import_module("hf_linattn.evaluation.recall")
    monkeypatch.setattr(suite, "make_prompts", lambda task, tokenizer, length, **how: written.append(length) or ours)
    own = lambda model, tokenizer, prompts, progress: prompts if written[-1] <= answered else []  # noqa: E731
    monkeypatch.setattr(import_module("hf_linattn.plan_search.choose"), "in_own_words", own)
    record = choose_plan(
        model, SimpleNamespace(), 1, tasks=["single_noise"], replace=WINDOW, batches=TEXT, progress=False
    ).record
    assert written == lengths
    missed = ", ".join(f"0 of {len(ours)} prompts of {length:,} tokens" for length in lengths if length > answered)
    if answered:
        assert record.signal == "recall" and record.kept == choose(make_retriever(), 1).record.kept
        assert (f"answers {missed}; those of 512 tokens choose" in caplog.text) == (len(lengths) > 1)
    else:
        assert record.signal == "divergence" and record.reason == f"LlamaForCausalLM itself answers {missed}"


@pytest.mark.parametrize(
    ("window", "positions", "lengths"),
    [
        (4, 512, [512]),
        (4, 9000, [2048]),
        (1024, 9000, [2048]),
        (1500, 9000, [4096]),
        (4096, 9000, [8192]),
        (4096, 5000, [4096]),
    ],
)
def test_lengths_of_prompts_pass_the_window_as_far_as_there_are_positions(monkeypatch, window, positions, lengths):
    model, asked = make_retriever(), []
    model.config.max_position_embeddings = positions

    def prompts(task, tokenizer, length, **how):
        asked.append(length)
        return [SimpleNamespace(**{**vars(make_prompt(0, 4)), "distance": length + 1})]

    monkeypatch.setattr(import_module("hf_linattn.evaluation.recall"), "make_prompts", prompts)
    options = {"tasks": ["single_noise"], "replace": {"streaming": {"window_size": window}}}
    with pytest.raises(DataError, match=r"lengths: the longest prompt has 4 tokens, .* longer lengths, or a smaller"):
        choose_plan(model, SimpleNamespace(), 1, **options)
    assert asked == lengths


@pytest.mark.parametrize(
    ("window", "count", "number"), [(64, 1, 1), (200, 1, 2), (277, 1, 4), (64, 2, 2), (150, 3, 6)]
)
def test_needles_lie_further_back_than_the_window(window, count, number):
    """A window of half a prompt finds a needle in its middle, and slopes of such a prompt are noise."""
    tokenizer = AutoTokenizer.from_pretrained("recipes/pretrained/llama")
    tasks, length = ["single_noise", "multiple_choice"], 400
    options = SearchOptions(tasks=tasks, lengths=[length], num_prompts=count, seed=5)
    found = _suite(tokenizer, options, None, window)
    assert all(prompt.distance > window for prompt in found)
    asked = [suite_prompts(task, tokenizer, length, count=number, seed=5) for task in tasks]
    assert found == asked[0][:count] + asked[1][: 4 * count], "none others than are needed"


def test_where_no_needle_is_far_enough_the_farthest_count():
    tokenizer = AutoTokenizer.from_pretrained("recipes/pretrained/llama")
    options = SearchOptions(tasks=["single_noise"], lengths=[400], num_prompts=1, seed=5)
    assert [prompt.depth for prompt in _suite(tokenizer, options, None, 399)] == [0.125]
    spread = SearchOptions(tasks=["multi_value"], lengths=[400], num_prompts=1, seed=5)
    (found,) = _suite(tokenizer, spread, None, 399)
    asked = [suite_prompts("multi_value", tokenizer, 400, count=number, seed=5)[0] for number in (1, 2, 4)]
    assert found.distance == max(prompt.distance for prompt in asked), "of several needles the last"


def test_slopes_of_prompts_that_a_window_answers_are_named(caplog):
    """As of windows so long that nothing is lost."""
    answered = [prompt for prompt in map(make_prompt, range(40)) if prompt.distance < 20][:4]
    choose(make_retriever(), 1, replace={"streaming": {"window_size": 22}}, prompts=answered)
    assert "with all heads replaced 0 of 4 prompts are lost, and slopes of others say little" in caplog.text


def test_kinds_of_prompts_that_are_longer_are_left_out_unless_they_are_named():
    """Shorter prompts are tried where a model answers no longer ones, and lists of words need 905 tokens here."""
    tokenizer = AutoTokenizer.from_pretrained("recipes/pretrained/llama")
    found = {prompt.task for prompt in _suite(tokenizer, SearchOptions(lengths=[512]), None, 64)}
    assert found == set(RECALL_TASKS) - {"common_words"}
    for options in ({"lengths": [512], "tasks": ["single_noise", "common_words"]}, {"lengths": [20]}):
        with pytest.raises(OptionError, match=r"^lengths must be at least .* for the task '.*' with this tokenizer"):
            _suite(tokenizer, SearchOptions(**options), None, 10)
