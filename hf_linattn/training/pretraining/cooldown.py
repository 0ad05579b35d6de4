"""A training whose learning rate falls to zero in the end."""

from __future__ import annotations

from typing import Any

from transformers import Trainer


class CooledTrainer(Trainer):
    """A Trainer whose schedule ends earlier, and whose last steps lead from the rate that it ends with to zero.

    What a cosine to a tenth leaves is noise of the last steps; a line to zero takes it out (Hägele et al. 2024,
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", there after a constant rate).

    Args:
        cooldown: the share of the steps in which the rate falls to zero; 0: none, the schedule takes all steps.
    """

    def __init__(self, *args: Any, cooldown: float, **others: Any):
        super().__init__(*args, **others)
        self.cooldown = cooldown

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule of the arguments for the steps before, and go on from its last rate."""
        cooled = round(self.cooldown * num_training_steps)
        end = num_training_steps - cooled
        scheduler = super().create_scheduler(end, optimizer)
        before = scheduler.lr_lambdas[0]
        if cooled:
            scheduler.lr_lambdas = [
                lambda step: before(min(step, end)) * min(1.0, (num_training_steps - step) / cooled)
            ] * len(scheduler.lr_lambdas)
        return scheduler
