"""A logistic regression on what an encoder says of documents: what their length is worth to a head alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from benchmarks.measure.classifiers import TASK, Material
from benchmarks.result_files import Document
from hf_linattn.evaluation.document_windows import DocumentWindows
from hf_linattn.evaluation.label_metrics import SINGLE, label_scores
from hf_linattn.training.classification import PaddingCollator

INVERSE_PENALTIES = (0.003, 0.03, 0.3, 3.0)  # of which the validation texts choose one


def probe(material: Material, model: PreTrainedModel, windows: DocumentWindows) -> Document:
    """Fit a logistic regression to the mean hidden state of each document, and return its score on the test.

    model: a classifier whose encoder reads, in `windows`; the means of several count by their tokens.
    """
    model.eval()
    (train, labels), (chosen, chosen_labels), (test, test_labels) = (
        _features(model, material, split, windows) for split in ("train", "validation", "test")
    )
    fitted = [
        make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=3000)).fit(train, labels)
        for penalty in INVERSE_PENALTIES
    ]
    found = [_score(material, each.predict(chosen), chosen_labels) for each in fitted]
    best = int(np.argmax(found))
    return {
        "inverse_penalty": INVERSE_PENALTIES[best], "validation_score": found[best], "tokens": material.length,
        "score": _score(material, fitted[best].predict(test), test_labels),
    }  # fmt: skip


def _score(material: Material, predictions: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
    return label_scores(SINGLE, predictions.tolist(), labels.tolist(), [material.metric])[material.metric]


@torch.no_grad()
def _features(
    model: PreTrainedModel, material: Material, split: str, windows: DocumentWindows
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the mean hidden states [R, d] of the documents of a split, and their labels."""

    def read(ids: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=material.bf16):
            states = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    rows = TASK.encode(material.splits[split], material.encoder, model.config)
    collator: Any = PaddingCollator.of(material.encoder.tokenizer, model.config)
    batches = DataLoader(rows, material.batch_size, collate_fn=collator)  # type: ignore[arg-type]
    found = torch.cat([windows.pooled(read, batch["input_ids"], batch["attention_mask"]) for batch in batches])
    return found.numpy(), np.asarray(rows["labels"][:])
