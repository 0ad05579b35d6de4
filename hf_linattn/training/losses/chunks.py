"""Losses of predictions, some positions at a time: the logits of all positions never lie side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import PreTrainedModel

from hf_linattn.architecture import root_model
from hf_linattn.chunked_sums import chunk_rows, sum_by_chunks
from hf_linattn.inference import accepted, evaluation_mode, without_labels
from hf_linattn.training.data import IGNORED_LABEL
from hf_linattn.training.task import task_of

MARK = 3.0  # in place of logits: no scale, bias or cap leaves it as it is


@contextmanager
def replaced_head(model: nn.Module, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have `function` in place of a model's output projection for a while: it gets the states [B, N, d] in front."""
    head: nn.Module = root_model(model).get_output_embeddings()  # type: ignore[assignment]  # it has one
    before = head.__dict__.get("forward")
    head.forward = function
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def cast_once(project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a projection whose weight is cast now, where autocast would cast it again for every chunk.

    Autocast keeps its copies of trained weights alone.

    Args:
        project: the `forward` of an output projection; what is no plain linear one is returned as it is.
    """
    if getattr(project, "__func__", None) is not nn.Linear.forward:
        return project
    head: nn.Linear = project.__self__  # type: ignore[attr-defined]  # a bound method
    kind = head.weight.device.type
    if head.weight.requires_grad or not torch.is_autocast_enabled(kind):
        return project
    dtype = torch.get_autocast_dtype(kind)
    weight, bias = head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
    return lambda states: linear(states, weight, bias)


def cross_entropy_by_chunks(
    model: nn.Module, head: nn.Module, inputs: Mapping[str, Any], smoothing: float = 0.0
) -> tuple[Any, Tensor]:
    """Return the output of a language model and how many tokens it predicts.

    In place of logits the output has the sum of their cross-entropy, with its gradient.

    Args:
        model: may be wrapped. head: its `separate_head`. inputs: with `labels`. smoothing: of the labels.
    """
    task, forward = task_of(model), head.forward
    wanted = task.predicted(inputs["labels"])
    chosen = wanted != IGNORED_LABEL

    def losses(states: Tensor) -> Tensor:
        project = cast_once(forward)  # here, as autocast is that of the model's forward

        def loss_of(states: Tensor, labels: Tensor) -> Tensor:
            logits = project(states)
            exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return cross_entropy(exact, labels, reduction="sum", label_smoothing=smoothing)

        size = chunk_rows(root_model(model).config.get_text_config().vocab_size)
        parameters = [p for p in head.parameters() if p.requires_grad]
        return sum_by_chunks(loss_of, size, task.predicting(states)[chosen], wanted[chosen], parameters=parameters)

    with replaced_head(model, losses):
        return model(**without_labels(inputs)), chosen.sum()


def same(states: Tensor) -> Tensor:
    """Return the states: in place of a projection, the model then returns what would have been projected."""
    return states


def separate_head(model: nn.Module) -> nn.Module | None:
    """Return the projection of a language model that is the last thing it does; None if something follows it.

    What stands in its place gets the states in front of it, and what that returns is returned as it is; the logits are
    the projection of those states, and the loss is their cross-entropy. All of it is tried out on two tokens. Models
    that scale or cap logits, add a bias to them or losses of routers, or call no projection, are not so.
    """
    root = root_model(model)
    head = root.get_output_embeddings()
    if not isinstance(head, nn.Module):
        return None
    ids = torch.zeros(1, 2, dtype=torch.int64, device=root.device)
    options = accepted(root, use_cache=False)
    received: list[Tensor] = []

    def mark(states: Tensor) -> Tensor:
        received.append(states)
        return states.new_full((), MARK)

    with evaluation_mode(model), torch.no_grad():
        whole = root(input_ids=ids, labels=ids, **options)
        try:
            with replaced_head(model, mark):
                marked = root(input_ids=ids, **options).logits
        except (IndexError, RuntimeError):  # what follows wants more than one number
            return None
        if len(received) != 1 or marked.dim() or marked.item() != MARK:
            return None
        if not torch.equal(head(received[0]), whole.logits):
            return None
        return head if torch.allclose(whole.loss.float(), _loss(root, whole.logits, ids), rtol=1e-3) else None


def _loss(root: PreTrainedModel, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of what a model predicts."""
    task = task_of(root)
    return cross_entropy(task.predicting(logits).flatten(0, -2).float(), task.predicted(labels).flatten())
