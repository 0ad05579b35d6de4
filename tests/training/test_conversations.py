"""Conversations: what the chat template writes of them, and that the answers alone are learnt."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict, Features, List, Sequence, Value
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from transformers.utils import chat_template_utils

from hf_linattn import patch_model
from hf_linattn.errors import DataError, OptionError
from hf_linattn.evaluation import perplexity
from hf_linattn.evaluation.recall.prompts import make_prompts
from hf_linattn.training.arguments import DataArguments, DistillationArguments, RecipeArguments
from hf_linattn.training.conversations import conversation, render_conversations
from hf_linattn.training.data import load_text_splits, tokenize_and_pack
from hf_linattn.training.preparation import check_windows
from hf_linattn.training.same_run import rows_digest
from hf_linattn.training.stages.positions import held_out
from hf_linattn.training.stages.report import compare_with_original, read_long_documents
from hf_linattn.training.task import CAUSAL, CLASSIFICATION, MASKED, TextEncoder
from tests.evaluation.recall_reader import byte_tokenizer
from tests.models import make_model

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
THINKING = TEMPLATE.replace("] {% endif", "] <think>{% endif")
TURNS = [
    {"role": "user", "content": "what is one"}, {"role": "assistant", "content": "a number"},
    {"role": "user", "content": "and é"}, {"role": "assistant", "content": "a lètter"},
]  # fmt: skip
CONTENTS = [turn["content"] for turn in TURNS]


@pytest.fixture
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def conversations(tokenizer):
    """A tokenizer that puts a token in front of a text, and two conversations as its template writes them."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<end> $A", special_tokens=[("<end>", 0)])
    rows = DatasetDict({"test": Dataset.from_dict({"text": [TURNS, TURNS[:2]]})})
    return tokenizer, render_conversations(rows, tokenizer)["test"]


def test_the_tokens_of_the_answers_and_of_their_ends_are_learnt_and_no_others(tokenizer):
    rows = DatasetDict({"train": Dataset.from_dict({"text": [TURNS, TURNS[:2]]})})
    written = render_conversations(rows, tokenizer)["train"]
    text = "[user] what is one|[assistant] a number|[user] and é|[assistant] a lètter|"
    assert written["text"][:] == [text, text[: text.index("|[user] and") + 1]]
    first = tokenize_and_pack(written, tokenizer, len(text.encode()))[0]
    learnt = [int(token) for token, label in zip(first["input_ids"], first["labels"], strict=True) if label != -100]
    assert tokenizer.decode(learnt) == "a number|a lètter|"
    assert tokenizer.decode(first["input_ids"]) == text, "no token is put around it"
    kept = first["labels"] != -100
    assert (first["labels"][kept] == first["input_ids"][kept]).all()


def test_turns_come_as_lists_of_their_parts_too_and_without_what_arrow_fills_in(tokenizer):
    tokenizer.chat_template = TEMPLATE.replace("|", "{% if 'tool_calls' in m %}CALLS{% endif %}|", 1)
    expected = conversation(TURNS, tokenizer)
    filled = [{**turn, "tool_calls": None} for turn in TURNS]
    part = {name: Value("string") for name in ("role", "content", "tool_calls")}
    for feature in (List(part), Sequence(part)):
        columns = {name: [turn[name] for turn in filled] for name in part}
        rows = [filled if isinstance(feature, List) else columns]
        splits = DatasetDict({"train": Dataset.from_dict({"text": rows}, features=Features({"text": feature}))})
        assert render_conversations(splits, tokenizer)["train"][0] == expected
    for wrong in ({"role": "user", "content": "one"}, ["user", "one"]):
        with pytest.raises(DataError, match=r"a conversation is .*; give a list of turns with `role` and `content`"):
            conversation(wrong, tokenizer)


def test_a_content_may_come_in_parts_that_are_texts(tokenizer):
    expected = conversation(TURNS, tokenizer)
    parts = [[{"type": "text", "text": text, "image": None} for text in (x[:3], x[3:])] for x in CONTENTS]
    columns = [{name: [part[name] for part in row] for name in row[0]} for row in parts]
    part = {name: Value("string") for name in ("type", "text", "image")}
    for feature, given in ((List(part), parts), (Sequence(part), columns)):
        rows = [[{"role": turn["role"], "content": x} for turn, x in zip(TURNS, given, strict=True)]]
        features = Features({"text": List({"role": Value("string"), "content": feature})})
        splits = DatasetDict({"train": Dataset.from_dict({"text": rows}, features=features)})
        assert render_conversations(splits, tokenizer)["train"][0] == expected
    for wrong in ([{"type": "image", "text": "a"}], [{"type": "text"}], ["a number"], 7, {"text": "a"}):
        turns = [TURNS[0], {"role": "assistant", "content": wrong}]
        with pytest.raises(DataError, match=r"a conversation has the content .*; give a text, or a list of parts"):
            conversation(turns, tokenizer)


