"""Everything that is loaded and checked before a run writes its first file."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linattn import get_mechanisms, is_patched, patch_model
from hf_linattn.calibration import own_parameters, what_is_fitted
from hf_linattn.config import require
from hf_linattn.errors import CheckpointError, DataError, OptionError
from hf_linattn.evaluation import position_limit, streaming_like, whole_windows
from hf_linattn.evaluation.label_metrics import REGRESSION, SEVERAL
from hf_linattn.positions.extend import reach_max_positions
from hf_linattn.reading import read_tokenizer
from hf_linattn.training.arguments import FULL, NONE, WINDOW, Arguments, ModelArguments, check_budget
from hf_linattn.training.arguments.board import CommandLine
from hf_linattn.training.base_task import Task, refuse
from hf_linattn.training.data import TrainingData, is_held_out
from hf_linattn.training.embeddings import texts_of
from hf_linattn.training.loading import load_task, load_texts
from hf_linattn.training.losses.chunks import separate_head
from hf_linattn.training.recall_rows import with_recall
from hf_linattn.training.run_directory import RunDirectory
from hf_linattn.training.same_run import TESTED, model_digest, rows_digest
from hf_linattn.training.stages import TrainingStage, stages_of
from hf_linattn.training.stages.positions import checked_length
from hf_linattn.training.task import CAUSAL, TextEncoder
from hf_linattn.training.training_run import TrainingRun
from hf_linattn.training.window_dropout import WindowDropout

logger = logging.getLogger(__name__)

LONGER = 8  # times block_size are the windows of `long_windows`

# options that say nothing about the control: it may come from a run with others, however its learning rate was found
CONVERSION_OPTIONS = (
    "mechanism", "mechanism_options", "layers", "softmax_share", "layer_search", "layer_unit", "layer_signal", "plan",
    "learning_rates", "lr_search_tokens", "control_learning_rates", "control", "control_dir", "kl_weight",
    "hidden_weight", "calibration_tokens", "speed_lengths", "fidelity_windows", "long_windows", "seed", "data_seed",
    "mechanism_rate", "mechanism_weight_decay", "document_window", "document_stride", "metrics",
)  # fmt: skip


def prepare(
    arguments: Arguments, program: str = "", argv: Sequence[str] = (), datasets: DatasetDict | None = None
) -> TrainingRun:
    """Load model, tokenizer and text, and raise the library's errors for whatever does not fit together.

    Args:
        datasets: splits in memory, in place of those that the options name.
        program, argv: how the run was started, for the report and for the command of a control that is missing.
    """
    model_options, data_options, recipe_options, training, distillation = arguments
    directory = RunDirectory(training.output_dir or "", training)
    directory.check_apart(arguments)
    directory.check(recipe_options.overwrite_output_dir, training.resume_from_checkpoint is not None)
    name = model_options.model_name_or_path or ""
    with training.main_process_first(local=False):  # mistakes in files first: neither budget nor model hides them
        loaded = load_texts(name, data_options, datasets)
    check_budget(arguments)
    model, task = load_task(name, model_options.dtype)
    if is_patched(model):
        raise OptionError(f"model_name_or_path={name!r} is converted already; give the original")
    digests, table = {"model_digest": model_digest(model)}, position_limit(model)
    if model_options.max_positions is not None:
        reach_max_positions(model, model_options.max_positions)
        warn_of_short_rows(arguments, table)
    task.check(model, data_options, recipe_options)
    task.check_options(arguments)
    settle_windows(arguments, task, table)
    patch_model(model, **model_options.patch_arguments())
    limit = position_limit(model)
    check_model(model, arguments, limit, task)
    tokenizer = load_tokenizer(model_options, task)
    with training.main_process_first(local=False):
        splits = task.written(loaded, TextEncoder(tokenizer, data_options))
        data = task.rows(splits, TextEncoder(tokenizer, data_options), model, recipe_options.max_train_tokens)
        long_data = None if not distillation.long_block_size else long_rows(arguments, task, tokenizer, splits, model)
    read = {"train": data.train, "validation": data.validation, "test": splits["test"]}
    read |= {} if long_data is None else {"long": long_data.train}
    check_tokenizer(tokenizer, model, arguments, read)
    timed = [n for n in sorted(set(recipe_options.speed_lengths)) if limit is None or n <= limit]
    run = TrainingRun(
        arguments=arguments,
        command=f"{program} {shlex.join(argv)}",
        directory=directory,
        tokenizer=tokenizer,
        task=task,
        splits=splits,
        data=data,
        long_data=long_data,
        long_length=min(LONGER * data_options.block_size, limit or math.inf),  # type: ignore[arg-type]  # an int
        speed_lengths=timed or [limit or data_options.block_size],
        in_memory=datasets is not None,
        held_out=is_held_out(loaded) if datasets is None else "test" not in datasets,
        digests=digests | contents(read, task, TextEncoder(tokenizer, data_options)),
    )
    check_windows(run, limit)
    run.shared_control = shared_control(run, program, argv)
    for stage in stages_of(arguments):
        if isinstance(stage, TrainingStage):
            stage.rehearse(run, model)
    return run


def contents(read: Mapping[str, Dataset], task: Task, encoder: TextEncoder) -> dict[str, str]:
    """Return what is recorded of the rows that a run reads: their digests, and how some test documents are chosen."""
    tested = TESTED if task.tests_some(encoder, read["test"]) else {}
    return tested | {f"{name}_digest": rows_digest(rows) for name, rows in read.items()}


def long_rows(
    arguments: Arguments, task: Task, tokenizer: PreTrainedTokenizerBase, splits: DatasetDict, model: PreTrainedModel
) -> TrainingData:
    """Return the rows of a last stage on longer ones, with generated recall among them if that is asked for.

    Raises:
        DataError: the text fills no row.
        OptionError: no row holds more of a document than the rows before do.
    """
    _, data, _, training, distillation = arguments
    length = distillation.long_block_size or 0
    options = replace(data, block_size=length, stride=None)
    try:
        rows = task.rows(splits, TextEncoder(tokenizer, options), model, distillation.long_tokens)
    except (DataError, OptionError) as error:
        raise type(error)(f"long_block_size={length}, rows of a last stage: {error}") from error
    if distillation.recall_share:
        rows = with_recall(rows, tokenizer, distillation.recall_share, splits["train"]["text"], training.seed)
    longest = max(longest_document(row) for row in rows.train)
    if longest <= data.block_size:
        raise OptionError(
            f"long_block_size={length}: the longest document of these rows has {longest} tokens, no more than rows of"
            f" block_size={data.block_size} hold, so they teach nothing of length; give longer documents, a"
            " recall_share, or leave long_block_size and long_tokens out"
        )
    return rows


def longest_document(row: Mapping[str, Any]) -> int:
    """Return the tokens of the longest document, or part of one, in a row; a text that is no packed row is one."""
    positions = row.get("position_ids")
    if positions is None:
        return len(row["input_ids"])
    positions = torch.as_tensor(positions)
    starts = torch.nonzero(positions == positions.min()).flatten()
    return int(torch.diff(starts, append=torch.tensor([len(positions)])).max())


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, arguments: Arguments, read: Mapping[str, Dataset]
) -> None:
    """Raise `OptionError` for a tokenizer that is not the model's.

    It has tokens that the model has no embedding for, and one is read; or it is said to be elsewhere than the model,
    beside which lies one whose tokens have other numbers.

    read: what a run reads, rows of tokens or texts.
    """
    options = arguments.model
    name = options.tokenizer_name or options.model_name_or_path
    size = model.config.get_text_config().vocab_size
    if max(tokenizer.get_vocab().values(), default=0) >= size:
        for part, rows in read.items():
            largest = largest_token(rows, TextEncoder(tokenizer, arguments.data))
            if largest >= size:
                raise OptionError(
                    f"tokenizer_name={name!r}: token {largest}, {tokenizer.convert_ids_to_tokens(largest)!r}, is"
                    f" beyond the {size} tokens of {options.model_name_or_path!r}, and the {part} rows hold it; give"
                    " the one that the model was trained with"
                )
    if options.tokenizer_name is None:
        return
    try:
        own = read_tokenizer("model_name_or_path", str(options.model_name_or_path)).get_vocab()
    except CheckpointError:
        return  # it has none, which is why one is given
    given = tokenizer.get_vocab()
    others = [token for token, number in own.items() if given.get(token) != number]
    if others:
        raise OptionError(
            f"tokenizer_name={name!r} is not the tokenizer of {options.model_name_or_path!r}: {len(others)} of its"
            f" {len(own)} tokens have other numbers or none, such as {others[0]!r}; leave tokenizer_name out"
        )


def largest_token(rows: Dataset, encoder: TextEncoder) -> int:
    """Return the largest number of a token in rows, or in texts that are tested."""
    if "input_ids" in rows.column_names:
        tokens: Any = (row["input_ids"] for row in rows)  # type: ignore[index, call-overload]  # a row is a dict
    else:
        tokenizer, options = encoder
        special = not options.completion_only
        texts = texts_of(options.tested(rows))
        tokens = tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
    return max((int(torch.as_tensor(ids).max()) for ids in tokens if len(ids)), default=0)


def check_model(model: PreTrainedModel, arguments: Arguments, limit: int | None, task: Task) -> None:
    """Raise `OptionError` for what a converted model cannot do: read rows so long, fit parameters it lacks.

    Args:
        limit: the positions of the model with its mechanism; None: any number of them.
    """
    model_options, data_options, recipe_options, _, distillation = arguments
    lengths = {"block_size": data_options.block_size, "long_block_size": distillation.long_block_size or 0}
    for name, length in lengths.items():
        if limit is not None and length > limit:
            raise OptionError(
                f"{name}={length} is beyond the {limit} positions of {model_options.model_name_or_path!r} with its"
                f" mechanism; give at most {limit}, or max_positions={length} where its position table is what ends,"
                " which calls extend_positions"
            )
    if distillation.recall_share and task is not CAUSAL:
        raise OptionError(
            f"recall_share={distillation.recall_share}: recall is asked of a causal language model; leave it out"
        )
    if distillation.keep_logits:
        check_kept_logits(model, task, arguments)
    for name, tokens, found in (
        ("calibration_tokens", recipe_options.calibration_tokens, what_is_fitted),
        ("transfer_tokens", distillation.transfer_tokens, own_parameters),
    ):
        if tokens and not found(get_mechanisms(model)):
            raise OptionError(
                f"{name}={tokens}: {model_options.mechanism!r} has no parameters of its own that could be fitted;"
                " leave it out"
            )
    if recipe_options.control == WINDOW and streaming_like(model) is None:
        raise OptionError(
            f"control={WINDOW!r}: {model_options.mechanism or 'the plan'} has no decoding state of constant size that"
            " holds a few tokens, so there is no window of as many bytes; leave it out"
        )
    if distillation.window_dropout:
        WindowDropout(model, distillation.window_dropout)


def check_kept_logits(model: PreTrainedModel, task: Task, arguments: Arguments) -> None:
    """Raise `OptionError` where the original's likeliest tokens cannot be kept from one time to the next."""
    _, _, recipe, training, distillation = arguments
    vocabulary = model.config.get_text_config().vocab_size
    reasons = {
        "rows of a masked model or a classifier are others each time": task is not CAUSAL,
        "hidden_weight needs the original's states": recipe.hidden_weight,
        f"top_k={distillation.top_k} is the whole vocabulary": (distillation.top_k or 0) >= vocabulary,
        "the model's logits are not the projection of its states, or fp16 or torch_compile makes all at once":
            training.fp16 or training.torch_compile or separate_head(model) is None,
    }  # fmt: skip
    for reason, holds in reasons.items():
        refuse("keep_logits", holds and True, reason)


