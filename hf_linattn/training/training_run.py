"""A run of a recipe: its options, what they name, loaded and checked, and what its stages came to so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_linattn import chunk_feed_forward, is_patched, patch_model
from hf_linattn.errors import CheckpointError
from hf_linattn.evaluation.document_windows import DocumentWindows, windows_for
from hf_linattn.evaluation.next_token import TokenLosses, even_places
from hf_linattn.positions.extend import reach_max_positions
from hf_linattn.sentence_models import encoder_folder
from hf_linattn.training.arguments import Arguments, tokens_per_step
from hf_linattn.training.data import TrainingData
from hf_linattn.training.finetuning import validation_loss
from hf_linattn.training.run_directory import RunDirectory
from hf_linattn.training.same_run import COMPARED, FREE, SCORED, training_options
from hf_linattn.training.task import Task, load_model


@dataclass
class TrainingRun:
    """What the stages of a recipe are given, and where they leave their results.

    Attributes:
        arguments: the options, by group; the stage that chooses the layers sets those of the model.
        command: how the run was started. directory: its output folder.
        tokenizer: of the model. task: what the model predicts. splits: the texts. in_memory: whether they were given
            as data sets, and not named by the options. held_out: whether the test split was cut from the training one.
        data: rows of `block_size` tokens. long_data: longer ones for a last stage; None: there is no such stage.
        long_length: tokens of the windows of `long_windows`.
        speed_lengths: the lengths to time that the model has positions for.
        digests: of the content of model and data. shared_control: results of stages of another run, by name.
        results: what each finished stage of this run recorded, by name.
        position_losses: of models on held-out windows of a length, by the stage that left them, in this process.
    """

    arguments: Arguments
    command: str
    directory: RunDirectory
    tokenizer: PreTrainedTokenizerBase
    task: Task
    splits: DatasetDict
    data: TrainingData
    long_data: TrainingData | None
    long_length: int
    speed_lengths: list[int]
    in_memory: bool = False
    held_out: bool = False
    digests: dict[str, str] = field(default_factory=dict)
    shared_control: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    position_losses: dict[tuple[str, bool], TokenLosses] = field(default_factory=dict)

    @cached_property
    def options(self) -> dict[str, Any]:
        """What determines the result: all options but those in `FREE`, content of model and data, what is scored."""
        model, data, recipe, training, distillation = self.arguments
        named = asdict(model) | asdict(data) | asdict(recipe) | asdict(distillation)
        named = {name: value for name, value in named.items() if name not in FREE}
        scored = SCORED if data.completion_only else {}
        compared = {COMPARED: True} if self.task.compares_rows(self.arguments) else {}
        return named | training_options(training) | self.digests | scored | compared

    @cached_property
    def saved_dtype(self) -> torch.dtype | None:
        """The dtype of the checkpoint that is converted, which its results have too; None: it does not say."""
        name: Any = self.arguments.model.model_name_or_path
        return AutoConfig.from_pretrained(name, subfolder=encoder_folder("model_name_or_path", name)).dtype

    def steps(self, tokens: int) -> int:
        """Return how many whole optimizer steps `tokens` are."""
        return tokens // tokens_per_step(self.arguments.data, self.arguments.training)

    @property
    def calibration_rows(self) -> int:
        """How many training rows the mechanisms are fitted on: those asked for, rounded up, as far as there are."""
        tokens = self.arguments.recipe.calibration_tokens
        return min(len(self.data.train), -(-tokens // self.arguments.data.block_size))

    def load(self, path: Path | None = None, extended: bool = True) -> PreTrainedModel:
        """Load the original, or a model this run saved, onto the device of the run.

        extended: give the original the positions that were asked for.
        """
        options = self.arguments.model
        model = load_model(str(path or options.model_name_or_path), options.dtype)
        if path is None and extended and options.max_positions is not None:
            reach_max_positions(model, options.max_positions)
        if is_patched(model):
            chunk_feed_forward(model, options.chunk_feed_forward)
        return model.to(self.arguments.training.device)

    def convert(self, stages: Sequence[str] = ()) -> PreTrainedModel:
        """Load the original and patch it as asked; the mechanisms' state is that after the last of `stages` done."""
        model = patch_model(self.load(), **self.arguments.model.patch_arguments())
        done = [name for name in stages if name in self.results]
        if done:
            file = self.mechanisms_file(done[-1])
            unknown = model.load_state_dict(load_file(file), strict=False).unexpected_keys
            if unknown:
                raise CheckpointError(
                    f"{str(file)!r} holds {unknown[0]!r}, which the model lacks; give another output_dir, or"
                    " --overwrite_output_dir"
                )
        return model

    def mechanisms_file(self, stage: str) -> Path:
        """Return the file for the mechanisms' state after a stage."""
        return self.directory.file(stage, ".safetensors")

    def softmax_baseline(self) -> PreTrainedModel:
        """Load the original with our exact attention, which keeps packed rows apart in BERT too."""
        return patch_model(self.load(), "softmax", chunk_feed_forward=self.arguments.model.chunk_feed_forward)

    def batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Yield `count` training rows, from all over them, in batches on the device, masked as in validation."""
        training, rows = self.arguments.training, self.data.train
        size, chosen = training.per_device_eval_batch_size, even_places(len(rows), count)
        for first in range(0, count, size):
            batch = self.data.evaluation_collator([rows[i] for i in chosen[first : first + size]])
            yield {name: value.to(training.device) for name, value in batch.items()}

    def original(self) -> PreTrainedModel:
        """Load the original as it teaches: with its own positions where it reads windows, else the run's."""
        return self.softmax_baseline() if self.windows is None else self.load(extended=False)

    def validation_loss(self, model: PreTrainedModel) -> float:
        """Score the validation split."""
        trainee = self.task.trainee(self, model)
        return validation_loss(trainee, self.data, self.arguments.training.per_device_eval_batch_size)

    def score(self, model: PreTrainedModel) -> dict[str, Any]:
        """Score the test split: its `perplexity`, or `loss`, and what else the task reports."""
        return self.task.measure(self, model, self.arguments.data)

    @cached_property
    def windows(self) -> DocumentWindows | None:
        """In what windows the original reads documents that are too long for it; None: it reads them whole."""
        options = self.arguments.data
        if not options.document_window:
            return None
        return windows_for(self.tokenizer, options.document_window, options.document_stride)

    def score_in_windows(self, model: PreTrainedModel) -> dict[str, Any]:
        """Score a model that reads the test split in windows, its answers pooled."""
        return self.task.measure(self, model, self.arguments.data, self.windows)

    def score_cut(self, model: PreTrainedModel) -> dict[str, Any]:
        """Score a model that reads the first window of each test document alone."""
        options = self.arguments.data
        cut = replace(options, block_size=options.document_window or options.block_size)
        return self.task.measure(self, model, cut)
