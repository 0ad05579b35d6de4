"""hf_linattn: subquadratic attention for pretrained Hugging Face models.

>>> from hf_linattn import calibrate, patch_model
>>> model = patch_model(model, "hybrid")  # doctest: +SKIP
>>> errors = calibrate(model, batches)  # doctest: +SKIP

Importing this package also teaches the Auto classes of transformers to load converted checkpoints. It imports neither
PyTorch nor transformers by itself: what a name needs is imported when the name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .auto_config import register_with_transformers

if TYPE_CHECKING:
    from .backends import set_backend
    from .calibration import calibrate
    from .chosen_plan import ChosenPlan
    from .config import MechanismConfig
    from .errors import (
        BuildError,
        CheckpointError,
        DataError,
        DerivativeError,
        HfLinattnError,
        OperandError,
        OptionError,
        PatchError,
        UnknownNameError,
        UnsupportedModeError,
        UnsupportedModelError,
    )
    from .explain import explain_backend
    from .mechanisms import AttentionLayer, Mechanism, list_mechanisms, register_mechanism
    from .patching import (
        chunk_feed_forward,
        get_mechanisms,
        get_patch_config,
        is_patched,
        original_attention,
        patch_model,
        unpatch_model,
    )
    from .plan import PatchConfig
    from .plan_search import choose_plan
    from .positions.extend import extend_positions
    from .sensitivity import choose_layers, layer_sensitivity

__version__ = "0.1.0"

__all__ = [
    "AttentionLayer",
    "BuildError",
    "CheckpointError",
    "ChosenPlan",
    "DataError",
    "DerivativeError",
    "HfLinattnError",
    "Mechanism",
    "MechanismConfig",
    "OperandError",
    "OptionError",
    "PatchConfig",
    "PatchError",
    "UnknownNameError",
    "UnsupportedModeError",
    "UnsupportedModelError",
    "calibrate",
    "choose_layers",
    "choose_plan",
    "chunk_feed_forward",
    "explain_backend",
    "extend_positions",
    "get_mechanisms",
    "get_patch_config",
    "is_patched",
    "layer_sensitivity",
    "list_mechanisms",
    "original_attention",
    "patch_model",
    "register_mechanism",
    "set_backend",
    "unpatch_model",
]

# module -> the public names that it has; the imports above say the same to type checkers
_HOMES = {
    "backends": ("set_backend",),
    "calibration": ("calibrate",),
    "chosen_plan": ("ChosenPlan",),
    "config": ("MechanismConfig",),
    "errors": (
        "BuildError", "CheckpointError", "DataError", "DerivativeError", "HfLinattnError", "OperandError",
        "OptionError", "PatchError", "UnknownNameError", "UnsupportedModeError",
        "UnsupportedModelError",
    ),
    "explain": ("explain_backend",),
    "mechanisms": ("AttentionLayer", "Mechanism", "list_mechanisms", "register_mechanism"),
    "patching": (
        "chunk_feed_forward", "get_mechanisms", "get_patch_config", "is_patched", "original_attention", "patch_model",
        "unpatch_model",
    ),
    "plan": ("PatchConfig",),
    "plan_search": ("choose_plan",),
    "positions.extend": ("extend_positions",),
    "sensitivity": ("choose_layers", "layer_sensitivity"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_transformers()
