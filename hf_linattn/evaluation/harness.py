"""Tasks of lm-evaluation-harness on a model in memory, from local JSON lines or from the Hub.

Prompts, choices and metrics are the harness's own (https://github.com/EleutherAI/lm-evaluation-harness, extra
`harness`): a task file includes the harness's YAML and overrides only where the data lies. Beside them stands what a
conversion hides behind: how long the prompts are, and what the model writes when nobody offers it the choices.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from numbers import Real
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from transformers import PreTrainedTokenizerBase

from .. import architecture
from ..config import require, require_count, require_known
from ..errors import DataError, OptionError
from ..inference import evaluation_mode
from ..reading import UNREADABLE, one_line
from .perplexity import position_limit

HEADLINES = ("acc_norm", "acc")  # of a task's metrics the first that it has stands for it
OUTPUT_TYPES = ("loglikelihood", "multiple_choice")  # of the harness, which have a value for each item
GENERATED = 16  # tokens that are written freely, and compared with the choices


@dataclass(frozen=True)
class Answer:
    """What a model says to one item of a task.

    Attributes:
        target: number of the right choice.
        chosen: number of the choice of the highest likelihood; where there is only one, as in LAMBADA, 0 if each of
            its tokens is the likeliest, else None.
        generated: what the model writes after the prompt, greedily: up to 16 tokens of one line; None if not asked, or
            where each choice is in a prompt of its own, as in WinoGrande.
        written: number of the only choice that the generated text agrees with; None if none or several do.
    """

    target: int
    chosen: int | None
    generated: str | None = None
    written: int | None = None


@dataclass(frozen=True)
class TaskRun:
    """One model on one task.

    Attributes:
        task: its name. shots: examples before each question.
        values: metric of the harness -> its value for each item, without those that only all items together have, as
            F1; `perplexity` has log-likelihoods.
        answers: one for each item.
        prompt_tokens: tokens of each item's prompt, without the choice.
        num_choices: how many choices each item has.
    """

    task: str
    shots: int
    values: dict[str, tuple[float, ...]]
    answers: tuple[Answer, ...]
    prompt_tokens: tuple[int, ...]
    num_choices: tuple[int, ...]


def task_names(task_files: Path) -> list[str]:
    """Return the names of the tasks that have a file in this folder; `OptionError` if there is none."""
    names = sorted(path.stem for path in task_files.glob("*.yaml"))
    require("task_files", str(task_files), bool(names), "a folder of task files, as recipes/tasks of the repository")
    return names


def load_task(name: str, task_files: Path, task_dir: Path | None = None) -> Any:
    """Return a task as the harness builds it from its own YAML.

    Args:
        name: of a file in `task_files` without its ending.
        task_files: a folder of YAML files. `include` is a file below the harness's `lm_eval/tasks`; the other keys
            override its content when the data is local, and nothing but `fewshot_split` does when it is not.
        task_dir: the folder with the JSON lines that the file names; None: the data set of the harness on the Hub.

    Raises:
        OptionError: the extra `harness` is not installed, or `task_files` has no task.
        UnknownNameError: no such task.
        DataError: the data, or the task file, cannot be read, or an item has not one right choice and an accuracy.
    """
    manager = _task_manager()
    require_known("task", name, task_names(task_files))
    config = _resolve(name, task_files / f"{name}.yaml", task_dir)
    origin = "the Hub" if task_dir is None else f"task_dir={str(task_dir)!r}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        try:
            task = manager(include_defaults=False).load(str(path))["tasks"][name]
        except _errors_of_data() as error:
            columns = f"write rows with the columns that {config['include']} reads"
            remedy = "give a task_dir with its rows" if task_dir is None else columns
            raise DataError(f"task {name!r} cannot be read from {origin}: {one_line(error)}; {remedy}") from error
    _check_kind(task)
    return task


def run_task(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: Any,
    *,
    limit: int | None = None,
    longer_than: int | None = None,
    num_generated: int | None = 0,
    batch_size: int = 8,
    seed: int = 0,
    positions: int | None = None,
) -> TaskRun:
    """Run a causal language model, patched or not, on a task of `load_task`.

    The result depends neither on `batch_size` nor on the global random state, but for rounding.

    Args:
        limit: the first items alone; None: all.
        longer_than: put as many examples before each question as make every prompt longer than that many tokens; None:
            no examples.
        num_generated: of how many items the answer is generated, too; None: of all.
        batch_size: sequences per forward.
        seed: chooses the examples: the same for every model.
        positions: that a prompt and its answer may take beside those of the model; None: these alone.

    Raises:
        OptionError: a value out of its range, prompts longer than the model has positions, or a likelihood that is not
            finite.
        DataError: the task has too few items for that many examples.
    """
    require_count("limit", limit, optional=True)
    require_count("longer_than", longer_than, optional=True)
    require_count("num_generated", num_generated, least=0, optional=True)
    require_count("batch_size", batch_size)
    from lm_eval.evaluator import evaluate

    with evaluation_mode(model):  # into which the harness's view of a model puts it
        language_model = _wrap(model, tokenizer, batch_size)
        shots = 0 if longer_than is None else _shots(task, language_model, limit, longer_than, seed)
        _build(task, limit, shots, seed)
        _check_length(task, language_model, positions)
        task.set_fewshot_seed(seed)
        found = evaluate(language_model, {"tasks": {task.task_name: task}}, limit=limit, bootstrap_iters=0)
        samples = found["samples"][task.task_name]
        written = [] if task.multiple_input else _generate(language_model, samples[:num_generated])
    prompts = tuple(len(language_model.tok_encode(sample["arguments"][0][0])) for sample in samples)
    return TaskRun(
        task=task.task_name,
        shots=shots,
        values={
            name: tuple(float(x[name]) for x in samples)
            for name in sorted(samples[0]["metrics"])
            if all(isinstance(x[name], Real) for x in samples)
        },
        answers=tuple(_answer(task, x, text) for x, text in zip_longest(samples, written)),
        prompt_tokens=prompts,
        num_choices=tuple(len(sample["arguments"]) for sample in samples),
    )


def agrees(generated: str, choice: str) -> bool:
    """Whether a generated text says a choice: it begins with it, at a word's end, or is the beginning of it.

    >>> agrees("Yes, it does", "yes"), agrees("yesterday", "yes"), agrees("a red", "a red herring"), agrees("", "a")
    (True, False, True, False)
    """
    said, expected = (" ".join(text.lower().split()) for text in (generated, choice))
    short, long = sorted((said, expected), key=len)
    ends = len(short) == len(long) or not long[len(short)].isalnum()
    return bool(short) and long.startswith(short) and (ends or short != expected)


def _task_manager() -> Any:
    """Return the harness's TaskManager; `OptionError` without the extra."""
    if find_spec("lm_eval") is None:
        raise OptionError("tasks need lm_eval, which is not installed; run pip install 'hf_linattn[harness]'")
    from lm_eval.tasks import TaskManager

    return TaskManager


