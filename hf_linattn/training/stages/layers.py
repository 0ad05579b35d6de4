"""The stage that chooses the layers to convert."""

from __future__ import annotations

from typing import Any

from hf_linattn import choose_layers, layer_sensitivity
from hf_linattn.training.stages.base import OneProcessStage
from hf_linattn.training.stages.calibration import fit_mechanisms
from hf_linattn.training.training_run import TrainingRun

SENSITIVITY_ROWS = 64  # training rows on which the layers are ranked


class LayerChoice(OneProcessStage):
    """Choose the layers to convert where that was left open: the others lose too much, by `layer_sensitivity`."""

    name = "layers"

    def run(self, context: TrainingRun) -> dict[str, Any]:
        result = super().run(context)
        context.arguments.model.layers = ",".join(map(str, result["layers"]))
        return result

    def compute(self, context: TrainingRun) -> dict[str, Any]:
        options, training = context.arguments.model, context.arguments.training
        model = context.convert()
        fitted = fit_mechanisms(context, model, self.name) if context.calibration_rows else {}
        rows = min(SENSITIVITY_ROWS, len(context.data.train))
        sensitivity = layer_sensitivity(model, context.batches(rows), progress=not training.disable_tqdm)
        chosen = choose_layers(sensitivity, options.softmax_share)
        return {"sensitivity": sensitivity, "layers": chosen, "calibration": fitted}
