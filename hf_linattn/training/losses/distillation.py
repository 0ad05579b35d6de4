"""Distillation: the outputs of the original model, and the losses of a student against them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_linattn import get_mechanisms
from hf_linattn.architecture import root_model
from hf_linattn.attention_call import intercept_attention
from hf_linattn.chunked_sums import chunk_rows, sum_by_chunks
from hf_linattn.errors import OptionError
from hf_linattn.evaluation.document_windows import DocumentWindows
from hf_linattn.inference import evaluation_mode, without_labels
from hf_linattn.training.classification import SequenceClassification
from hf_linattn.training.data import IGNORED_LABEL
from hf_linattn.training.losses.kept_logits import KeptLogits
from hf_linattn.training.losses.loss_module import LossModule
from hf_linattn.training.losses.pooled_answers import PooledAnswers
from hf_linattn.training.task import Task, task_of


@dataclass(frozen=True)
class Teacher:
    """The original model and how much its outputs count beside the cross-entropy of the text.

    Attributes:
        model: gives the outputs; it is not trained. None: the student itself, its adapters off and softmax in
            place of its mechanisms, so that one copy of the weights serves both; the student is then a `PeftModel`.
        kl_weight: of KL(teacher || student) over the vocabulary, in nats per predicted token.
        hidden_weight: of the squared difference of the hidden states after every layer, relative to the teacher's,
            token by token.
        ce_weight: of the text's own cross-entropy.
        temperature: divides the logits of both in the divergence, which is multiplied by its square.
        top_k: compare that many of the teacher's likeliest tokens one by one, all others as one; None: all of them.
        fading: kl_weight and hidden_weight fall linearly to zero over a training. A student that trains longer on a
            text than its teacher did comes to know it better.
        windows: in which a classifier reads documents that are too long for it, its answers pooled; None: whole.
        answers: which it has given of documents in windows.
        kept: where its `top_k` likeliest tokens are kept for the next time that a row is seen; None: nowhere.
    """

    model: PreTrainedModel | None = None
    kl_weight: float = 0.0
    hidden_weight: float = 0.0
    ce_weight: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    fading: bool = False
    windows: DocumentWindows | None = None
    kept: KeptLogits | None = None
    answers: PooledAnswers = field(default_factory=PooledAnswers, repr=False, compare=False)

    def schedule(self, step: int, max_steps: int) -> float:
        """Return by what `kl_weight` and `hidden_weight` are multiplied in a step."""
        return 1 - step / max_steps if self.fading else 1.0

    def divergence(self, got: Tensor, want: Tensor) -> Tensor:
        """Return temperature^2 KL, summed, for logits [T, V] of the student and of the teacher."""
        got, want = (x.to(torch.promote_types(x.dtype, torch.float32)) / self.temperature for x in (got, want))
        got, want = _likeliest(got.log_softmax(-1), want.log_softmax(-1), self.top_k)
        return self.temperature**2 * (want.exp() * (want - got)).sum()

    def divergence_from(self, got: Tensor, tokens: Tensor, logs: Tensor) -> Tensor:
        """Return what `divergence` does, from the teacher's likeliest tokens [T, K] and their log probabilities."""
        got = got.to(torch.promote_types(got.dtype, torch.float32)) / self.temperature
        listed = _with_rest(got.log_softmax(-1).gather(-1, tokens)), _with_rest(logs)
        return self.temperature**2 * (listed[1].exp() * (listed[1] - listed[0])).sum()

    @torch.no_grad()
    def outputs(self, student: nn.Module, inputs: dict[str, Any]) -> Any:
        """Return the output of the original for `inputs`; `student` may be wrapped (DDP, FSDP)."""
        inputs = without_labels(inputs)
        if self.model is not None and self.windows is not None:
            return SequenceClassifierOutput(logits=self.answers.read(self.model, self.windows, inputs))  # type: ignore
        if self.model is not None:
            return self.model(**inputs)
        adapted = next((module for module in student.modules() if isinstance(module, PeftModel)), None)
        if adapted is None:
            raise OptionError(
                f"{type(student).__name__} has no adapters to switch off, so its weights are not the original's any"
                " more; give the teacher a model of its own, or the student adapters (lora_rank)"
            )
        with ExitStack() as original:
            original.enter_context(adapted.disable_adapter())
            original.enter_context(evaluation_mode(student))
            original.enter_context(intercept_attention(get_mechanisms(adapted)))
            return student(**inputs)


