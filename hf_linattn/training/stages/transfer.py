"""The stage of attention transfer: mechanisms learn what softmax does in their layers."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_linattn.training.finetuning import Trained, fine_tune
from hf_linattn.training.losses.attention_transfer import AttentionTransfer, Transfer
from hf_linattn.training.losses.block_transfer import BlockTransfer
from hf_linattn.training.not_finite import with_halved_rates
from hf_linattn.training.stages.calibration import save_mechanisms
from hf_linattn.training.stages.training import TrainingPlan, TrainingStage
from hf_linattn.training.training_run import TrainingRun

logger = logging.getLogger(__name__)


class TransferTraining(TrainingStage):
    """Train the mechanisms alone: nothing decays, and no activations are kept from layer to layer anyway."""

    name = "transfer"
    inputs: tuple[str, ...] = ("calibration",)
    keeps_model = False

    def plan(self, context: TrainingRun) -> TrainingPlan:
        options, training = context.arguments.distillation, context.arguments.training
        names = ("gradient_checkpointing", "activation_checkpointing")  # newer transformers has the second name
        changes: dict[str, Any] = {f.name: False for f in fields(training) if f.name in names}
        training = replace(training, weight_decay=0.0, **changes)
        steps = context.steps(options.transfer_tokens)
        return TrainingPlan(context.data, training, [options.transfer_learning_rate], steps)

    def make_model(self, context: TrainingRun) -> nn.Module:
        return self.trained_part(context, context.convert(self.inputs))

    def trained_part(self, context: TrainingRun, model: PreTrainedModel) -> Transfer:
        options = context.arguments.distillation
        if options.transfer_block_layers is not None:
            return BlockTransfer(model, options.transfer_block_layers)
        weights = options.transfer_output_weight, options.transfer_weights_weight
        return AttentionTransfer(model, *weights, projected=options.transfer_projected)

    def train(self, context: TrainingRun, plan: TrainingPlan) -> dict[str, Any]:
        logger.info("stage transfer: %d steps", plan.max_steps)
        (rate,), folder = plan.learning_rates, context.directory.checkpoints(self.name)
        made: dict[str, Any] = {}  # the model of the last training

        def train_at(rate: float) -> tuple[Trained, int | None]:
            model = made["model"] = context.convert(self.inputs)
            transfer = self.trained_part(context, model)
            trained = fine_tune(
                transfer, plan.data, plan.training, folder, learning_rate=rate, max_steps=plan.max_steps
            )
            return trained, trained.result.get("not_finite")

        (result, state), _ = with_halved_rates(self.name, "transfer_learning_rate", rate, context.directory, train_at)
        model = made["model"]
        result["tokens"] = plan.tokens(result["steps"])
        training = context.arguments.training
        with training.main_process_first(local=False):  # the others go on when the file is there
            if training.should_save:
                if state is not None:
                    model = context.convert(self.inputs)
                    self.trained_part(context, model).load_state_dict(state)
                save_mechanisms(model, context.mechanisms_file(self.name))
                losses = {"transfer_loss": result["eval_loss"], "eval_loss": context.validation_loss(model)}
                context.directory.finish(self.name, result | losses)
        return context.directory.finished(self.name) or {}
