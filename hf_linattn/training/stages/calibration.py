"""The stage that fits the mechanisms on training rows, before anything is trained."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from hf_linattn import calibrate
from hf_linattn.atomic_io import write_whole
from hf_linattn.training.stages.base import OneProcessStage
from hf_linattn.training.training_run import TrainingRun
from hf_linattn.transformers_bridge import MECHANISM


class Calibration(OneProcessStage):
    """Fit the mechanisms; where layers were chosen, all were fitted before, each for itself."""

    name = "calibration"
    inputs: tuple[str, ...] = ("layers",)

    def compute(self, context: TrainingRun) -> dict[str, Any]:
        model, chosen = context.convert(), context.results.get("layers")
        if chosen is None:
            fitted = fit_mechanisms(context, model, self.name)
        else:
            fitted, known = chosen["calibration"], model.state_dict()
            state = load_file(context.mechanisms_file("layers"))
            model.load_state_dict({name: x for name, x in state.items() if name in known}, strict=False)
            save_mechanisms(model, context.mechanisms_file(self.name))
        return {"eval_loss": context.validation_loss(model), **fitted}


def fit_mechanisms(context: TrainingRun, model: PreTrainedModel, stage: str) -> dict[str, Any]:
    """Fit the mechanisms, write their state to the file of a stage, and return what that took."""
    count, start = context.calibration_rows, time.perf_counter()
    errors = calibrate(model, context.batches(count), progress=not context.arguments.training.disable_tqdm)
    seconds = round(time.perf_counter() - start, 1)
    save_mechanisms(model, context.mechanisms_file(stage))
    tokens = count * round(context.data.row_tokens)
    return {"tokens": tokens, "seconds": seconds, "layer_errors": errors}


def save_mechanisms(model: nn.Module, file: Path) -> None:
    """Write the state of all mechanisms, whole or not at all."""
    state = {name: x.contiguous() for name, x in model.state_dict().items() if f".{MECHANISM}." in name}
    write_whole(file, lambda path: save_file(state, path))