def warn_of_short_rows(arguments: Arguments, table: int | None) -> None:
    """Warn of positions that were added and that no row reaches; table: those before; None: any number of them."""
    size, wanted = arguments.data.block_size, arguments.model.max_positions
    if table is not None and max(size, arguments.distillation.long_block_size or 0) <= table:
        logger.warning(
            "max_positions=%s: rows of block_size=%d tokens reach none beyond the original's %d positions, so the"
            " added ones are not trained; give block_size %s, or leave max_positions out", wanted, size, table, wanted,
        )  # fmt: skip


def settle_windows(arguments: Arguments, task: Task, table: int | None) -> None:
    """Have the original read in windows what is longer than its own positions, and check what goes with it.

    table: the positions that the original came with; None: any number of them.

    Raises:
        OptionError: windows that documents or positions do not fit, or an option that cannot be honoured.
    """
    model_options, data, recipe, training, distillation = arguments
    if not task.reads_windows:
        return
    longest = max(data.block_size, distillation.long_block_size or 0)
    if data.document_window is None and table is not None and longest > table and model_options.max_positions:
        pairs = task.joins_pairs and data.text_pair_column
        whole = "document_window 0 has the original read them whole, its table extended"
        refuse("text_pair_column", pairs, f"pairs of more than {table} tokens have no windows; {whole}")
        data.document_window = table
    if data.document_window:
        fits = data.document_window <= (table or math.inf)
        require("document_window", data.document_window, fits, f"at most the {table} positions of the original")
        shorter = data.document_window < longest
        expected = f"below block_size={longest}, to which texts are cut, or absent"
        require("document_window", data.document_window, shorter, expected)
        reason = f"the original reads windows of {data.document_window} tokens, whose hidden states are others"
        refuse("hidden_weight", recipe.hidden_weight, reason)
    else:
        refuse("document_stride", data.document_stride, "there are no windows")
        if task.has_own_loss and recipe.control != NONE:
            logger.info("no control is trained: with its own attention the original has nothing to learn from itself")
            recipe.control = NONE
    problem = getattr(task, "problem", None)
    if problem == REGRESSION:
        refuse("label_smoothing_factor", training.label_smoothing_factor, "a number has no classes to smooth")
        refuse("top_k", distillation.top_k, "a number is one output")
    if problem == SEVERAL:
        refuse("label_smoothing_factor", training.label_smoothing_factor, "each label is yes or no")
        refuse("top_k", distillation.top_k, "each label is compared for itself")


