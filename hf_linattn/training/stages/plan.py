"""The stage that chooses which layers or heads stay exact, by `choose_plan`."""

from __future__ import annotations

import json
from typing import Any

from hf_linattn import choose_plan
from hf_linattn.training.stages.base import OneProcessStage
from hf_linattn.training.stages.layers import SENSITIVITY_ROWS
from hf_linattn.training.training_run import TrainingRun


class PlanChoice(OneProcessStage):
    """Choose a plan where that was left open; from then on it is the run's plan."""

    name = "plan"

    def run(self, context: TrainingRun) -> dict[str, Any]:
        result, options = super().run(context), context.arguments.model
        options.plan, options.mechanism, options.mechanism_options, options.layers = result["plan"], None, None, None
        return result

    def compute(self, context: TrainingRun) -> dict[str, Any]:
        options, training = context.arguments.model, context.arguments.training
        rows = min(SENSITIVITY_ROWS, len(context.data.train))
        chosen = choose_plan(
            context.load(), context.tokenizer, float(options.softmax_share), unit=options.layer_unit,
            replace={str(options.mechanism): options.mechanism_options or {}}, signal=options.layer_signal,
            search=str(options.layer_search), batches=context.batches(rows), seed=training.seed,
            progress=not training.disable_tqdm,
        )  # fmt: skip
        return json.loads(chosen.to_json())
