"""What a recipe found out: a typed report as JSON, as tables and as plots."""

from .card import CARD_FILE, measured, model_card, save_adapter_card, save_card
from .classifiers import MetricRow, ReadingRow
from .four_models import Accuracies, Perplexities, SquaredErrors
from .plan_picture import save_plan_picture
from .plots import BytesPoint, bytes_figure, points_of, save_plots
from .samples import TextSample
from .schema import (
    REPORT_FILE,
    Evaluation,
    LongContext,
    Provenance,
    Report,
    Stage,
    Training,
    WindowRow,
    collect_provenance,
)
from .tables import four_model_table, save_report, stage_table, to_markdown

__all__ = [
    "CARD_FILE",
    "REPORT_FILE",
    "Accuracies",
    "BytesPoint",
    "Evaluation",
    "LongContext",
    "MetricRow",
    "Perplexities",
    "Provenance",
    "ReadingRow",
    "Report",
    "SquaredErrors",
    "Stage",
    "TextSample",
    "Training",
    "WindowRow",
    "bytes_figure",
    "collect_provenance",
    "four_model_table",
    "measured",
    "model_card",
    "points_of",
    "save_adapter_card",
    "save_card",
    "save_plan_picture",
    "save_plots",
    "save_report",
    "stage_table",
    "to_markdown",
]
