"""recall: how likely the right answers of prompts are that ask for what stands in them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..inference import accepted, device_of, progress_bar
from .gates import Gates
from .options import Signal

logger = logging.getLogger(__name__)


class RecallSignal(Signal):
    """log p(answer | prompt), summed over the answer's tokens, in nats; only the answer's logits are made.

    A prompt is what `hf_linattn.evaluation.recall.make_prompts` makes: it has a `task`, a `length`, `prompt_ids` and
    `answer_ids`.
    """

    name = "recall"

    def __init__(self, prompts: Sequence[Any]):
        super().__init__(prompts)
        self._first_slopes: dict[int, Tensor] = {}  # by id of the prompt: with all gates shut

    @property
    def groups(self) -> list[str]:
        """The kind and length of each prompt; these count alike."""
        return [f"{prompt.task} {prompt.length}" for prompt in self.examples]

    def value(self, gates: Gates, values: Tensor, example: Any) -> Tensor:
        """Return the signal [] of a prompt with these gates [U]: the higher, the better."""
        logits = gates.run(values, _inputs(gates, example)).logits[0, -len(example.answer_ids) :]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        answer = torch.tensor(example.answer_ids, device=logits.device)
        return logits.log_softmax(-1).gather(1, answer[:, None]).sum()

    def slopes(self, gates: Gates, values: Tensor, example: Any) -> Tensor:
        """Return d signal / d g [U] of a prompt at these gates."""
        first = self._first_slopes.get(id(example))
        return super().slopes(gates, values, example) if first is None or bool(values.any()) else first

    def answered(self, gates: Gates, progress: bool | None) -> list[Any]:
        """Return the prompts whose answer the original knows."""
        prompts = progress_bar(self.examples, desc="prompts that are answered", progress=progress)
        whole = torch.ones_like(gates.values)
        return [prompt for prompt in prompts if is_known(float(self.value(gates, whole, prompt)), prompt.answer_ids)]

    def keep_lost(self, gates: Gates, least: int, progress: bool | None) -> None:
        """Leave the prompts alone whose answer is not known with all gates shut, if there are `least`.

        The forward that says so is that of their first slopes, too. A prompt whose likelihood is not finite is none of
        them, as a warning says.
        """
        lost = []
        for prompt in progress_bar(self.examples, desc="prompts that are lost", progress=progress):
            shut = torch.zeros_like(gates.values).requires_grad_()
            with torch.enable_grad():
                value = self.value(gates, shut, prompt)
                likelihood = float(value.detach())
                if not math.isfinite(likelihood):
                    logger.warning("choose_plan: recall is %s on a prompt of %r", likelihood, prompt.task)
                elif not is_known(likelihood, prompt.answer_ids):
                    lost.append(prompt)
                    (self._first_slopes[id(prompt)],) = torch.autograd.grad(value, shut)
        if len(lost) < least:
            logger.warning(
                "choose_plan: with all heads replaced %d of %d prompts are lost, and slopes of others say little; give"
                " longer prompts (lengths), or more of them (num_prompts)", len(lost), len(self.examples),
            )  # fmt: skip
        self.examples = lost if len(lost) >= least else self.examples


def is_known(log_likelihood: float, answer_ids: Sequence[int]) -> bool:
    """Say whether a model knows an answer: p >= 1/2 a token, in the geometric mean."""
    return log_likelihood >= -math.log(2) * len(answer_ids)


def _inputs(gates: Gates, prompt: Any) -> dict[str, Any]:
    """Return what the model takes: the prompt and the answer but its last token, which nothing is predicted from."""
    ids = [*prompt.prompt_ids, *prompt.answer_ids[:-1]]
    tokens = torch.tensor([ids], device=device_of(gates.model))
    return {"input_ids": tokens, **accepted(gates.model, logits_to_keep=len(prompt.answer_ids))}
