"""What of a training the original taught, and what it did not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema import EMBEDDING, Report

# options by which the original teaches, and how each name begins of those that say more of it
TEACHING = (
    "calibration_tokens", "transfer_tokens", "kl_weight", "hidden_weight", "cosine_weight", "similarity_weight",
)  # fmt: skip
OF_TEACHER = (*TEACHING, "transfer_", "temperature", "top_k", "keep_logits", "fading_teacher")


def is_taught(report: Report) -> bool:
    """Return whether the original taught the model; one of embeddings is taught by nothing else."""
    return report.evaluation.problem == EMBEDDING or any(report.training.teaching.get(name) for name in TEACHING)


def teaching_rows(report: Report) -> list[list[str]]:
    """Return how the original taught the model, and the other options of the training, if there are any."""
    given, is_pupil = report.training.teaching, is_taught(report)
    taught = {name: value for name, value in given.items() if is_pupil and name.startswith(OF_TEACHER)}
    others = {name: value for name, value in given.items() if name not in taught}
    shown = listed(taught) or ("by its embeddings" if is_pupil else "not at all")
    rows = [["how the original taught it", shown], ["other options of the training", listed(others)]]
    return rows if others else rows[:1]


def listed(options: Mapping[str, Any]) -> str:
    """Return options in words; none: nothing.

    >>> listed({"kl_weight": 1.0, "top_k": 8})
    'kl_weight=1.0, top_k=8'
    """
    return ", ".join(f"{name}={value}" for name, value in options.items())
