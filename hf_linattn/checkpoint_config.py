"""What `AutoConfig` finds under the model type `hf_linattn`; what it reads is imported with the first checkpoint.

The other config classes of transformers refuse such a checkpoint by name; `from_pretrained` of a model class, which
asks its own, goes on from there (`checkpoint_guard.py`). transformers has no seam for this: the library wraps the
method.
"""

from __future__ import annotations

import importlib
import logging
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


class ConvertedConfigError(CheckpointError):
    """What a config class raises for the config of a checkpoint of this library, `config_dict`."""

    def __init__(self, message: str, config_dict: dict[str, Any]):
        super().__init__(message)
        self.config_dict = config_dict


def from_dict(cls: Any, config_dict: Any, **kwargs: Any) -> Any:
    """Read a config as ever, and raise `ConvertedConfigError` for that of a checkpoint of this library."""
    if isinstance(config_dict, dict) and config_dict.get("model_type") == MODEL_TYPE:
        message = (
            f"config.json has model_type {MODEL_TYPE!r}, which {cls.__name__} alone does not read, as its model class"
            " would run softmax; read it by AutoConfig.from_pretrained, and load the model through an Auto class, such"
            " as AutoModelForCausalLM, or its own"
        )
        raise ConvertedConfigError(message, config_dict)
    return PLAIN_READ(cls, config_dict, **kwargs)


def is_of_others(record: logging.LogRecord) -> bool:
    """Say whether a record is none over the model type of this library, which is that of no model class."""
    return f"You are using a model of type `{MODEL_TYPE}`" not in record.getMessage()


logging.getLogger(PreTrainedConfig.__module__).addFilter(is_of_others)
PreTrainedConfig.from_dict = classmethod(from_dict)  # type: ignore[assignment]
