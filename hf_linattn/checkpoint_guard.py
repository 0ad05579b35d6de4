"""What `from_pretrained` of a model class does with a converted checkpoint: it makes a patched model, or none.

A config that is given stands in place of the checkpoint's `config.json`, the only file that says what is converted:
softmax would run on weights that were trained for something else. transformers has no seam for this.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from .checkpoint_config import MODEL_TYPE, ConvertedConfigError
from .errors import CheckpointError

CLASSES = "hf_linattn.hub"  # of patched models; imported with the first checkpoint


def guard(models: Any) -> None:
    """Put `require_own_config` before `from_pretrained` of `PreTrainedModel`, and behind it the class that patches."""
    read = models.from_pretrained.__func__

    @functools.wraps(read)
    def from_pretrained(cls: Any, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        require_own_config(name, config, kwargs)
        try:
            return read(cls, name, *args, config=config, **kwargs)
        except ConvertedConfigError as error:
            patched = importlib.import_module(CLASSES).patched_class(cls, name, error.config_dict)
        return patched.from_pretrained(name, *args, config=config, **kwargs)

    models.from_pretrained = classmethod(from_pretrained)


def require_own_config(name: Any, config: Any, kwargs: dict[str, Any]) -> None:
    """Raise `CheckpointError` for an unmarked config beside the name of a converted checkpoint.

    One that was read from there may be of another subfolder or revision, or of before it was converted. A GGUF file,
    which takes long to read, is never converted.
    """
    marked = MODEL_TYPE in getattr(config, "__dict__", ())
    if config is None or name is None or marked or kwargs.get("gguf_file") is not None:
        return
    try:
        said, _ = PreTrainedConfig.get_config_dict(name, **kwargs)
    except OSError:  # weights without a config, for which the given one stands
        return
    if said.get("model_type") == MODEL_TYPE:
        given = repr(config) if isinstance(config, str) else type(config).__name__
        raise CheckpointError(
            f"config={given} was given for {str(name)!r}, which is converted: softmax would run on its weights; leave"
            " config out and give fields by name, such as use_cache=False, or change those of"
            f" AutoConfig.from_pretrained({str(name)!r})"
        )
