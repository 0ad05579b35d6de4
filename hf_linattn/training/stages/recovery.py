"""The stages that train a whole model on text: the control, and the converted model that is to recover."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from hf_linattn import chunk_feed_forward, is_patched
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.inference import evaluation_mode, set_aside
from hf_linattn.training.adapter_files import save_adapter
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.arguments import FULL, LORA
from hf_linattn.training.finetuning import Trained, fine_tune, without_checkpoints
from hf_linattn.training.losses.distillation import Teacher
from hf_linattn.training.losses.kept_logits import KeptLogits
from hf_linattn.training.not_finite import with_halved_rates
from hf_linattn.training.parameter_groups import cast_as_loaded
from hf_linattn.training.run_folders import ADAPTER, CONTROL
from hf_linattn.training.stages.training import TrainingPlan, TrainingStage
from hf_linattn.training.task import Task, load_model
from hf_linattn.training.training_run import TrainingRun
from hf_linattn.training.window_dropout import WindowDropout

logger = logging.getLogger(__name__)
ALIGNMENT = 64  # bytes that PyTorch's own tensors on a CPU begin at a multiple of


class ModelTraining(TrainingStage):
    """Fine-tune a model with the learning rate that serves it best, and save it.

    Every candidate trains a fresh model for `search_steps` through the whole schedule; the lowest validation loss
    wins and gets the full run. Each part is recorded and not repeated by a rerun.

    Raises:
        OptionError: training diverged with every learning rate, or the full run with half and a quarter of it too.
        CheckpointError: the saved model does not compute what the trained one does.
    """

    rate_option = "learning_rates"

    def folder(self, context: TrainingRun) -> Path:
        """Return where the trained model goes."""
        raise NotImplementedError

    def is_last(self, context: TrainingRun) -> bool:
        """Return whether no stage goes on with the model, which then gets the dtype of the original's checkpoint."""
        return True

    def callbacks(self, context: TrainingRun, model: nn.Module) -> Sequence[TrainerCallback]:
        """Return what else happens while the model trains."""
        return ()

    def train(self, context: TrainingRun, plan: TrainingPlan) -> dict[str, Any]:
        teacher = self.teacher(context)
        losses = {rate: self.try_rate(context, plan, rate, teacher) for rate in plan.candidates}
        learning_rate = select_learning_rate(losses) if losses else plan.learning_rates[0]
        logger.info("stage %s: learning rate %g, %d steps", self.name, learning_rate, plan.max_steps)
        made: dict[str, Any] = {}  # the model and its training, of which the last is kept

        def train(rate: float) -> tuple[Trained, int | None]:
            model = made["model"] = self.make_model(context)
            trained = fine_tune(
                context.task.trainee(context, model), plan.data, plan.training,
                context.directory.checkpoints(self.name), learning_rate=rate, max_steps=plan.max_steps,
                teacher=teacher, callbacks=self.callbacks(context, model),
            )  # fmt: skip
            return trained, trained.result.get("not_finite")

        trained, _ = with_halved_rates(self.name, self.rate_option, learning_rate, context.directory, train)
        result, model = trained.result, made["model"]
        result["tokens"] = plan.tokens(result["steps"])
        result["trained"] = LORA if isinstance(model, PeftModel) else FULL
        result["search"] = [{"learning_rate": rate, "eval_loss": loss} for rate, loss in losses.items()]
        training = context.arguments.training
        with training.main_process_first(local=False):  # the others go on when the model is there
            if training.should_save:
                self.save(context, plan, model, trained)
                if teacher is not None and teacher.kept is not None and self.is_last(context):
                    shutil.rmtree(teacher.kept.folder, ignore_errors=True)
                context.directory.finish(self.name, result)
        return result

    def try_rate(self, context: TrainingRun, plan: TrainingPlan, rate: float, teacher: Teacher | None) -> float | None:
        """Return the validation loss after one run of the search, recorded; None if it diverged."""
        name = f"{self.name}-{rate:g}"
        result = context.directory.finished(name)
        if result is None:
            logger.info("stage %s: %d steps", name, plan.search_steps)
            model = self.make_model(context)
            result, _ = fine_tune(
                context.task.trainee(context, model), plan.data, without_checkpoints(plan.training),
                context.directory.checkpoints(name), learning_rate=rate, max_steps=plan.search_steps, teacher=teacher,
                callbacks=self.callbacks(context, model),
            )  # fmt: skip
            context.directory.finish(name, result)
        return result["eval_loss"]

    def keep_adapter(self, context: TrainingRun, adapted: PeftModel) -> None:
        """Write the adapters of a trained model, if they are asked for, before they are merged."""

    def save(self, context: TrainingRun, plan: TrainingPlan, model: Any, trained: Trained) -> None:
        """Write the trained model, without adapters, and see that it loads as it is."""
        if trained.state is not None:
            model = self.make_model(context)
            context.task.trainee(context, model).load_state_dict(trained.state)
        if isinstance(model, PeftModel):
            self.keep_adapter(context, model)
            model = model.merge_and_unload()  # type: ignore[operator]
        folder = self.folder(context)
        if self.is_last(context):
            cast_as_loaded(model, context.saved_dtype)
        context.task.save(model, folder)
        verify_saved(model, folder, torch.as_tensor(plan.data.validation[0]["input_ids"])[None], context.task)


