"""One training on transformers.Trainer: run, resumed, or set up without a step to see that its options fit."""

from __future__ import annotations

import dataclasses
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_linattn import architecture
from hf_linattn.errors import DataError, HfLinattnError, OptionError
from hf_linattn.inference import accepted, evaluation_mode
from hf_linattn.mechanisms import Mechanism
from hf_linattn.reading import one_line
from hf_linattn.training.arguments import FinetuningArguments
from hf_linattn.training.checkpoints import has_ended, last_complete_checkpoint, read_state
from hf_linattn.training.classification import SequenceClassification, weighted_loss
from hf_linattn.training.data import IGNORED_LABEL, TrainingData
from hf_linattn.training.losses.chunks import cross_entropy_by_chunks, separate_head
from hf_linattn.training.losses.distillation import Teacher
from hf_linattn.training.losses.loss_module import LossModule
from hf_linattn.training.not_finite import NotFiniteError
from hf_linattn.training.random_states import kept_random_states
from hf_linattn.training.speed import Clock, Speed, product_dtype
from hf_linattn.training.task import task_of
from hf_linattn.training.trainers import RecoveryTrainer

logger = logging.getLogger(__name__)

# at what: options of the loss of a language model and of its embeddings, which another loss does not have
OF_TEXT = {"label_smoothing_factor": 0.0, "neftune_noise_alpha": None}
WRAPPED = ("forward", "_original_forward")  # what Accelerate writes on a model that it prepares for mixed precision
# what Trainers, optimizers, schedules, adapters and data loaders raise for options that do not fit
SETUP_ERRORS = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError)


class Trained(NamedTuple):
    """What `fine_tune` returns."""

    result: dict[str, Any]
    state: dict[str, Tensor] | None = None


