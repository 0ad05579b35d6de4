"""Fine-tuning on transformers.Trainer: one run, the search for its learning rate, and saving what came of it."""

from __future__ import annotations

import dataclasses
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PreTrainedModel, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_linattn import architecture, chunk_feed_forward, is_patched
from hf_linattn.errors import CheckpointError, HfLinattnError, OptionError
from hf_linattn.reading import one_line
from hf_linattn.running import accepted, evaluation_mode
from hf_linattn.training.arguments import FinetuningArguments
from hf_linattn.training.checkpoints import has_ended, last_complete_checkpoint, read_state
from hf_linattn.training.data import IGNORED_LABEL, TrainingData
from hf_linattn.training.losses.distillation import Teacher
from hf_linattn.training.losses.loss_module import LossModule
from hf_linattn.training.run_directory import RunDirectory
from hf_linattn.training.task import load_model, task_of
from hf_linattn.training.trainers import RecoveryTrainer

logger = logging.getLogger(__name__)

# at what: options of the loss of a language model and of its embeddings, which an objective of its own has not
OF_TEXT = {"label_smoothing_factor": 0.0, "neftune_noise_alpha": None}
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
    keep_checkpoints: bool = True,
    teacher: Teacher | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trained:
    """Train `model` in place for `max_steps` steps and return what it came to.

    With checkpoints a run interrupted in `folder` goes on from the last complete one and takes the steps that were
    left, and `load_best_model_at_end`
    leaves the weights with the lowest validation loss in the model. Rows are repeated as often as the steps need. With
    a `teacher` the model learns from it beside the text.

    Returns:
        result: `learning_rate`, `eval_loss` (mean nats per predicted token, of the weights left in the model; None if
        not finite), `steps`, `seconds` (of this call) and `history` (the Trainer's log). state: the whole weights, on
        the main process, if training sharded the model (FSDP, ZeRO-3), which then is of no more use; else None.
    """
    arguments = _stage_arguments(
        model, training, folder, keep_checkpoints, learning_rate=learning_rate, max_steps=max_steps
    )
    config: Any = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    checkpoint = last_complete_checkpoint(folder, training.world_size) if keep_checkpoints else None
    saved = None if checkpoint is None else read_state(Path(checkpoint))
    trainer = RecoveryTrainer(model, arguments, data, teacher, callbacks)
    trainer.has_ended = saved is not None and has_ended(saved, max_steps)
    if keep_checkpoints and training.early_stopping_patience:
        trainer.add_callback(early_stopping(training.early_stopping_patience, saved))
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - start
    loss = trainer.state.best_metric if arguments.load_best_model_at_end else trainer.evaluate()["eval_loss"]
    if use_cache is not None:
        config.use_cache = use_cache  # the Trainer switched it off, and it would be saved so
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None
    unset_hf_deepspeed_config()  # the Trainer set it, see `FinetuningArguments`
    result = {
        "learning_rate": learning_rate,
        "eval_loss": loss if loss is not None and math.isfinite(loss) else None,
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "history": _finite(trainer.state.log_history),
    }
    return Trained(result, state)


def early_stopping(patience: int, saved: Mapping[str, Any] | None) -> EarlyStoppingCallback:
    """Return what ends a training that gets no better; `saved`, the state of a checkpoint, says how patient it was."""
    callback = EarlyStoppingCallback(patience)
    recorded = (saved or {}).get("stateful_callbacks", {}).get(type(callback).__name__, {})
    for name, value in recorded.get("attributes", {}).items():
        setattr(callback, name, value)
    return callback


@torch.no_grad()
def validation_loss(model: PreTrainedModel, data: TrainingData, batch_size: int) -> float:
    """Return the mean nats per predicted token, or text, of the validation rows, in this process alone."""
    task, total, count = task_of(model), 0.0, 0
    with evaluation_mode(model):
        for batch in DataLoader(data.validation, batch_size, collate_fn=data.evaluation_collator):  # type: ignore
            inputs = {name: value.to(model.device) for name, value in batch.items()}
            predicted = int((task.predicted(inputs["labels"]) != IGNORED_LABEL).sum())
            total += float(model(**inputs, **accepted(model, use_cache=False)).loss) * predicted
            count += predicted
    return total / count


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
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        try:
            model = make_model()
            for keep, steps in ((True, max_steps), (False, search_steps)):
                if not steps:
                    continue
                arguments = _stage_arguments(
                    model, training, Path(folder), keep, learning_rate=learning_rate, max_steps=steps, report_to="none"
                )
                trainer = RecoveryTrainer(model, arguments, data)
                trainer.get_train_dataloader()
                check_model(model, arguments)
                if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):  # they make their own
                    trainer.create_optimizer_and_scheduler(steps)
        except HfLinattnError:
            raise
        except SETUP_ERRORS as error:
            raise OptionError(
                f"the stage {stage} cannot be set up with the options of this training:"
                f" {type(error).__name__}: {one_line(error)}; change or leave out the option that this is about"
            ) from error
        finally:
            unset_hf_deepspeed_config()


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


