"""A recipe from its command line to its report: stages, each done once."""

from __future__ import annotations

import gc
import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from rich.console import Console
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers.utils import logging as transformers_logging

from hf_linattn.report import Report, four_model_table, stage_table
from hf_linattn.training.arguments import read_arguments
from hf_linattn.training.arguments.help import help_if_asked
from hf_linattn.training.memory_limits import naming_memory
from hf_linattn.training.preparation import prepare
from hf_linattn.training.price import price_of
from hf_linattn.training.stages import stages_of
from hf_linattn.training.training_run import TrainingRun

logger = logging.getLogger(__name__)


def run_recipe(run: TrainingRun) -> Report:
    """Run the stages, each only if its result is not recorded yet, and return the report."""
    stages = stages_of(run.arguments)
    for place, stage in enumerate(stages, start=1):
        done = run.directory.finished(stage.name) is not None
        logger.info("stage %d of %d: %s%s", place, len(stages), stage.name, ", done before" if done else "")
        where = f"{place} of {len(stages)}, {stage.name}"
        divisible = not run.task.compares_rows(run.arguments)
        with naming_memory(stage.name, run.arguments, divisible), saying_where_it_stopped(run, where):
            run.results[stage.name] = stage.run(run)
        gc.collect()  # its models; modules may refer to each other in a ring
    return Report.load(run.directory.path)


@contextmanager
def saying_where_it_stopped(run: TrainingRun, stage: str) -> Iterator[None]:
    """Log, where Ctrl-C ends a stage, that the run can go on."""
    try:
        yield
    except KeyboardInterrupt:
        if run.arguments.training.should_log:
            anew = " without overwrite_output_dir" if run.arguments.recipe.overwrite_output_dir else ""
            folder = run.directory.path
            logger.warning("stopped in stage %s; the same command%s goes on from there, in %s", stage, anew, folder)
        raise


def main(argv: Sequence[str], kinds: Sequence[type], program: str, console: Console | None = None) -> Report:
    """Run a recipe with command-line arguments; print the table of the four models and return the report.

    Args:
        kinds: the groups of options it takes. program: how it was started, for the command that the report names.
        console: takes the tables; None: standard output.

    Raises:
        SystemExit: with code 0, when the help, or with `dry_run` the plan, is printed.
    """
    help_if_asked(argv, program, kinds, console=console)
    arguments = read_arguments(argv, kinds)
    training = arguments.training
    level = logging.INFO if training.should_log else logging.WARNING
    # lines of the log above a bar, not inside it
    with own_log(level), without_loading_bars(), logging_redirect_tqdm():
        return carry_out(prepare(arguments, program, argv), console)


@contextmanager
def own_log(level: int) -> Iterator[None]:
    """Show what this library logs from a level on, and of others warnings alone, not each request to the Hub."""
    logging.basicConfig(format="%(message)s")
    own = logging.getLogger("hf_linattn")
    before = own.level
    own.setLevel(level)
    try:
        yield
    finally:
        own.setLevel(before)


@contextmanager
def without_loading_bars() -> Iterator[None]:
    """Show no bar for weights read and written, which a run does a dozen times; downloads keep theirs."""
    shown, downloads = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    if downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def carry_out(run: TrainingRun, console: Console | None = None) -> Report:
    """Print the plan of a run, run it, print its tables and return the report; see `main`."""
    training, recipe = run.arguments.training, run.arguments.recipe
    console = console or Console()
    if recipe.plan_steps:
        price = price_of(run)
        if training.should_log and (price.stages or recipe.dry_run):
            console.print(price.table())
    if recipe.dry_run:
        console.print("nothing was written; without --dry_run the run begins", soft_wrap=True)
        raise SystemExit(0)
    resume = training.resume_from_checkpoint is not None
    try:
        run.directory.open(run.options, recipe.overwrite_output_dir, resume)
        report = run_recipe(run)
    finally:
        run.directory.close()
    if training.should_log:
        console.print(four_model_table(report))
        console.print(stage_table(report))
        folder = run.directory.path
        console.print(f"saved to {folder}; reloaded from there, what it computes is bit-equal", soft_wrap=True)
        console.print(f"look at it: hf-linattn report {shlex.quote(str(folder))} --html page.html", soft_wrap=True)
    return report
