"""Convert a pretrained language model to a subquadratic mechanism, recover its quality, and measure what came of it.

    accelerate launch recipes/finetune.py recipes/gpt2/performer.yaml --output_dir out/gpt2-performer

Options come from flags, from a YAML file of the same names, or both; recipes/README.md lists them. A rerun of the same
command continues an interrupted run.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_linattn import calibrate, get_mechanisms, get_patch_config, is_patched, patch_model, unpatch_model
from hf_linattn.calibration import own_parameters
from hf_linattn.errors import HfLinattnError, OptionError
from hf_linattn.evaluation import (
    is_masked_language_model,
    measure_memory,
    measure_speed,
    perplexity,
    position_limit,
)
from hf_linattn.report import (
    Evaluation,
    Perplexities,
    Report,
    Training,
    collect_provenance,
    four_model_table,
    save_report,
)
from hf_linattn.training.arguments import Arguments, parse_arguments, tokens_per_step
from hf_linattn.training.data import load_text_splits
from hf_linattn.training.finetuning import RunDirectory, load_language_model, pack_splits, recover
from hf_linattn.training.trainers import PackedData, Teacher

logger = logging.getLogger("finetune")

# options of transformers.TrainingArguments that change the result: a run continues only with the same ones
RESULT_OPTIONS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "lr_scheduler_type", "warmup_steps",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim", "seed", "data_seed", "bf16",
    "fp16", "load_best_model_at_end", "eval_steps",
)  # fmt: skip


@dataclass
class Recipe:
    """Everything checked and loaded before the first file is written."""

    arguments: Arguments
    tokenizer: PreTrainedTokenizerBase
    splits: DatasetDict
    data: PackedData
    masked: bool
    speed_lengths: list[int]

    @classmethod
    def prepare(cls, arguments: Arguments) -> Recipe:
        """Load model, tokenizer and text, and raise the library's errors for whatever does not fit together."""
        model_options, data_options, recipe_options, training = arguments
        model = load_language_model(model_options.model_name_or_path, model_options.dtype)
        if is_patched(model):
            raise OptionError(
                f"model_name_or_path={model_options.model_name_or_path!r} is converted already; give the original"
            )
        limit = position_limit(model)
        if limit is not None and data_options.block_size > limit:
            raise OptionError(
                f"block_size={data_options.block_size} is beyond the {limit} positions of"
                f" {model_options.model_name_or_path!r}; give at most {limit}"
            )
        masked = is_masked_language_model(model)
        if masked and data_options.stride is not None:
            raise OptionError(f"stride={data_options.stride}: windows of a masked model do not overlap; leave it out")
        patch_model(model, **model_options.patch_arguments())
        if recipe_options.calibration_tokens and not own_parameters(get_mechanisms(model)):
            raise OptionError(
                f"calibration_tokens={recipe_options.calibration_tokens}: {model_options.mechanism!r} has no"
                " parameters of its own that could be fitted; leave it out"
            )
        tokenizer = AutoTokenizer.from_pretrained(model_options.tokenizer_name or model_options.model_name_or_path)
        with training.main_process_first(local=False):
            splits = load_text_splits(
                data_options.dataset_name,
                data_options.dataset_config_name,
                data_options.train_file,
                data_options.validation_file,
                data_options.test_file,
                data_options.text_column,
            )
            data = pack_splits(splits, tokenizer, model, data_options, recipe_options.max_train_tokens, masked)
        lengths = [n for n in sorted(set(recipe_options.speed_lengths)) if limit is None or n <= limit]
        return cls(arguments, tokenizer, splits, data, masked, lengths or [limit])

    @cached_property
    def options(self) -> dict[str, Any]:
        """What determines the result."""
        model_options, data_options, recipe_options, training = self.arguments
        named = asdict(model_options) | asdict(data_options) | asdict(recipe_options)
        del named["overwrite_output_dir"]
        return named | {name: _plain(getattr(training, name)) for name in RESULT_OPTIONS}

    @property
    def stride(self) -> int | None:
        """By how many tokens test windows advance; None for a masked model, whose windows do not overlap."""
        data_options = self.arguments[1]
        return None if self.masked else data_options.stride or max(1, data_options.block_size // 2)

    def load(self, path: Path | None = None) -> PreTrainedModel:
        """Load the original, or a model this run saved, onto the device of the run."""
        model_options, _, _, training = self.arguments
        model = load_language_model(str(path or model_options.model_name_or_path), model_options.dtype)
        return model.to(training.device)

    def convert(self) -> PreTrainedModel:
        """Load the original and patch it as asked."""
        return patch_model(self.load(), **self.arguments[0].patch_arguments())

    @property
    def calibration_rows(self) -> int:
        """How many training rows the mechanisms are fitted on: those asked for, rounded up, as far as there are."""
        _, data_options, recipe_options, _ = self.arguments
        return min(len(self.data.train), -(-recipe_options.calibration_tokens // data_options.block_size))

    @cached_property
    def calibration(self) -> dict[str, dict[str, Tensor]]:
        """Path -> state of its mechanism after calibration, made once for all runs of the search."""
        training, rows, count = self.arguments[-1], self.data.train, self.calibration_rows
        model, size = self.convert(), training.per_device_eval_batch_size
        chosen = ([rows[i] for i in range(start, min(start + size, count))] for start in range(0, count, size))
        batches = ({k: v.to(training.device) for k, v in self.data.evaluation_collator(x).items()} for x in chosen)
        calibrate(model, batches, progress=not training.disable_tqdm)
        return {path: mechanism.state_dict() for path, mechanism in get_mechanisms(model).items()}

    def trainee(self) -> PreTrainedModel:
        """Return the converted model, calibrated if that was asked for: what training starts from."""
        model = self.convert()
        if self.arguments[2].calibration_tokens:
            for path, mechanism in get_mechanisms(model).items():
                mechanism.load_state_dict(self.calibration[path])
        return model

    def exact(self) -> PreTrainedModel:
        """Load the original with our exact attention, which keeps packed rows apart in BERT too."""
        return patch_model(self.load(), "softmax")

    def teacher(self) -> Teacher | None:
        """Return the original with the weights of its losses; None if it is not to teach."""
        options = self.arguments[2]
        if not (options.kl_weight or options.hidden_weight):
            return None
        return Teacher(self.exact(), options.kl_weight, options.hidden_weight)

    def perplexity(self, model: PreTrainedModel) -> dict[str, Any]:
        """Score the test split."""
        _, data_options, _, training = self.arguments
        share = {"mask_probability": data_options.eval_mlm_probability} if self.masked else {}
        return dict(
            perplexity(
                model,
                self.tokenizer,
                self.splits["test"]["text"][: data_options.max_test_documents],
                max_length=data_options.block_size,
                batch_size=training.per_device_eval_batch_size,
                stride=self.stride,
                **share,
            )
        )


def run_recipe(recipe: Recipe, run: RunDirectory, command: str) -> Report:
    """Run the stages, each only if its result is not recorded yet, and return the report."""
    _, data_options, recipe_options, training = recipe.arguments
    step = tokens_per_step(data_options, training)
    schedule: dict[str, Any] = {
        "learning_rates": recipe_options.learning_rates,
        "search_steps": recipe_options.lr_search_tokens // step,
        "max_steps": recipe_options.max_train_tokens // step,
    }
    control_path = run.path / "control"
    scores = {
        "original": run.stage("original", lambda: recipe.perplexity(recipe.load())),
        "converted": run.stage("converted", lambda: recipe.perplexity(recipe.convert())),
    }
    control = recover(run, "control_training", recipe.exact, recipe.data, save_to=control_path, **schedule)
    scores["control"] = run.stage("control", lambda: recipe.perplexity(unpatch_model(recipe.load(control_path))))
    recovered = recover(
        run, "recovered_training", recipe.trainee, recipe.data, save_to=run.path, teacher=recipe.teacher(), **schedule
    )
    scores["recovered"] = run.stage("recovered", lambda: recipe.perplexity(recipe.load(run.path)))
    if training.should_save:
        for path in (control_path, run.path):
            recipe.tokenizer.save_pretrained(path)

    def report() -> dict[str, Any]:
        files = save_report(build_report(recipe, recipe.load(run.path), scores, control, recovered, command), run.path)
        return {"files": [file.name for file in files]}

    run.stage("report", report)
    return Report.load(run.path)


def build_report(
    recipe: Recipe,
    model: PreTrainedModel,
    scores: dict[str, dict[str, Any]],
    control: dict[str, Any],
    recovered: dict[str, Any],
    command: str,
) -> Report:
    """Measure speed and memory of the recovered model beside its original attention, and put everything together."""
    model_options, data_options, recipe_options, training = recipe.arguments
    rates = tuple(recipe_options.learning_rates)
    step = tokens_per_step(data_options, training)
    mechanisms = {config.mechanism for config in get_patch_config(model).layers.values()}
    layers = {"layers": model_options.layers} if model_options.layers else {}
    files = [getattr(data_options, f"{split}_file") for split in recipe.splits]
    sources = [data_options.dataset_name, data_options.dataset_config_name, *files]
    return Report(
        base_model=model_options.model_name_or_path,
        mechanism="+".join(sorted(mechanisms)),
        options=(model_options.mechanism_options or {}) | layers,
        data=", ".join(filter(None, sources)) or "documentation of Python's standard library",
        perplexity=Perplexities(**{name: score["perplexity"] for name, score in scores.items()}),
        evaluation=Evaluation(data_options.block_size, scores["recovered"]["num_tokens"], recipe.stride),
        training=Training(
            tokens=recipe_options.max_train_tokens // step * step,
            recovered_learning_rate=recovered["learning_rate"],
            control_learning_rate=control["learning_rate"],
            learning_rate_grid=rates,
            search_tokens=recipe_options.lr_search_tokens // step * step if len(rates) > 1 else 0,
            calibration_tokens=recipe.calibration_rows * data_options.block_size,
            kl_weight=recipe_options.kl_weight,
            hidden_weight=recipe_options.hidden_weight,
        ),
        provenance=collect_provenance(training.seed, command, device=model.device, dtype=model.dtype),
        speed=tuple(measure_speed(model, recipe.speed_lengths)),
        memory=tuple(measure_memory(model, recipe.speed_lengths)),
    )


def main(argv: Sequence[str] | None = None) -> Report:
    """Run the recipe with command-line arguments; print the table of the four models and return the report."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(argv)
    training = arguments[-1]
    logging.basicConfig(level=logging.INFO if training.should_log else logging.WARNING, format="%(message)s")
    recipe = Recipe.prepare(arguments)
    run = RunDirectory(training.output_dir, training)
    run.open(recipe.options, arguments[2].overwrite_output_dir, training.resume_from_checkpoint is not None)
    report = run_recipe(recipe, run, shlex.join(["accelerate", "launch", "recipes/finetune.py", *argv]))
    if training.should_log:
        console = Console()
        console.print(four_model_table(report))
        console.print(f"saved to {run.path}; reloaded from there, its logits are bit-equal", soft_wrap=True)
    return report


def _plain(value: Any) -> Any:
    """Enumerations as their values."""
    return getattr(value, "value", value)


if __name__ == "__main__":
    try:
        main()
    except HfLinattnError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
