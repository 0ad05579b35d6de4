"""What `AutoConfig` finds under the model type `hf_linattn`; what it reads is imported with the first checkpoint."""

from __future__ import annotations

import importlib
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

MODEL_TYPE = "hf_linattn"
READER = "hf_linattn.saved_config"  # it imports this module


class HfLinattnConfig(PreTrainedConfig):
    """The config of a checkpoint of this library; reading it gives the linearised base config."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the base config, marked with the patch; `CheckpointError` if malformed. See `saved_config.py`."""
        return importlib.import_module(READER).read_config(config_dict, **kwargs)