class ControlTraining(ModelTraining):
    """The original on as many tokens: what the text alone does, to all weights or to adapters."""

    name = "control_training"
    rate_option = "control_learning_rates"

    def plan(self, context: TrainingRun) -> TrainingPlan:
        options = context.arguments.recipe
        return TrainingPlan(
            context.data,
            context.arguments.training,
            options.control_learning_rates or (),
            context.steps(options.max_train_tokens),
            context.steps(options.lr_search_tokens or 0),
        )

    def make_model(self, context: TrainingRun) -> nn.Module:
        return self.with_adapters(context, context.softmax_baseline())

    def with_adapters(self, context: TrainingRun, model: PreTrainedModel) -> nn.Module:
        """Return a model to compare with, with adapters if these are to be trained alone."""
        return model if context.arguments.control_trains == FULL else adapted(context, model)

    def folder(self, context: TrainingRun) -> Path:
        return context.directory.path / CONTROL


class RecoveredTraining(ModelTraining):
    """The converted model: all of its weights, or adapters and the mechanisms; with or without a teacher."""

    name = "recovered_training"
    inputs: tuple[str, ...] = ("calibration", "transfer")

    def plan(self, context: TrainingRun) -> TrainingPlan:
        options, distillation = context.arguments.recipe, context.arguments.distillation
        calibrated = context.calibration_rows * context.arguments.data.block_size
        before = calibrated + distillation.transfer_tokens + distillation.long_tokens
        return TrainingPlan(
            context.data,
            context.arguments.training,
            options.learning_rates or (),
            context.steps(options.max_train_tokens - before),
            context.steps(options.lr_search_tokens or 0),
        )

    def make_model(self, context: TrainingRun) -> nn.Module:
        return self.trained_part(context, context.convert(self.inputs))

    def trained_part(self, context: TrainingRun, model: PreTrainedModel) -> nn.Module:
        return adapted(context, model)

    def folder(self, context: TrainingRun) -> Path:
        directory = context.directory
        return directory.path if context.long_data is None else directory.file(self.name, "_model")

    def adapter_folder(self, context: TrainingRun) -> Path:
        """Return where the adapters go, if they are kept."""
        directory = context.directory
        return directory.path / ADAPTER if self.is_last(context) else directory.file(self.name, "_adapter")

    def keep_adapter(self, context: TrainingRun, adapted: PeftModel) -> None:
        if context.arguments.distillation.save_adapter is None:
            return
        options, last = context.arguments.model, self.is_last(context)
        save_adapter(
            adapted, self.adapter_folder(context), str(options.model_name_or_path), options.max_positions,
            context.saved_dtype if last else None, self.merged_before(context),
        )  # fmt: skip

    def merged_before(self, context: TrainingRun) -> Path | None:
        """Return the folder of the adapters that were merged into the model before it was trained here, if any."""
        return None

    def teacher(self, context: TrainingRun) -> Teacher | None:
        # the weights under a student's adapters are still the original's
        # unless it reads windows, with the positions that it came with
        own_model = context.arguments.distillation.lora_rank is None or context.windows is not None
        return make_teacher(context, own_model)

    def is_last(self, context: TrainingRun) -> bool:
        return context.long_data is None

    def callbacks(self, context: TrainingRun, model: nn.Module) -> Sequence[TrainerCallback]:
        probability, seed = context.arguments.distillation.window_dropout, context.arguments.training.seed
        return [WindowDropout(model, probability, seed)] if probability else []


