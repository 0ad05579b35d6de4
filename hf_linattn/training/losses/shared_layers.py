"""The first layers of a student that are still its teacher's: run once, in the teacher's forward, for both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hf_linattn import get_mechanisms
from hf_linattn.architecture import layer_stacks, root_model
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.mechanisms.softmax import SoftmaxMechanism


class SharedLayers:
    """Layers of a teacher, whose last output stands in for the same layers of a student.

    Args:
        own, others: the layers of the student, and of the teacher, in their order.
    """

    def __init__(self, own: Sequence[nn.Module], others: Sequence[nn.Module]):
        self.own, self.others, self._output = own, others, None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep what comes out of the layers while the teacher runs."""

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._output = output

        handle = self.others[-1].register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Have the student's layers hand on what was kept, and run none of them."""
        with ExitStack() as undo:
            for layer in self.own:
                undo.enter_context(_answering(layer, self._output))
            self._output = None
            yield


@contextmanager
def _answering(layer: nn.Module, output: Any) -> Iterator[None]:
    """Have a layer return an output, whatever it is given."""
    before = layer.__dict__.get("forward")
    layer.forward = lambda *args, **kwargs: output  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before  # type: ignore[method-assign]


def shared_layers(student: nn.Module, teacher: nn.Module | None) -> SharedLayers | None:
    """Return the layers under the first one that differs from the teacher's; None if there are none.

    They keep softmax, have the teacher's weights, and neither they nor anything in front of them is trained or drops
    activations.

    Args:
        student: a patched model, which may have adapters. teacher: None: the student itself, its adapters off.
    """
    root = root_model(student)
    other = root if teacher is None else root_model(teacher)
    mechanisms = get_mechanisms(student)
    try:
        stacks = layer_stacks(root, mechanisms)
    except UnsupportedModelError:  # its layers are in no list, of which there would be first ones
        return None
    if len(stacks) != 1:
        return None
    (stack,) = stacks
    layers: Any = root.get_submodule(stack)
    count = 0
    while count < len(layers) - 1 and _keeps_softmax(f"{stack}.{count}.", mechanisms):
        count += 1
    own = {name: p for name, p in root.named_parameters() if not _is_in(name, stack, range(count, len(layers)))}
    shared = [*own.values()]
    if not count or any(p.requires_grad for p in shared):
        return None
    theirs = dict(other.named_parameters())
    if teacher is not None and not all(name in theirs and torch.equal(p, theirs[name]) for name, p in own.items()):
        return None
    later = range(count, len(layers))
    if any(_drops(module) for name, module in root.named_modules() if not _is_in(f"{name}.", stack, later)):
        return None
    return SharedLayers(list(layers[:count]), list(other.get_submodule(stack)[:count]))


def _keeps_softmax(prefix: str, mechanisms: Any) -> bool:
    """Return whether no layer under a path has a mechanism but softmax."""
    return all(isinstance(m, SoftmaxMechanism) for path, m in mechanisms.items() if f"{path}.".startswith(prefix))


def _is_in(name: str, stack: str, layers: range) -> bool:
    """Return whether a parameter or module is in one of these layers of a stack."""
    return any(name.startswith(f"{stack}.{number}.") for number in layers)


def _drops(module: nn.Module) -> bool:
    """Return whether a module drops activations in training."""
    own = getattr(module, "attention_dropout", 0.0)
    return (isinstance(module, nn.Dropout) and module.p > 0) or (isinstance(own, float) and own > 0)
