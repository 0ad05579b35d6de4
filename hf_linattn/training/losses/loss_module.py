"""A loss as a module: what a Trainer trains where the loss is not that of a language model."""

from __future__ import annotations

from torch import Tensor, nn


class LossModule(nn.Module):
    """A module that holds the parameters to be trained and whose forward returns their loss on a batch of rows.

    What it only looks at, such as a teacher, a subclass keeps in a tuple: no submodule, so neither saved nor moved nor
    trained. The signature is spelt out because a Trainer passes a model with `**kwargs` more than its inputs.

    Attributes:
        evaluation_rows: how many rows an evaluation gives it at a time; None: as many as the options say.
    """

    evaluation_rows: int | None = None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return what `measure` returns for the inputs [B, N] that were given; labels are not looked at."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        inputs |= {"token_type_ids": token_type_ids}
        return self.measure({name: value for name, value in inputs.items() if value is not None})

    def measure(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the `loss`, and whatever else is of interest."""
        raise NotImplementedError
