"""What makes two starts of a recipe the same run: its options, all but a few, and the content of model and data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn

from hf_linattn.training.arguments import DISTILLATION, FULL, FinetuningArguments

ROWS = 1000  # of a data set that are read at a time

# options that change no number in the result, but for its rounding; a run continues with others of these, and with
# other batches that make steps of as many rows
FREE = frozenset((
    # of the recipe; what a row says is compared option by option
    "overwrite_output_dir", "plan_steps", "dry_run", "position_windows", "text_samples", "speed_lengths",
    "chunk_feed_forward", "row", "board",
    # where results go, and whether they are continued
    "output_dir", "resume_from_checkpoint", "save_steps", "save_total_limit", "save_on_each_node",
    # what is said meanwhile
    "disable_tqdm", "logging_dir", "logging_first_step", "logging_steps", "logging_strategy", "log_level",
    "log_level_replica", "log_on_each_node", "report_to", "run_name", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "skip_memory_metrics", "include_num_input_tokens_seen",
    # how batches come to the processes, and the processes to each other
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "ddp_timeout", "local_rank", "torch_empty_cache_steps",
    # what is held in memory at a time: a run that it did not suffice for goes on with less
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "per_device_eval_batch_size", "eval_accumulation_steps",
    # said by learning_rates, which is compared
    "learning_rate",
    # not looked at by a recipe
    "do_train", "do_eval", "do_predict", "remove_unused_columns", "prediction_loss_only", "include_for_metrics",
    "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision",
    "restore_callback_states_from_checkpoint",
))  # fmt: skip

# recorded beside the options where the loss compares the rows of a batch: another batch is another loss
COMPARED = "compared_rows"

# how a step is divided into batches; a run continues with others of as many rows, unless these are compared
BATCHES = ("per_device_train_batch_size", "gradient_accumulation_steps", "train_batch_size")

# settled by other options, where they are not given
DERIVED = frozenset(("control_learning_rates", "lr_search_tokens", "train_batch_size"))

FORMER = {"control": FULL, "max_test_tokens": 0}  # what older runs did where they recorded nothing

# what is recorded beside the options: of what it is the digest, and which options it comes from
DIGESTS = {
    "model_digest": ("the weights of the model", ("model_name_or_path",)),
    "train_digest": ("the training rows", ("train_file", "dataset_name", "tokenizer_name")),
    "validation_digest": ("the validation rows", ("validation_file", "dataset_name", "tokenizer_name")),
    "test_digest": ("the test texts", ("test_file", "dataset_name")),
    "long_digest": ("the longer training rows", ("train_file", "dataset_name", "tokenizer_name")),
}
# recorded beside the options, too: what is scored where older runs scored something else, and what that was
SCORED = {"scored": "answers"}
TESTED = {"tested": "evenly"}
FORMERLY = {
    "scored": "that scored whole conversations, where this version scores their answers alone",
    "tested": "that scored the beginning of the test split, or of each of its documents, where this version reads"
    " documents from all over it",
}


def training_options(training: FinetuningArguments) -> dict[str, Any]:
    """Return all options of a training but those in `FREE`, and its number of processes, as JSON-able data."""
    given = training.to_dict()
    named = {f.name: given.get(f.name) for f in dataclasses.fields(training) if f.init and f.name not in FREE}
    # a process may see several devices, on which a batch is as many times as large
    counted = {"world_size": training.world_size, "train_batch_size": training.train_batch_size}
    return json.loads(json.dumps(named | counted, default=str))


def difference(started: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first name whose values differ, by the alphabet; an option that is not recorded had its default.

    What follows from other options comes after them.

    A newer transformers, or a newer version of this library, has options that an older one had not, and more of them
    in `FREE`.
    """
    defaults = {f.name: f.default for kind in DISTILLATION for f in dataclasses.fields(kind)}
    started, now = (FORMER | {name: x for name, x in given.items() if x is not None} for given in (started, now))
    rows = step_rows(started), step_rows(now)
    same_steps = None not in rows and rows[0] == rows[1] and not now.get(COMPARED)
    for name in sorted(started.keys() | now.keys(), key=lambda name: (name in DERIVED, name)):
        if name in FREE or name == COMPARED or (same_steps and name in BATCHES):
            continue
        default = getattr(defaults.get(name), "value", defaults.get(name))
        if started.get(name, default) != now.get(name, default):
            return name
    return None


def step_rows(options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many rows a device has in a step, of the usual and of the longer ones; None: it is not recorded."""
    if any(name not in options for name in BATCHES):
        return None
    batch, accumulated = options["train_batch_size"], options["gradient_accumulation_steps"]
    length, longer = options.get("block_size") or 1, options.get("long_block_size") or 1
    return batch * accumulated, max(1, batch * length // longer) * accumulated


def told_difference(name: str, started: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what is different, in terms of options: "a run with `name`=..., got ..."."""
    if name in FORMERLY:
        return FORMERLY[name]
    if name not in DIGESTS:
        return f"with {name}={started.get(name)!r}, got {now.get(name)!r}"
    what, options = DIGESTS[name]
    given = ", ".join(f"{option}={now[option]!r}" for option in options if now.get(option)) or "no file was given"
    if name not in started:
        return f"that did not record the content of {what} ({given}), as this version does"
    return f"on other content: {what} were others ({given})"


def rows_digest(dataset: Dataset) -> str:
    """Return the SHA-256 of all columns of a data set, row by row."""
    digest = hashlib.sha256()
    for rows in dataset.with_format("numpy").iter(ROWS):
        for name in sorted(rows):
            digest.update(name.encode())
            for part in _bytes_of(rows[name]):
                digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def model_digest(model: nn.Module) -> str:
    """Return the SHA-256 of the names and values of all parameters of a model."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _bytes_of(value: Any) -> Iterable[bytes]:
    """Yield the content of a column: an array of numbers, of texts, or of rows of several lengths."""
    if isinstance(value, str):
        yield value.encode()
    elif isinstance(value, np.ndarray) and value.dtype.kind not in "OUS":
        yield value.tobytes()
    elif isinstance(value, np.ndarray | list):
        for part in value:
            yield from _bytes_of(part)
    else:
        yield repr(value).encode()
