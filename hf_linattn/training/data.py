"""From text to rows of tokens: loading splits, packing documents without attending across borders.

A packed row holds several documents one after another. What keeps them apart is `position_ids`, which restart at 0
with every document: causal transformers models then build a block-diagonal mask, provided they receive neither an
`attention_mask` nor a cache (train with `model.config.use_cache = False`), and a patched model resets its state.
Bidirectional transformers models ignore the restarts unless they are patched.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, Value, load_dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, default_data_collator

from hf_linattn.errors import DataError
from hf_linattn.evaluation.perplexity import IGNORED_LABEL, tokens_inside
from hf_linattn.reading import reading
from hf_linattn.training.columns import CLASSES, NUMBERS, check_columns
from hf_linattn.training.conversations import ANSWERS
from hf_linattn.training.corpus import standard_library_corpus
from hf_linattn.training.files import load_file

# by the option that names the file of a split: the argument that gives it in Python
IN_MEMORY = {"train_file": "train_dataset", "validation_file": "eval_dataset", "test_file": "test_dataset"}
HELD_OUT_SHARE = 0.05
TOKENIZED_AT_ONCE = 64
ONE_TYPE = {"large_string": "string", "bool": "int64", "int32": "int64", "float32": "float64"}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """Rows, and how they become batches; `evaluation_collator` gives the same batch every time.

    class_weights: multiply the loss of each class; None: all count alike.
    """

    train: Dataset
    validation: Dataset
    collator: Callable[..., Any] = default_data_collator
    evaluation_collator: Callable[..., Any] = default_data_collator
    class_weights: tuple[float, ...] | None = None

    @property
    def row_tokens(self) -> float:
        """The mean tokens of a row, from the first ones: packed rows are all of one length."""
        lengths = [len(row) for row in self.train[:64]["input_ids"]]
        return sum(lengths) / len(lengths)


def load_text_splits(
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    train_file: str | Path | None = None,
    validation_file: str | Path | None = None,
    test_file: str | Path | None = None,
    text_column: str = "text",
    label_column: str | None = None,
    conversations: bool = False,
) -> DatasetDict:
    """Return `DatasetDict(train, validation, test)` whose column `text` holds one document per row.

    With a `label_column` there is a second column, `label`, the document's class.

    With `conversations` a document is a list of turns, mappings with `role` and `content`.

    The text comes from a dataset of the Hub, or from local files (`.txt` and `.md`: the whole file is one
    document, since a language model gains from every word of context; `.json`, `.jsonl`, `.csv`, `.parquet`:
    one document per row), or, when nothing is given, from `standard_library_corpus`.

    A held-out split that the source lacks is cut from the training split: 5 % of its documents, drawn alike each time,
    so no document is ever in two splits. Of fewer than 3 documents the end of the longest is cut off, as of a book.

    Raises:
        DataError: a file is missing, empty, damaged or of an unknown kind, no split trains, `text_column` does not
            exist or holds no strings, `label_column` does not exist or holds neither integers nor strings, or a
            split holds no text.

    >>> splits = load_text_splits()
    >>> splits["validation"].column_names
    ['text']
    """
    splits = read_splits(dataset_name, dataset_config_name, train_file, validation_file, test_file)
    return text_splits(splits, text_column, label_column, conversations)


def read_splits(
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    train_file: str | Path | None = None,
    validation_file: str | Path | None = None,
    test_file: str | Path | None = None,
) -> DatasetDict:
    """Return the splits that a source has, with all their columns; see `load_text_splits`."""
    given = {"train": train_file, "validation": validation_file, "test": test_file}
    files = {split: Path(path) for split, path in given.items() if path is not None}
    if dataset_name and files:
        raise DataError(f"dataset_name={dataset_name!r} and {sorted(files)} files were both given; give one of them")
    if dataset_name:
        remedy = "give the name of a data set on the Hub and a connection to it, or text of your own with train_file"
        with reading("dataset_name", dataset_name, remedy, DataError):
            return load_dataset(dataset_name, dataset_config_name)
    if files:
        return DatasetDict({split: load_file(f"{split}_file", path, split) for split, path in files.items()})
    return standard_library_corpus()


def text_splits(
    splits: Mapping[str, Dataset],
    text_column: str = "text",
    label_column: str | None = None,
    conversations: bool = False,
    pair_column: str | None = None,
    label_kinds: Sequence[str] = CLASSES,
) -> DatasetDict:
    """Return training, validation and test split of a data set in memory, as `load_text_splits` does.

    With a `pair_column` there is a column `text_pair`, a second text. `label_kinds`: what labels may be.
    """
    if "train" not in splits:
        raise DataError(f"no training split: got {sorted(splits)}; {_give('train')}, or a data set with a train split")
    kept = {split: splits[split] for split in ("train", "validation", "test") if split in splits}
    columns = text_column, label_column, pair_column, conversations, label_kinds
    texts = {split: text_of(f"the {split} split", dataset, *columns) for split, dataset in kept.items()}
    for missing in [split for split in ("validation", "test") if split not in texts]:
        texts["train"], texts[missing] = _hold_out(texts["train"], missing)
    return DatasetDict(texts)


def is_held_out(splits: Mapping[str, Dataset]) -> bool:
    """Return whether the test split of `load_text_splits` was cut from the training split of its source."""
    return splits["test"].split == splits["train"].split  # the source's names, which parts of a split keep


def tokenize_and_pack(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    max_tokens: int | None = None,
    add_bos_eos: bool = True,
    text_column: str = "text",
    mixed: bool = False,
) -> Dataset:
    """Return rows of exactly `block_size` tokens: `input_ids`, `position_ids` and `labels`, all int64 tensors.

    Documents follow each other without padding; a document that does not fit goes on in the next row as a segment of
    its own. `position_ids` restart at 0 at every segment. `labels` equal `input_ids` except for the first token
    of a segment, which is -100: it would otherwise be predicted from another document. The last, incomplete row is
    dropped. Where the dataset says where `answers` stand in its texts, labels are -100 outside them too, and rows
    without any are left out; texts then are as the chat template wrote them, and get no tokens more.

    There is no `attention_mask`: giving one would switch off transformers' detection of packed rows.

    Args:
        max_tokens: stop after this many tokens (rounded down to whole rows); None takes all.
        add_bos_eos: put the tokenizer's beginning-of-text token (`bos_token`, else `cls_token`) before each
            document and its end (`eos_token`, else `sep_token`) after it, where it has them.
        mixed: where `max_tokens` leaves text out, take documents from all over it, in a fixed order: it may be sorted.

    Raises:
        DataError: `block_size` or `max_tokens` leaves no row, or the text fills none.
    """
    if block_size < 2:
        raise DataError(f"block_size={block_size}: a row needs at least 2 tokens to predict one")
    if max_tokens is not None and max_tokens < block_size:
        raise DataError(f"max_tokens={max_tokens} is less than one row of block_size={block_size}; raise max_tokens")
    answered = ANSWERS in dataset.column_names
    options = tokenizer, text_column, add_bos_eos and not answered, max_tokens
    documents, learnt = _tokenize(dataset, *options)
    if mixed and (len(documents) < len(dataset) or sum(map(len, documents)) > (max_tokens or math.inf)):
        documents, learnt = _tokenize(dataset.shuffle(seed=0), *options)
    lengths = np.array([len(document) for document in documents])
    available = int(lengths.sum())
    total = min(available, max_tokens or available) // block_size * block_size
    if not total:
        raise DataError(f"the text has {available} tokens, less than one row of block_size={block_size}; give more")
    input_ids = np.concatenate(documents)[:total]
    index = np.arange(total)
    document_start = np.repeat(np.cumsum(lengths) - lengths, lengths)[:total]
    position_ids = index - np.maximum(document_start, index // block_size * block_size)
    labels = np.where((position_ids == 0) | ~np.concatenate(learnt)[:total], IGNORED_LABEL, input_ids)
    columns = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
    kept = (labels != IGNORED_LABEL).reshape(-1, block_size).any(1) | (not answered)
    if not kept.any():
        raise DataError(f"block_size={block_size}: no row holds a part of an answer; raise it or give other text")
    rows = {name: list(values.reshape(-1, block_size)[kept]) for name, values in columns.items()}
    return Dataset.from_dict(rows).with_format("torch")


def text_of(
    place: str,
    dataset: Dataset,
    text_column: str,
    label_column: str | None = None,
    pair_column: str | None = None,
    conversations: bool = False,
    label_kinds: Sequence[str] = CLASSES,
) -> Dataset:
    """Keep the columns of texts and labels alone, as `text`, `text_pair` and `label`, and the rows with text.

    A format that was set is left out: rows are texts and numbers. place: what the rows are called in messages, such as
    `the train split`.
    """
    given = {"text_column": text_column, "text_pair_column": pair_column, "label_column": label_column}
    named = {option: column for option, column in given.items() if column is not None}
    check_columns(place, dataset, named, conversations, label_kinds)
    columns = {option.removesuffix("_column"): column for option, column in named.items()}
    dataset = dataset.with_format(None).select_columns(list(columns.values()))
    dataset = dataset.rename_columns({column: name for name, column in columns.items() if column != name})
    given_rows, dataset = len(dataset), with_one_type(dataset, label_kinds)
    dataset = dataset.filter(lambda text: bool(text and (conversations or text.strip())), input_columns="text")
    if not len(dataset):
        raise DataError(f"{place} holds no text in column {text_column!r}")
    if dropped := given_rows - len(dataset):
        logger.warning("%s: %d of %d rows have no text and are left out", place, dropped, given_rows)
    return dataset


def with_one_type(dataset: Dataset, label_kinds: Sequence[str]) -> Dataset:
    """Return rows whose columns have the types that those of any other file have, so that they can be joined."""
    types = ONE_TYPE | ({"int64": "float64"} if label_kinds == NUMBERS else {})

    def of(feature: Any) -> Any:
        return Value(types.get(feature.dtype, feature.dtype)) if type(feature) is Value else feature

    features = Features({name: of(feature) for name, feature in dataset.features.items()})
    return dataset if features == dataset.features else dataset.cast(features)


def _hold_out(train: Dataset, split: str) -> tuple[Dataset, Dataset]:
    """Cut a held-out split from the training split."""
    if len(train) < 3:
        return _cut_off(train, split)
    parts = train.train_test_split(test_size=max(1, round(len(train) * HELD_OUT_SHARE)), seed=0)
    return parts["train"], parts["test"]


def _cut_off(train: Dataset, split: str) -> tuple[Dataset, Dataset]:
    """Cut a held-out split off the end of the longest document, between two lines; labels are of whole documents."""
    texts = list(train["text"])
    plain = train.column_names == ["text"] and all(isinstance(text, str) for text in texts)
    whole = max(texts, key=len) if plain else ""
    cut = whole.rfind("\n", 0, int(len(whole) * (1 - HELD_OUT_SHARE))) + 1
    if not cut:
        raise DataError(
            f"no {split} split, and {len(train)} training document(s) to cut it from; {_give(split)}, or more of these"
        )
    texts[texts.index(whole)] = whole[:cut]
    return Dataset.from_dict({"text": texts}), Dataset.from_dict({"text": [whole[cut:]]})


def _give(split: str) -> str:
    """Return the remedy for a split that is missing, of a recipe's command line and from Python."""
    return f"give {split}_file, from Python {IN_MEMORY[f'{split}_file']}"


