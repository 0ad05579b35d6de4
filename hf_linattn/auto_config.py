"""Have `AutoConfig` know the checkpoints of this library, without importing transformers for it.

If transformers' registry of configs is there already, the config class is entered at once; otherwise as soon as
somebody imports it. A finder that stands before the others waits for that one module, and removes itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REGISTRY = "transformers.models.auto.configuration_auto"
OUR_CONFIG = "hf_linattn.checkpoint_config"  # imported by name, as it imports transformers


def register_with_auto_config() -> None:
    """Enter the config class into `AutoConfig`, now or when it is imported."""
    if REGISTRY in sys.modules:
        _register(sys.modules[REGISTRY])
    else:
        sys.meta_path.insert(0, _Waiting())


def _register(registry: ModuleType) -> None:
    ours = importlib.import_module(OUR_CONFIG)
    registry.AutoConfig.register(ours.MODEL_TYPE, ours.HfLinattnConfig, exist_ok=True)


class _Waiting(MetaPathFinder):
    """Finds `REGISTRY` as the other finders do, and registers after it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register(module)

        loader.exec_module = run_and_register
        return spec
