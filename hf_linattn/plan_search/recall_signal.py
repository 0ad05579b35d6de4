"""recall: how likely the right answers of prompts are that ask for what stands in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..architecture import root_model
from ..inference import accepted
from .gates import Gates


class RecallSignal:
    """log p(answer | prompt), summed over the answer's tokens, in nats; only the answer's logits are made.

    A prompt is what `hf_linattn.evaluation.recall.make_prompts` makes: it has a `task`, a `length`, `prompt_ids` and
    `answer_ids`.
    """

    name = "recall"

    def __init__(self, prompts: Sequence[Any]):
        self.examples: list[Any] = list(prompts)

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

    def answered(self, gates: Gates, values: Tensor, progress: bool) -> list[Any]:
        """Return the prompts whose answer is known with these gates: p >= 1/2 a token, in the geometric mean."""
        prompts = tqdm(self.examples, desc="prompts that are answered", disable=not progress)
        return [prompt for prompt in prompts if bool(self._mean(gates, values, prompt) >= -math.log(2))]

    def _mean(self, gates: Gates, values: Tensor, example: Any) -> Tensor:
        return self.value(gates, values, example) / len(example.answer_ids)


def _inputs(gates: Gates, prompt: Any) -> dict[str, Any]:
    """Return what the model takes: the prompt and the answer but its last token, which nothing is predicted from."""
    ids = [*prompt.prompt_ids, *prompt.answer_ids[:-1]]
    tokens = torch.tensor([ids], device=root_model(gates.model).device)
    return {"input_ids": tokens, **accepted(gates.model, logits_to_keep=len(prompt.answer_ids))}