def _stage_arguments(
    model: nn.Module, training: FinetuningArguments, folder: Path, keep_checkpoints: bool, **changes: Any
) -> FinetuningArguments:
    """Return the options of the run as one Trainer of it needs them; raises what transformers says of them."""
    if not keep_checkpoints:
        changes |= {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    if isinstance(model, LossModule):
        changes |= {name: value for name, value in OF_TEXT.items() if getattr(training, name) != value}
    changes |= {
        "output_dir": str(folder),
        "remove_unused_columns": False,  # position_ids must arrive, or packed documents see each other
        "prediction_loss_only": True,
        "dataloader_pin_memory": training.dataloader_pin_memory and training.device.type != "cpu",
        "resume_from_checkpoint": None,
    }
    return dataclasses.replace(training, **changes)


def recover(
    run: RunDirectory,
    name: str,
    make_model: Callable[[], PreTrainedModel],
    data: TrainingData,
    learning_rates: Sequence[float],
    search_steps: int,
    max_steps: int,
    save_to: Path,
    teacher: Teacher | None = None,
    make_callbacks: Callable[[nn.Module], Sequence[TrainerCallback]] = lambda model: (),
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
    trials = [
        _try(run, f"{name}-{rate:g}", make_model, data, rate, search_steps, teacher, make_callbacks)
        for rate in candidates
    ]
    losses = {trial["learning_rate"]: trial["eval_loss"] for trial in trials}
    learning_rate = select_learning_rate(losses) if losses else learning_rates[0]
    logger.info("stage %s: learning rate %g, %d steps", name, learning_rate, max_steps)
    model, folder = make_model(), run.checkpoints(name)
    result, state = fine_tune(
        model, data, run.training, folder, learning_rate=learning_rate, max_steps=max_steps, teacher=teacher,
        callbacks=make_callbacks(model),
    )  # fmt: skip
    if result["eval_loss"] is None:
        raise OptionError(f"learning_rate={learning_rate:g}: training of {name} diverged; give lower learning_rates")
    result["search"] = [{"learning_rate": rate, "eval_loss": loss} for rate, loss in losses.items()]
    if run.training.should_save:
        if state is not None:
            model = make_model()
            model.load_state_dict(state)
        if isinstance(model, PeftModel):
            model = model.merge_and_unload()  # type: ignore[operator]  # what is saved has no adapters
        model.save_pretrained(save_to)
        verify_saved(model, save_to, torch.as_tensor(data.validation[0]["input_ids"])[None])
    run.finish(name, result)
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
    loaded, input_ids = load_model(str(path), dtype=model.dtype).to(device), input_ids.to(device)
    if is_patched(model):
        chunk_feed_forward(model, None)  # the loaded one has no chunks; on several threads they would be rounded apart
    with evaluation_mode(model), evaluation_mode(loaded), torch.no_grad():
        equal = torch.equal(model(input_ids=input_ids).logits, loaded(input_ids=input_ids).logits)
    if not equal:
        raise CheckpointError(f"{str(path)!r}: the reloaded logits differ from the trained model's; save again")


def _try(
    run: RunDirectory,
    name: str,
    make_model: Callable[[], PreTrainedModel],
    data: TrainingData,
    learning_rate: float,
    max_steps: int,
    teacher: Teacher | None,
    make_callbacks: Callable[[nn.Module], Sequence[TrainerCallback]],
) -> dict[str, Any]:
    """One search run, recorded."""
    result = run.finished(name)
    if result is None:
        logger.info("stage %s: %d steps", name, max_steps)
        model = make_model()
        result, _ = fine_tune(
            model, data, run.training, run.checkpoints(name), learning_rate=learning_rate, max_steps=max_steps,
            keep_checkpoints=False, teacher=teacher, callbacks=make_callbacks(model),
        )  # fmt: skip
        run.finish(name, result)
    return result


def _finite(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The Trainer's log with None for what JSON cannot say."""
    return [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        for entry in history
    ]
