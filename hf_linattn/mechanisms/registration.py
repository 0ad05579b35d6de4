"""The names of mechanisms: a decorator enters them, and every function that takes a name finds them."""

from __future__ import annotations

from collections.abc import Callable

from ..registry import MECHANISMS
from .base import Mechanism


def register_mechanism(name: str) -> Callable[[type[Mechanism]], type[Mechanism]]:
    """Return a class decorator that makes a mechanism known as `name`.

    A distribution can also list the class under the entry-point group `hf_linattn.mechanisms`.

    Args:
        name: what `patch_model` is to know it by.

    Raises:
        OptionError: raised by the decorator, where another class has the name or no module can have it. So is a class
            without a `config_class` of its own, as an inherited one is another mechanism's, or with a field in it that
            `patch_model` takes itself.

    Examples:
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

    Examples:
        >>> from hf_linattn import list_mechanisms
        >>> {"linear", "performer", "softmax"} <= set(list_mechanisms())
        True
    """
    return MECHANISMS.names()
