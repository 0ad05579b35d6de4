"""Names -> classes. One registry type serves mechanisms, feature maps and kernels."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from .errors import OptionError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named classes that is filled by decorators and fails well.

    Args:
        kind: what an entry is called in messages, for example `"mechanism"`.
        package: a package whose modules register entries when imported; they are imported on the first look-up.
        entry_point_group: installed distributions may add entries through this entry-point group.

    >>> shapes = Registry("shape")
    >>> @shapes.register("square")
    ... class Square: ...
    >>> shapes.names()
    ['square']
    >>> shapes.get("sqare")
    Traceback (most recent call last):
    hf_linattn.errors.UnknownNameError: unknown shape 'sqare'; did you mean square? Known: square
    """

    def __init__(self, kind: str, package: str | None = None, entry_point_group: str | None = None):
        self.kind = kind
        self._package = package
        self._entry_point_group = entry_point_group
        self._entries: dict[str, type[T]] = {}
        self._discovered = False

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return a decorator that enters a class under `name`; a name that is taken raises `OptionError`."""

        def enter(entry: type[T]) -> type[T]:
            holder = self._entries.setdefault(name, entry)
            if (holder.__module__, holder.__qualname__) != (entry.__module__, entry.__qualname__):
                raise OptionError(
                    f"{self.kind} {name!r} is already registered by {holder.__module__}.{holder.__qualname__};"
                    f" choose another name for {entry.__module__}.{entry.__qualname__}"
                )
            self._entries[name] = entry  # a module that is reloaded replaces its own entry
            return entry

        return enter

    def get(self, name: str) -> type[T]:
        """Return the class entered under `name`, or raise `UnknownNameError` with the nearest names."""
        self._discover()
        if not isinstance(name, str) or name not in self._entries:
            raise UnknownNameError(self.kind, name, self._entries)
        return self._entries[name]

    def names(self) -> list[str]:
        """Return every registered name in alphabetical order."""
        self._discover()
        return sorted(self._entries)

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True  # first, since the modules below may look entries up themselves
        if self._package is not None:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
        if self._entry_point_group is not None:
            for point in entry_points(group=self._entry_point_group):
                self.register(point.name)(point.load())


MECHANISM_PACKAGE = "hf_linattn.mechanisms"  # of the library's own, and the entry-point group of others
# here, so that configs and plans find mechanisms by name without importing what imports them
MECHANISMS: Registry[Any] = Registry("mechanism", package=MECHANISM_PACKAGE, entry_point_group=MECHANISM_PACKAGE)
