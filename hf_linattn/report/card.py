"""The model card of a recovered model: metadata for the Hub, how to load it, and the report."""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.utils import yaml_dump

from ..atomic_io import write_text
from ..mechanisms import MECHANISMS
from .schema import Report
from .tables import to_markdown

CARD_FILE = "README.md"
EVAL_RESULTS_FILE = ".eval_results/hf_linattn.yaml"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
LOADERS = {
    "text-generation": "AutoModelForCausalLM",
    "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
}
USAGE = """\
```python
import hf_linattn  # pip install hf_linattn
from transformers import {loader}

model = {loader}.from_pretrained("{name}")
```

Without `import hf_linattn` it does not load: its weights were trained for another attention than softmax."""


def model_card(report: Report, name: str = "path/or/name") -> ModelCard:
    """Return the card of the model that a report is about: metadata, the report's own page, how to load, sources.

    Args:
        name: under which the model is loaded in the example.
    """
    mechanisms = [mechanism for mechanism in report.mechanism.split("+") if mechanism != "softmax"]
    task = task_of_report(report)
    data = ModelCardData(
        base_model=base_model(report),
        library_name="transformers",
        pipeline_tag=task,
        tags=["hf_linattn", *mechanisms, "subquadratic-attention"],
        model_name=f"{Path(report.base_model).name} with {report.mechanism} attention",
        eval_results=eval_results(report, task),
    )
    sources = [f"- `{mechanism}`: {MECHANISMS.get(mechanism).citation}" for mechanism in mechanisms]
    usage = USAGE.format(loader=LOADERS[task], name=name)
    body = "\n\n".join([to_markdown(report).strip(), "## Load", usage, "## Sources", "\n".join(sources)])
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def save_card(report: Report, directory: str | os.PathLike[str], name: str = "path/or/name") -> Path:
    """Write the card into a directory, and the scores for the Hub's table of the data set; return the card's path."""
    entries = eval_result_entries(report)
    if entries:
        write_text(Path(directory) / EVAL_RESULTS_FILE, yaml_dump(eval_result_entries_to_yaml(entries)))
    return write_text(Path(directory) / CARD_FILE, str(model_card(report, name)))


def task_of_report(report: Report) -> str:
    """Return the Hub's name of what the model does."""
    if report.accuracy is not None or report.metrics:
        return "text-classification"
    return "fill-mask" if report.evaluation.stride is None else "text-generation"


def base_model(report: Report) -> str | None:
    """Return the base model by its name on the Hub; None for a folder."""
    name = report.base_model
    return name if HUB_ID.fullmatch(name) and not Path(name).exists() else None


def scores_of(report: Report) -> dict[str, float]:
    """Return what the recovered model scores on the test split."""
    accuracy = {} if report.accuracy is None else {"accuracy": report.accuracy.recovered}
    metrics = {row.metric: row.recovered for row in report.metrics}
    return {"perplexity": report.perplexity.recovered, **accuracy, **metrics}


def eval_results(report: Report, task: str) -> list[EvalResult]:
    """Return the scores for the `model-index`."""
    return [
        EvalResult(
            task_type=task, dataset_type=report.dataset_name or "text", dataset_name=report.data,
            dataset_config=report.dataset_config_name, dataset_split="test", metric_type=metric, metric_value=value,
            metric_name=f"test {metric}",
        )
        for metric, value in scores_of(report).items()
    ]  # fmt: skip


def eval_result_entries(report: Report) -> list[EvalResultEntry]:
    """Return the scores as the Hub collects them by data set; none where the data set is not one of the Hub's."""
    if report.dataset_name is None:
        return []
    how = f"{report.dataset_config_name or 'default'}, test split, {report.evaluation.max_length} tokens at a time"
    return [
        EvalResultEntry(report.dataset_name, metric, value, notes=how) for metric, value in scores_of(report).items()
    ]