def _errors_of_data() -> tuple[type[Exception], ...]:
    """Return what the harness raises over data that is missing or malformed."""
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateError

    return (*UNREADABLE, DatasetsError, TemplateError, TypeError)


def _resolve(name: str, file: Path, task_dir: Path | None) -> dict[str, Any]:
    """Return a task file with the places of this machine: of the harness's YAML and of the rows."""
    import lm_eval

    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        included = Path(lm_eval.__file__).parent / "tasks" / config["include"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise DataError(f"task_files: {str(file)!r} is no task file: {one_line(error)}; it needs `include`") from error
    if not included.is_file():
        raise DataError(f"task {name!r}: this lm_eval has no tasks/{config['include']}; install lm_eval>=0.4.13")
    config["include"] = str(included)
    if task_dir is None:
        return {key: config[key] for key in ("include", "fewshot_split") if key in config}
    missing = [file for file in _files(config) if not (task_dir / file).is_file()]
    if missing:
        raise DataError(
            f"task_dir={str(task_dir)!r} has no {', '.join(missing)}, which task {name!r} reads; put JSON lines there,"
            " or leave task_dir out to take the data set from the Hub"
        )
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"] = {"data_files": {split: str(task_dir / file) for split, file in files.items()}}
    return config


def _files(config: dict[str, Any]) -> list[str]:
    return list(config.get("dataset_kwargs", {}).get("data_files", {}).values())


def _check_kind(task: Any) -> None:
    """Raise `DataError` for a task whose items have not one right choice each, and an accuracy."""
    metrics = task.aggregation()
    if task.OUTPUT_TYPE not in OUTPUT_TYPES or task.multiple_target or not {*HEADLINES} & {*metrics}:
        raise DataError(
            f"task {task.task_name!r} is of output_type {task.OUTPUT_TYPE!r} with the metrics {', '.join(metrics)};"
            f" take one of {' or '.join(OUTPUT_TYPES)}, with one right choice and {' or '.join(HEADLINES)}"
        )


def _wrap(model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Any:
    """Return the harness's view of a model in memory."""
    from .shared_prompts import SharedPrompts

    own = copy.deepcopy(tokenizer)  # the harness sets a padding token and a side
    root = architecture.root_model(model)
    return SharedPrompts(pretrained=root, tokenizer=own, backend="causal", batch_size=batch_size)


def _build(task: Any, limit: int | None, shots: int, seed: int) -> list[Any]:
    """Let the task make its requests, with the same examples for every model."""
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed)
    task.build_all_requests(limit=limit)
    return task.instances


def _shots(task: Any, language_model: Any, limit: int | None, longer_than: int, seed: int) -> int:
    """Return how many examples make every prompt longer than that many tokens, no more than a few beyond it."""

    def lengths(shots: int) -> list[int]:
        prompts = {(instance.doc_id, instance.args[0]) for instance in _build(task, limit, shots, seed)}
        return [len(language_model.tok_encode(prompt)) for _, prompt in prompts]

    most = len(list(task.fewshot_docs())) - 1  # the item itself is none of its examples
    none, one = lengths(0), lengths(min(1, most))
    example = max(1.0, (sum(one) - sum(none)) / len(none))
    shots = max(1, int((longer_than - sum(none) / len(none)) / example))
    while shots <= most:
        if min(lengths(shots)) > longer_than:
            return shots
        shots += 1
    raise DataError(
        f"longer_than={longer_than}: the {most} examples that task {task.task_name!r} has make no prompt that long;"
        " give fewer tokens or more rows"
    )


def _check_length(task: Any, language_model: Any, positions: int | None) -> None:
    """Raise `OptionError` for a prompt beyond the positions, which the harness would cut, or the model refuse."""
    longest = max(len(language_model.tok_encode("".join(instance.args[:2]))) for instance in task.instances)
    longest += GENERATED
    limit = min(filter(None, (language_model.max_length, position_limit(language_model.model), positions)))
    if longest > limit:
        raise OptionError(
            f"task {task.task_name!r} has prompts of {longest:,} tokens with the answer, and the model {limit:,}"
            " positions; ask for prompts that are shorter"
        )


def _generate(language_model: Any, samples: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the model writes after each prompt, left-padded in batches."""
    from lm_eval.api.instance import Instance

    if not samples:
        return []
    end = language_model.tokenizer.eos_token_id
    if end is None:
        raise DataError("eos_token=None: generated answers need a tokenizer that has one; set num_generated=0")
    # the end by its number: a model that does not know it writes on while another row of its batch does
    known = language_model.model.generation_config.eos_token_id
    ends = {end, *(known if isinstance(known, list) else [known])} - {None}
    options = {"until": ["\n"], "max_gen_toks": GENERATED, "do_sample": False, "eos_token_id": sorted(ends)}
    requests = [Instance("generate_until", x["doc"], (x["arguments"][0][0], dict(options)), 0) for x in samples]
    return language_model.generate_until(requests)


def _answer(task: Any, sample: dict[str, Any], text: str | None) -> Answer:
    """Return what the model said to one item: by likelihood, and in its own words."""
    continuations = [argument[1] for argument in sample["arguments"]]
    likelihoods = [likelihood for likelihood, _ in sample["filtered_resps"]]
    if len(continuations) == 1:
        target, chosen = 0, 0 if sample["filtered_resps"][0][1] else None
    else:
        target = task.doc_to_text(sample["doc"]) if task.multiple_input else sample["target"]
        target = target if isinstance(target, int) else task.doc_to_choice(sample["doc"]).index(target)
        chosen = max(range(len(likelihoods)), key=likelihoods.__getitem__)
    said = [] if text is None else [number for number, choice in enumerate(continuations) if agrees(text, choice)]
    return Answer(target, chosen, text, said[0] if len(said) == 1 else None)