def check_teacher(student: nn.Module, teacher: nn.Module) -> None:
    """Raise `OptionError` unless two models have as many tokens, and classifiers as many classes."""
    models: list[Any] = [root_model(model) for model in (student, teacher)]
    for name, what in (("vocab_size", "tokens"), ("num_labels", "classes")):
        if name == "num_labels" and not isinstance(task_of(student), SequenceClassification):
            continue
        own, other = (getattr(model.config.get_text_config(), name, None) for model in models)
        if own != other:
            raise OptionError(
                f"teacher: {type(models[1]).__name__} predicts {other} {what} ({name}), and the model that it teaches"
                f" {own}; give a teacher of the same vocabulary, such as the original"
            )


def distillation_loss(
    student: Any,
    teacher_outputs: Any,
    labels: Tensor,
    teacher: Teacher,
    task: Task,
    count: Tensor | int | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return kl_weight KL and hidden_weight hidden for two outputs with `logits` and `hidden_states`.

    Args:
        labels: int64 [B, N], of a classifier [B] or, with several labels, [B, K]; no KL is taken where it is -100.
        task: what the models predict. count: divides the sum of the divergences; None: how many there are.
        attention_mask: [B, N], 0 at padding, whose hidden states are not compared.
    """
    chosen = task.predicted(labels) != IGNORED_LABEL
    divergence = hidden = student.logits.new_zeros((), dtype=torch.float32)
    if teacher.kl_weight and bool(chosen.any()):
        got, want = (task.predicting(x.logits)[chosen] for x in (student, teacher_outputs))
        total = sum_by_chunks(partial(task.divergence, teacher), chunk_rows(got.shape[-1]), got, want)
        divergence = teacher.kl_weight * total / (len(want) if count is None else count)
    if teacher.hidden_weight:
        states = student.hidden_states, teacher_outputs.hidden_states
        hidden = teacher.hidden_weight * hidden_error(*states, attention_mask)
    return divergence, hidden


def hidden_error(found: Sequence[Tensor], wanted: Sequence[Tensor], attention_mask: Tensor | None) -> Tensor:
    """Return the mean over layers, rows and their real tokens of |h - h'|^2 / |h'|^2, the inputs left out.

    Rows count alike, however long: so processes and accumulated batches add up.
    """
    errors = []
    for got, want in zip(found[1:], wanted[1:], strict=True):
        got, want = got.float(), want.float()
        smallest = torch.finfo(want.dtype).tiny
        errors.append((got - want).square().sum(-1) / want.square().sum(-1).clamp(min=smallest))
    error = torch.stack(errors).mean(0)
    mask = torch.ones_like(error) if attention_mask is None else attention_mask.to(error.dtype)
    return ((error * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


class HiddenStates(LossModule):
    """A model that learns the hidden states of another, for models without a head, such as those of embeddings.

    Its forward returns the loss: the mean over layers, rows and real tokens of |h - h'|^2 / |h'|^2, h the student's
    hidden state after a layer, h' the teacher's.

    Args:
        student: is trained. teacher: gives the states to learn; stays in eval mode, and is neither trained nor saved.
    """

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel):
        super().__init__()
        self.student = student
        self._teacher = (teacher.eval().requires_grad_(False),)

    def measure(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the `loss`."""
        wanted: dict[str, Any] = {**inputs, "output_hidden_states": True}
        with torch.no_grad():
            target = self._teacher[0](**wanted).hidden_states
        found = self.student(**wanted).hidden_states
        return {"loss": hidden_error(found, target, inputs.get("attention_mask"))}


def _likeliest(got: Tensor, want: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """Return both log probabilities [T, V] of the `count` tokens likeliest in `want`, and of all others as one."""
    if count is None or count >= want.shape[-1]:
        return got, want
    chosen = want.topk(count, dim=-1).indices
    return _with_rest(got.gather(-1, chosen)), _with_rest(want.gather(-1, chosen))


def _with_rest(listed: Tensor) -> Tensor:
    """Return log probabilities [T, K] of some tokens, and behind them that of all others together."""
    largest = -torch.finfo(listed.dtype).eps  # a probability of all others that is not quite zero
    rest = torch.log(-torch.expm1(listed.logsumexp(-1, keepdim=True).clamp(max=largest)))
    return torch.cat([listed, rest], dim=-1)