@pytest.mark.parametrize("opening", ["", "\n", "  {% if true %}x{% endif %}\n"])
def test_a_template_that_writes_the_date_writes_the_same_one_every_day(tokenizer, monkeypatch, opening):
    dated = "{% macro day() %}{{ strftime_now('%A, %-d %y') }}{% endmacro %}{{ strftime_now('%d %b %Y') }} {{ day() }}"
    tokenizer.chat_template, found = f"{opening}{dated}\n{TEMPLATE}", set()
    splits = DatasetDict({"test": Dataset.from_dict({"text": [TURNS]})})
    for day in (1, 2):
        monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda day=day: date(2031, 5, day)))
        written = render_conversations(splits, tokenizer)["test"]
        recalled = make_prompts("copying", tokenizer, 400, count=1, chat=True)
        found.add((rows_digest(written), str(recalled)))
    assert len(found) == 1
    plain = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert written["text"][0] == plain.replace("02 May 2031 Friday, 2 31", "26 Jul 2024 Friday, 26 24") != plain


@torch.no_grad()
def test_the_answers_alone_are_scored(conversations):
    tokenizer, texts = conversations
    model = patch_model(make_model("llama", vocab_size=300), "linear")
    encoder, losses = TextEncoder(tokenizer, DataArguments(block_size=100, completion_only=True)), []
    for text in texts["text"]:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        each = cross_entropy(model(input_ids=ids[None]).logits[0, :-1].double(), ids[1:], reduction="none")
        for answer in ("a number|", "a lètter|")[: text.count("[assistant]")]:
            first = len(text[: text.index(answer)].encode()) - 1
            losses += each[first : first + len(answer.encode())].tolist()
    found = CAUSAL.score(model, encoder, texts, batch_size=2)
    assert found["num_tokens"] == len(losses) == 9 + 9 + 10
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    with pytest.raises(OptionError, match="answers: a masked model answers nothing"):
        perplexity(make_model("bert"), tokenizer, ["w"], max_length=8, answers=[[[0, 1]]])


