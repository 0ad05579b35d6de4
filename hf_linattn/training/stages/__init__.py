"""The stages of a recipe, from the original to the report, one kind in a file."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_linattn import unpatch_model
from hf_linattn.training.arguments import AUTO, NONE, WINDOW, Arguments
from hf_linattn.training.training_run import TrainingRun

from .adapter import AdapterStage
from .base import Stage
from .calibration import Calibration
from .layers import LayerChoice
from .long import LongTraining
from .measurement import Measurement, SharedStage, validation
from .plan import PlanChoice
from .positions import position_checks
from .recovery import ControlTraining, RecoveredTraining
from .report import ReportStage
from .training import TrainingStage
from .transfer import TransferTraining
from .window import TrainedWindowMeasurement, WindowMeasurement, WindowTraining

__all__ = ["Stage", "TrainingStage", "stages_of"]


def stages_of(arguments: Arguments) -> list[Stage]:
    """Return the stages of a run with these options, in their order."""
    options, shared = arguments.distillation, arguments.recipe.control_dir is not None
    window, read_in_windows = arguments.recipe.control == WINDOW, arguments.data.document_window
    trains = arguments.recipe.control != NONE and not shared
    trained = ("recovered_training", "long_training")
    stages: list[tuple[Stage, object]] = [
        (LayerChoice(), arguments.model.layers == AUTO and arguments.model.layer_search is None),
        (PlanChoice(), arguments.model.layer_search is not None),
        (Measurement("original", TrainingRun.load), True),
        (Measurement("original_cut", _unextended, (), TrainingRun.score_cut), read_in_windows),
        (Measurement("original_windows", _unextended, (), TrainingRun.score_in_windows), read_in_windows),
        (Measurement("converted", TrainingRun.convert, ("layers",)), True),
        (Measurement("converted_validation", TrainingRun.convert, ("layers",), validation), True),
        (WindowMeasurement(), True),
        (ControlTraining(), trains),
        (Measurement("control", _control, ("control_training",)), trains),
        (SharedStage("control_training"), shared),
        (SharedStage("control"), shared),
        (WindowTraining(), window),
        (TrainedWindowMeasurement(), window),
        (SharedStage("window_trained"), shared and not window),
        (Calibration(), arguments.recipe.calibration_tokens),
        (TransferTraining(), options.transfer_tokens),
        (RecoveredTraining(), True),
        (LongTraining(), options.long_block_size),
        (Measurement("recovered", _recovered, trained), True),
        (Measurement("recovered_validation", _recovered, trained, validation), True),
        (ReportStage(), True),
        (AdapterStage(), options.save_adapter),
    ]
    chosen = [stage for stage, wanted in stages if wanted]
    if not arguments.recipe.position_windows:
        return chosen
    checks: dict[str, Stage] = dict(position_checks(arguments))
    return [each for stage in chosen for each in (stage, checks.get(stage.name)) if each is not None]


def _unextended(context: TrainingRun) -> PreTrainedModel:
    return context.load(extended=False)


def _control(context: TrainingRun) -> PreTrainedModel:
    return unpatch_model(context.load(ControlTraining().folder(context)))


def _recovered(context: TrainingRun) -> PreTrainedModel:
    return context.load(context.directory.path)
