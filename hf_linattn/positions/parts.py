"""Parts of a model whose positions were extended: the config of the whole says so while the whole is saved.

`extend_positions` gives a model a config of its own, as others may be made from the old one. Where the model is a
part, the whole goes on with the old one, and would be loaded with the old positions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from ..blueprints import blueprint, plain_attributes, shapes
from ..errors import PatchError
from ..pinning import SHARED, free_config, nested_configs
from .extend import EXTENSIONS
from .tables import position_configs


@contextmanager
def positions_of_parts(model: PreTrainedModel) -> Iterator[None]:
    """Have the config of a model say for a while what the configs of its extended parts say of their positions.

    Raises:
        PatchError: a part's config is none of the whole's, or something else would be made longer when it is loaded.
    """
    parts = {path: part for path, part in model.named_modules() if path and vars(part).get(EXTENSIONS)}
    homes = {path: _home(model, path, part) for path, part in parts.items()}
    before = {id(home): copy.deepcopy(home) for home in homes.values()}
    try:
        for path, part in parts.items():
            for config, name, value in _said(part, homes[path]):
                setattr(config, name, value)
        for path, home in homes.items():
            if other := _not_alike(model, path, home, before[id(home)], parts):
                raise PatchError(
                    f"the positions of {path!r} were extended, and {type(model).__name__} has one config for them and"
                    f" those of {other!r}, which were not extended alike; call unpatch_model with what was extended,"
                    " and extend_positions with the whole"
                )
        yield
    finally:
        for path, part in parts.items():
            old = position_configs(before[id(homes[path])])
            for (config, name, _), (index, _) in zip(_said(part, homes[path]), _fields(part), strict=True):
                setattr(config, name, getattr(old[index], name))


def _fields(part: Any) -> list[tuple[int, str]]:
    """Return which fields of which of its `position_configs` the extensions of a part have written."""
    return [(index, name) for extension in vars(part)[EXTENSIONS] for index, name, _ in extension.fields]


def _said(part: Any, home: Any) -> list[tuple[Any, str, Any]]:
    """Return the configs in the whole's, the names of their fields, and what the part's own say there."""
    own, shared = position_configs(part.config), position_configs(home)
    return [(shared[index], name, getattr(own[index], name)) for index, name in _fields(part)]


def _home(model: PreTrainedModel, path: str, part: Any) -> Any:
    """Return the config, of those in the whole's, that a part is made from when the whole is loaded."""
    known = [part.config, *vars(part)[SHARED]]
    for config in nested_configs(model.config):
        if any(config is one for one in known):
            return config
    raise PatchError(
        f"the positions of {path!r} were extended, and its config is not in that of {type(model).__name__}, which"
        " therefore cannot say so; put it there, or unpatch_model the part and call extend_positions(model, ...)"
    )


def _not_alike(model: PreTrainedModel, path: str, home: Any, old: Any, parts: dict[str, Any]) -> str | None:
    """Return the path of another part that the config in the whole's makes longer than it is, or less long."""
    if any(getattr(config, name) != value for config, name, value in _said(parts[path], home)):
        return next(other for other, part in parts.items() if other != path)
    for other, module in model.named_modules():
        around = not other or f"{path}.".startswith(f"{other}.")
        if isinstance(module, PreTrainedModel) and not around and module.config is home and other not in parts:
            if _differs(module, old, home):
                return other
    return None


def _differs(module: PreTrainedModel, old: Any, new: Any) -> bool:
    """Whether two configs make different modules of a class."""
    configs = copy.deepcopy(old), copy.deepcopy(new)
    for config in configs:
        free_config(config)
    first, second = (blueprint(module, config).modules() for config in configs)
    return any(
        shapes(one) != shapes(other) or plain_attributes(one) != plain_attributes(other)
        for one, other in zip(first, second, strict=True)
    )
