"""transformers' Trainer for recovery: plain, and taught by the original model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput

from hf_linattn import architecture
from hf_linattn.architecture import root_model
from hf_linattn.chunked_sums import chunk_rows, sum_by_chunks
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.inference import without_labels
from hf_linattn.reading import one_line
from hf_linattn.training.classification import Regression, SequenceClassification, weighted_loss
from hf_linattn.training.data import IGNORED_LABEL, TrainingData
from hf_linattn.training.losses.chunks import cast_once, cross_entropy_by_chunks, replaced_head, same, separate_head
from hf_linattn.training.losses.distillation import Teacher, check_teacher, distillation_loss, hidden_error
from hf_linattn.training.losses.kept_logits import likeliest
from hf_linattn.training.losses.loss_module import LossModule
from hf_linattn.training.losses.shared_layers import shared_layers
from hf_linattn.training.masking import MaskedAnew, PackedMaskingCollator
from hf_linattn.training.not_finite import NotFiniteError, has_finite_weights
from hf_linattn.training.parameter_groups import float32_masters, group_parameters, initial_rates
from hf_linattn.training.progress import Progress, StepBar
from hf_linattn.training.task import task_of


class RecoveryTrainer(Trainer):
    """A Trainer that masks the validation rows in the same way every time and weighs every predicted token alike.

    With a `teacher` the training loss is ce_weight cross-entropy + kl_weight KL + hidden_weight hidden: every token
    then says what all layers should make of it, and not the predicted ones alone. The validation loss stays the
    cross-entropy, and is not smoothed where `label_smoothing_factor` smooths that of training. Weights of classes
    count in both.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        data: TrainingData,
        teacher: Teacher | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ):
        super().__init__(
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.validation,
            data_collator=data.collator,
            callbacks=[Progress(data.row_tokens), *callbacks],
        )
        if isinstance(data.collator, PackedMaskingCollator):
            self.add_callback(MaskedAnew(data.collator))
        self.data_collator: Callable[..., Any]
        self.remove_callback(PrinterCallback)  # prints with a bare print where progress bars are off
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(StepBar)
        self.evaluation_collator = data.evaluation_collator
        self.teacher = teacher
        self.label_smoother = None  # transformers' knows models by their names, and smooths the validation loss too
        self.smoothing: float = args.label_smoothing_factor
        self.class_weights = data.class_weights
        self.has_ended = False  # before it was resumed: there is no step left to take
        self._broken: Tensor | None = None  # whether a loss of the step so far is not finite
        self._losses: list[Tensor] = []  # of an evaluation's batches: the sum, and over how many predictions
        self._own_loss = isinstance(model, LossModule)  # which has no logits
        self._averages = False
        self._mean_rows: float | None = None  # of the batches of this step
        self.model_accepts_loss_kwargs: bool
        if self.model_accepts_loss_kwargs:
            # some models take the number of predicted tokens, but give the mean over their own batch all the same
            self.model_accepts_loss_kwargs = not isinstance(task_of(model), SequenceClassification)
            forward = inspect.unwrap(type(architecture.root_model(model)).forward)
            self._averages = "loss_function" not in forward.__code__.co_names
        if teacher is not None and teacher.model is not None:
            check_teacher(model, teacher.model)
            teacher.model.to(args.device).eval().requires_grad_(False)
            teacher.model.config.use_cache = False  # with a cache, packed documents would see each other
        self._head = self._head_of_chunks()
        # with a hidden_weight all layers' states are compared, and noise on embeddings is the student's alone
        alone = self._head is None or bool(teacher and teacher.hidden_weight) or args.neftune_noise_alpha is not None
        self._shared = None if alone or teacher is None else shared_layers(model, teacher.model)
        if teacher is not None and teacher.kept is not None and self._head is None:
            raise OptionError(
                "keep_logits=True: logits are kept where they are made some positions at a time, which this model, or"
                " fp16, torch_compile, FSDP or DeepSpeed, does not do; leave keep_logits out"
            )

    @property
    def shards(self) -> bool:
        """Whether each process holds a part of every parameter (FSDP, DeepSpeed)."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    @property
    def splits_layers(self) -> bool:
        """Whether each process has a part of a layer's weights until the layer runs (FSDP, ZeRO-3)."""
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        return self.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)

    def masters(self) -> AbstractContextManager[None]:
        """Train small parameters in float32, see `float32_masters`; not where those of a layer are sharded as one."""
        return nullcontext() if self.shards else float32_masters(self.model)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the optimizer, in whose groups mechanisms and attention have the rates of their own."""
        made = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if made:
            group_parameters(optimizer, self.model, self.args, self.get_decay_parameter_names(self.model))
        return optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both, with the learning rates of this training: a checkpoint may have been left with others."""
        scheduler: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        # the schedule is asked first, as DeepSpeed has loaded the optimizer by now
        rates = getattr(scheduler, "base_lrs", None) or initial_rates(self.optimizer)
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except ValueError as error:
            raise CheckpointError(
                f"{str(Path(checkpoint or '').parent)!r} holds checkpoints of an optimizer with other parameters, as"
                f" of another version ({one_line(error)}); delete this folder, and the stage begins anew"
            ) from error
        groups = self.optimizer.param_groups  # others, as loading makes them anew
        found = initial_rates(self.optimizer)
        if checkpoint is None or found == rates:
            return
        for group, before, rate in zip(groups, found, rates, strict=True):
            group["lr"], group["initial_lr"] = group["lr"] * (rate / before if before else 1.0), rate
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs, scheduler._last_lr = rates, [group["lr"] for group in groups]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take the gradient of a batch; `NotFiniteError` in front of a step for which any process has no number."""
        loss = super().training_step(*args, **kwargs)
        broken = ~torch.isfinite(loss.detach())
        self._broken = broken if self._broken is None else self._broken | broken
        if self.accelerator.sync_gradients:
            self._stop_if(self._broken, self.state.global_step + 1)
            self._broken = None
        return loss

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        broken = torch.tensor(not has_finite_weights(model), device=self.args.device)
        self._stop_if(broken, self.state.global_step)  # a loss may be finite whose gradient is not
        super()._save_checkpoint(model, trial)

    def _stop_if(self, broken: Tensor, step: int) -> None:
        """Raise `NotFiniteError` in all processes if one of them has numbers that are not finite."""
        if self.accelerator.num_processes > 1:
            broken = self.accelerator.reduce(broken.float(), reduction="sum")  # type: ignore[assignment]
        if bool(broken):
            raise NotFiniteError(step)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Take the steps of an epoch; none, where a training that had ended is resumed, which else takes one more."""
        if self.has_ended:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of weights that a checkpoint lacks, but for those that are another one's, as a tied head is."""
        parts = [(path, part) for path, part in self.model.named_modules() if isinstance(part, PreTrainedModel)]
        tied = {f"{path}.{name}".lstrip(".") for path, part in parts for name in part.all_tied_weights_keys}
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def get_train_dataloader(self) -> DataLoader:
        """Return the batches of an epoch; `OptionError` if there is none, of which no step would be taken."""
        batches = super().get_train_dataloader()
        if not len(batches):
            rows: Any = self.train_dataset
            raise OptionError(
                f"dataloader_drop_last=True drops all {len(rows)} rows of a training, as a batch of all processes has"
                f" {self.args.train_batch_size * self.args.world_size}; leave it out, or lower"
                " per_device_train_batch_size"
            )
        return batches

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the batches of a step, and how many predictions they have."""
        batches, counted = super().get_batch_samples(*args, **kwargs)
        self._mean_rows = sum(len(batch["input_ids"]) for batch in batches) / len(batches) if batches else None
        return batches, counted

    def _share(self, inputs: dict[str, Any]) -> float:
        """Return by what a mean over a batch's rows is multiplied, so that batches average to that of all rows."""
        return 1.0 if self._mean_rows is None else len(inputs["input_ids"]) / self._mean_rows

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """Return the batches of the validation rows: all of them, also where a training drops its last batch."""
        before = self.data_collator, self.args.dataloader_drop_last
        self.data_collator, self.args.dataloader_drop_last = self.evaluation_collator, False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator, self.args.dataloader_drop_last = before

    def evaluation_loop(
        self, dataloader: DataLoader, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Evaluate, with the mean over all predictions as the loss; transformers has that over batches' means."""
        self._losses = []
        found = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self._losses:
            total, count = self.accelerator.gather(torch.stack(self._losses)).cpu().double().sum(0)
            found.metrics[f"{metric_key_prefix}_loss"] = float(total / count)
        return found

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:  # fmt: skip
        rows = len(inputs["input_ids"])
        own = self._own_rows(rows)
        if own < rows and prediction_loss_only:
            inputs = {name: value[: max(1, own)] for name, value in inputs.items()}  # no process may stand aside
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None:
            count = torch.as_tensor(self._predictions(inputs) if own else 0, dtype=torch.float32, device=loss.device)
            total = torch.where(count > 0, loss.float() * count, 0.0)  # the mean of none is no number
            self._losses.append(torch.stack([total, count]))
        return loss, logits, labels

    def _own_rows(self, rows: int) -> int:
        """Return how many rows of a batch this process evaluates; the last batch is filled up with rows of others."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return rows
        return min(rows, max(0, state.remainder - rows * self.accelerator.process_index))

    def _predictions(self, inputs: dict[str, Any]) -> Tensor | int:
        """Return over how many tokens or texts the loss of a batch is a mean."""
        if self._own_loss:
            return len(inputs["input_ids"])
        return (task_of(self.model).predicted(inputs["labels"]) != IGNORED_LABEL).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if not model.training:
            num_items_in_batch = None  # of all processes; what a batch counts is settled by `evaluation_loop`
        if num_items_in_batch is not None:
            num_items_in_batch = torch.as_tensor(num_items_in_batch).clamp(min=1)  # a step may mask no token
        labels, counted = inputs.get("labels"), num_items_in_batch if self.model_accepts_loss_kwargs else None
        share = self._share(inputs) if model.training else 1.0
        if self.teacher is None or not model.training:
            if self._head is not None and labels is not None and (model.training or self.args.prediction_loss_only):
                smoothing = self.smoothing if model.training else 0.0
                output, count = cross_entropy_by_chunks(model, self._head, inputs, smoothing)
                loss = self._mean(output.logits, count, counted)
            else:
                loss, output = super().compute_loss(model, inputs, True, num_items_in_batch)
                loss = self._weighted(loss, output, model, inputs, counted)
            loss = loss * share if counted is None else loss
            return (loss, output) if return_outputs else loss
        if self._head is not None:
            return self._taught_by_chunks(self._head, self.teacher, model, inputs, counted)
        inputs = {**inputs, "output_hidden_states": bool(self.teacher.hidden_weight)}
        # first: switching adapters off and on disturbs gradients
        teacher_outputs = self.teacher.outputs(model, inputs)
        loss, output = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = self._weighted(loss, output, model, inputs, counted)
        divergence, hidden = distillation_loss(
            output, teacher_outputs, inputs["labels"], self.teacher, task_of(model), counted,
            inputs.get("attention_mask"),
        )  # fmt: skip
        if counted is not None:
            # as with the cross-entropy, the Trainer adds up what accumulated batches and averages what processes say
            divergence = divergence * self._processes
            hidden = hidden * share / self.current_gradient_accumulation_steps
        schedule = self.teacher.schedule(self.state.global_step, self.state.max_steps)
        loss = self.teacher.ce_weight * loss + schedule * (divergence + hidden)
        loss = loss * share if counted is None else loss
        return (loss, output) if return_outputs else loss

    def _taught_by_chunks(
        self, head: nn.Module, teacher: Teacher, model: nn.Module, inputs: dict[str, Any], counted: Tensor | int | None
    ) -> Tensor:
        """Return the loss of a step, its logits and the teacher's made and compared some positions at a time."""
        task = task_of(model)
        schedule = teacher.schedule(self.state.global_step, self.state.max_steps)
        wanted = task.predicted(inputs["labels"])
        chosen = wanted != IGNORED_LABEL
        given = {**without_labels(inputs), "output_hidden_states": bool(teacher.hidden_weight)}
        size = chunk_rows(root_model(model).config.get_text_config().vocab_size)
        project = head.forward
        project_other = teacher.model.get_output_embeddings().forward if teacher.model else project
        listed = None if teacher.kept is None else teacher.kept.find(given)
        example: Any = None
        shared = self._shared if listed is None else None
        if listed is None:
            with replaced_head(teacher.model or model, same), shared.recorded() if shared else nullcontext():
                example = teacher.outputs(model, given)  # first, as in compute_loss
            if teacher.kept is not None:
                listed = likeliest(project_other, example.logits, teacher.kept.count, teacher.temperature, size)
                teacher.kept.keep(given, *listed)

        def losses(states: Tensor) -> Tensor:
            of_teacher = (example.logits,) if listed is None else listed
            rows, *others = (task.predicting(x)[chosen] for x in (states, *of_teacher))
            parameters = [p for p in head.parameters() if p.requires_grad]
            own, taught = cast_once(project), cast_once(project_other)  # here, as autocast is that of the forward

            def loss_of(states: Tensor, labels: Tensor, *others: Tensor) -> Tensor:
                logits = own(states)
                exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
                loss = teacher.ce_weight * cross_entropy(
                    exact, labels, reduction="sum", label_smoothing=self.smoothing
                )
                if not teacher.kl_weight:
                    return loss
                if listed is not None:
                    return loss + schedule * teacher.kl_weight * teacher.divergence_from(logits, *others)
                with torch.no_grad():
                    other = taught(*others)
                return loss + schedule * teacher.kl_weight * teacher.divergence(logits, other)

            return sum_by_chunks(loss_of, size, rows, wanted[chosen], *others, parameters=parameters)

        with replaced_head(model, losses), shared.replayed() if shared else nullcontext():
            output = model(**given)
        loss, share = self._mean(output.logits, chosen.sum(), counted), self._share(inputs)
        loss = loss * share if counted is None else loss
        if teacher.hidden_weight:
            hidden = hidden_error(output.hidden_states, example.hidden_states, inputs.get("attention_mask"))
            batches = 1 if counted is None else self.current_gradient_accumulation_steps
            loss = loss + schedule * teacher.hidden_weight * hidden * share / batches
        return loss

    def _head_of_chunks(self) -> nn.Module | None:
        """Return the projection whose logits are made some positions at a time; None: the model makes them all."""
        other = self.args.torch_compile or self.args.n_gpu > 1 or self.args.fp16  # small gradients need its scaling
        if other or self.shards or self._own_loss:
            return None
        classifies = isinstance(task_of(self.model), SequenceClassification)
        head = None if classifies else separate_head(self.model)
        return head if head is None or type(head) is nn.Linear else None  # with adapters it would not be the teacher's

    def _mean(self, total: Tensor, count: Tensor, counted: Tensor | int | None) -> Tensor:
        """Return what a sum over the predictions of a batch, `count` of them, is of the mean over those of a step."""
        return total / count.clamp(min=1) if counted is None else total / counted * self._processes

    @property
    def _processes(self) -> int:
        """By what a process multiplies a loss that is divided by the number of predictions in all of them."""
        return self.accelerator.num_processes if self.args.average_tokens_across_devices else 1

    def _weighted(
        self, loss: Tensor, output: Any, model: nn.Module, inputs: dict[str, Any], counted: Tensor | int | None
    ) -> Tensor:
        """Turn the mean over a batch into its part of the mean over all batches of a step, smoothed if asked for."""
        labels = inputs.get("labels")
        if labels is None or self._own_loss:
            return loss
        if self.class_weights is not None:
            return weighted_loss(output.logits, labels, self.class_weights, self.smoothing if model.training else 0.0)
        if self.smoothing and model.training:
            return self._smoothed(output.logits, labels, model, counted)
        task = task_of(model)
        if isinstance(task, Regression):
            return task.loss(output.logits, labels)  # before PyTorch 2.12 the model's own has no gradient in bfloat16
        count = torch.as_tensor(self._predictions(inputs), device=loss.device)
        loss = torch.where(count > 0, loss, 0.0)  # the mean of none is no number
        return loss * count / counted if self._averages and counted is not None else loss

    def _smoothed(self, logits: Tensor, labels: Tensor, model: nn.Module, counted: Tensor | int | None) -> Tensor:
        """Return the cross-entropy with labels that leave `label_smoothing_factor` to all classes alike."""
        task = task_of(model)
        logits, wanted = task.predicting(logits).flatten(0, -2), task.predicted(labels).flatten()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = cross_entropy(
            logits, wanted, ignore_index=IGNORED_LABEL, label_smoothing=self.smoothing, reduction="sum"
        )
        return self._mean(total, (wanted != IGNORED_LABEL).sum(), counted)
