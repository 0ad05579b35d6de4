"""What a run will take: its stages with tokens, steps, time, memory and disk, from a few real steps of each."""

from __future__ import annotations

import gc
import logging
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from rich import box
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from hf_linattn import MechanismConfig, get_mechanisms
from hf_linattn.console_table import console_table
from hf_linattn.errors import OptionError
from hf_linattn.memory_errors import gigabytes, is_out_of_memory, size_said
from hf_linattn.plan import names_in_layer
from hf_linattn.training.base_task import TextEncoder
from hf_linattn.training.finetuning import (
    own_forward,
    stage_arguments,
    validation_loss,
    whole_models,
    without_checkpoints,
)
from hf_linattn.training.memory_limits import what_helps
from hf_linattn.training.not_finite import NotFiniteError
from hf_linattn.training.random_states import kept_random_states
from hf_linattn.training.stages import Stage, TrainingStage, stages_of
from hf_linattn.training.stages.training import TrainingPlan
from hf_linattn.training.step_watch import StepWatch
from hf_linattn.training.trainers import RecoveryTrainer
from hf_linattn.training.training_run import TrainingRun

logger = logging.getLogger(__name__)

HEADS = ("stage", "tokens", "rows", "steps", "trained", "s/step", "time", "GB")


@dataclass(frozen=True)
class StagePrice:
    """What one training stage takes.

    Attributes:
        name: of the stage. place: its number among all stages of the run.
        tokens, steps: of all its trainings, those that search for a learning rate too.
        rows: tokens of a row, by rows of a step. trained: parameters.
        seconds: of one step, the median of those timed. peak_bytes: of weights, teacher, optimizer and the step, or
            of a batch of the validation where that is more.
        checkpoint_bytes: of all its checkpoints, and a teacher's kept logits, that lie on disk at once.
        kept_bytes: of the model it leaves.
    """

    name: str
    place: int
    tokens: int
    steps: int
    rows: tuple[int, int]
    trained: int
    seconds: float
    peak_bytes: int
    checkpoint_bytes: int
    kept_bytes: int

    @property
    def hours(self) -> float:
        """Hours of all its steps, without evaluations."""
        return self.steps * self.seconds / 3600


@dataclass(frozen=True)
class TestPrice:
    """What it takes to score models on the test split: one after the other, each reads `tokens` of them.

    Attributes:
        models: how many. rows: tokens of a window, by windows of a batch. seconds: of one batch of the converted one.
    """

    models: int
    tokens: int
    rows: tuple[int, int]
    seconds: float

    @property
    def batches(self) -> int:
        """Of one model."""
        return math.ceil(self.tokens / math.prod(self.rows))

    @property
    def hours(self) -> float:
        """Hours for all models."""
        return self.models * self.batches * self.seconds / 3600


@dataclass(frozen=True)
class RunPrice:
    """What a run takes.

    Attributes:
        model: its name. parameters: how many it has, converted. dtype: of the weights while training.
        layers: how many layers each mechanism has. chosen: whether these are the run's, and not still to be chosen.
        stages: those that train and are not done yet. places: how many stages the run has, of all kinds.
        test: of the models that are still to be scored; None: there are none, or the model is no language model.
        free_bytes: on the disk of the output folder.
    """

    model: str
    parameters: int
    dtype: str
    layers: dict[str, int]
    chosen: bool
    places: int
    stages: tuple[StagePrice, ...]
    test: TestPrice | None
    free_bytes: int

    @property
    def disk_bytes(self) -> int:
        """Bytes of all models that are left and of the checkpoints of the stage that has most of them."""
        checkpoints = max((stage.checkpoint_bytes for stage in self.stages), default=0)
        return checkpoints + sum(stage.kept_bytes for stage in self.stages)

    @property
    def hours(self) -> float:
        """Hours of all steps and of the test, without validation and other measurements."""
        return sum(stage.hours for stage in self.stages) + (self.test.hours if self.test else 0.0)

    def table(self) -> Table:
        """Return the plan for `rich.print`."""
        layers = ", ".join(f"{count} {name}" for name, count in self.layers.items())
        later = "" if self.chosen else ", of which those that stay softmax are chosen first"
        table = console_table(
            *HEADS, numbers=True,
            title=f"{self.model}: {self.parameters:,} parameters in {self.dtype}; layers: {layers}{later}",
            box=box.SIMPLE, padding=0,  # a row has 80 columns
            caption="trained: parameters; GB: peak memory."
            f" {in_time(self.hours * 3600)} without validation;"
            f" disk {gigabytes(self.disk_bytes)} of {gigabytes(self.free_bytes)} free",
        )  # fmt: skip
        for stage in self.stages:
            row, count = stage.rows
            table.add_row(
                f"{stage.place}/{self.places} {stage.name}", in_short(stage.tokens), f"{count}x{row}",
                f"{stage.steps:,}", in_short(stage.trained), f"{stage.seconds:.3g}", in_time(stage.hours * 3600),
                f"{stage.peak_bytes / 1e9:.2f}",
            )  # fmt: skip
        if (test := self.test) is not None:
            row, count = test.rows
            table.add_row(
                f"test, {test.models} models", in_short(test.models * test.tokens), f"{count}x{row}",
                f"{test.models * test.batches:,}", "", f"{test.seconds:.3g}", in_time(test.hours * 3600), "",
            )  # fmt: skip
        return table


