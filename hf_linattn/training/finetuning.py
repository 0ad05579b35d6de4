"""Fine-tuning on transformers.Trainer: one run, the search for its learning rate, and a folder that can be resumed."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING

from hf_linattn import architecture
from hf_linattn import transformers_bridge as bridge
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.running import evaluation_mode
from hf_linattn.training.arguments import DataArguments
from hf_linattn.training.data import PackedMaskingCollator, tokenize_and_pack
from hf_linattn.training.trainers import PackedData, PackedTrainer, Teacher

logger = logging.getLogger(__name__)

STAGES = "stages"  # the folder of a run that holds the results of its finished stages
RECIPE = "recipe"  # the record of the options the run was started with
TRAINER_STATE = "trainer_state.json"  # what transformers writes last into a checkpoint


# -- model and data ---------------------------------------------------------------------------------------------------


def load_language_model(name_or_path: str, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """Load a checkpoint as the language model it was saved as: causal, or masked (BERT and its kind)."""
    config = AutoConfig.from_pretrained(name_or_path)
    saved_as_causal = set(config.architectures or ()) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not saved_as_causal
    auto_class = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    return auto_class.from_pretrained(name_or_path, dtype=dtype)


def pack_splits(
    splits: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    model: nn.Module,
    data: DataArguments,
    max_train_tokens: int,
    masked: bool,
) -> PackedData:
    """Tokenise and pack the training and validation splits for `model`; `DataError` if one fills no row."""
    limits = {"train": max_train_tokens, "validation": data.max_validation_tokens}
    first = first_position(model)
    rows = {name: tokenize_and_pack(splits[name], tokenizer, data.block_size, limit) for name, limit in limits.items()}
    if first:
        rows = {
            name: dataset.map(lambda row: {"position_ids": row["position_ids"] + first})
            for name, dataset in rows.items()
        }
    if not masked:
        return PackedData(**rows)
    return PackedData(
        **rows,
        collator=PackedMaskingCollator(tokenizer, data.mlm_probability),
        evaluation_collator=PackedMaskingCollator(tokenizer, data.eval_mlm_probability, seed=0),
    )


def first_position(model: nn.Module) -> int:
    """Return the position id of a text's first token: 0, but padding_idx + 1 in RoBERTa and its kind."""
    tables = bridge.PatchedModel.of(architecture.root_model(model), {}).position_tables
    return max((first for first, _ in tables.values()), default=0)


# -- the folder of a run ----------------------------------------------------------------------------------------------


