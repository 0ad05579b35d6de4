"""Suites: a converted model beside the original and a control, item by item, on language, recall and tasks.

Every suite is a function from a model to `Measurement`s, a value for each item; `compare` sets those of several models
side by side. What a conversion hides behind stands in every row: the share of its prompts that is longer than the
window, as a row of windows has the original's numbers wherever prompts are shorter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..config import given_as, require, require_count, require_known
from ..errors import OptionError
from ..mechanisms.composite import CompositeMechanism
from ..patching import get_mechanisms, is_patched
from .harness import HEADLINES, TaskRun, load_task, run_task, task_names
from .next_token import token_losses, windows_of_documents
from .perplexity import is_masked_language_model, position_limit, require_finite_loss
from .positions import doubling_edges, in_turn
from .recall import RECALL_TASKS, answer_prompts, make_prompts
from .recall.measure import by_depth
from .side_by_side import Measurement


@dataclass(frozen=True)
class SuiteOptions:
    """What is measured.

    Attributes:
        texts: documents of `language`, and the haystack of `recall`; without them that has one of its own.
        length: tokens of the windows of `language`. num_windows: how many of them, the first.
        recall_tasks: names in `RECALL_TASKS`; none: all of them. lengths: tokens of their prompts. num_samples: how
            many questions for each task and length.
        positions: that a window, or a prompt and each answer, may take beside those of the model; None: these alone.
        tasks: names of files in `task_files`; none: all of them. task_dir: a folder with their rows; None: the Hub.
        limit: the first items of each task; None: all.
        long_prompts: tasks run again with as many examples as make each prompt longer than this; None: they do not.
        num_generated: items of each task whose answer is generated, too; None: all.
        batch_size: windows or prompts per forward; of long windows as many as have 16,384 tokens.
        seed: makes prompts of recall and chooses examples.
        progress: show bars of recall; None: where standard error is a terminal. The harness shows its own.
    """

    texts: tuple[str, ...] = ()
    length: int = 1024
    num_windows: int | None = 32
    recall_tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (1024,)
    num_samples: int = 20
    positions: int | None = None
    tasks: tuple[str, ...] = ()
    task_files: Path = Path("recipes/tasks")
    task_dir: Path | None = None
    limit: int | None = 200
    long_prompts: int | None = 1000
    num_generated: int | None = None
    batch_size: int = 8
    seed: int = 0
    progress: bool | None = None

    def __post_init__(self) -> None:
        require_count("length", self.length, least=2)
        require_count("batch_size", self.batch_size)
        require_count("num_samples", self.num_samples)
        require("lengths", self.lengths, len(self.lengths) > 0, "numbers of tokens, at least one")
        for name in ("num_windows", "limit", "long_prompts", "positions"):
            require_count(name, getattr(self, name), optional=True)
        require_count("num_generated", self.num_generated, least=0, optional=True)


Suite = Callable[[nn.Module, PreTrainedTokenizerBase, SuiteOptions], list[Measurement]]


def language(model: nn.Module, tokenizer: PreTrainedTokenizerBase, options: SuiteOptions) -> list[Measurement]:
    """Return perplexity on whole windows of the texts, without overlap, and the loss by position in them.

    The perplexity is exp of the mean loss of all tokens but the first of each window. Windows are the first ones of as
    many texts as there are, then their next ones. Positions come in the buckets of `doubling_edges`. Intervals are
    over texts, as windows of one are alike, or over the windows of a single one.
    """
    require("texts", len(options.texts), bool(options.texts), "text files to read")
    options = limited(model, ["language"], options)
    windows, documents = windows_of_documents(tokenizer, options.texts, options.length)
    chosen = in_turn(documents)[: options.num_windows]
    losses = token_losses(
        model, windows[chosen], documents[chosen], batch_size=options.batch_size, progress=options.progress
    ).losses
    require_finite_loss(model, float(losses.mean()))
    tokens, groups = (options.length,) * len(chosen), tuple(documents[chosen].tolist())
    values = tuple(losses.mean(1).tolist())
    found = [Measurement("language", "text", "perplexity", values, tokens, False, True, groups=groups)]
    for first, end in pairwise(doubling_edges(options.length)):
        means = losses[:, max(0, first - 1) : end - 1].mean(1)  # the first token has none
        facts = {"first": first, "last": end - 1}
        name = f"positions {first:,} to {end - 1:,}"
        values = tuple(means.tolist())
        found.append(Measurement("language", name, "loss", values, tokens, False, facts=facts, groups=groups))
    return found


@given_as(length="lengths")
def recall(model: nn.Module, tokenizer: PreTrainedTokenizerBase, options: SuiteOptions) -> list[Measurement]:
    """Return what the model recalls of generated prompts: in writing, and by the likeliest answer.

    What it writes comes by quarters of the depths of the needle too, as rows with a `depth` in their facts. An item is
    a question: of multiple choice the mean over its prompts.
    """
    found, options = [], limited(model, ["recall"], options)
    for name, length in product(options.recall_tasks or RECALL_TASKS, options.lengths):
        prompts = make_prompts(
            name, tokenizer, length, count=options.num_samples, seed=options.seed, haystack=options.texts or None,
            positions=options.positions,
        )  # fmt: skip
        answers = answer_prompts(model, tokenizer, prompts, batch_size=options.batch_size, progress=options.progress)
        each = RECALL_TASKS[name].rotations  # prompts of a question, which is one item
        tokens = tuple(len(prompt.prompt_ids) for prompt in prompts[::each])
        right = {"found": [x["found"] for x in answers], "first": [float(x["rank"] == 1) for x in answers]}
        values = {x: [fmean(own[i : i + each]) for i in range(0, len(own), each)] for x, own in right.items()}
        facts = {"length": length, "chance": fmean(1 / x["candidates"] for x in answers)}
        found += [Measurement("recall", name, x, tuple(own), tokens, facts=facts) for x, own in values.items()]
        for depth, places in by_depth(answers[::each]):
            own, some = tuple(values["found"][i] for i in places), tuple(tokens[i] for i in places)
            title = f"{name}, depths {depth[0]:g} to {depth[1]:g}"
            found.append(
                Measurement("recall", title, "found", own, some, facts={**facts, "task": name, "depth": depth})
            )
    return found


def limited(model: nn.Module, suites: Iterable[str], options: SuiteOptions) -> SuiteOptions:
    """Return options with no more positions than the model has; `OptionError` for a length of a suite beyond them."""
    limit = fewest(options.positions, position_limit(model))
    for name, lengths in (LENGTHS[suite](options) for suite in suites):
        for length in lengths:
            fits = limit is None or length <= limit
            require(name, length, fits, f"at most {limit}, the positions that the models have")
    return dataclasses.replace(options, positions=limit)


def fewest(*positions: int | None) -> int | None:
    """Return the least of some limits, None where there is none."""
    return min((limit for limit in positions if limit is not None), default=None)


def tasks(model: nn.Module, tokenizer: PreTrainedTokenizerBase, options: SuiteOptions) -> list[Measurement]:
    """Return each task's metrics without examples, and with as many as make prompts long."""
    found, options = [], limited(model, ["tasks"], options)
    names = options.tasks or task_names(options.task_files)
    for task in [load_task(name, options.task_files, options.task_dir) for name in names]:
        for longer_than in dict.fromkeys((None, options.long_prompts)):
            run = run_task(
                model, tokenizer, task, limit=options.limit, longer_than=longer_than,
                num_generated=options.num_generated, batch_size=options.batch_size, seed=options.seed,
                positions=options.positions,
            )  # fmt: skip
            found += _task_measurements(run, longer_than is not None)
    return found