def adapted(context: TrainingRun, model: PreTrainedModel) -> nn.Module:
    """Return a converted model with adapters if they are to be trained alone."""
    options = context.arguments.distillation
    if options.lora_rank is None:
        return model
    return add_adapters(
        model,
        options.lora_rank,
        options.lora_alpha,
        options.lora_dropout,
        options.lora_target_modules,
        options.lora_mechanisms,
        context.arguments.training.seed,
    )


def make_teacher(context: TrainingRun, own_model: bool) -> Teacher | None:
    """Return the original with the weights of its losses; None if it is not to teach.

    Args:
        own_model: load the original; else the student is its own teacher, with its adapters off.
    """
    options, losses = context.arguments.distillation, context.arguments.recipe
    if context.task.has_own_loss or not (losses.kl_weight or losses.hidden_weight):
        return None
    training, folder = context.arguments.training, context.directory.file("teacher_logits", "")
    kept = KeptLogits(folder, options.top_k, training.process_index) if options.keep_logits and options.top_k else None
    return Teacher(
        context.original() if own_model else None,
        losses.kl_weight,
        losses.hidden_weight,
        options.ce_weight,
        options.temperature,
        options.top_k,
        options.fading_teacher,
        context.windows,
        kept,
    )


def select_learning_rate(losses: Mapping[float, float | None]) -> float:
    """Return the learning rate with the lowest validation loss; None stands for a run that diverged.

    >>> select_learning_rate({3e-4: 2.5, 1e-3: 2.25, 3e-3: None})
    0.001
    """
    finite = {rate: loss for rate, loss in losses.items() if loss is not None and math.isfinite(loss)}
    if not finite:
        raise OptionError(f"learning_rates={list(losses)}: training diverged with each of them; give lower ones")
    return min(finite, key=finite.__getitem__)


def verify_saved(model: PreTrainedModel, path: Path, input_ids: Tensor, task: Task) -> None:
    """Load `path` as it will be loaded; `CheckpointError` unless its logits are those of `model`, bit for bit.

    The weights of both are moved where PyTorch places its own, see `align`.

    Args:
        input_ids: int64 [B, N], on any device. task: whose answers are compared, embeddings in place of logits.
    """
    device: Any = model.device
    if is_patched(model):
        chunk_feed_forward(model, None)  # the loaded one has no chunks; on several threads they would be rounded apart

    def answers(asked: PreTrainedModel) -> Tensor:
        with evaluation_mode(asked), torch.no_grad():
            return task.answers(asked, input_ids.to(device))

    align(model)
    expected = answers(model)
    with set_aside(model):
        loaded: Any = load_model(str(path), dtype=model.dtype)
        align(loaded)
        equal = torch.equal(expected, answers(loaded.to(device)))
    if not equal:
        raise CheckpointError(f"{str(path)!r}: the reloaded logits differ from the trained model's; save again")


def align(model: nn.Module) -> None:
    """Move weights that a file had begin anywhere to where PyTorch places its own: a matrix product rounds by that."""
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
