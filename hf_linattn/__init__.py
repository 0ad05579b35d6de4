"""hf_linattn: subquadratic attention for pretrained Hugging Face models.

>>> from hf_linattn import calibrate, patch_model
>>> model = patch_model(model, "hybrid")  # doctest: +SKIP
>>> errors = calibrate(model, batches)  # doctest: +SKIP

Importing this package also teaches the Auto classes of transformers to load converted checkpoints.
"""

from . import hub  # noqa: F401  the Auto classes load converted checkpoints from now on
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
from .longer_positions import extend_positions
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
