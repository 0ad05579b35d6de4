"""Attention transfer by blocks of layers: what one layer gets wrong, the next ones of its block learn to live with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_linattn import get_mechanisms
from hf_linattn.architecture import layer_stacks, root_model
from hf_linattn.attention_call import intercept_attention, pass_through
from hf_linattn.calibration import squared_errors
from hf_linattn.config import require_count
from hf_linattn.mechanisms import Mechanism
from hf_linattn.mechanisms.softmax import SoftmaxMechanism
from hf_linattn.training.losses.attention_transfer import Transfer, add_gradients, make_mean, over_runs


class BlockTransfer(Transfer):
    """Blocks of `block_layers` layers: what comes out behind their last layer, beside what the original has there.

    The mean over the blocks, and over each time that one runs in a forward, of

        mean_b sum_i |y_i - y'_i|^2 / sum_i |y'_i - x_i|^2,

    x: the original's hidden states in front of the block, y': behind it, y: behind it if its layers run on their
    mechanisms from x on, b: rows, i: real tokens. Every block starts from the original's states, so blocks do not wait
    for each other and memory is that of one of them, feed-forward layers too. (Zhang et al. 2024, LoLCATs, arXiv
    2410.10254, train blocks apart for large models, with the loss of each layer; here the loss is that of the block.)

    Args:
        model: a patched model, of which at least one mechanism has parameters of its own.
        block_layers: layers in a block, of each list of layers in their order; the last block may have fewer.

    Raises:
        PatchError: the model is not patched.
        OptionError: nothing to train, or `block_layers` is no positive integer.
        UnsupportedModelError: the model does not keep its layers in a list.
    """

    def __init__(self, model: nn.Module, block_layers: int = 4):
        super().__init__(model)
        require_count("block_layers", block_layers)
        root, mechanisms = root_model(model), get_mechanisms(model)
        self._blocks: list[tuple[list[nn.Module], list[Mechanism]]] = []
        for stack in layer_stacks(root, mechanisms):
            layers: Any = root.get_submodule(stack)
            for first in range(0, len(layers), block_layers):
                block = range(first, min(first + block_layers, len(layers)))
                inside = [m for path, m in mechanisms.items() if any(path.startswith(f"{stack}.{i}.") for i in block)]
                if not all(isinstance(mechanism, SoftmaxMechanism) for mechanism in inside):
                    self._blocks.append(([layers[i] for i in block], inside))

    def compare(self, inputs: dict[str, Tensor], gradients: dict[nn.Parameter, Tensor]) -> dict[str, Tensor]:
        """Return the `loss`, and `output_errors` of all blocks."""
        mask = inputs.get("attention_mask")
        blocks = [_Block(*block, mask, gradients, len(self._blocks)) for block in self._blocks]
        with ExitStack() as watching, intercept_attention(get_mechanisms(self._model[0])):
            for block in blocks:
                watching.enter_context(block.watched())
            self.run_backbone(inputs)
        errors, loss = over_runs([block.errors for block in blocks])
        make_mean(gradients, len(blocks), sum(len(block.errors) for block in blocks))
        return {"loss": loss, "output_errors": errors}


@dataclass
class _Block:
    """Runs its layers once more, on their mechanisms, as soon as the original has been through them."""

    layers: list[nn.Module]
    mechanisms: list[Mechanism]
    attention_mask: Tensor | None
    gradients: dict[nn.Parameter, Tensor]
    count: int
    errors: list[Tensor] = field(default_factory=list)  # one for each time that the block runs
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    again: bool = False  # whether the layers are being run once more

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the calls of the layers for a while."""
        handles = [layer.register_forward_pre_hook(self._record, with_kwargs=True) for layer in self.layers]
        handles.append(self.layers[-1].register_forward_hook(self._compare))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.again:
            self.calls.append((args, kwargs))

    def _compare(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.again:
            return
        self.again = True
        start = hidden = _input(*self.calls[0])
        change = _output(output) - start
        with torch.set_grad_enabled(bool(self.gradients)), pass_through(self.mechanisms):
            for inner, (others, options) in zip(self.layers, self.calls, strict=True):
                given = ((hidden, *others[1:]), options) if others else ((), {**options, "hidden_states": hidden})
                hidden = _output(inner(*given[0], **given[1]))
            errors, sizes = squared_errors((hidden - start)[:, None], change[:, None], self.attention_mask)
            error = (errors / sizes).mean()  # of rows, so that processes and accumulated batches add up
            add_gradients(error / self.count, self.gradients)
        self.errors.append(error.detach())
        self.calls.clear()
        self.again = False


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states [B, N, width] that a layer was called with."""
    return args[0] if args else kwargs["hidden_states"]


def _output(output: Any) -> Tensor:
    """Return the hidden states [B, N, width] that a layer gave."""
    return output[0] if isinstance(output, tuple) else output
