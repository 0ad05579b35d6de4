"""transformers' Trainer for packed rows: plain, and taught by the original model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_callback import PrinterCallback

from hf_linattn.evaluation.perplexity import is_masked_language_model
from hf_linattn.training.distillation import Teacher, distillation_loss

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedData:
    """Packed rows, and how they become batches; `evaluation_collator` gives the same batch every time."""

    train: Dataset
    validation: Dataset
    collator: Callable[..., Any] = default_data_collator
    evaluation_collator: Callable[..., Any] = default_data_collator


class PackedTrainer(Trainer):
    """A Trainer for packed rows, which masks the validation rows in the same way every time.

    With a `teacher` the training loss is ce_weight cross-entropy + kl_weight KL + hidden_weight hidden: every token
    then says what all layers should make of it, and not the predicted ones alone. The validation loss stays the
    cross-entropy.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        data: PackedData,
        teacher: Teacher | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ):
        super().__init__(
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.validation,
            data_collator=data.collator,
            callbacks=[StopAtDivergence(), *callbacks],
        )
        self.data_collator: Callable[..., Any]
        self.remove_callback(PrinterCallback)  # prints with a bare print where progress bars are off
        self.evaluation_collator = data.evaluation_collator
        self.teacher = teacher
        if teacher is not None and teacher.model is not None:
            teacher.model.to(args.device).eval().requires_grad_(False)
            teacher.model.config.use_cache = False  # with a cache, packed documents would see each other

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        training_collator, self.data_collator = self.data_collator, self.evaluation_collator
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = training_collator

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if self.teacher is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = {**inputs, "output_hidden_states": bool(self.teacher.hidden_weight)}
        example = self.teacher.example(model, inputs)  # first: switching adapters off and on disturbs gradients
        loss, output = super().compute_loss(model, inputs, True, num_items_in_batch)
        masked = is_masked_language_model(self.accelerator.unwrap_model(model))
        labels = inputs["labels"]
        counted = num_items_in_batch if self.model_accepts_loss_kwargs else None
        divergence, hidden = distillation_loss(output, example, labels, self.teacher, masked, counted)
        if counted is not None:
            # as with the cross-entropy, the Trainer adds up what accumulated batches and averages what processes say
            processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            divergence = divergence * processes
            hidden = hidden / self.args.gradient_accumulation_steps
        authority = self.teacher.authority(self.state.global_step, self.state.max_steps)
        loss = self.teacher.ce_weight * loss + authority * (divergence + hidden)
        return (loss, output) if return_outputs else loss


class StopAtDivergence(TrainerCallback):
    """End a run whose training loss is no longer finite: nothing better can come."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if not math.isfinite((logs or {}).get("loss", 0.0)):
            logger.warning("the training loss is %s at step %d; the run ends here", logs["loss"], state.global_step)
            control.should_training_stop = True