def test_of_a_limit_conversations_are_read_whole_and_spaced_evenly(tokenizer):
    """The first tokens of each would hold no answer: a limit of 300 tokens, 20 conversations of some 40."""
    turns = [[TURNS[0], {"role": "assistant", "content": f"number {'x' * (i % 7)}"}] for i in range(20)]
    texts = render_conversations(DatasetDict({"test": Dataset.from_dict({"text": turns})}), tokenizer)["test"]
    model, options = make_model("llama", vocab_size=300), DataArguments(block_size=100, completion_only=True)
    limited = TextEncoder(tokenizer, replace(options, max_test_tokens=300))
    found = CAUSAL.score(model, limited, texts, batch_size=4)
    count = found.pop("num_documents")
    chosen = texts.select([(2 * i + 1) * 10 // count for i in range(count)])
    assert found == CAUSAL.score(model, TextEncoder(tokenizer, options), chosen, batch_size=4)
    read = CAUSAL.read_tokens(limited, texts)
    assert 300 - 45 < read == sum(len(text) for text in chosen["text"]) <= 300
    one = TextEncoder(tokenizer, replace(options, max_test_tokens=5))
    assert CAUSAL.score(model, one, texts, batch_size=4)["num_documents"] == 1
    with pytest.raises(DataError, match=r"none of the 1 conversations that were read .* max_test_tokens or max_test"):
        perplexity(model, tokenizer, ["no", "none"], max_length=8, answers=[[[0, 0]]] * 2, max_tokens=3)


def test_no_token_is_put_around_a_conversation_whatever_reads_it(conversations, tmp_path, monkeypatch):
    tokenizer, texts = conversations
    model, asked, call = patch_model(make_model("llama", vocab_size=300), "linear"), [], type(tokenizer).__call__
    recipe = RecipeArguments(fidelity_windows=2, long_windows=2, position_windows=2)
    options = DataArguments(block_size=16, completion_only=True)
    arguments = SimpleNamespace(data=options, recipe=recipe, distillation=DistillationArguments())
    context = SimpleNamespace(
        arguments=arguments, tokenizer=tokenizer, splits={"validation": texts, "test": texts}, long_length=20,
        load=lambda: model, directory=SimpleNamespace(path=tmp_path), long_data=None, windows=None,
    )  # fmt: skip

    def watch(self, *given, **how):
        asked.append(how["add_special_tokens"])
        return call(self, *given, **how)

    monkeypatch.setattr(type(tokenizer), "__call__", watch)
    encoder = TextEncoder(tokenizer, options)
    CAUSAL.score(model, encoder, texts, batch_size=2)
    assert CAUSAL.read_tokens(encoder, texts) > sum(len(text.encode()) for text in texts["text"]), "windows overlap"
    assert len(CAUSAL.samples(model, encoder, texts, 1)) == 1
    check_windows(context, None)
    windows, _ = held_out(context, 20)
    assert tokenizer.decode(windows[0]) == texts["text"][0][:20]
    compare_with_original(context, model)
    read_long_documents(context, model)
    assert asked == [False] * 10


def test_rows_without_an_answer_are_left_out(tokenizer):
    turns = [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "yes"}]
    written = render_conversations(DatasetDict({"train": Dataset.from_dict({"text": [turns]})}), tokenizer)["train"]
    rows = tokenize_and_pack(written, tokenizer, 28)
    assert len(rows) == 1 and "yes" in tokenizer.decode(rows[0]["input_ids"])
    with pytest.raises(DataError, match="block_size=28: no row holds a part of an answer"):
        tokenize_and_pack(written, tokenizer, 28, max_tokens=28)


@pytest.mark.parametrize(
    ("turns", "template", "message"),
    [
        (TURNS[:1], TEMPLATE, "a conversation with the roles user has no answer"),
        (TURNS[1:2], TEMPLATE, "a conversation with the roles assistant has no answer"),
        (TURNS[:2], THINKING, "asks for an answer with '.assistant. <think>', and writes one that does not"),
        (TURNS, "{{ messages[-1]['content'] }}", "writes earlier turns otherwise once there are later ones"),
        (TURNS, "{{ raise_exception('no roles') }}", "the chat template refuses a conversation .no roles."),
        (TURNS, "{{ 1 + messages[0]['role'] }}", "the chat template refuses a conversation .unsupported operand"),
        (TURNS, "{{ messages[0]['role'] | int('no') + 1 }}", "chat template refuses a conversation .can only concat"),
        (TURNS, {"tool_use": TEMPLATE}, "chat template refuses a conversation .This model has multiple"),
    ],
)
def test_conversations_whose_answers_cannot_be_told_are_refused(tokenizer, turns, template, message):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        conversation(turns, tokenizer)


def test_a_greeting_answers_nobody_and_an_answer_may_begin_as_it_is_asked_for(tokenizer):
    tokenizer.chat_template = THINKING
    thought = {"role": "assistant", "content": "<think>hm</think>a number"}
    written = conversation([TURNS[1], TURNS[0], thought], tokenizer)
    (place,) = written["answers"]
    assert written["text"].startswith("[assistant] a number|[user] what is one|")
    assert written["text"][slice(*place)] == "hm</think>a number|"


def test_the_option_asks_for_a_template_for_turns_and_for_a_causal_model(tokenizer, tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"messages": TURNS, "text": "plain"}) + "\n" for _ in range(6)))
    options = DataArguments(train_file=str(file), text_column="messages", completion_only=True)
    splits = CAUSAL.written(CAUSAL.load(options), TextEncoder(tokenizer, options))
    assert {name: len(split) for name, split in splits.items()} == {"train": 4, "validation": 1, "test": 1}
    assert splits["test"]["text"][0].endswith("a lètter|")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="completion_only=True: the tokenizer has no chat_template"):
        CAUSAL.written(splits, TextEncoder(tokenizer, options))
    with pytest.raises(DataError, match="text_column='text' of the train split holds string; name a column of conver"):
        load_text_splits(train_file=file, conversations=True)
    for task, name in ((MASKED, "bert"), (CLASSIFICATION, "bert")):
        with pytest.raises(OptionError, match="completion_only=True"):
            task.check(make_model(name), options, None)
