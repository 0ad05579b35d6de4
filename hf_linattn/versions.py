"""Versions of other packages, which are not imported for it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str | None:
    """Return the version of a package; None where it is not installed.

    >>> installed_version("no_such_package")
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
