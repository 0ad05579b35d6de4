"""Window dropout: a hybrid model that trains without its windows, at times, learns to use its linear branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_linattn import get_mechanisms
from hf_linattn.errors import OptionError
from hf_linattn.mechanisms.hybrid import HybridMechanism, hybrids_of


class WindowDropout(TrainerCallback):
    """Shuts the windows of hybrid mechanisms for some steps, so that the model cannot hide behind them.

    In each step the window of each hybrid, in a layer or on some of its heads, shows a query its own key alone with a
    probability that falls linearly from `probability` to zero over a training; sinks stay. (Scheduled sliding-window
    dropout, 2025, arXiv 2510.05901.) Where windows count in blocks, as with hard keys or a delta rule, a query's own
    block and the hard keys stay, too. Which windows are shut depends on the seed and the step alone, so a resumed run
    shuts the same ones.
    """

    def __init__(self, model: nn.Module, probability: float, seed: int = 0):
        self.model, self.probability, self.seed = model, probability, seed
        if not self._hybrids():
            raise OptionError(f"window_dropout={probability}: the model has no hybrid mechanism; leave it out")

    def _hybrids(self) -> list[HybridMechanism]:
        return hybrids_of(get_mechanisms(self.model).values())

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = self.probability * (1 - state.global_step / state.max_steps)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + state.global_step)
        hybrids = self._hybrids()
        for hybrid, drawn in zip(hybrids, torch.rand(len(hybrids), generator=generator).tolist(), strict=True):
            hybrid.window_shut = drawn < now

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for hybrid in self._hybrids():
            hybrid.window_shut = False
