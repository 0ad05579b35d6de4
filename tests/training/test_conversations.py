"""Conversations: what the chat template writes of them, and that the answers alone are learnt."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict

from hf_linattn.errors import DataError, OptionError
from hf_linattn.training.arguments import DataArguments
from hf_linattn.training.conversations import conversation, render_conversations
from hf_linattn.training.data import load_text_splits, tokenize_and_pack
from hf_linattn.training.task import CAUSAL, CLASSIFICATION, MASKED, TextEncoder
from tests.evaluation.recall_reader import byte_tokenizer
from tests.models import make_model

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TURNS = [
    {"role": "user", "content": "what is one"}, {"role": "assistant", "content": "a number"},
    {"role": "user", "content": "and é"}, {"role": "assistant", "content": "a lètter"},
]  # fmt: skip


@pytest.fixture
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


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
        (TURNS, "{{ messages[-1]['content'] }}", "writes earlier turns otherwise once there are later ones"),
        (TURNS, "{{ raise_exception('no roles') }}", "the chat template refuses a conversation .no roles."),
    ],
)
def test_conversations_whose_answers_cannot_be_told_are_refused(tokenizer, turns, template, message):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        conversation(turns, tokenizer)


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
