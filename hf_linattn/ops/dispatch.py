"""THE choice of a backend: which file in an operation's folder computes a call.

`set_backend` chooses a policy for the mechanisms of a model, which is an order of backends. A backend of an operation
is a module `ops/<operation>/<backend>.py`, which answers `unsupported(call)`: None, or in a few words why it cannot
compute this call. The first that can `run`s it; `torch` can compute all calls. Nobody else asks what runs.

`recording` keeps the answers, which is what `hf_linattn.explain_backend` shows.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from ..config import require
from ..errors import OptionError
from .common.tracing import is_watched

logger = logging.getLogger(__name__)

POLICIES: dict[str, tuple[str, ...]] = {
    "auto": ("triton", "cpu", "torch"),
    "torch": ("torch",),
    "compile": ("compile", "cpu", "torch"),
    "triton": ("triton", "torch"),
}
WATCHED = "operations are recorded or transformed, which only PyTorch's own can be"


def default_backend() -> str:
    """Return the backend that mechanisms are made with: what HF_LINATTN_BACKEND says, "auto" or "torch".

    Raises:
        OptionError: it says anything else. The other backends are chosen for one model, by `set_backend`.
    """
    name = os.environ.get("HF_LINATTN_BACKEND", "auto")
    require("the environment variable HF_LINATTN_BACKEND", name, name in ("auto", "torch"), "'auto' or 'torch'")
    return name


DEFAULT_BACKEND = default_backend()  # read once, so that all layers of a process agree


class Policy(NamedTuple):
    """How a backend is chosen for a call.

    name: of `POLICIES`. training: whether a call without gradients must give the same bits as one with them, which may
    recompute it.
    """

    name: str = "torch"
    training: bool = False

    @property
    def inference(self) -> bool:
        """Whether what has no gradients may be used."""
        return not self.training and not torch.is_grad_enabled()


PYTORCH = Policy()


class Decision(NamedTuple):
    """One choice of a backend: what ran, and why the backends before it in the order did not: name -> reason."""

    operation: str
    backend: str
    passed_over: Mapping[str, str]


_RECORD: ContextVar[list[Decision] | None] = ContextVar("decisions", default=None)


@contextmanager
def recording() -> Iterator[list[Decision]]:
    """A context in which the choices made in this thread are put into the list that it gives, as they are made."""
    decisions: list[Decision] = []
    token = _RECORD.set(decisions)
    try:
        yield decisions
    finally:
        _RECORD.reset(token)


class Operation:
    """An operation and its backends, by name: modules, or the names of modules that are imported when first needed.

    A call is a tuple with `query`, the heads [B, H, N, D], and `policy`. `run` of a backend may return anything, the
    same for all of them.
    """

    def __init__(self, name: str, **backends: Any):
        self.name, self.backends = name, backends
        self.orders = {policy: [x for x in order if x in backends] for policy, order in POLICIES.items()}
        OPERATIONS[name] = self

    def run(self, call: Any) -> Any:
        """Compute the call by the first backend in the order of its policy that can.

        Raises:
            OptionError: there is no such policy, or none of its backends can.
        """
        if is_watched() and call.policy.name == "triton":
            tell_watched()
        name, passed_over = self._choose(call, self.order(call))
        if name is not None:
            return self._run(name, call, passed_over)
        tried = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items()) or "it has none of these"
        raise OptionError(
            f"operation {self.name!r} has no backend for a call with {describe(call)} under the policy"
            f" {call.policy.name!r} ({tried}); call set_backend(model, 'auto')"
        )

    def run_kernels(self, call: Any) -> Any:
        """Compute the call by another backend than PyTorch's operations; return None where none of these can."""
        name, passed_over = self._choose(call, [x for x in self.order(call) if x != "torch"])
        return None if name is None else self._run(name, call, passed_over)

    def _run(self, name: str, call: Any, passed_over: dict[str, str]) -> Any:
        """Compute the call by a backend, and record that."""
        record = None if torch.compiler.is_compiling() else _RECORD.get()
        if record is not None:
            record.append(Decision(self.name, name, passed_over))
        return self.backend(name).run(call)

    def _choose(self, call: Any, names: list[str]) -> tuple[str | None, dict[str, str]]:
        """Return the first backend of these that can, None if none can, and why those before it cannot."""
        passed_over: dict[str, str] = {}
        watched = is_watched()
        for name in names:
            reason = WATCHED if watched and name != "torch" else absent(name, call)
            reason = self.backend(name).unsupported(call) if reason is None else reason
            if reason is None:
                return name, passed_over
            passed_over[name] = reason
        return None, passed_over

    def order(self, call: Any) -> list[str]:
        """Return the backends that the policy of the call names and this operation has."""
        order = self.orders.get(call.policy.name)
        if order is None:
            raise OptionError(
                f"operation {self.name!r} got a call with {describe(call)} for the backend {call.policy.name!r}, which"
                f" must be one of {', '.join(POLICIES)}; call set_backend(model, 'auto')"
            )
        return order

    def backend(self, name: str) -> Any:
        """Return the module of a backend."""
        found = self.backends[name]
        if isinstance(found, str):
            found = self.backends[name] = importlib.import_module(found)
        return found


OPERATIONS: dict[str, Operation] = {}  # name -> those whose `interface` was imported


def describe(call: Any) -> str:
    """Return the size and kind of a call's queries, for messages."""
    return f"queries {list(call.query.shape)} of {str(call.query.dtype).removeprefix('torch.')} on {call.query.device}"


@torch.compiler.assume_constant_result  # torch.compile calls it while it records, and puts nothing into the program
def tell_watched() -> None:
    """Say that there will be no kernels of Triton, which were asked for."""
    _tell_watched()


@functools.cache
def _tell_watched() -> None:
    """Once in a process."""
    logger.warning(
        "set_backend(model, 'triton') has no effect here: %s; call the model without torch.compile, and without a"
        " static cache on a GPU, for Triton's kernels", WATCHED,
    )  # fmt: skip


def absent(backend: str, call: Any) -> str | None:
    """Return why a policy does without a backend on the device of a call, None if it may have it."""
    automatic = backend == "triton" and call.policy.name == "auto"
    return no_triton(call.query.device) if automatic else None


@functools.cache
def no_triton(device: torch.device) -> str | None:
    """Return why "auto" does without Triton on a device: it takes GPUs that have run its kernels, see `why_small`."""
    if device.type != "cuda":
        return f"heads on {device.type!r}"
    try:  # here: nothing else needs Triton
        from .runtime.triton import why_small
    except ImportError:
        return "Triton is not installed"
    return why_small(device)