def _tokenize(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, text_column: str, add_bos_eos: bool, max_tokens: int | None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Token ids of the documents in order, and which are learnt, stopping once there are `max_tokens`."""
    first = tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    last = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    head, tail = ([token] if add_bos_eos and token is not None else [] for token in (first, last))
    documents: list[np.ndarray] = []
    learnt: list[np.ndarray] = []
    answered, count = ANSWERS in dataset.column_names, 0
    with tqdm(total=len(dataset), desc="tokenizing", unit="document", leave=False) as progress:
        for batch in dataset.iter(TOKENIZED_AT_ONCE):
            found = tokenizer(
                batch[text_column], add_special_tokens=False, verbose=False, return_offsets_mapping=answered
            )
            encoded = found["input_ids"]
            documents.extend(np.array([*head, *ids, *tail], dtype=np.int64) for ids in encoded)
            if answered:
                places = zip(found["offset_mapping"], batch[ANSWERS], strict=True)
                learnt.extend(tokens_inside(*given).numpy() for given in places)
            else:
                learnt.extend(np.ones(len(document), dtype=bool) for document in documents[len(learnt) :])
            count += sum(map(len, documents[-len(encoded) :]))
            progress.update(len(encoded))
            if max_tokens is not None and count >= max_tokens:
                break
    return documents, learnt
