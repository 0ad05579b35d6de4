"""The options of a mechanism as data, and the checks of every option in the library."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .errors import DataError, OptionError, UnknownNameError, did_you_mean, warn_of_former_name
from .registry import MECHANISMS

LARGEST_COUNT = 2**24  # no option needs more; a checkpoint cannot ask for any amount of memory
LARGEST_SEED = 2**63 - 1  # which every generator takes
# names that options had before -> those of today; what has them, in code, plans and checkpoints, works
FORMER_OPTIONS = {"sink": "sink_logit", "num_sinks": "num_sink_tokens"}


@dataclass
class MechanismConfig:
    """Options that every mechanism takes. A mechanism adds its own fields in a subclass.

    Each field carries `metadata={"help": ...}`; values are checked in `__post_init__`, which raises `OptionError`.

    Attributes:
        seed: of everything random in the mechanism; one stream per layer.
    """

    mechanism: ClassVar[str] = ""
    # options that saved models may lack, as older versions wrote them -> what computes what these did
    formerly: ClassVar[Mapping[str, Any]] = {}

    seed: int = field(default=0, metadata={"help": "seed of everything random in the mechanism; one stream per layer"})

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            setattr(self, f.name, numbers_as_data(getattr(self, f.name)))
        require_seed(self.seed)
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            require(f.name, value, f.type not in (bool, "bool") or isinstance(value, bool), "True or False")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> MechanismConfig:
        """Build the config from keyword options; an unknown one raises `OptionError` with the nearest names."""
        known = {f.name for f in dataclasses.fields(cls) if f.init}
        former = {name: new for name, new in FORMER_OPTIONS.items() if new in known and name not in known}
        given: dict[str, Any] = {}
        for name, value in options.items():
            new = former.get(name, name)
            if new not in known:
                hint = did_you_mean(name, known, former)
                raise OptionError(f"mechanism {cls.mechanism!r} has no option {name!r}{hint}")
            if new != name:
                if new in options:
                    raise OptionError(f"{name!r} is a former name of the option {new!r}; give one of them, not both")
                warn_of_former_name("option", name, new)
            given[new] = value
        for f in dataclasses.fields(cls):
            if f.init and f.name not in given and f.default is f.default_factory is dataclasses.MISSING:
                raise OptionError(f"mechanism {cls.mechanism!r} needs the option {f.name!r}; give it a value")
        return cls(**given)

    @classmethod
    def complete_saved(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of a saved model, with those that came after it as they were before there were any."""
        return {**cls.formerly, **options}

    def require_counts(self, *names: str, least: int = 1) -> None:
        """Raise `OptionError` unless the named options are integers of at least `least`."""
        for name in names:
            require_count(name, getattr(self, name), least)

    def to_options(self) -> dict[str, Any]:
        """Return the options as JSON-able data, the inverse of `from_options`."""
        options = dataclasses.asdict(self)
        return {f.name: options[f.name] for f in dataclasses.fields(self) if f.init}


def numbers_as_data(value: Any) -> Any:
    """Return an option with the numbers of NumPy and PyTorch in it as Python and JSON have them.

    >>> import numpy as np
    >>> numbers_as_data({"window_size": np.int64(64)})
    {'window_size': 64}
    """
    if isinstance(value, dict):
        return {name: numbers_as_data(part) for name, part in value.items()}
    if isinstance(value, list):
        return [numbers_as_data(part) for part in value]
    return value.item() if getattr(value, "ndim", None) == 0 else value


def require(name: str, value: object, valid: bool, expected: str) -> None:
    """Raise `OptionError` unless `valid`, in the one wording used for every option."""
    if not valid:
        raise OptionError(f"{name} must be {expected}, got {value!r}")


@contextmanager
def given_as(**names: str) -> Iterator[None]:
    """Have an `OptionError` about an option say the name under which its value was given: own -> given.

    Around a block, or as a decorator of a function.
    """
    try:
        yield
    except OptionError as error:
        own, _, rest = str(error).partition(" ")
        if own not in names:
            raise
        raise OptionError(f"{names[own]} {rest}") from error


def require_count(name: str, value: Any, least: int = 1, optional: bool = False) -> None:
    """Raise `OptionError` unless an option is an integer from `least` to `LARGEST_COUNT`, or None if optional."""
    if optional and value is None:
        return
    either = "None or " if optional else ""
    integer = isinstance(value, int) and not isinstance(value, bool)
    require(name, value, integer and value >= least, f"{either}an integer >= {least}")
    require(name, value, value <= LARGEST_COUNT, f"{either}at most {LARGEST_COUNT:,}")


def require_seed(seed: Any) -> None:
    """Raise `OptionError` unless a seed is an integer that every generator takes."""
    whole = isinstance(seed, int) and not isinstance(seed, bool)
    require("seed", seed, whole and 0 <= seed <= LARGEST_SEED, f"an integer from 0 to {LARGEST_SEED}")


def require_finite(name: str, scores: Iterable[float]) -> None:
    """Raise `OptionError` unless all scores of a model are finite: no other one is greater than NaN."""
    broken = [score for score in scores if not math.isfinite(score)]
    remedy = "look at what it predicts, or load it in float32 or bfloat16 where float16 overflows"
    require(name, broken[:1], not broken, f"finite, or the model is broken: {remedy}")


def require_known(kind: str, name: object, known: Iterable[str]) -> None:
    """Raise `UnknownNameError`, with the nearest names, unless a name is one of those known."""
    if name not in list(known):  # a list compares with anything, a dict hashes
        raise UnknownNameError(kind, name, known)


def require_texts(name: str, given: Any) -> list[str]:
    """Return texts as a list; `DataError` for one string, whose letters are no texts, and for what is not text."""
    if isinstance(given, str):
        raise DataError(f"{name} must be a sequence of texts, got one string; pass [text]")
    texts: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    if others := [text for text in texts if not isinstance(text, str)]:
        raise DataError(f"{name} must be a sequence of texts, got {others[0]!r}; pass strings in a list")
    return texts


def json_object(name: str, value: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return a mapping that is given as it is or as JSON text; `OptionError` if it is neither.

    >>> json_object("options", '{"num_features": 128}')
    {'num_features': 128}
    """
    return dict(read_json(name, value, Mapping, 'a JSON object like {"num_features": 128}'))


def read_json(name: str, value: Any, kinds: Any, expected: str) -> Any:
    """Return data of these types that is given as it is or as JSON text; `OptionError` if it is neither."""
    try:
        content = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise OptionError(f"{name} must be a JSON object, got {value!r} ({error})") from error
    require(name, value, isinstance(content, kinds), expected)
    return content


def make_config(name: str, options: Mapping[str, Any], saved: bool = False) -> MechanismConfig:
    """Return the config of the mechanism registered as `name`, with `options` applied and checked.

    saved: whether these are all the options of a saved model, which an older version may have written.
    """
    kind = MECHANISMS.get(name).config_class
    return kind.from_options(kind.complete_saved(options) if saved else options)
