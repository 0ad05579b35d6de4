"""Names -> classes. One registry type serves mechanisms, feature maps and kernels."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import threading
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from .errors import OptionError, UnknownNameError, warn_of_former_name

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named classes that is filled by decorators and fails well.

    Args:
        kind: what an entry is called in messages, for example `"mechanism"`.
        package: a package whose modules register entries when imported; they are imported on the first look-up, or
            before the first entry of another module.
        entry_point_group: installed distributions may add entries through this entry-point group. One that cannot be
            loaded is left out with a warning.
        former: names that entries had before -> those of today. They are found, with a warning, and never listed.

    >>> shapes = Registry("shape")
    >>> @shapes.register("square")
    ... class Square: ...
    >>> shapes.names()
    ['square']
    >>> shapes.get("sqare")
    Traceback (most recent call last):
    hf_linattn.errors.UnknownNameError: unknown shape 'sqare'; did you mean square? Known: square
    """

    def __init__(
        self,
        kind: str,
        package: str | None = None,
        entry_point_group: str | None = None,
        former: Mapping[str, str] | None = None,
    ):
        self.kind = kind
        self.former = dict(former or {})
        self._package = package
        self._entry_point_group = entry_point_group
        self._entries: dict[str, type[T]] = {}
        self._lock = threading.RLock()
        self._discovered = self._discovering = False

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return a decorator that enters a class under `name`; a name that is taken raises `OptionError`."""

        def enter(entry: type[T]) -> type[T]:
            if not f"{entry.__module__}.".startswith(f"{self._package}."):
                self._import_package()  # so that its names are taken, whoever comes first
            self._admit(name, entry)
            self._entries[name] = entry  # a module that is reloaded replaces its own entry
            return entry

        return enter

    def _admit(self, name: str, entry: type[T]) -> None:
        """Raise `OptionError` unless a class can have this name."""
        if name in self.former:
            raise OptionError(
                f"{self.kind} {name!r} is a former name of {self.former[name]!r};"
                f" choose another name for {entry.__module__}.{entry.__qualname__}"
            )
        holder = self._entries.get(name, entry)
        if (holder.__module__, holder.__qualname__) != (entry.__module__, entry.__qualname__):
            raise OptionError(
                f"{self.kind} {name!r} is already registered by {holder.__module__}.{holder.__qualname__};"
                f" choose another name for {entry.__module__}.{entry.__qualname__}"
            )

    def get(self, name: str) -> type[T]:
        """Return the class entered under `name`, or raise `UnknownNameError` with the nearest names."""
        self._discover()
        if isinstance(name, str) and name in self.former:
            warn_of_former_name(self.kind, name, self.former[name])
            name = self.former[name]
        if not isinstance(name, str) or name not in self._entries:
            raise UnknownNameError(self.kind, name, self._entries, self.former)
        return self._entries[name]

    def names(self) -> list[str]:
        """Return every registered name in alphabetical order."""
        self._discover()
        return sorted(self._entries)

    def _discover(self) -> None:
        if self._discovered:
            return
        with self._lock:  # other threads wait for the whole table
            if self._discovered or self._discovering:  # the modules below may look entries up themselves
                return
            self._discovering = True
            try:
                self._import_entries()
                self._discovered = True
            finally:
                self._discovering = False

    def _import_package(self) -> None:
        if self._package is not None and not self._discovered:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")

    def _import_entries(self) -> None:
        self._import_package()
        if self._entry_point_group is not None:
            for point in entry_points(group=self._entry_point_group):
                self._load(point)

    def _load(self, point: EntryPoint) -> None:
        """Enter what another distribution adds, or warn: one that is broken takes nothing else away."""
        try:
            entry = point.load()
            if not isinstance(entry, type):
                raise OptionError(f"a {self.kind} must be a class, got {entry!r}")
            self.register(point.name)(entry)
        except Exception as error:  # whatever code of others raises
            owner = "an unknown package" if point.dist is None else point.dist.name
            warnings.warn(
                f"{self.kind} {point.name!r} is left out: {point.value!r} of {owner} cannot be loaded"
                f" ({type(error).__name__}: {error}); update {owner} or uninstall it",
                RuntimeWarning,
                stacklevel=5,
            )


class MechanismRegistry(Registry[Any]):
    """The table of mechanisms. A config finds its mechanism by the name on its class, which no two can share."""

    def _admit(self, name: str, entry: Any) -> None:
        """As the base, and leave the name where plans and checkpoints look for it."""
        super()._admit(name, entry)
        _require_module_name(name)
        config = _require_config(name, entry)
        options = [option.name for option in dataclasses.fields(config)]
        if taken := [option for option in RESERVED if option in options]:
            raise OptionError(
                f"mechanism {name!r} has the option {taken[0]!r}, which patch_model or plans take themselves; give it"
                f" another name than {', '.join(RESERVED)}"
            )
        if vars(config).get("mechanism", name) != name:
            owner = repr(config.mechanism) if config.mechanism else "every mechanism"
            raise OptionError(
                f"mechanism {name!r} has the config_class {config.__qualname__}, which is that of {owner}; give"
                f" {entry.__qualname__} its own: `class {entry.__name__}Config({config.__name__}): pass`"
            )
        config.mechanism = name


def _require_config(name: str, entry: Any) -> Any:
    """Return the `config_class` of a mechanism; `OptionError` unless it is a dataclass."""
    config = getattr(entry, "config_class", None)
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise OptionError(
            f"mechanism {name!r} is to be a subclass of Mechanism whose config_class is a dataclass on"
            f" MechanismConfig, got {entry.__qualname__} with {config!r}; see docs/extending.md"
        )
    if "__dataclass_fields__" not in vars(config) and (options := vars(config).get("__annotations__")):
        raise OptionError(
            f"mechanism {name!r}: {config.__qualname__} names {', '.join(options)}, which are no options as long as it"
            " is not decorated with @dataclass; decorate it"
        )
    return config


def _require_module_name(name: str) -> None:
    """Raise `OptionError` unless a submodule can have this name, as members of `by_head` and `fusion` do."""
    from torch import nn  # which mechanisms have imported; a look at the help must not

    try:
        nn.ModuleDict({name: nn.Identity()})
    except (KeyError, TypeError) as error:
        raise OptionError(
            f"a mechanism cannot have the name {name!r}, as no module in PyTorch can ({error.args[0]}); choose another"
        ) from error


# what `patch_model` and plans take beside the options of a mechanism
RESERVED = ("model", "mechanism", "layers", "heads", "cross_attention", "chunk_feed_forward", "max_positions")
MECHANISM_PACKAGE = "hf_linattn.mechanisms"  # of the library's own, and the entry-point group of others
# names that said something else to most readers; checkpoints and plans that have them load
FORMER_MECHANISMS = {
    "flash": "mixed_chunk",
    "sinks": "streaming",
    "fixed": "fixed_pattern",
    "random": "random_blocks",
}
# here, so that configs and plans find mechanisms by name without importing what imports them
MECHANISMS = MechanismRegistry(
    "mechanism", package=MECHANISM_PACKAGE, entry_point_group=MECHANISM_PACKAGE, former=FORMER_MECHANISMS
)