def price_of(run: TrainingRun) -> RunPrice:
    """Take a few real steps of each training stage that is not done yet, on models of their own, and add them up.

    Raises:
        OptionError: weights, teacher and optimizer do not fit into the memory that is left, a step runs out of it,
            the loss of a first step is not finite, or models and checkpoints do not fit on the disk; nothing is
            written.
    """
    converted, todo = run.convert(), stages_to_do(run)
    layers = Counter(served_by(mechanism.config) for mechanism in get_mechanisms(converted).values())
    count, dtype = parameters(converted), str(converted.dtype).removeprefix("torch.")
    test = price_of_test(run, converted, sum(stage.scores for stage in todo.values()))
    del converted
    trained = {place: stage for place, stage in todo.items() if isinstance(stage, TrainingStage)}
    options = run.arguments.model
    price = RunPrice(
        model=str(options.model_name_or_path), parameters=count, dtype=dtype, layers=dict(layers),
        chosen=options.layers != "auto", places=len(stages_of(run.arguments)),
        stages=tuple(price_of_stage(run, stage, place) for place, stage in trained.items()), test=test,
        free_bytes=shutil.disk_usage(nearest_folder(run.directory.path)).free,
    )  # fmt: skip
    if price.disk_bytes > price.free_bytes:
        raise OptionError(
            f"output_dir={str(run.directory.path)!r}: models and checkpoints need {gigabytes(price.disk_bytes)},"
            f" {gigabytes(price.free_bytes)} are free; give {what_helps(run.arguments, disk=True)}"
        )
    return price


def stages_to_do(run: TrainingRun) -> dict[int, Stage]:
    """Return the stages that are not done yet, by their places; those of a run that is overwritten are all to do."""
    anew, stages = run.arguments.recipe.overwrite_output_dir, stages_of(run.arguments)
    done = [not anew and run.directory.finished(stage.name) is not None for stage in stages]
    return {place: stage for place, stage in enumerate(stages, start=1) if not done[place - 1]}


def price_of_test(run: TrainingRun, model: PreTrainedModel, models: int) -> TestPrice | None:
    """Read a batch of validation rows with the converted model, and count how many tokens the test split has."""
    options, batch = run.arguments.data, run.arguments.training.per_device_eval_batch_size
    tokens = run.task.read_tokens(TextEncoder(run.tokenizer, options), options.tested(run.splits["test"]))
    if not models or not tokens:
        return None
    rows = min(batch, len(run.data.validation))
    data = replace(run.data, validation=run.data.validation.select(range(rows)))
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        validation_loss(model, data, batch)
    seconds = (time.perf_counter() - start) * batch / rows
    return TestPrice(models, tokens, (options.block_size, batch), seconds)


def price_of_stage(run: TrainingRun, stage: TrainingStage, place: int) -> StagePrice:
    """Take a few real steps of a stage on a model of its own; see `price_of`."""
    logger.info("timing %d steps of %s", run.arguments.recipe.plan_steps or 1, stage.name)
    model = run.task.trainee(run, stage.fresh(run))
    price = _price_of_training(run, stage, place, model)
    del model
    gc.collect()
    return price


