"""What `--help` of a recipe prints: every option, in groups, with its default."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from rich.console import Console

from hf_linattn.training.arguments.refused import REFUSED

ASKED = frozenset({"-h", "--help"})
USAGE = "[config.yaml | recipe:NAME] [--option value ...]"
DESCRIPTION = (
    "Options are flags, entries of a YAML file, or both; a row overrides the file, a flag both. Mappings are JSON."
)
NOT_TAKEN = "options of transformers.TrainingArguments that no recipe takes"
# by title: names, or patterns of them, in the order in which they are tried; then the class of an option decides
GROUPS: dict[str, tuple[str, ...]] = {
    NOT_TAKEN: ("max_steps", *REFUSED),
    "report: what is measured, logged and said": (
        "plan_steps", "dry_run", "position_windows", "speed_lengths", "fidelity_windows", "long_windows",
        "text_samples", "report_to", "run_name", "project", "trackio_*", "logging_*", "log_*",
        "disable_tqdm", "skip_memory_metrics", "include_*", "debug",
    ),
    "output, evaluations and checkpoints": (
        "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "eval_*", "save_*", "load_best_*", "metric_*",
        "early_stopping_*", "per_device_eval_*", "*_full_eval", "batch_eval_metrics", "prediction_loss_only",
        "restore_*",
    ),
    "teacher: attention transfer, adapters and distillation": ("kl_weight", "hidden_weight", "calibration_tokens"),
    "processes and hardware": (
        "use_cpu", "ddp_*", "fsdp*", "deepspeed", "dataloader_*", "torch_compile*", "tf32", "accelerator_*",
        "parallelism_*", "local_rank", "*_checkpointing*", "use_cache", "torch_empty_*", "average_tokens_*",
        "liger_*",
    ),
    "the Hub": ("hub_*",),
}  # fmt: skip
CLASSES = {
    "ModelArguments": "model",
    "DataArguments": "data",
    "RecipeArguments": "training: tokens, learning rates, optimizer",
    "FinetuningArguments": "training: tokens, learning rates, optimizer",
    "DistillationArguments": "teacher: attention transfer, adapters and distillation",
}
ORDER = (
    "model", "data", "training: tokens, learning rates, optimizer",
    "teacher: attention transfer, adapters and distillation", "report: what is measured, logged and said",
    "output, evaluations and checkpoints", "processes and hardware", "the Hub", NOT_TAKEN,
)  # fmt: skip


def help_if_asked(
    argv: Sequence[str],
    program: str,
    kinds: Sequence[type],
    groups: Mapping[str, Sequence[str]] | None = None,
    console: Console | None = None,
) -> None:
    """Print the help if a command line asks for it.

    Args:
        program: how it was started. kinds: the dataclasses of its options; without `groups` a YAML file may be given.
        groups: title -> names or patterns of options; None: those of the recipes that convert.
        console: takes the text; None: standard output.

    Raises:
        SystemExit: with code 0, when it is printed.
    """
    if not ASKED.isdisjoint(argv):
        text = help_text(program, kinds, groups)
        (console or Console()).print(text, markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(0)


def help_text(program: str, kinds: Sequence[type], groups: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the text of `--help`; see `help_if_asked`."""
    usage, said = (f"{program} {USAGE}", DESCRIPTION) if groups is None else (f"{program} [--option value ...]", None)
    parser = argparse.ArgumentParser(program, usage=usage, description=said, add_help=False)
    found: dict[str, list[Any]] = {title: [] for title in groups or ORDER}
    for kind in kinds:
        for option in (f for f in dataclasses.fields(kind) if f.init):
            found[_title(option.name, kind, groups or GROUPS)].append(option)
    for title, options in found.items():
        group = parser.add_argument_group(title)  # one without options is not printed
        for option in options:
            said = " ".join(_said(option)).replace("%%", "%").replace("%", "%%")  # argparse fills in what follows one
            group.add_argument(f"--{option.name}", metavar="VALUE", help=said)
    return parser.format_help().replace("usage:", "Usage:", 1)


def _title(name: str, kind: type, groups: Mapping[str, Sequence[str]]) -> str:
    """Return the group of an option."""
    for title, patterns in groups.items():
        if any(fnmatch(name, pattern) for pattern in patterns):
            return title
    return CLASSES[kind.__name__]


def _said(option: Any) -> Iterator[str]:
    """Yield what is said of an option: why it is refused, or its help and default."""
    if option.name in REFUSED:
        yield f"Refused: {REFUSED[option.name]}."
        return
    yield " ".join(str(option.metadata.get("help", "As in transformers.TrainingArguments.")).split())
    default = option.default
    if default is dataclasses.MISSING and option.default_factory is not dataclasses.MISSING:
        default = option.default_factory()
    if isinstance(default, list):
        default = " ".join(map(str, default))
    if default not in (None, "", dataclasses.MISSING):
        yield f"Default: {getattr(default, 'value', default)}."
