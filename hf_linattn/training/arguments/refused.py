"""Options of transformers' TrainingArguments that the stages of a recipe cannot honour: refused before anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_linattn.config import require
from hf_linattn.errors import OptionError, did_you_mean
from hf_linattn.training.arguments.trainer import FinetuningArguments

# by name: why nothing but the default will do, and what to do instead
REFUSED = {
    "num_train_epochs": "the length of a run is given by max_train_tokens",
    "auto_find_batch_size": "a run counts the tokens of its steps; give per_device_train_batch_size",
    "enable_jit_checkpoint": "a run that was killed goes on from its last checkpoint by itself; lower save_steps and"
        " eval_steps",
    "save_only_model": "a run cannot go on from a checkpoint without its optimizer",
    "ignore_data_skip": "a run that goes on would see rows twice",
    "bf16_full_eval": "it rounds the weights that are trained; bf16 evaluates in bfloat16, too",
    "fp16_full_eval": "it rounds the weights that are trained; fp16 evaluates in float16, too",
    "eval_on_start": "the loss before training is measured by stages of their own",
    "label_names": "rows have the column labels",
    "greater_is_better": "the best weights are those with the lowest validation loss",
    "push_to_hub": "a recipe saves to output_dir; run hf-linattn push on it",
    "use_liger_kernel": "its kernels are for models as they were, and keep back the logits",
}
LEAST = {
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1,
    "save_total_limit": 1,  # transformers takes 0 for all
    "weight_decay": 0, "mechanism_weight_decay": 0, "attention_weight_decay": 0, "head_weight_decay": 0,
    "mechanism_rate": 0, "attention_rate": 0, "head_rate": 0,
    "eval_steps": 0, "save_steps": 0, "logging_steps": 0, "neftune_noise_alpha": 0,
}  # fmt: skip
LOSSES = (None, "loss", "eval_loss")  # what an evaluation measures


def check_stages(training: FinetuningArguments, given: Collection[str] = ()) -> None:
    """Raise `OptionError` for an option of a training that a stage would not honour, or die of after hours.

    given: names of options that were given, at their defaults, too.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(training)}
    for name, reason in REFUSED.items():
        value = getattr(training, name, None)
        if value and (name in given or value != defaults.get(name)):
            raise OptionError(f"{name}={value!r}: {reason}; leave it out")
    on_cpu = training.use_cpu or not torch.accelerator.is_available()
    if training.fp16 and on_cpu:  # of accelerate launch, too
        raise OptionError("fp16=True: on a CPU it is left out, and all is computed in float32; give bf16 true instead")
    for name, least in LEAST.items():
        value = getattr(training, name)
        require(name, value, value is None or value >= least, f"at least {least}")
    rate, smoothing = training.learning_rate, training.label_smoothing_factor
    require("learning_rate", rate, rate is None or (rate > 0 and math.isfinite(rate)), "above 0 and finite, or absent")
    require("label_smoothing_factor", smoothing, 0 <= smoothing < 1, "at least 0 and below 1")
    schedule = training.lr_scheduler_kwargs
    require("lr_scheduler_kwargs", schedule, isinstance(schedule, Mapping | None), 'JSON like {"num_cycles": 3}')
    metric = training.metric_for_best_model
    require("metric_for_best_model", metric, metric in LOSSES, "'loss', which is all that an evaluation measures")
    patience = training.early_stopping_patience
    require("early_stopping_patience", patience, patience is None or patience >= 1, "an integer >= 1, or absent")
    evaluated = getattr(training.eval_strategy, "value", training.eval_strategy) != "no"
    require("early_stopping_patience", patience, patience is None or evaluated, "absent where eval_strategy is 'no'")
    check_best(training)
    resumed, folder = training.resume_from_checkpoint, Path(training.output_dir or "")
    own = resumed in (None, "True") or Path(resumed).expanduser().resolve() == folder
    require("resume_from_checkpoint", resumed, own, "'True', the output_dir, whose last checkpoint goes on, or absent")
    check_reports(training.report_to)


def check_best(training: FinetuningArguments) -> None:
    """Raise `OptionError` where weights are evaluated that are not saved: the best of them could not be kept."""
    by_steps = getattr(training.save_strategy, "value", training.save_strategy) == "steps"
    saved, evaluated = training.save_steps, training.eval_steps
    kept = saved == evaluated or not (by_steps and training.load_best_model_at_end)
    expected = f"eval_steps={evaluated}, as the best weights may be any that are evaluated, or save_strategy 'best'"
    require("save_steps", saved, kept, expected)


def check_reports(names: str | list[str] | None) -> None:
    """Raise `OptionError` unless the packages that a training reports to are known and installed."""
    installed = get_available_reporting_integrations()
    for name in [names] if isinstance(names, str) else names or []:
        if name not in INTEGRATION_TO_CALLBACK:
            raise OptionError(f"report_to={name!r} is not known{did_you_mean(name, INTEGRATION_TO_CALLBACK)}")
        if name not in installed and name != "flyte":  # which is not among those that are looked for
            raise OptionError(f"report_to={name!r}: the package is not installed; install it, or leave report_to out")
