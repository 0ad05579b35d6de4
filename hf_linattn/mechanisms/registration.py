"""The names of mechanisms: a decorator enters them, and every function that takes a name finds them."""

from __future__ import annotations

from collections.abc import Callable

from ..registry import MECHANISMS
from .base import Mechanism


def register_mechanism(name: str) -> Callable[[type[Mechanism]], type[Mechanism]]:
    """Return a class decorator that makes a mechanism known as `name`.

    Its `config_class` must be its own subclass of `MechanismConfig`: an inherited one is another mechanism's, and
    raises `OptionError`. So does a field of it that `patch_model` takes itself, and a name that no module can have.
    A distribution can also list the class under the entry-point group `hf_linattn.mechanisms`.

    >>> from dataclasses import dataclass
    >>> from hf_linattn import Mechanism, MechanismConfig, register_mechanism
    >>> @dataclass
    ... class MeanConfig(MechanismConfig):
    ...     pass
    >>> @register_mechanism("mean_of_values")
    ... class MeanOfValues(Mechanism):
    ...     config_class, modes = MeanConfig, frozenset({"bidirectional"})
    """
    return MECHANISMS.register(name)


def list_mechanisms() -> list[str]:
    """Return the names `patch_model` accepts.

    >>> {"linear", "performer", "softmax"} <= set(list_mechanisms())
    True
    """
    return MECHANISMS.names()