def fine_tune(
    model: nn.Module,
    data: TrainingData,
    training: FinetuningArguments,
    folder: Path,
    *,
    learning_rate: float,
    max_steps: int,
    teacher: Teacher | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trained:
    """Train `model` in place for `max_steps` steps and return what it came to.

    A run interrupted in `folder` goes on from the last complete checkpoint and takes the steps that were left.
    `load_best_model_at_end` leaves the weights with the lowest validation loss in the model. Rows are repeated as
    often as the steps need. With a `teacher` the model learns from it beside the text.

    Args:
        training: its options; `without_checkpoints` makes those of a run that only tries a learning rate.

    Returns:
        result: `learning_rate`, `eval_loss` (mean nats per predicted token, of the weights left in the model; None if
        not finite), `steps`, `seconds` (of all calls, see `Clock`), `history` (the Trainer's log), what `Speed` found
        of this call and, where the training ended because a loss was not finite, `not_finite`, its step. state: the
        whole weights, on the main process, if training sharded the model (FSDP, ZeRO-3), which then is of no more
        use; else None.
    """
    arguments = stage_arguments(model, training, folder, learning_rate=learning_rate, max_steps=max_steps)
    with training.main_process_first(local=False):  # it may write
        checkpoint = last_complete_checkpoint(folder, training.world_size)
    saved = None if checkpoint is None else read_state(Path(checkpoint))
    own = next((p.dtype for p in model.parameters() if p.ndim > 1), torch.float32)
    speed = Speed(data.row_tokens, product_dtype(arguments, own))
    loss, state = None, None
    with whole_models(), own_forward(model), own_cache(model):
        clock = Clock.resumed(saved)
        trainer = RecoveryTrainer(model, arguments, data, teacher, [speed, clock, *callbacks])
        trainer.has_ended = saved is not None and has_ended(saved, max_steps)
        if training.early_stopping_patience:
            trainer.add_callback(early_stopping(training.early_stopping_patience, saved))
        with trainer.masters():
            broken = _train(trainer, checkpoint, speed)
        seconds = clock.seconds
        if broken is None:
            loss = trainer.state.best_metric if arguments.load_best_model_at_end else None
            loss = trainer.evaluate()["eval_loss"] if loss is None else loss  # shorter than eval_steps: none yet
            state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.shards else None
    if broken is None and (loss is None or not math.isfinite(loss)):
        broken, loss = trainer.state.global_step, None
    result = {
        "learning_rate": learning_rate,
        "eval_loss": loss,
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "history": _finite(trainer.state.log_history),
        **speed.result(arguments),
    }
    return Trained(result if broken is None else result | {"not_finite": broken}, state)


def _train(trainer: RecoveryTrainer, checkpoint: str | None, speed: Speed) -> int | None:
    """Train, and return the step whose loss was not finite; None if there was none."""
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except NotFiniteError as error:
        return error.step
    finally:
        speed.stop_counting()
    return None


@contextmanager
def whole_models() -> Iterator[None]:
    """Have models loaded whole afterwards: a Trainer under ZeRO-3 makes each of them an empty shard."""
    try:
        yield
    finally:
        unset_hf_deepspeed_config()


@contextmanager
def own_cache(model: nn.Module) -> Iterator[None]:
    """Give a model its `use_cache` back: the Trainer switches it off, and it would be saved so."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    try:
        yield
    finally:
        if before is not None:
            config.use_cache = before


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Give a model its `forward` back: Accelerate puts one in mixed precision in its place, and leaves it there."""
    before = {name: model.__dict__[name] for name in WRAPPED if name in model.__dict__}
    try:
        yield
    finally:
        for name in WRAPPED:
            model.__dict__.pop(name, None)
        model.__dict__.update(before)


def early_stopping(patience: int, saved: Mapping[str, Any] | None) -> EarlyStoppingCallback:
    """Return what ends a training that gets no better; `saved`, the state of a checkpoint, says how patient it was."""
    callback = EarlyStoppingCallback(patience)
    recorded = (saved or {}).get("stateful_callbacks", {}).get(type(callback).__name__, {})
    for name, value in recorded.get("attributes", {}).items():
        setattr(callback, name, value)
    return callback


@torch.no_grad()
def validation_loss(model: nn.Module, data: TrainingData, batch_size: int) -> float:
    """Return the mean nats per predicted token, or text, of the validation rows, in this process alone.

    model: a model, or a `LossModule` on an encoder, whose loss is a mean over the texts.
    """
    if isinstance(model, LossModule):
        return _mean_loss(model, data, batch_size)
    task, total, count = task_of(model), 0.0, 0
    head = None if isinstance(task, SequenceClassification) else separate_head(model)
    with evaluation_mode(model):
        for batch in DataLoader(data.validation, batch_size, collate_fn=data.evaluation_collator):  # type: ignore
            inputs = {name: value.to(architecture.root_model(model).device) for name, value in batch.items()}
            inputs |= accepted(model, use_cache=False)
            predicted = int((task.predicted(inputs["labels"]) != IGNORED_LABEL).sum())
            count += predicted
            if head is not None:
                total += float(cross_entropy_by_chunks(model, head, inputs)[0].logits)
                continue
            output = model(**inputs)
            weights = data.class_weights
            loss = weighted_loss(output.logits, inputs["labels"], weights) if weights else output.loss
            total += float(loss) * predicted if predicted else 0.0  # the mean of none is no number
    if not count:
        raise DataError(
            f"the validation rows, {len(data.validation)}, have no token to predict; raise max_validation_tokens, or"
            " eval_mlm_probability where tokens are masked"
        )
    return total / count


def _mean_loss(model: LossModule, data: TrainingData, batch_size: int) -> float:
    """Return the mean loss of the validation rows."""
    total, device = 0.0, next(model.parameters()).device
    with evaluation_mode(model):
        rows = model.evaluation_rows or batch_size
        for batch in DataLoader(data.validation, rows, collate_fn=data.evaluation_collator):  # type: ignore
            inputs = {name: value.to(device) for name, value in batch.items()}
            total += float(model(**inputs)["loss"]) * len(batch["input_ids"])
    return total / len(data.validation)


def rehearse(
    stage: str,
    make_model: Callable[[], nn.Module],
    data: TrainingData,
    training: FinetuningArguments,
    *,
    learning_rate: float,
    max_steps: int,
    search_steps: int = 0,
) -> None:
    """Set up the Trainers of a stage as `fine_tune` will, without a step, so that what they refuse is said before.

    Args:
        search_steps: of the runs that search for a learning rate; 0: there are none.

    Raises:
        OptionError: a Trainer, its data loader, optimizer or schedule cannot be made with these options.
    """
    with tempfile.TemporaryDirectory() as folder, kept_random_states(), whole_models():
        try:
            model = make_model()
            for searches, steps in ((False, max_steps), (True, search_steps)):
                if not steps:
                    continue
                options = without_checkpoints(training) if searches else training
                arguments = stage_arguments(
                    model, options, Path(folder), learning_rate=learning_rate, max_steps=steps, report_to="none"
                )
                trainer = RecoveryTrainer(model, arguments, data)
                trainer.get_train_dataloader()
                check_model(model, arguments)
                check_sharding(stage, model, trainer)
                if not trainer.shards:  # which makes its own
                    trainer.create_optimizer_and_scheduler(steps)
        except HfLinattnError:
            raise
        except SETUP_ERRORS as error:
            raise OptionError(
                f"the stage {stage} cannot be set up with the options of this training:"
                f" {type(error).__name__}: {one_line(error)}; change or leave out the option that this is about"
            ) from error


def without_checkpoints(training: FinetuningArguments) -> FinetuningArguments:
    """Return the options of a run that tries a learning rate: evaluated at its end alone, and not kept."""
    changes: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    return dataclasses.replace(training, early_stopping_patience=None, **changes)


def check_model(model: nn.Module, arguments: FinetuningArguments) -> None:
    """Raise now what a model raises in the first step of a training with these options."""
    if isinstance(model, LossModule):  # whose trainings are asked for neither
        return
    root: Any = architecture.root_model(model)
    if arguments.neftune_noise_alpha is not None:
        root.get_input_embeddings()
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # newer transformers has the first name
        if getattr(arguments, name, None) and not root.supports_gradient_checkpointing:
            raise OptionError(f"{name}=True: {type(root).__name__} cannot compute activations anew; leave it out")


def check_sharding(stage: str, model: nn.Module, trainer: RecoveryTrainer) -> None:
    """Raise `OptionError` for what cannot be sharded, in the first step: weights of two layers, several dtypes as one.
    """
    if trainer.splits_layers and any(part.borrowed() for part in model.modules() if isinstance(part, Mechanism)):
        raise OptionError(
            f"the stage {stage} has layers that read weights of another one, as sharing='layers' of 'linformer' says,"
            " and FSDP and ZeRO-3 keep those sharded meanwhile; give sharing 'kv' or 'heads', or train with DDP"
        )
    if not trainer.is_fsdp_enabled:
        return
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if trainer.accelerator.mixed_precision == "no" and len(trained) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in trained))
        raise OptionError(
            f"the stage {stage} trains parameters in {names}, such as mechanisms beside adapters, and FSDP shards"
            " those of a layer as one; give bf16 true, which trains all in float32, or dtype 'float32'"
        )


def stage_arguments(
    model: nn.Module, training: FinetuningArguments, folder: Path, **changes: Any
) -> FinetuningArguments:
    """Return the options of the run as one Trainer of it needs them; raises what transformers says of them."""
    if isinstance(model, LossModule):
        changes |= {name: value for name, value in OF_TEXT.items() if getattr(training, name) != value}
        changes |= {"per_device_eval_batch_size": model.evaluation_rows} if model.evaluation_rows else {}
    changes |= {
        "output_dir": str(folder),
        "remove_unused_columns": False,  # position_ids must arrive, or packed documents see each other
        "prediction_loss_only": True,
        "dataloader_pin_memory": training.dataloader_pin_memory and training.device.type != "cpu",
        "resume_from_checkpoint": None,
    }
    return dataclasses.replace(training, **changes)


def _finite(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The Trainer's log with None for what JSON cannot say."""
    return [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        for entry in history
    ]
