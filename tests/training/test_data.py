"""Loading text, packing rows: properties that training relies on."""

from __future__ import annotations

import json
import logging
from itertools import chain
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_linattn.errors import DataError
from hf_linattn.training.data import (
    IGNORED_LABEL,
    is_held_out,
    load_text_splits,
    text_of,
    text_splits,
    tokenize_and_pack,
)
from hf_linattn.training.files import load_file

BLOCK_SIZE = 16
SPECIAL = ["<|endoftext|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = {token: index for index, token in enumerate([*SPECIAL, *map(str, range(90))])}
TINY = {"vocab_size": len(VOCABULARY), "bos_token_id": 0, "eos_token_id": 0}
TINY_MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=BLOCK_SIZE, **TINY)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, **TINY)
    ),
}  # fmt: skip


def make_tokenizer(**special_tokens: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, **special_tokens)


@pytest.fixture(scope="module")
def causal_tokenizer():
    return make_tokenizer(bos_token="<|endoftext|>", eos_token="<|endoftext|>")


@pytest.fixture(scope="module")
def masked_tokenizer():
    return make_tokenizer(cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", pad_token="[PAD]")


@pytest.fixture(scope="module")
def documents():
    """Documents of 1 to 42 tokens: shorter than a row, longer than one, longer than two."""
    lengths = [3, 11, 1, 42, 7, 16, 14, 5, 20, 2]
    return Dataset.from_dict({"text": [" ".join(str(7 * n % 90) for n in range(length)) for length in lengths]})


def ids_of(documents, tokenizer, first, last):
    return [[first, *tokenizer.convert_tokens_to_ids(text.split()), last] for text in documents["text"]]


def flat(lists):
    return list(chain.from_iterable(lists))


def test_no_token_is_lost_but_the_incomplete_last_row(documents, causal_tokenizer):
    rows = tokenize_and_pack(documents, causal_tokenizer, BLOCK_SIZE)
    expected = flat(ids_of(documents, causal_tokenizer, 0, 0))
    assert rows.column_names == ["input_ids", "position_ids", "labels"]
    assert rows["input_ids"][:].shape == (len(expected) // BLOCK_SIZE, BLOCK_SIZE)
    assert rows["input_ids"][:].flatten().tolist() == expected[: len(rows) * BLOCK_SIZE]
    assert len(expected) % BLOCK_SIZE, "the documents should leave a tail"


def test_positions_restart_at_documents_and_rows_and_first_labels_are_ignored(documents, causal_tokenizer):
    rows = tokenize_and_pack(documents, causal_tokenizer, BLOCK_SIZE)
    expected = []
    for document in ids_of(documents, causal_tokenizer, 0, 0):
        for token in range(len(document)):
            restart = token == 0 or len(expected) % BLOCK_SIZE == 0
            expected.append(0 if restart else expected[-1] + 1)
    positions, labels, ids = (rows[name][:] for name in ("position_ids", "labels", "input_ids"))
    assert positions.flatten().tolist() == expected[: positions.numel()]
    assert torch.equal(labels == IGNORED_LABEL, positions == 0)
    assert torch.equal(labels[positions > 0], ids[positions > 0])


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_packed_row_gives_the_logits_of_its_separate_documents(name, documents, causal_tokenizer):
    torch.manual_seed(0)
    model = TINY_MODELS[name]().eval()
    rows = tokenize_and_pack(documents, causal_tokenizer, BLOCK_SIZE)[:]
    with torch.no_grad():
        packed = model(input_ids=rows["input_ids"], position_ids=rows["position_ids"], use_cache=False).logits
        for row, positions, logits in zip(rows["input_ids"], rows["position_ids"], packed, strict=True):
            lengths = torch.diff(torch.nonzero(positions == 0).flatten(), append=torch.tensor([BLOCK_SIZE])).tolist()
            alone = [model(segment[None], use_cache=False).logits[0] for segment in row.split(lengths)]
            torch.testing.assert_close(logits, torch.cat(alone), atol=1e-5, rtol=1e-4)


def test_bert_tokenizers_mark_documents_with_cls_and_sep(documents, masked_tokenizer):
    rows = tokenize_and_pack(documents, masked_tokenizer, BLOCK_SIZE)
    expected = flat(ids_of(documents, masked_tokenizer, VOCABULARY["[CLS]"], VOCABULARY["[SEP]"]))
    assert rows["input_ids"][:].flatten().tolist() == expected[: len(rows) * BLOCK_SIZE]


def test_marks_can_be_left_out_and_tokens_limited(documents, causal_tokenizer):
    rows = tokenize_and_pack(documents, causal_tokenizer, BLOCK_SIZE, max_tokens=3 * BLOCK_SIZE + 5, add_bos_eos=False)
    assert len(rows) == 3
    assert not (rows["input_ids"][:] == 0).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size=1"),
        ({"block_size": 16, "max_tokens": 15}, "max_tokens=15"),
        ({"block_size": 4096}, "block_size=4096"),
    ],
)
def test_packing_that_leaves_no_row_is_an_error(documents, causal_tokenizer, options, message):
    with pytest.raises(DataError, match=message):
        tokenize_and_pack(documents, causal_tokenizer, **options)