class RunDirectory:
    """An output folder in which every finished stage leaves its result, so that a rerun goes on where it stopped.

    Args:
        path: the folder. training: says which process writes and how the others wait for it.
    """

    def __init__(self, path: str | Path, training: TrainingArguments):
        self.path = Path(path)
        self.training = training

    def open(self, options: Mapping[str, Any], overwrite: bool = False, resume: bool = False) -> None:
        """Start a run, or continue the one that was started here with the same options.

        Raises:
            OptionError: the folder holds something else, or a run with other options.
            CheckpointError: `resume`, but there is nothing to resume.
        """
        with self.training.main_process_first(local=False):
            if self.training.should_save and overwrite:
                for folder in (STAGES, "control"):
                    shutil.rmtree(self.path / folder, ignore_errors=True)
            started = self.finished(RECIPE)
            if started is not None:
                self._check_options(started, json.loads(json.dumps(options)))
                logger.info("continuing the run in %s", self.path)
            elif resume:
                raise CheckpointError(
                    f"resume_from_checkpoint: {str(self.path)!r} holds no run of this recipe; leave it out"
                )
            else:
                self._check_empty(overwrite)
                self.record(RECIPE, options)

    def finished(self, name: str) -> dict[str, Any] | None:
        """Return the recorded result of a stage, or None; a damaged record raises `CheckpointError`."""
        file = self._file(name)
        if not file.is_file():
            return None
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{str(file)!r} is damaged ({error}); delete it to run that stage again") from error

    def record(self, name: str, result: Mapping[str, Any]) -> None:
        """Write the result of a stage, whole or not at all, from the main process only."""
        if not self.training.should_save:
            return
        file = self._file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, file)

    def stage(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the result of a stage that one process computes while the others wait; recorded, so done once."""
        with self.training.main_process_first(local=False):
            result = self.finished(name)
            if result is None:
                logger.info("stage %s", name)
                self.record(name, compute())
                result = self.finished(name) or {}
        return result

    def checkpoints(self, name: str) -> Path:
        """Return the folder for the Trainer's checkpoints of a stage."""
        return self._file(name).with_suffix("")

    def _file(self, name: str) -> Path:
        return self.path / STAGES / f"{name}.json"

    def _check_empty(self, overwrite: bool) -> None:
        """Refuse a folder with anything in it, unless it may be overwritten."""
        if self.path.exists() and not self.path.is_dir():
            raise OptionError(f"output_dir={str(self.path)!r} is not a folder; give another path")
        content = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
        if content and not overwrite:
            raise OptionError(
                f"output_dir={str(self.path)!r} holds {', '.join(content[:3])} but no run that could be continued;"
                " give another output_dir, or --overwrite_output_dir"
            )

    def _check_options(self, started: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Refuse to continue a run with other options than it was started with."""
        for name in sorted(started.keys() | options.keys()):
            if started.get(name) != options.get(name):
                raise OptionError(
                    f"output_dir={str(self.path)!r} holds a run with {name}={started.get(name)!r}, got"
                    f" {options.get(name)!r}; give another output_dir, or --overwrite_output_dir"
                )


def last_complete_checkpoint(folder: Path) -> str | None:
    """Return the newest Trainer checkpoint that was written to its end, or None; unfinished ones are passed over."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in found:
        if (path / TRAINER_STATE).is_file():
            return str(path)
        logger.warning("%s is half-written (no %s) and not used", path, TRAINER_STATE)
    return None


# -- training ---------------------------------------------------------------------------------------------------------


def fine_tune(
    model: nn.Module,
    data: PackedData,
    training: TrainingArguments,
    folder: Path,
    *,
    learning_rate: float,
    max_steps: int,
    keep_checkpoints: bool = True,
    teacher: Teacher | None = None,
) -> dict[str, Any]:
    """Train `model` in place for `max_steps` steps and return what it came to.

    With checkpoints a run interrupted in `folder` goes on from the last complete one, and `load_best_model_at_end`
    leaves the weights with the lowest validation loss in the model. Rows are repeated as often as the steps need. With
    a `teacher` the model learns from it beside the text.

    Returns:
        `learning_rate`, `eval_loss` (mean nats per predicted token, of the weights left in the model; None if not
        finite), `steps`, `seconds` (of this call) and `history` (the Trainer's log).
    """
    changes: dict[str, Any] = (
        {} if keep_checkpoints else {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    )
    arguments = dataclasses.replace(
        training,
        output_dir=str(folder),
        learning_rate=learning_rate,
        max_steps=max_steps,
        remove_unused_columns=False,  # position_ids must arrive, or packed documents see each other
        prediction_loss_only=True,
        dataloader_pin_memory=training.dataloader_pin_memory and training.device.type != "cpu",
        resume_from_checkpoint=None,
        **changes,
    )
    config: Any = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    checkpoint = last_complete_checkpoint(folder) if keep_checkpoints else None
    trainer = PackedTrainer(model, arguments, data, teacher)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - start
    loss = trainer.state.best_metric if arguments.load_best_model_at_end else trainer.evaluate()["eval_loss"]
    if use_cache is not None:
        config.use_cache = use_cache  # the Trainer switched it off, and it would be saved so
    return {
        "learning_rate": learning_rate,
        "eval_loss": loss if loss is not None and math.isfinite(loss) else None,
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "history": _finite(trainer.state.log_history),
    }


def recover(
    run: RunDirectory,
    name: str,
    make_model: Callable[[], PreTrainedModel],
    data: PackedData,
    learning_rates: Sequence[float],
    search_steps: int,
    max_steps: int,
    save_to: Path,
    teacher: Teacher | None = None,
) -> dict[str, Any]:
    """Fine-tune a model with the learning rate that serves it best, save it to `save_to`, and return the result.

    Every candidate trains a fresh model for `search_steps` through the whole schedule; the lowest validation loss
    wins and gets the full run. Each part is recorded in `run` and not repeated by a rerun.

    Raises:
        OptionError: training diverged with every learning rate.
        CheckpointError: the saved model does not compute what the trained one does.
    """
    done = run.finished(name)
    if done is not None:
        return done
    candidates = learning_rates if len(learning_rates) > 1 else []
    trials = [_try(run, f"{name}-{rate:g}", make_model, data, rate, search_steps, teacher) for rate in candidates]
    losses = {trial["learning_rate"]: trial["eval_loss"] for trial in trials}
    learning_rate = select_learning_rate(losses) if losses else learning_rates[0]
    logger.info("stage %s: learning rate %g, %d steps", name, learning_rate, max_steps)
    model, folder = make_model(), run.checkpoints(name)
    result = fine_tune(
        model, data, run.training, folder, learning_rate=learning_rate, max_steps=max_steps, teacher=teacher
    )
    if result["eval_loss"] is None:
        raise OptionError(f"learning_rate={learning_rate:g}: training of {name} diverged; give lower learning_rates")
    result["search"] = [{"learning_rate": rate, "eval_loss": loss} for rate, loss in losses.items()]
    if run.training.should_save:
        model.save_pretrained(save_to)
        verify_saved(model, save_to, data.validation[:1]["input_ids"])
    run.record(name, result)
    if run.training.should_save:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def select_learning_rate(losses: Mapping[float, float | None]) -> float:
    """Return the learning rate with the lowest validation loss; None stands for a run that diverged.

    >>> select_learning_rate({3e-4: 2.5, 1e-3: 2.25, 3e-3: None})
    0.001
    """
    finite = {rate: loss for rate, loss in losses.items() if loss is not None and math.isfinite(loss)}
    if not finite:
        raise OptionError(f"learning_rates={list(losses)}: training diverged with each of them; give lower ones")
    return min(finite, key=finite.__getitem__)


def verify_saved(model: PreTrainedModel, path: Path, input_ids: Tensor) -> None:
    """Load `path` through the Auto classes; `CheckpointError` unless its logits are those of `model`, bit for bit.

    Args:
        input_ids: int64 [B, N], on any device.
    """
    device: Any = model.device
    loaded, input_ids = load_language_model(str(path), dtype=model.dtype).to(device), input_ids.to(device)
    with evaluation_mode(model), evaluation_mode(loaded), torch.no_grad():
        equal = torch.equal(model(input_ids=input_ids).logits, loaded(input_ids=input_ids).logits)
    if not equal:
        raise CheckpointError(f"{str(path)!r}: the reloaded logits differ from the trained model's; save again")


def _try(
    run: RunDirectory,
    name: str,
    make_model: Callable[[], PreTrainedModel],
    data: PackedData,
    learning_rate: float,
    max_steps: int,
    teacher: Teacher | None,
) -> dict[str, Any]:
    """One search run, recorded."""
    result = run.finished(name)
    if result is None:
        logger.info("stage %s: %d steps", name, max_steps)
        folder = run.checkpoints(name)
        result = fine_tune(
            make_model(),
            data,
            run.training,
            folder,
            learning_rate=learning_rate,
            max_steps=max_steps,
            keep_checkpoints=False,
            teacher=teacher,
        )
        run.record(name, result)
        if run.training.should_save:
            shutil.rmtree(folder, ignore_errors=True)
    return result


def _finite(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The Trainer's log with None for what JSON cannot say."""
    return [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        for entry in history
    ]
