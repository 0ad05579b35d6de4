"""The scores of recall against forwards of whole texts, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_linattn import DataError, OptionError, UnknownNameError, UnsupportedModelError, patch_model
from hf_linattn.evaluation import suite
from hf_linattn.evaluation.recall import (
    RecallPrompt,
    answer_prompts,
    make_prompts,
    own_answers,
    recall,
    share_found,
    wilson_interval,
)
from hf_linattn.evaluation.suite import SuiteOptions
from hf_linattn.plan_search.suite_prompts import in_own_words
from tests.evaluation.recall_reader import bundled_tokenizer, byte_tokenizer
from tests.helpers import make_tokenizer
from tests.models import make_model

LENGTH = 300
EMPTY = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({}, [])))  # it knows no letter
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def prompts() -> list[RecallPrompt]:
    """Of unlike lengths."""
    return [
        prompt
        for length in (LENGTH, LENGTH - 77, LENGTH - 130)
        for prompt in make_prompts("single_text", bundled_tokenizer(), length, count=2)
    ]


@pytest.fixture(
    scope="module", params=["positions", "linear", "local", pytest.param("softmax", marks=pytest.mark.exhaustive)]
)
def model(request) -> PreTrainedModel:
    """Of mechanisms with a cache, with a state and with both; `positions` has a table of learned ones."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(bundled_tokenizer()), "eos_token_id": None, "bos_token_id": None}
    if request.param == "positions":
        config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=512, initializer_range=0.3, **sizes)
        return GPT2LMHeadModel(config).eval()
    made = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=512, initializer_range=0.3, **sizes,
        )
    ).eval()  # fmt: skip
    options = {"window_size": 16, "block_size": 16} if request.param == "local" else {}
    return made if request.param == "softmax" else patch_model(made, request.param, **options)


@torch.no_grad()
def log_likelihood(model: PreTrainedModel, prompt: list[int], continuation: list[int]) -> float:
    """In a forward of the whole text alone, in float64."""
    logits = model(input_ids=torch.tensor([prompt + continuation]), use_cache=False).logits[0].double()
    table = logits.log_softmax(-1)
    return sum(float(table[len(prompt) + i - 1, token]) for i, token in enumerate(continuation))


def test_likelihoods_and_ranks_are_those_of_whole_texts(model, prompts):
    answers = answer_prompts(model, bundled_tokenizer(), prompts, progress=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        right, *wrong = (log_likelihood(model, prompt.prompt_ids, x) for x in (prompt.answer_ids, *prompt.wrong_ids))
        assert answer["log_likelihood"] == pytest.approx(right, abs=2e-3)
        assert answer["rank"] == 1 + sum(other >= right for other in wrong)
        assert answer["candidates"] == 8


def test_positions_begin_where_the_model_has_them_begin():
    """RoBERTa's at padding_idx + 1: what it reads without positions, it counts from there itself."""
    model = make_model("roberta", "ForCausalLM", is_decoder=True, std=0.4, max_position_embeddings=66)
    ids, answer = list(range(5, 25)), [30, 31, 32]
    prompt = RecallPrompt("single_noise", 30, 0.5, 0, 3, ids, ("w30",), answer, ([40, 41, 42],))
    (found,) = answer_prompts(model, make_tokenizer(), [prompt])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids + answer]), use_cache=False).logits[0].double().log_softmax(-1)
    want = sum(float(logits[len(ids) - 1 + i, token]) for i, token in enumerate(answer))
    assert found["log_likelihood"] == pytest.approx(want, abs=1e-4)


def test_a_pad_token_that_the_model_has_no_embedding_for_is_not_read(model, prompts, monkeypatch):
    ends = [*range(0, model.config.vocab_size, 4)]  # so that answers end at several places, and are filled up
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    tokenizer, padded = copy.deepcopy(bundled_tokenizer()), copy.deepcopy(bundled_tokenizer())
    padded.add_special_tokens({"pad_token": "[OTHER PAD]"})
    assert padded.pad_token_id >= model.config.vocab_size
    tokenizer.pad_token = None
    wanted = answer_prompts(model, tokenizer, prompts[::2], progress=False)
    assert answer_prompts(model, padded, prompts[::2], progress=False) == wanted


