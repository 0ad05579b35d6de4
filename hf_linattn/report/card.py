"""The model card of a recovered model: metadata for the Hub, how to load it, and the report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.utils import yaml_dump

from ..adapter_config import read_adapter_config
from ..atomic_io import write_text
from ..cards import (
    CARD_FILE,
    PIPELINE_TAGS,
    WRITTEN,
    Measured,
    attention_table,
    card_of,
    library_of,
    loading_lines,
    measured_sentence,
    packages_of,
    read_base,
    sources,
    title,
    uses_and_limits,
)
from ..checkpoint_config import MODEL_TYPE
from ..errors import CheckpointError
from ..json_files import read_object
from ..mechanisms import MECHANISMS
from ..plan import PatchConfig
from ..saved_config import read_patches
from .schema import EMBEDDING, Report
from .tables import sections
from .teaching import is_taught

EVAL_RESULTS_FILE = ".eval_results/hf_linattn.yaml"
LOADERS = {tag: loader for loader, tag in reversed(PIPELINE_TAGS.items())}


def model_card(
    report: Report,
    name: str = "path/or/name",
    patches: Mapping[str, PatchConfig] | None = None,
    adapter_of: str | None = None,
) -> ModelCard:
    """Return the card of the model that a report is about: metadata, what was kept, how to load it, the report.

    Args:
        name: under which the model is loaded in the example.
        patches: path of a part of the model -> its patch, for the table of layers; None: there is no table.
        adapter_of: the base that an adapter is loaded onto; None: the card is of a whole model.
    """
    mechanisms = [mechanism for mechanism in report.mechanism.split("+") if mechanism != "softmax"]
    base, task = read_base(report.base_model), task_of_report(report)
    data = ModelCardData(
        base_model=base.hub_id,
        datasets=[report.dataset_name] if report.dataset_name else None,
        library_name=library_of(LOADERS[task]) if adapter_of is None else "peft",
        pipeline_tag=task,
        tags=["hf_linattn", *mechanisms, "subquadratic-attention"],
        model_name=title(base, mechanisms),
        eval_results=eval_results(report, task),
        **base.metadata,
    )
    layers = [] if patches is None else ["## Attention", attention_table(patches)]
    parts = [
        f"# {data.model_name}",
        f"{measured_sentence(measured(report))} {how_trained(report)}",
        "## Load",
        loading_lines(LOADERS[task], name, adapter_of, packages_of(mechanisms)),
        *layers,
        *sections(report),
        *uses_and_limits(base),
        "## Sources",
        sources([mechanism for mechanism in mechanisms if mechanism in MECHANISMS.names()]),
        WRITTEN,
    ]
    return card_of(data, parts)


def save_card(report: Report, directory: str | os.PathLike[str], name: str | None = None) -> Path:
    """Write the card into a directory, and the scores for the Hub's table of the data set; return the card's path.

    name: under which the model is loaded in the example; None: that of the directory.
    """
    folder = Path(directory)
    (folder / EVAL_RESULTS_FILE).unlink(missing_ok=True)  # of a run before
    for file, text in card_files(report, folder, name).items():
        write_text(folder / file, text)
    return folder / CARD_FILE


def card_files(report: Report, folder: Path, name: str | None = None) -> dict[str, str]:
    """Return what `save_card` writes: path in the folder -> text; `name`: as for it."""
    entries = eval_result_entries(report)
    scores = {EVAL_RESULTS_FILE: yaml_dump(eval_result_entries_to_yaml(entries))} if entries else {}
    shown = name or (folder.name if folder.is_absolute() else folder.as_posix())
    return scores | {CARD_FILE: str(model_card(report, shown, patches_in(folder)))}


def save_adapter_card(report: Report, folder: Path, name: str | None = None) -> Path:
    """Write the card of an adapter into its folder, and return its path; `name`: as for `save_card`."""
    return write_text(folder / CARD_FILE, str(adapter_card(report, folder, name)))


def adapter_card(report: Report, folder: Path, name: str | None = None) -> ModelCard:
    """Return the card of the adapter in a folder; `name`: as for `save_card`."""
    config = read_adapter_config(folder)
    if config is None:
        raise CheckpointError(f"{str(folder)!r} holds no adapter of this library; give a folder of save_adapter")
    patches = read_patches(config[MODEL_TYPE])
    return model_card(report, name or folder.as_posix(), patches, config["base_model_name_or_path"])


def patches_in(folder: Path) -> dict[str, PatchConfig] | None:
    """Return what the config in a folder says of the patch; None where there is no converted model."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    described = read_object(file, "save the model again").get(MODEL_TYPE)
    return None if described is None else read_patches(described)


def measured(report: Report) -> Measured:
    """Return what the first sentence of the card says: beside the better softmax model, at the longest length."""
    accuracy, scores = report.accuracy, report.scores
    fastest = max(report.speed, key=lambda row: row.length, default=None)
    largest = max(report.memory, key=lambda row: row.length, default=None)
    state = None
    if largest is not None and largest.patched_state is not None and largest.original_state is not None:
        state = largest.patched_state, largest.original_state, largest.length
    recalls = {row.metric: row for row in report.metrics}.get("recall_at_10")
    return Measured(
        recall=None if recalls is None else (recalls.recovered, max(recalls.original, recalls.control or 0.0)),
        accuracy=None if accuracy is None else (accuracy.recovered, accuracy.best),
        **({} if accuracy or recalls else {scores.name: (scores.recovered, scores.best)}),
        speed=None if fastest is None else (fastest.prefill_speedup, fastest.length),
        state=state,
    )


def how_trained(report: Report) -> str:
    """Return how the model was recovered, in a sentence."""
    taught = "with the original as its teacher" if is_taught(report) else "without a teacher"
    return f"Recovered on {report.training.tokens:,} tokens of {report.data}, {taught}."


def task_of_report(report: Report) -> str:
    """Return the Hub's name of what the model does."""
    if report.evaluation.problem == EMBEDDING:
        return "sentence-similarity"
    if report.accuracy is not None or report.metrics:
        return "text-classification"
    return "fill-mask" if report.evaluation.stride is None else "text-generation"


def scores_of(report: Report) -> dict[str, float]:
    """Return what the recovered model scores on the test split; of a classifier its accuracy first."""
    accuracy = {} if report.accuracy is None else {"accuracy": report.accuracy.recovered}
    metrics = {row.metric: row.recovered for row in report.metrics}
    own = "perplexity" if report.squared_error is None else "mean_squared_error"
    return {**accuracy, **metrics, own: report.scores.recovered}


def eval_results(report: Report, task: str) -> list[EvalResult]:
    """Return the scores for the `model-index`."""
    split, said = ("train", "held-out") if report.evaluation.held_out else ("test", "test")
    return [
        EvalResult(
            task_type=task, dataset_type=report.dataset_name or "text", dataset_name=report.data,
            dataset_config=report.dataset_config_name, dataset_split=split, metric_type=metric, metric_value=value,
            metric_name=f"{said} {metric}",
        )
        for metric, value in scores_of(report).items()
    ]  # fmt: skip


def eval_result_entries(report: Report) -> list[EvalResultEntry]:
    """Return the scores as the Hub collects them by data set; none where that is not the Hub's, or has no test split.
    """
    if not report.dataset_name or report.evaluation.held_out:
        return []
    how = f"{report.dataset_config_name or 'default'}, test split, {report.evaluation.max_length} tokens at a time"
    return [
        EvalResultEntry(report.dataset_name, metric, value, notes=how) for metric, value in scores_of(report).items()
    ]