SUITES: dict[str, Suite] = {"language": language, "recall": recall, "tasks": tasks}
# suite -> the option that says how long its windows or prompts are, and these lengths
LENGTHS: dict[str, Callable[[SuiteOptions], tuple[str, Iterable[int]]]] = {
    "language": lambda options: ("length", [options.length]),
    "recall": lambda options: ("lengths", options.lengths),
    "tasks": lambda options: ("long_prompts", [options.long_prompts or 0]),
}
ALL = "all"


def suite_names(name: str) -> list[str]:
    """Return the suites that a name stands for; `UnknownNameError` if there is none.

    >>> suite_names("tasks")
    ['tasks']
    """
    require_known("suite", name, [*SUITES, ALL])
    return list(SUITES) if name == ALL else [name]


def measure(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, suites: Collection[str], options: SuiteOptions
) -> list[Measurement]:
    """Return what one causal language model, patched or not, comes to.

    Raises:
        OptionError: it is a masked one, or a suite's windows or prompts are to be longer than its positions.
    """
    if is_masked_language_model(model):
        raise OptionError("suite needs a causal language model, got a masked one; give files alone, without suite")
    options = limited(model, suites, options)
    return [found for name in suites for found in SUITES[name](model, tokenizer, options)]


def exact_window(model: nn.Module) -> int | None:
    """Return the most tokens on which a patched model's layers equal softmax, of mechanisms that do so in a window.

    On longer prompts all that was converted differs from softmax; the share of such prompts stands beside every number
    of a suite. Where windows differ, layers of a smaller one differ from softmax on shorter prompts already.
    Layers and heads that keep softmax count for nothing. None where another mechanism is among them, which differs
    from softmax on prompts of any length, and for a model that is not patched.
    """
    if not is_patched(model):
        return None
    mechanisms = list(get_mechanisms(model).values())
    single = [part for x in mechanisms for part in (x.parts() if isinstance(x, CompositeMechanism) else [x])]
    converted = [x for x in single if x.config.mechanism != "softmax"]
    windows = [size for x in converted if (size := x.limit.window(x.config)) is not None]
    return max(windows) if windows and len(windows) == len(converted) else None


def _task_measurements(run: TaskRun, long_prompts: bool) -> list[Measurement]:
    """Return a measurement for each metric of the harness, and for what the model writes beside what it chooses."""
    headline = next(name for name in HEADLINES if name in run.values)
    chance = fmean(1 / count if count > 1 else 0.0 for count in run.num_choices)
    facts = {"shots": run.shots, "long_prompts": long_prompts}
    found = [
        Measurement(
            "tasks", run.task, name, tuple(-x for x in values) if name == "perplexity" else values, run.prompt_tokens,
            higher_is_better=name != "perplexity", logarithmic=name == "perplexity",
            facts={**facts, "headline": name == headline, "chance": chance},
            answers=run.answers if name == headline else (),
        )
        for name, values in run.values.items()
    ]  # fmt: skip
    written = [x for x in run.answers if x.generated is not None]
    says = {"generated": [x.written == x.target for x in written]}
    if min(run.num_choices) > 1:  # with one, to choose it is to write it
        says["agreement"] = [x.written == x.chosen for x in written]
    return found + [
        Measurement("tasks", run.task, name, tuple(map(float, own)), run.prompt_tokens[: len(own)], facts=facts)
        for name, own in says.items()
        if own
    ]
