"""A recipe with everything that is checked and loaded before it starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from hf_linattn import chunk_feed_forward, get_mechanisms, is_patched, patch_model
from hf_linattn.calibration import own_parameters, what_is_fitted
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.evaluation import (
    Fidelity,
    fidelity,
    position_limit,
    whole_windows,
    without_far_keys,
)
from hf_linattn.reading import read_tokenizer
from hf_linattn.training.arguments import Arguments, ModelArguments, tokens_per_step
from hf_linattn.training.block_transfer import BlockTransfer
from hf_linattn.training.board import CommandLine
from hf_linattn.training.data import TrainingData
from hf_linattn.training.distillation import Teacher, WindowDropout, add_adapters
from hf_linattn.training.finetuning import rehearse, validation_loss
from hf_linattn.training.finetuning_arguments import FinetuningArguments
from hf_linattn.training.run_directory import RunDirectory
from hf_linattn.training.same_run import FREE, model_digest, rows_digest, training_options
from hf_linattn.training.task import Reader, Task, load_model, task_of
from hf_linattn.training.transfer import AttentionTransfer, Transfer

logger = logging.getLogger(__name__)

# options that say nothing about the control: it may come from a run with others, however its learning rate was found
CONVERSION_OPTIONS = (
    "mechanism", "mechanism_options", "layers", "softmax_share", "plan", "learning_rates", "lr_search_tokens",
    "control_learning_rates", "control_dir", "kl_weight", "hidden_weight", "calibration_tokens", "speed_lengths",
    "fidelity_windows", "seed", "data_seed",
)  # fmt: skip


@dataclass
class Recipe:
    """Everything checked and loaded before the first file is written."""

    arguments: Arguments
    tokenizer: PreTrainedTokenizerBase
    splits: DatasetDict
    data: TrainingData
    task: Task
    speed_lengths: list[int]
    long_data: TrainingData | None = None
    digests: dict[str, str] = field(default_factory=dict)
    program: str = ""
    argv: Sequence[str] = ()

    @classmethod
    def prepare(cls, arguments: Arguments, program: str = "", argv: Sequence[str] = ()) -> Recipe:
        """Load model, tokenizer and text, and raise the library's errors for whatever does not fit together.

        Args:
            program, argv: how the recipe was started; an error names the command of a control that is missing.
        """
        model_options, data_options, recipe_options, training, distillation = arguments
        model = load_model(model_options.model_name_or_path or "", model_options.dtype)
        if is_patched(model):
            raise OptionError(
                f"model_name_or_path={model_options.model_name_or_path!r} is converted already; give the original"
            )
        digests = {"model_digest": model_digest(model)}
        task = task_of(model)
        task.check(model, data_options, recipe_options)
        patch_model(model, **model_options.patch_arguments())
        limit = position_limit(model)
        lengths = {"block_size": data_options.block_size, "long_block_size": distillation.long_block_size or 0}
        for name, length in lengths.items():
            if limit is not None and length > limit:
                raise OptionError(
                    f"{name}={length} is beyond the {limit} positions of {model_options.model_name_or_path!r} with its"
                    f" mechanism; give at most {limit}"
                )
        for name, tokens, found in (
            ("calibration_tokens", recipe_options.calibration_tokens, what_is_fitted),
            ("transfer_tokens", distillation.transfer_tokens, own_parameters),
        ):
            if tokens and not found(get_mechanisms(model)):
                raise OptionError(
                    f"{name}={tokens}: {model_options.mechanism!r} has no parameters of its own that could be fitted;"
                    " leave it out"
                )
        if distillation.window_dropout:
            WindowDropout(model, distillation.window_dropout)
        tokenizer = load_tokenizer(model_options)
        with training.main_process_first(local=False):
            splits = task.load(data_options)
            data = task.rows(splits, Reader(tokenizer, data_options), model, recipe_options.max_train_tokens)
            long_data = None
            if distillation.long_block_size:
                long_options = replace(data_options, block_size=distillation.long_block_size, stride=None)
                long_data = task.rows(splits, Reader(tokenizer, long_options), model, distillation.long_tokens)
        timed = [n for n in sorted(set(recipe_options.speed_lengths)) if limit is None or n <= limit]
        timed = timed or [limit or data_options.block_size]
        read = {"train": data.train, "validation": data.validation, "test": splits["test"]}
        read |= {} if long_data is None else {"long": long_data.train}
        digests |= {f"{name}_digest": rows_digest(rows) for name, rows in read.items()}
        recipe = cls(arguments, tokenizer, splits, data, task, timed, long_data, digests, program, argv)
        recipe.check_measurements()
        recipe.rehearse(model)
        return recipe

    def rehearse(self, model: PreTrainedModel) -> None:
        """Set up the Trainer of every stage of training; `OptionError` if one does not take the options.

        Args:
            model: the converted model, of which nothing is asked afterwards.
        """
        options, distillation, training = self.arguments.recipe, self.arguments.distillation, self.arguments.training
        search = self.steps(options.lr_search_tokens or 0)
        if options.control_dir is None:
            rates, steps = options.control_learning_rates or [], self.steps(options.max_train_tokens)
            rehearse(
                "control_training", lambda: model, self.data, training, learning_rate=rates[0], max_steps=steps,
                search_steps=search if len(rates) > 1 else 0,
            )  # fmt: skip
        if distillation.transfer_tokens:
            rehearse(
                "transfer", lambda: self.transfer(model), self.data, self.transfer_training,
                learning_rate=distillation.transfer_learning_rate, max_steps=self.steps(distillation.transfer_tokens),
            )  # fmt: skip
        rates, trainee = options.learning_rates or [], self.adapted
        rehearse(
            "recovered_training", lambda: trainee(model), self.data, training, learning_rate=rates[0],
            max_steps=self.recovery_steps, search_steps=search if len(rates) > 1 else 0,
        )  # fmt: skip
        if self.long_data is not None:
            rehearse(
                "long_training", lambda: model, self.long_data, self.long_training, learning_rate=rates[0],
                max_steps=self.steps(distillation.long_tokens),
            )  # fmt: skip

    @property
    def transfer_training(self) -> FinetuningArguments:
        """The options of attention transfer: nothing decays; no activations are kept from layer to layer anyway."""
        training = self.arguments.training
        names = ("gradient_checkpointing", "activation_checkpointing")  # newer transformers has the second name
        changes: dict[str, Any] = {f.name: False for f in fields(training) if f.name in names}
        return replace(training, weight_decay=0.0, **changes)

    @property
    def long_training(self) -> FinetuningArguments:
        """The options of the stage of longer rows: as many tokens to a step."""
        training, longer = self.arguments.training, self.arguments.distillation.long_block_size or 1
        shorter = training.per_device_train_batch_size * self.arguments.data.block_size // longer
        rows: dict[str, Any] = {"per_device_train_batch_size": max(1, shorter)}
        return replace(training, **rows)

    def check_measurements(self) -> None:
        """Raise now what would otherwise come up after hours: too little text, a control that does not serve."""
        if self.arguments.recipe.fidelity_windows:
            try:
                whole_windows(self.tokenizer, self.splits["test"]["text"], self.arguments.data.block_size)
            except OptionError as error:
                raise OptionError(
                    f"fidelity_windows={self.arguments.recipe.fidelity_windows}, windows of block_size in the test"
                    f" split: {error}"
                ) from error
        _ = self.lent_control

    @cached_property
    def options(self) -> dict[str, Any]:
        """What determines the result: all options but those in `FREE`, and the content of model and data."""
        model, data, recipe, training, distillation = self.arguments
        named = asdict(model) | asdict(data) | asdict(recipe) | asdict(distillation)
        named = {name: value for name, value in named.items() if name not in FREE}
        return named | training_options(training) | self.digests

    @cached_property
    def lent_control(self) -> dict[str, Any]:
        """The results of the stages that another run's control went through, if it is to serve here too."""
        training, folder = self.arguments.training, self.arguments.recipe.control_dir
        if folder is None:
            return {}
        ignored = {*CONVERSION_OPTIONS, *asdict(self.arguments.distillation), "long_digest"}
        command = CommandLine(self.argv).command_for(folder, self.program, ignored)
        return RunDirectory(folder, training).lend(("control_training", "control"), self.options, ignored, command)

    def steps(self, tokens: int) -> int:
        """Return how many whole optimizer steps `tokens` are."""
        return tokens // tokens_per_step(self.arguments.data, self.arguments.training)

    @property
    def calibration_rows(self) -> int:
        """How many training rows the mechanisms are fitted on: those asked for, rounded up, as far as there are."""
        tokens = self.arguments.recipe.calibration_tokens
        return min(len(self.data.train), -(-tokens // self.arguments.data.block_size))

    @property
    def recovery_steps(self) -> int:
        """Optimizer steps of the recovered model's training: what the other stages leave."""
        options = self.arguments.distillation
        before = self.calibration_rows * self.arguments.data.block_size + options.transfer_tokens + options.long_tokens
        return self.steps(self.arguments.recipe.max_train_tokens - before)

    def load(self, path: Path | None = None) -> PreTrainedModel:
        """Load the original, or a model this run saved, onto the device of the run."""
        options = self.arguments.model
        model = load_model(str(path or options.model_name_or_path), options.dtype)
        if is_patched(model):
            chunk_feed_forward(model, options.chunk_feed_forward)
        return model.to(self.arguments.training.device)

    def convert(self, mechanisms: Path | None = None) -> PreTrainedModel:
        """Load the original and patch it as asked; the mechanisms' state may come from a file."""
        model = patch_model(self.load(), **self.arguments.model.patch_arguments())
        if mechanisms is not None:
            unknown = model.load_state_dict(load_file(mechanisms), strict=False).unexpected_keys
            if unknown:
                raise CheckpointError(
                    f"{str(mechanisms)!r} holds {unknown[0]!r}, which the model lacks; give another output_dir, or"
                    " --overwrite_output_dir"
                )
        return model

    def exact(self) -> PreTrainedModel:
        """Load the original with our exact attention, which keeps packed rows apart in BERT too."""
        return patch_model(self.load(), "softmax", chunk_feed_forward=self.arguments.model.chunk_feed_forward)

    def transfer(self, model: PreTrainedModel) -> Transfer:
        """Return what attention transfer trains of a converted model."""
        options = self.arguments.distillation
        if options.transfer_block_layers is not None:
            return BlockTransfer(model, options.transfer_block_layers)
        weights = options.transfer_output_weight, options.transfer_weights_weight
        return AttentionTransfer(model, *weights, projected=options.transfer_projected)

    def trainee(self, mechanisms: Path | None) -> PreTrainedModel:
        """Return the converted model that recovery trains."""
        return self.adapted(self.convert(mechanisms))

    def adapted(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a converted model with adapters if they are to be trained alone."""
        options = self.arguments.distillation
        if options.lora_rank is None:
            return model
        return add_adapters(  # type: ignore[return-value]  # a PeftModel trains as the model inside it does
            model,
            options.lora_rank,
            options.lora_alpha,
            options.lora_dropout,
            options.lora_target_modules,
            options.lora_mechanisms,
            self.arguments.training.seed,
        )

    def teacher(self, inside: bool = True) -> Teacher | None:
        """Return the original with the weights of its losses; None if it is not to teach.

        `inside`: the weights under a student's adapters are still the original's.
        """
        options, losses = self.arguments.distillation, self.arguments.recipe
        if not (losses.kl_weight or losses.hidden_weight):
            return None
        return Teacher(
            None if inside and options.lora_rank is not None else self.exact(),
            losses.kl_weight,
            losses.hidden_weight,
            options.ce_weight,
            options.temperature,
            options.top_k,
            options.fading_teacher,
        )

    def callbacks(self, model: nn.Module) -> list[TrainerCallback]:
        """Return what else happens while the recovered model trains."""
        probability, seed = self.arguments.distillation.window_dropout, self.arguments.training.seed
        return [WindowDropout(model, probability, seed)] if probability else []

    def batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Yield the first `count` training rows in batches, on the device of the run, masked as in validation."""
        training, rows = self.arguments.training, self.data.train
        size = training.per_device_eval_batch_size
        for first in range(0, count, size):
            batch = self.data.evaluation_collator([rows[i] for i in range(first, min(first + size, count))])
            yield {name: value.to(training.device) for name, value in batch.items()}

    def validation_loss(self, model: PreTrainedModel) -> float:
        """Score the validation split."""
        return validation_loss(model, self.data, self.arguments.training.per_device_eval_batch_size)

    def fidelity(self, model: PreTrainedModel) -> Fidelity:
        """Compare a converted model with the original on the test split."""
        size, texts = self.arguments.data.block_size, self.splits["test"]["text"]
        prompt = size // 4
        found = fidelity(
            model, self.load(), self.tokenizer, texts, max_length=size,
            num_windows=self.arguments.recipe.fidelity_windows, prompt_length=prompt,
            new_tokens=min(64, size - prompt),
        )  # fmt: skip
        if found.linear_share is None:
            return found
        with without_far_keys(model):
            return replace(found, perplexity_without_linear=self.score(model)["perplexity"])

    def score(self, model: PreTrainedModel) -> dict[str, Any]:
        """Score the test split: its `perplexity`, and what else the task reports."""
        options, test = self.arguments.data, self.splits["test"]
        if options.max_test_documents:
            test = test.select(range(min(len(test), options.max_test_documents)))
        size = self.arguments.training.per_device_eval_batch_size
        return self.task.score(model, Reader(self.tokenizer, options), test, size)


def load_tokenizer(options: ModelArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run; `CheckpointError`, which names the option, if it cannot be read."""
    option = "tokenizer_name" if options.tokenizer_name else "model_name_or_path"
    return read_tokenizer(option, getattr(options, option))