def check_windows(run: TrainingRun, limit: int | None) -> None:
    """Raise now what would otherwise come up after hours: too little text to compare models on, or in windows."""
    if run.windows is not None:  # whose stride the tokenizer's marks leave room for
        logger.info("the original reads windows of %d tokens every %d", run.windows.length, run.windows.step)
    recipe, size = run.arguments.recipe, run.arguments.data.block_size
    checked = checked_length(run.arguments, limit, run.long_data is not None)
    for name, count, length, what, split in (
        ("fidelity_windows", recipe.fidelity_windows, size, "block_size", "test"),
        ("long_windows", recipe.long_windows, run.long_length, f"{run.long_length} tokens", "test"),
        ("position_windows", recipe.position_windows, checked, f"{checked} tokens", "validation"),
    ):
        if not count:
            continue
        try:
            whole_windows(run.tokenizer, run.splits[split]["text"], length, not run.arguments.data.completion_only)
        except OptionError as error:
            remedy = f"; give longer texts, or leave it out with {name} 0"
            raise OptionError(f"{name}={count}, windows of {what} in the {split} split: {error}{remedy}") from error


def shared_control(run: TrainingRun, program: str = "", argv: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the results of the stages that another run's control went through, if it is to serve here too.

    program, argv: as in `prepare`.

    Raises:
        CheckpointError: that run has not finished them.
        OptionError: it had other options, or one trains adapters where the other trains all weights.
    """
    training, folder = run.arguments.training, run.arguments.recipe.control_dir
    if folder is None:
        return {}
    ignored = {*CONVERSION_OPTIONS, *asdict(run.arguments.distillation), "long_digest"} - run.task.of_control
    command = CommandLine(argv).command_for(folder, program, ignored)
    directory = RunDirectory(folder, training)
    windows = [name for name in ("window_trained",) if directory.finished(name)]
    shared = directory.export_stages(("control_training", "control", *windows), run.options, ignored, command)
    expected, trained = run.arguments.control_trains, shared["control_training"].get("trained", FULL)
    if trained != expected:
        raise OptionError(
            f"control_dir={folder!r} holds a control that trained {trained!r}, where this run's would train"
            f" {expected!r}; give another folder, or control {trained!r} to compare with it nevertheless"
        )
    return shared


def load_tokenizer(options: ModelArguments, task: Task) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run; `CheckpointError`, which names the option, if it cannot be read."""
    option = "tokenizer_name" if options.tokenizer_name else "model_name_or_path"
    tokenizer = task.tokenizer or read_tokenizer(option, getattr(options, option))
    if options.max_positions is not None:
        tokenizer.model_max_length = options.max_positions
    return tokenizer
