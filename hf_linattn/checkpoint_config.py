"""What `AutoConfig` finds under the model type `hf_linattn`; what it reads is imported with the first checkpoint.

The other config classes of transformers refuse such a checkpoint by name. A model class asks its own config class, and
so does PEFT where an adapter does not say its task. transformers has no seam for this: the library wraps the method.
"""

from __future__ import annotations

import importlib
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from .errors import CheckpointError

MODEL_TYPE = "hf_linattn"
READER = "hf_linattn.saved_config"  # it imports this module
PLAIN_READ: Any = PreTrainedConfig.from_dict.__func__  # type: ignore[attr-defined]


class HfLinattnConfig(PreTrainedConfig):
    """The config of a checkpoint of this library; reading it gives the linearised base config."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the base config, marked with the patch; `CheckpointError` if malformed. See `saved_config.py`."""
        return importlib.import_module(READER).read_config(config_dict, **kwargs)


def from_dict(cls: Any, config_dict: Any, **kwargs: Any) -> Any:
    """Read a config as ever, and raise `CheckpointError` for that of a checkpoint of this library."""
    if isinstance(config_dict, dict) and config_dict.get("model_type") == MODEL_TYPE:
        raise CheckpointError(
            f"config.json has model_type {MODEL_TYPE!r}, which {cls.__name__} alone does not read, as its model class"
            " would run softmax; load it through an Auto class, such as AutoModelForCausalLM.from_pretrained, and an"
            " adapter without a task_type by PeftModel.from_pretrained(the loaded model, adapter)"
        )
    return PLAIN_READ(cls, config_dict, **kwargs)


PreTrainedConfig.from_dict = classmethod(from_dict)  # type: ignore[assignment]