@torch.no_grad()
def test_what_is_written_is_the_greedy_continuation(model, prompts):
    tokenizer, some = bundled_tokenizer(), prompts[::2]
    for prompt, answer in zip(some, answer_prompts(model, tokenizer, some, progress=False), strict=True):
        ids = list(prompt.prompt_ids)
        for _ in range(len(prompt.answer_ids) * 3 // 2 + 16):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert answer["written"] == tokenizer.decode(ids[len(prompt.prompt_ids) :], skip_special_tokens=True)


@pytest.mark.parametrize("said", [("use_cache", False), ("cache_implementation", "static")])
def test_what_a_checkpoint_says_of_caches_changes_nothing(model, prompts, said, monkeypatch):
    wanted = answer_prompts(model, bundled_tokenizer(), prompts[-1:], progress=False)
    monkeypatch.setattr(model.generation_config, *said)
    assert answer_prompts(model, bundled_tokenizer(), prompts[-1:], progress=False) == wanted


def test_own_answers_are_the_shortest_continuations_that_hold_the_answer(model, prompts):
    written = [answer["written"] for answer in answer_prompts(model, bundled_tokenizer(), prompts, progress=False)]
    asked = [
        replace(prompt, answers=(text[len(text) // 3 :][:2], text[:1]) if text.isascii() else ("no such answer",))
        for prompt, text in zip(prompts, written, strict=True)
    ]
    own = own_answers(model, bundled_tokenizer(), asked, batch_size=3, progress=False)
    for prompt, text, answer in zip(asked, written, own, strict=True):
        found = [share_found(prompt, text[:end]) == 1 for end in range(len(text) + 1)]
        assert (answer is None) == (not any(found))
        if answer is not None:
            ids, score = answer
            assert score == pytest.approx(log_likelihood(model, prompt.prompt_ids, ids), abs=2e-3)
            said, before = (bundled_tokenizer().decode(part) for part in (ids, ids[:-1]))
            assert text.startswith(said) and share_found(prompt, said) == 1 > share_found(prompt, before)
    known = in_own_words(model, bundled_tokenizer(), asked, False)
    found = [answer.ids for answer in own if answer and answer.log_likelihood >= -math.log(2) * len(answer.ids)]
    assert [prompt.answer_ids for prompt in known] == found


def test_batches_of_1_and_16_give_the_same(model, prompts):
    one, many = (
        answer_prompts(model, bundled_tokenizer(), prompts, batch_size=size, progress=False) for size in (1, 16)
    )
    for a, b in zip(one, many, strict=True):
        assert a["log_likelihood"] == pytest.approx(b.pop("log_likelihood"), abs=2e-3)
        assert {name: value for name, value in a.items() if name != "log_likelihood"} == b


def test_prompts_may_end_where_the_position_table_does():
    torch.manual_seed(0)
    tokenizer, tasks = bundled_tokenizer(), ("single_uuid", "single_noise")
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": None, "bos_token_id": None, "initializer_range": 0.3}
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=LENGTH, **sizes)).eval()

    plain, fitting = (
        [p for task in tasks for p in make_prompts(task, tokenizer, LENGTH, count=2, positions=positions)]
        for positions in (None, LENGTH)
    )
    with pytest.raises(OptionError, match="make it with length and positions of at most 300"):
        answer_prompts(model, tokenizer, plain)
    assert own_answers(model, tokenizer, plain, progress=False) == [None] * 4
    one, many = (answer_prompts(model, tokenizer, fitting, batch_size=size, progress=False) for size in (1, 4))
    for prompt, a, b in zip(fitting, one, many, strict=True):
        right = log_likelihood(model, prompt.prompt_ids, prompt.answer_ids)
        assert a["written"] == b["written"] and b["log_likelihood"] == pytest.approx(right, abs=2e-3)
    options = SuiteOptions(recall_tasks=tasks[:1], lengths=(LENGTH,), num_samples=2, progress=False)
    assert suite.recall(model, tokenizer, options)[0].prompt_tokens == tuple(len(p.prompt_ids) for p in fitting[:2])
    assert len(recall(model, tokenizer, tasks[:1], [LENGTH], num_samples=2, progress=False)) == 3
    with pytest.raises(OptionError, match=r"^lengths must be at most 300, the model's positions, got 301"):
        recall(model, tokenizer, tasks, [LENGTH + 1])


def test_a_prompt_makes_no_logits_but_those_of_continuations(model, prompts):
    widths: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: widths.append(inputs[0].shape[1]))
    try:
        answer_prompts(model, bundled_tokenizer(), prompts[:2], progress=False)
    finally:
        hook.remove()
    assert max(widths) <= max(len(ids) for prompt in prompts[:2] for ids in (prompt.answer_ids, *prompt.wrong_ids))


def test_rows_count_what_a_loop_counts(model):
    tokenizer = bundled_tokenizer()
    rows = recall(model, tokenizer, ["multiple_choice", "single_noise"], [400], num_samples=4, progress=False)
    assert json.loads(json.dumps(rows)) == [
        {name: list(value) if isinstance(value, tuple) else value for name, value in row.items()} for row in rows
    ]
    choices = make_prompts("multiple_choice", tokenizer, 400, count=4)
    answers = answer_prompts(model, tokenizer, choices, progress=False)
    whole, *bins = (row for row in rows if row["task"] == "multiple_choice")
    assert whole["num_samples"] == 16 and whole["chance"] == 0.25 and whole["depth"] is None
    assert [row["depth"] for row in bins] == [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)]
    for row, some in zip([whole, *bins], [answers, *(answers[i : i + 4] for i in range(0, 16, 4))], strict=True):
        assert row["first"] == np.mean([answer["rank"] == 1 for answer in some])
        assert row["mean_rank"] == np.mean([answer["rank"] for answer in some])
        assert row["log_likelihood"] == pytest.approx(np.mean([answer["log_likelihood"] for answer in some]), abs=2e-3)
        assert row["letters"] == {letter: sum(answer["letter"] == letter for answer in some) for letter in "ABCD"}
        assert row["first_interval"] == wilson_interval(row["first"], len(some) // 4)  # questions
    assert all(row["letters"] is None for row in rows if row["task"] == "single_noise")


@pytest.mark.parametrize(("share", "count"), [(0.0, 20), (0.3, 10), (0.98, 100), (1.0, 7)])
def test_the_interval_solves_the_equation_of_wilson(share, count):
    z = 1.959963984540054  # (share - p)^2 = z^2 p (1 - p) / count
    roots = np.roots([1 + z**2 / count, -2 * share - z**2 / count, share**2])
    assert wilson_interval(share, count) == pytest.approx(sorted(roots.real), abs=1e-7)


def test_found_is_the_share_of_answers_that_are_contained():
    (values,) = make_prompts("multi_value", bundled_tokenizer(), LENGTH, count=1)
    assert share_found(values, f"they are {values.answers[2]}.") == 0.25
    (variables,) = make_prompts("variable_tracking", bundled_tokenizer(), 700, count=1)
    assert share_found(variables, " ".join(variables.answers).lower()) == 1
    (choice, *_) = make_prompts("multiple_choice", bundled_tokenizer(), LENGTH, count=1)
    letter = choice.answers[0]
    written = {f" {letter}. 12": 1, letter: 1, f"Not {letter}": 0, f"{letter}x": 0, "": 0}
    assert {text: share_found(choice, text) for text in written} == written


def test_a_chat_has_the_question_in_the_turn_of_the_user_and_the_start_of_the_answer_in_the_other():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    (chat,) = make_prompts("single_noise", tokenizer, 1500, count=1, chat=True)
    (plain,) = make_prompts("single_noise", tokenizer, 1500, count=1)
    user, _, assistant = tokenizer.decode(chat.prompt_ids).partition("<|end|><|assistant|>")
    assert user.startswith("<|user|>A special magic number") and user.endswith("mentioned in the provided text?")
    assert assistant.startswith("The special magic number for") and assistant.endswith("in the provided text is")
    assert tokenizer.decode(plain.prompt_ids).endswith(f"text? {assistant}")
    assert chat.answers == plain.answers and 1440 < len(chat.prompt_ids) + len(chat.answer_ids) <= 1500


def test_prompts_have_the_tokens_that_the_tokenizer_puts_before_a_text():
    tokenizer = bundled_tokenizer()
    (prompt,) = make_prompts("copying", tokenizer, 200, count=1)
    whole = tokenizer(tokenizer.decode(prompt.prompt_ids + prompt.answer_ids, skip_special_tokens=True))["input_ids"]
    assert prompt.prompt_ids + prompt.answer_ids == whole[: len(prompt.prompt_ids) + len(prompt.answer_ids)]


def test_the_haystack_is_the_text_that_was_given():
    texts = ["Sea and sand. " * 20, "Rock and rain! " * 20]
    (prompt,) = make_prompts("single_uuid", bundled_tokenizer(), 600, count=1, haystack=texts)
    text = bundled_tokenizer().decode(prompt.prompt_ids)
    assert "Sea and sand. Sea" in text and "rain! Rock" in text and "Alice" not in text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"task": "single_nois"}, UnknownNameError, "unknown recall task 'single_nois'; did you mean single_noise"),
        ({"count": 0}, OptionError, "count must be an integer >= 1, got 0"),
        ({"length": 60}, OptionError, r"length must be at least \d+ for the task 'single_noise' .*, got 60"),
        ({"chat": True}, DataError, "chat=True: the tokenizer has no chat_template"),
        ({"haystack": "one text"}, DataError, r"haystack must be a sequence of texts, got one string; pass \[text\]"),
        ({"haystack": ["few words"]}, DataError, "haystack has 2 words of at least 50"),
        ({"haystack": 3}, DataError, "haystack must be a sequence of texts, got 3; pass strings in a list"),
        ({"haystack": ["text", None]}, DataError, "haystack must be a sequence of texts, got None; pass strings"),
        ({"tokenizer": "gpt2"}, OptionError, "tokenizer must be a tokenizer, such as .*, got 'gpt2'"),
        ({"tokenizer": EMPTY}, DataError, "the tokenizer writes a text in 0 tokens however long it is"),
        ({"tokenizer": make_tokenizer()}, DataError, "the tokenizer writes '[0-9]+' as '.*UNK.*'; take one"),
    ],
)
def test_prompts_that_cannot_be_made_are_refused(options, error, message):
    given = {"task": "single_noise", "tokenizer": bundled_tokenizer(), "length": LENGTH, "count": 1, **options}
    with pytest.raises(error, match=message):
        make_prompts(given.pop("task"), given.pop("tokenizer"), given.pop("length"), **given)


