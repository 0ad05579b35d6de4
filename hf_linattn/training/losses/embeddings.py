"""How far the embeddings of a student are from those of the original: hidden states, embeddings, and their cosines.

    L = hidden_weight sum_i |h_i - h'_i|^2 / |h'_i|^2 / tokens, the mean over texts and layers
        + cosine_weight mean_b (1 - cos(e_b, e'_b))
        + similarity_weight mean_{b != c} (cos(e_b, e_c) - cos(e'_b, e'_c))^2

h_i: hidden state of token i after a layer, e_b: embedding of text b of a batch, with a prime those of the original. In
evaluation the texts are compared in groups of `COMPARED`, however many are read at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_linattn.evaluation.document_windows import DocumentWindows
from hf_linattn.inference import accepted
from hf_linattn.sentence_models import SentenceModel
from hf_linattn.training.losses.distillation import hidden_error
from hf_linattn.training.losses.loss_module import LossModule

COMPARED = 8  # texts of an evaluation, with each other; as many as a batch of it has by default


class EmbeddingWeights(NamedTuple):
    """What the three parts of the loss are multiplied by."""

    hidden: float = 0.0
    cosine: float = 1.0
    similarity: float = 1.0


class EmbeddingDistillation(LossModule):
    """An encoder that learns the embeddings of another; its forward returns the loss.

    Args:
        student: is trained. original: gives what is to be learnt; in eval mode, neither trained nor saved.
        modules: make embeddings of hidden states. weights: of the parts of the loss.
        windows: in which the original reads texts that are too long for it; None: whole.
        at_once: how many texts are read at a time in evaluation.
    """

    def __init__(
        self, student: nn.Module, original: nn.Module, modules: SentenceModel, weights: EmbeddingWeights,
        windows: DocumentWindows | None = None, at_once: int = COMPARED,
    ):  # fmt: skip
        super().__init__()
        self.student = student
        self._model = (original.eval().requires_grad_(False),)
        self._modules_of_folder, self._weights, self._windows = modules, weights, windows
        self._at_once, self.evaluation_rows = at_once, max(COMPARED, at_once // COMPARED * COMPARED)

    def measure(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the `loss` for `input_ids` and `attention_mask` [B, N], padded on the right."""
        weights, rows = self._weights, len(inputs["input_ids"])
        read, compared = (rows, rows) if self.training else (self._at_once, COMPARED)
        parts = [{name: x[i : i + read] for name, x in inputs.items()} for i in range(0, rows, read)]
        found, wanted, errors = zip(*map(self._compare, parts), strict=True)
        got, want = torch.cat(found), torch.cat(wanted)
        loss = weights.cosine * (1 - (got * want).sum(-1)).mean() + weights.hidden * sum(errors) / rows
        if weights.similarity:
            groups = zip(got.split(compared), want.split(compared), strict=True)
            total = sum(len(g) * similarity_error(g, w) for g, w in groups if len(g) > 1)
            loss = loss + weights.similarity * total / rows
        return {"loss": loss}

    def _compare(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | float]:
        """Return embeddings of texts by the student and by the original [B, D], and the sum of their `hidden_error`.
        """
        with torch.no_grad():
            if self._windows is None:
                wanted, want = self._read(self._model[0], inputs)
            else:
                wanted, want = None, self._modules_of_folder.embed(self._model[0], inputs, self._windows)
        found, got = self._read(self.student, inputs)
        if not self._weights.hidden or wanted is None:
            return got, want, 0.0
        return got, want, hidden_error(found, wanted, inputs["attention_mask"]) * len(got)

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """Have the student compute activations anew, as a Trainer asks for it."""
        student: Any = self.student
        student.gradient_checkpointing_enable(**options)

    def _read(self, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any, Tensor]:
        """Return the hidden states after each layer, where they count, and the embeddings [B, D] of length 1."""
        options = accepted(model, use_cache=False)
        output = model(**inputs, **options, output_hidden_states=bool(self._weights.hidden))
        pooled = self._modules_of_folder.pool(output.last_hidden_state, inputs["attention_mask"])
        return output.hidden_states, nn.functional.normalize(pooled, dim=-1)


def similarity_error(got: Tensor, want: Tensor) -> Tensor:
    """Return mean_{b != c} (g_b . g_c - w_b . w_c)^2 for embeddings [B, D] of length 1, B at least 2."""
    squared = (got @ got.T - want @ want.T).square()
    return (squared.sum() - squared.diagonal().sum()) / (len(got) * (len(got) - 1))