def test_what_a_limit_leaves_of_a_sorted_text_is_from_all_over_it(causal_tokenizer):
    texts = Dataset.from_dict({"text": ["1 2 3 4 5 6"] * 200 + ["7 8 9 10 11 12"] * 200})
    first, mixed, whole = (
        tokenize_and_pack(texts, causal_tokenizer, BLOCK_SIZE, limit, mixed=mixed)
        for limit, mixed in ((1280, False), (1280, True), (10_000, True))
    )
    later = [torch.stack([*rows["input_ids"]]) > VOCABULARY["6"] for rows in (first, mixed, whole)]
    assert not later[0].any() and 0.3 < later[1].sum() / 1280 < 0.5
    assert torch.equal(whole["input_ids"][:], tokenize_and_pack(texts, causal_tokenizer, BLOCK_SIZE)["input_ids"][:])


WRITERS = {
    ".txt": lambda texts: "\n\n".join(texts),
    ".jsonl": lambda texts: "\n".join(json.dumps({"text": text}) for text in texts),
    ".json": lambda texts: json.dumps([{"text": text} for text in texts]),
    ".csv": lambda texts: "\n".join(["text", *(f'"{text}"' for text in texts)]),
}


@pytest.mark.parametrize("extension", WRITERS)
def test_local_files(tmp_path, extension):
    texts = ["one line\nand another", "a second document"]
    path = tmp_path / f"data{extension}"
    path.write_text(WRITERS[extension](texts))
    splits = load_text_splits(train_file=path, validation_file=path, test_file=path)
    expected = ["\n\n".join(texts)] if extension == ".txt" else texts
    assert {split: list(dataset["text"]) for split, dataset in splits.items()} == dict.fromkeys(
        ["train", "validation", "test"], expected
    )


@pytest.mark.parametrize("name", ["data[1].jsonl", "data*.txt", "../sweep [rate=0.1]/data?.csv"])
def test_a_name_is_one_file_and_no_pattern(tmp_path, monkeypatch, name):
    (tmp_path / "sweep [rate=0.1]").mkdir()
    monkeypatch.chdir(tmp_path / "sweep [rate=0.1]")
    write = WRITERS[Path(name).suffix]
    Path(f"data1{Path(name).suffix}").write_text(write(["another file"]))
    Path(name).write_text(write(["this file"]))
    assert load_file("train_file", Path(name))["text"][:] == ["this file"]


def test_parquet_and_another_column(tmp_path):
    path = tmp_path / "data.parquet"
    Dataset.from_dict({"body": ["kept", "", None, "  "], "text": ["not"] * 4}).to_parquet(path)
    splits = load_text_splits(train_file=path, validation_file=path, test_file=path, text_column="body")
    assert list(splits["train"]["text"]) == ["kept"]


@pytest.mark.parametrize("kind", ["torch", "numpy", "pandas", "arrow"])
def test_a_format_that_was_set_changes_no_text_and_no_label(kind):
    rows = Dataset.from_dict({"text": ["one", " ", "two", "three"], "label": [0, 1, 2, 1]})
    plain, formatted = (text_of("it", data, "text", "label") for data in (rows, rows.with_format(kind)))
    assert formatted["text"][:] == plain["text"][:] == ["one", "two", "three"]
    assert formatted["label"][:] == plain["label"][:] == [0, 2, 1]


def test_missing_held_out_splits_are_cut_from_training_without_overlap(tmp_path):
    path = tmp_path / "data.jsonl"
    texts = [f"document {index}" for index in range(100)]
    path.write_text(WRITERS[".jsonl"](texts))
    cut, whole = load_text_splits(train_file=path), load_text_splits(train_file=path, test_file=path)
    assert is_held_out(cut) and not is_held_out(whole)
    splits = {split: list(dataset["text"]) for split, dataset in cut.items()}
    assert sorted(flat(splits.values())) == sorted(texts)
    assert len(splits["validation"]) == len(splits["test"]) == 5


def test_held_out_splits_are_cut_off_the_end_of_a_single_text(tmp_path):
    book = "".join(f"line {index} of a book\n" for index in range(1000))
    (tmp_path / "book.txt").write_text(book)
    splits = load_text_splits(train_file=tmp_path / "book.txt")
    assert is_held_out(splits)
    found = {split: list(dataset["text"]) for split, dataset in splits.items()}
    assert all(len(texts) == 1 for texts in found.values())
    train, validation, test = (found[split][0] for split in ("train", "validation", "test"))
    assert train + test + validation == book and test.startswith("line ")
    assert 0.05 <= len(validation) / len(book) < 0.052 and len(test) > 0.047 * len(book)


