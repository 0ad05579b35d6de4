"""Have transformers know the checkpoints of this library, without importing transformers for it.

`AutoConfig` gets the config class, and `from_pretrained` of model classes a guard. Where the module of transformers
that has them is imported already this is done at once; otherwise as soon as somebody imports it: a finder that stands
before the others waits for that one module, and removes itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OUR_CONFIG = "hf_linattn.checkpoint_config"  # imported by name, as it imports transformers
OUR_GUARD = "hf_linattn.checkpoint_guard"


def _enter_config(registry: ModuleType) -> None:
    ours = importlib.import_module(OUR_CONFIG)
    registry.AutoConfig.register(ours.MODEL_TYPE, ours.HfLinattnConfig, exist_ok=True)


def _guard_weights(models: ModuleType) -> None:
    importlib.import_module(OUR_GUARD).guard(models.PreTrainedModel)


AFTER: Mapping[str, Callable[[ModuleType], None]] = {  # module of transformers -> what is done when it is there
    "transformers.models.auto.configuration_auto": _enter_config,
    "transformers.modeling_utils": _guard_weights,
}


def register_with_transformers() -> None:
    """Do what `AFTER` says, now or when a module is imported."""
    for name, act in AFTER.items():
        if name in sys.modules:
            act(sys.modules[name])
        else:
            sys.meta_path.insert(0, Waiting(name, act))


class Waiting(MetaPathFinder):
    """Finds one module as the other finders do, and acts after it has run."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]):
        self.name, self.act = name, act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run, act = loader.exec_module, self.act

        def run_and_act(module: ModuleType) -> None:
            run(module)
            act(module)

        loader.exec_module = run_and_act
        return spec
