"""A checkpoint, and the task that it was trained for."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hf_linattn.sentence_models import SentenceModel, is_sentence_model
from hf_linattn.training.base_task import Task
from hf_linattn.training.embeddings import Embeddings
from hf_linattn.training.task import load_model, task_of


def load_task(name_or_path: str, dtype: str | torch.dtype = "auto") -> tuple[PreTrainedModel, Task]:
    """Load a checkpoint as `load_model` does, and return it with its task."""
    if is_sentence_model("model_name_or_path", name_or_path):
        modules = SentenceModel(name_or_path, dtype)
        return modules.take_encoder(), Embeddings(modules)
    model = load_model(name_or_path, dtype)
    return model, task_of(model)