def test_a_split_that_cannot_be_cut_off_is_asked_for_as_it_is_given():
    rows = Dataset.from_dict({"text": ["one line"] * 2})
    remedy = "2 training document.* give validation_file, from Python eval_dataset, or more of these"
    with pytest.raises(DataError, match=f"no validation split, and {remedy}"):
        text_splits({"train": rows})


def test_nothing_given_means_the_bundled_corpus():
    splits = load_text_splits()
    assert list(splits) == ["train", "validation", "test"] and not is_held_out(splits)
    assert any(text.startswith("Help on module json") for text in splits["train"]["text"])


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("absent.txt", None, {}, "absent.txt.*does not exist"),
        ("empty.txt", "", {}, "empty.txt.*is empty"),
        ("blank.txt", " \n \n", {}, "holds no text"),
        ("data.xlsx", "text", {}, "unknown extension '.xlsx'"),
        ("data.jsonl", '{"body": "a"}', {}, "text_column='text' is not a column"),
        ("data.jsonl", '{"class": 1, "document": "a"}', {"label_column": "label"},
         "text_column='text' and label_column='label' are no columns of the train split; give --text_column NAME"
         " --label_column NAME. Known: class, document"),
        ("data.csv", "text;label\na;b\n", {}, "columns are separated by semicolons; save .* commas .* text;label"),
        ("data.csv", "text;label\na, b;c\n", {}, "text;label; its columns are separated by semicolons; save"),
        ("data.csv", "text\tlabel\na, b\tc\n", {}, "its columns are separated by tabs; save"),
        ("data.csv", "text,label\na, b,c\nd, e,f\n", {},
         "more fields than its header, text, label; put quotation marks around texts with commas"),
        ("data.csv", "text,label\n", {}, "train_file='.*' has no rows"),
        ("data.csv", "text,label\na,\nb,\n", {"label_column": "label"},
         "label_column='label' of the train split has no value in any row; name a column of"),
        ("data.json", '{"v": 1, "data": [{"text": "a"}, {"text": "b"}]}', {}, "rows stand inside 'data'; put .* top"),
        ("data.jsonl", '{"text": 1}', {}, "text_column='text' of the train split holds int64"),
        ("data.jsonl", '{"text": "a"}\n{"text": ', {}, "data.jsonl.* is not valid json"),
        ("data.jsonl", '{"text": "a"}', {}, "give validation_file"),
        ("data.jsonl", '{"text": "a"}', {"dataset_name": "wikitext"}, "give one of them"),
    ],
)
def test_bad_files_raise_data_errors(tmp_path, name, content, options, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_text_splits(train_file=path, **options)


@pytest.mark.parametrize("name", ["data.csv", "data.jsonl", "data.txt"])
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_files_are_read_as_utf8_alone(tmp_path, name, encoding):
    path = tmp_path / name
    path.write_bytes('{"text": "café"}\n'.encode(encoding))
    with pytest.raises(DataError, match=rf"train_file='.*{name}' is not UTF-8 \(.*\); save it as UTF-8"):
        load_file("train_file", path)


def test_words_of_a_table_that_others_take_for_missing_values_are_words(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("text,label\nnull,None\nnan,NA\n,a\n")
    found = load_file("train_file", path)
    assert found["text"][:] == ["null", "nan", None] and found["label"][:] == ["None", "NA", "a"]


def test_a_broken_file_is_reported_once(tmp_path):
    records, logger = [], logging.getLogger("datasets")
    handler = logging.Handler()
    handler.emit = records.append
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n{"text": ')
    level = logger.level
    logger.addHandler(handler)
    try:
        with pytest.raises(DataError, match="is not valid json"):
            load_file("train_file", tmp_path / "data.jsonl")
    finally:
        logger.removeHandler(handler)
    assert not records and logger.level == level


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_column": "text"}, "text_column and label_column are both 'text'; name another column in one"),
        ({"pair_column": "text"}, "text_column and text_pair_column are both 'text'"),
        ({"label_column": "name", "pair_column": "name"}, "text_pair_column and label_column are both 'name'"),
    ],
)
def test_a_column_in_two_roles_is_refused(options, message):
    rows = Dataset.from_dict({"text": ["one", "two"] * 6, "name": ["a", "b"] * 6})
    with pytest.raises(DataError, match=message):
        text_splits({"train": rows}, **options)
    swapped = text_splits({"train": rows}, "name", "text")["test"]
    assert set(swapped["text"]) <= {"a", "b"} and set(swapped["label"]) <= {"one", "two"}


def test_a_held_out_file_alone_cannot_train(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("some text")
    with pytest.raises(DataError, match=r"no training split: .*; give train_file, from Python train_dataset, or"):
        load_text_splits(test_file=path)


def test_rows_without_a_text_are_counted(caplog):
    rows = Dataset.from_dict({"text": ["a b", "", None, " "]})
    assert text_of("the train split", rows, "text")["text"][:] == ["a b"]
    assert "the train split: 3 of 4 rows have no text and are left out" in caplog.text