def test_log_likelihoods_that_are_not_finite_are_refused(prompts):
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=LENGTH, vocab_size=len(bundled_tokenizer()))
    model = GPT2LMHeadModel(config).train()
    model.transformer.ln_f.weight.data.fill_(math.nan)
    with pytest.raises(OptionError, match=r"^log_likelihood must be finite, .*, got \[nan\]$") as refused:
        answer_prompts(model, bundled_tokenizer(), prompts[-2:], progress=False)
    assert torch.is_grad_enabled() and model.training, refused.value  # which keeps all frames


def test_what_cannot_be_measured_is_refused(prompts):
    tokenizer, causal = bundled_tokenizer(), make_model("gpt2")
    with pytest.raises(UnsupportedModelError, match="BertForMaskedLM has no causal language-modelling head"):
        answer_prompts(make_model("bert"), tokenizer, prompts)
    with pytest.raises(OptionError, match=r"length=300: a prompt of 'single_text' has \d+ tokens .* the model 64 pos"):
        answer_prompts(causal, tokenizer, prompts)
    with pytest.raises(DataError, match="prompts is empty"):
        answer_prompts(causal, tokenizer, [])
    with pytest.raises(DataError, match="prompts have unlike numbers of wrong answers"):
        answer_prompts(causal, tokenizer, [*prompts, *make_prompts("multiple_choice", tokenizer, LENGTH, count=1)])
    with pytest.raises(OptionError, match="batch_size must be an integer >= 1, got 0"):
        answer_prompts(causal, tokenizer, prompts, batch_size=0)
    for name, value in {"tasks": [], "lengths": []}.items():
        with pytest.raises(OptionError, match=f"{name} must be a list"):
            recall(causal, tokenizer, **{name: value})
    with pytest.raises(OptionError, match="tasks must be a list of names"):
        recall(causal, tokenizer, "single_noise")
