"""recall: how likely the right answers of prompts are that ask for what stands in them."""

from __future__ import annotations

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
        return _likelihoods(gates.run(values, _inputs(gates, example)), example).sum()

    def answered(self, gates: Gates, progress: bool) -> list[Any]:
        """Return the prompts of which the original finds every token of the answer the likeliest."""
        return [
            prompt
            for prompt in tqdm(self.examples, desc="prompts that the original answers", disable=not progress)
            if _is_right(gates.run_original(_inputs(gates, prompt)), prompt)
        ]


def _inputs(gates: Gates, prompt: Any) -> dict[str, Any]:
    """Return what the model takes: the prompt and the answer but its last token, which nothing is predicted from."""
    ids = [*prompt.prompt_ids, *prompt.answer_ids[:-1]]
    tokens = torch.tensor([ids], device=root_model(gates.model).device)
    return {"input_ids": tokens, **accepted(gates.model, logits_to_keep=len(prompt.answer_ids))}


def _answer_logits(output: Any, prompt: Any) -> Tensor:
    """Return [A, V], in float32 or wider, of which the answer's A tokens are predicted."""
    logits = output.logits[0, -len(prompt.answer_ids) :]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _likelihoods(output: Any, prompt: Any) -> Tensor:
    """Return log p of each token of the answer [A]."""
    logits = _answer_logits(output, prompt)
    answer = torch.tensor(prompt.answer_ids, device=logits.device)
    return logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]


def _is_right(output: Any, prompt: Any) -> bool:
    return _answer_logits(output, prompt).argmax(-1).tolist() == list(prompt.answer_ids)