def _price_of_training(run: TrainingRun, stage: TrainingStage, place: int, model: nn.Module) -> StagePrice:
    plan, teacher = stage.plan(run), stage.teacher(run)
    kept = None if teacher is None else teacher.kept
    teacher = teacher and replace(teacher, kept=None)  # nothing is written
    other = None if teacher is None else teacher.model
    watch = StepWatch(run.arguments.training.device)
    with _trainer(run, plan, model, teacher, watch) as trainer, trainer.masters():  # as in the training itself
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        weights = size(model) + sum(map(size, filter(None, (other, *getattr(model, "_model", ())))))
        state = sum(3 * p.nbytes for p in model.parameters() if p.requires_grad)  # gradients and two moments
        left = free_memory(run.arguments.training.device)
        if state > left:
            raise OptionError(
                f"the stage {stage.name} needs {gigabytes(state)} for gradients and optimizer beside"
                f" {gigabytes(weights)} of weights, {gigabytes(left)} are left; give {what_helps(run.arguments)}"
            )
        try:
            _take_steps(trainer, watch, stage.name, plan.learning_rates[0])
            with watch.counted():
                trainer.evaluate()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OptionError(
                f"the stage {stage.name} runs out of memory in a step, {size_said(error)};"
                f" give {what_helps(run.arguments)}"
            ) from error
        adapters = trained < parameters(model)
        saved = sum(p.nbytes for p in model.parameters() if p.requires_grad or not adapters) + 2 * state // 3
        left_behind = size(model) if stage.keeps_model else 0
    trials = len(plan.candidates)
    training, rows = plan.training, round(plan.data.row_tokens)
    batch = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    steps = plan.max_steps + trials * plan.search_steps
    tokens = plan.tokens(plan.max_steps) + trials * plan.tokens(plan.search_steps)
    logits = kept.row_bytes(rows) * min(len(plan.data.train), steps * batch) if kept else 0
    return StagePrice(
        stage.name, place, tokens, steps, (rows, batch), trained, watch.seconds,
        weights + watch.peak, saved * checkpoints_at_once(training, plan.max_steps) + logits, left_behind,
    )  # fmt: skip


@contextmanager
def _trainer(
    run: TrainingRun, plan: TrainingPlan, model: nn.Module, teacher: Any, watch: StepWatch
) -> Iterator[RecoveryTrainer]:
    """Give what trains a model for `plan_steps` steps, in a folder that is gone afterwards, and validates a batch."""
    silent: Mapping[str, Any] = {"logging_strategy": "no", "disable_tqdm": True}
    training, held_out = replace(without_checkpoints(plan.training), **silent), plan.data.validation
    batch = held_out.select(range(min(len(held_out), training.eval_batch_size)))
    with tempfile.TemporaryDirectory() as folder, kept_random_states(), whole_models(), own_forward(model):
        arguments = stage_arguments(
            model, training, Path(folder), learning_rate=plan.learning_rates[0],
            max_steps=run.arguments.recipe.plan_steps or 1, report_to="none",
        )  # fmt: skip
        yield RecoveryTrainer(model, arguments, replace(plan.data, validation=batch), teacher, [watch])


def _take_steps(trainer: RecoveryTrainer, watch: StepWatch, stage: str, rate: float) -> None:
    """Train, up to the first step whose loss is not finite: the run itself tries other rates."""
    try:
        trainer.train()
    except NotFiniteError as error:
        if not watch.times:
            raise OptionError(
                f"plan_steps={trainer.state.max_steps}: the loss of the stage {stage} is not finite at step 1 with"
                f" learning rate {rate:g}, before it has changed a weight; give dtype 'float32', or plan_steps 0,"
                " which leaves out the plan"
            ) from error
        logger.warning(
            "stage %s: the loss of step %d is not finite with learning rate %g; the plan has the steps before it",
            stage, error.step, rate,
        )  # fmt: skip
    finally:
        watch.stop_counting()


def served_by(config: MechanismConfig) -> str:
    """Return what serves a layer, in words."""
    return " and ".join(names_in_layer(config)) + " in some heads" * (config.mechanism == "by_head")


def in_short(count: int) -> str:
    """Return a number in thousands or millions from ten thousand on.

    >>> in_short(9_216), in_short(262_144), in_short(4_884_480)
    ('9,216', '262 k', '4.88 M')
    """
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1e3:.0f} k" if count < 999_500 else f"{count / 1e6:.3g} M"


def in_time(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> in_time(41), in_time(571), in_time(40_000)
    ('41 s', '10 min', '11.1 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def checkpoints_at_once(training: Any, steps: int) -> int:
    """Return how many checkpoints of a training lie on disk at the worst moment: kept ones, the best, the next.

    Without a `save_total_limit` all are kept.
    """
    if getattr(training.save_strategy, "value", training.save_strategy) == "no":
        return 0
    every = training.save_steps * steps if 0 < training.save_steps < 1 else training.save_steps
    saves = math.ceil(steps / max(every, 1))
    return saves if training.save_total_limit is None else min(saves, training.save_total_limit + 2)


def free_memory(device: torch.device) -> int:
    """Return the bytes of memory that are left on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def nearest_folder(path: Path) -> Path:
    """Return the first folder above a path, or itself, that exists."""
    return path if path.is_dir() else nearest_folder(path.parent)


def parameters(model: nn.Module) -> int:
    """Return how many parameters a model has."""
    return sum(p.numel() for p in model.parameters())


def size(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
