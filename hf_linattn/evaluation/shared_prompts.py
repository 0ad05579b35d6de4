"""The harness's model class, which reads each prompt once for all of its choices.

Import this file with the extra `harness` alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache

from ..config import require_finite
from ..inference import accepted
from ..patching import is_patched
from ..positions.tables import first_position
from .generation import GREEDY, plain_generation
from .memory import state_bytes_by_length

Request = tuple[Any, list[int], list[int]]  # as the harness makes them: a key, the prompt and the choice in tokens
# HFLM asks for a cache itself, and says how long a text may be by `max_length`
PROBE = 16  # tokens after which a state is measured
WORTH = 16  # times the bytes of a prompt's keys and values that are copied sooner than the prompt is read again
PLAIN = {name: value for name, value in GREEDY.items() if name != "use_cache"} | {"max_new_tokens": None}


class SharedPrompts(HFLM):
    """As HFLM, which reads the prompt again with every choice; with examples in it a prompt is long.

    Prompts are read into a cache up to their last token, padded on the left, and the choices from there, padded on the
    right. Only the logits of choices are made. Results are those of HFLM but for rounding. Of short prompts nothing is
    shared where the state is far larger than their keys, as the buckets of `lsh` are: copies of it would cost more.

    Beams, penalties, filters and lengths of the model's `generation_config` do not count.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.first = first_position(self.model)
        self.shared_from = 0.0  # tokens of a prompt
        if is_patched(self.model):
            (row,) = state_bytes_by_length(self.model, [PROBE])
            self.shared_from = PROBE * row.patched / row.original / WORTH

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        with plain_generation(self.model):
            return super()._model_generate(context, max_length, stop, **options | PLAIN)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each choice in nats, and whether each of its tokens is the likeliest.

        `OptionError` for one that is not finite.
        """
        numbers: dict[tuple[int, ...], list[int]] = {}
        for number, (_, prompt, _) in enumerate(requests):
            numbers.setdefault(tuple(prompt), []).append(number)
        prompts = sorted(numbers, key=len, reverse=True)
        size = override_bs or int(self.batch_size)
        found: dict[int, tuple[float, bool]] = {}
        with torch.no_grad(), tqdm(total=len(requests), desc="choices", disable=disable_tqdm) as bar:
            for start in range(0, len(prompts), size):
                batch = prompts[start : start + size]
                own = [numbers[prompt] for prompt in batch]
                choices = [[requests[number][2] for number in several] for several in own]
                for several, scores in zip(own, self._score(batch, choices), strict=True):
                    found.update(zip(several, scores, strict=True))
                    bar.update(len(several))
        require_finite("log_likelihood", (likelihood for likelihood, _ in found.values()))
        return [found[number] for number in range(len(requests))]

    def _score(
        self, prompts: Sequence[Sequence[int]], choices: Sequence[list[list[int]]]
    ) -> list[list[tuple[float, bool]]]:
        """Return the scores of the choices of each prompt."""
        ids, here = self._pad(prompts, left=True)
        cache: Cache | None = None
        if ids.shape[1] >= self.shared_from:
            cache = DynamicCache(config=self.model.config)
        if cache is not None and ids.shape[1] > 1:
            self._read(ids[:, :-1], here[:, :-1], cache, kept=1)
        scores: list[list[tuple[float, bool]]] = [[] for _ in prompts]
        most = max(map(len, choices))
        for number in range(most):
            # a prompt with fewer choices reads its first one again, for nothing
            chosen = [own[number] if number < len(own) else own[0] for own in choices]
            last = number == most - 1
            found = self._score_choices(ids, here, chosen, cache if last else copy.deepcopy(cache))
            for own, score, several in zip(scores, found, choices, strict=True):
                if number < len(several):
                    own.append(score)
        return scores

    def _score_choices(
        self, ids: Tensor, here: Tensor, choices: Sequence[list[int]], cache: Cache | None
    ) -> list[tuple[float, bool]]:
        """Return the scores of one choice of each prompt, whose cache is used up; without one all is read."""
        targets, real = self._pad(choices, left=False)
        read = torch.cat([ids if cache is None else ids[:, -1:], targets[:, :-1]], 1)
        mask = torch.cat([here, real[:, :-1]], 1)
        count = targets.shape[1]
        logits = self._read(read, mask, cache, kept=count)[:, -count:].float().log_softmax(-1)
        likelihoods = logits.gather(-1, targets[..., None])[..., 0].masked_fill(~real, 0.0).cpu().double()
        likeliest = (logits.argmax(-1) == targets) | ~real
        return list(zip(likelihoods.sum(1).tolist(), likeliest.all(1).tolist(), strict=True))

    def _read(self, ids: Tensor, here: Tensor, cache: Cache | None, kept: int) -> Tensor:
        """Read tokens [B, n] behind what a cache has; return the last `kept` logits, or where a model cuts none, all.
        """
        positions = (here.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :] + self.first
        options = accepted(self.model, position_ids=positions, logits_to_keep=kept)
        kept_state = {"past_key_values": cache, "use_cache": cache is not None}
        return self.model(input_ids=ids, attention_mask=here.long(), **kept_state, **options).logits

    def _pad(self, rows: Sequence[Sequence[int]], left: bool) -> tuple[Tensor, Tensor]:
        """Return rows of tokens [B, N], and which are no padding."""
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        here = torch.zeros(ids.shape, dtype=torch.bool)
        for number, row in enumerate(rows):
            place = slice(ids.shape[1] - len(row), None) if left else slice(len(row))
            ids[number, place] = torch.tensor(row)
            here[number, place] = True
        return ids.to(self.device), here.to(self.device)
