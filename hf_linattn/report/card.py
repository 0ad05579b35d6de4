"""The model card of a recovered model: metadata for the Hub, how to load it, and the report."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..mechanisms import MECHANISMS
from .schema import Report, write_whole
from .tables import to_markdown

CARD_FILE = "README.md"
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
    """Write the card into a directory, whole or not at all; return its path."""
    content = str(model_card(report, name))
    return write_whole(Path(directory) / CARD_FILE, lambda path: path.write_text(content, encoding="utf-8"))


def task_of_report(report: Report) -> str:
    """Return the Hub's name of what the model does."""
    if report.accuracy is not None:
        return "text-classification"
    return "fill-mask" if report.evaluation.stride is None else "text-generation"


def base_model(report: Report) -> str | None:
    """Return the base model by its name on the Hub; None for a folder."""
    name = report.base_model
    return name if HUB_ID.fullmatch(name) and not Path(name).exists() else None


def eval_results(report: Report, task: str) -> list[EvalResult]:
    """Return what the recovered model scores, for the `model-index`."""
    scores: dict[str, Any] = {"perplexity": report.perplexity.recovered}
    if report.accuracy is not None:
        scores["accuracy"] = report.accuracy.recovered
    return [
        EvalResult(
            task_type=task, dataset_type="text", dataset_name=report.data, dataset_split="test", metric_type=metric,
            metric_value=value, metric_name=f"test {metric}",
        )
        for metric, value in scores.items()
    ]  # fmt: skip
