"""The options with which mechanisms are timed: defaults, but where these would make a row another one than before."""

from __future__ import annotations

from typing import Any

from hf_linattn.config import MechanismConfig, make_config

TIMED: dict[str, dict[str, Any]] = {"hybrid": {"window_size": 64}}  # its default is as wide as quality asks for


def timed_config(name: str) -> MechanismConfig:
    """Return the config of a mechanism that is timed."""
    return make_config(name, TIMED.get(name, {}))
