"""A checkpoint, and the task that it was trained for."""

from __future__ import annotations

import torch
from datasets import DatasetDict
from transformers import PreTrainedModel

from hf_linattn.sentence_models import SentenceModel, is_sentence_model
from hf_linattn.training.arguments import DataArguments
from hf_linattn.training.base_task import Task
from hf_linattn.training.embeddings import Embeddings
from hf_linattn.training.task import load_model, saved_task, task_of


def load_task(name_or_path: str, dtype: str | torch.dtype = "auto") -> tuple[PreTrainedModel, Task]:
    """Load a checkpoint as `load_model` does, and return it with its task."""
    if is_sentence_model("model_name_or_path", name_or_path):
        modules = SentenceModel(name_or_path, dtype)
        return modules.take_encoder(), Embeddings(modules)
    model = load_model(name_or_path, dtype)
    return model, task_of(model)


def load_texts(name_or_path: str, data: DataArguments, datasets: DatasetDict | None = None) -> DatasetDict:
    """Return the three splits as the task of a checkpoint takes them, before its weights are loaded.

    datasets: splits in memory, in place of those that the options name.
    """
    kind = Embeddings if is_sentence_model("model_name_or_path", name_or_path) else saved_task(name_or_path)
    return kind.load(data) if datasets is None else kind.select(datasets, data)
