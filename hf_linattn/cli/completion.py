"""What the shell completes, without PyTorch: names of mechanisms and of recipes."""

from __future__ import annotations

from ..mechanism_table import rows
from ..recipe_files import recipe_names


def mechanism_names(incomplete: str) -> list[str]:
    """Return the mechanisms that begin so.

    >>> mechanism_names("perf")
    ['performer']
    """
    return [row["name"] for row in rows() if row["name"].startswith(incomplete)]


def recipes(incomplete: str) -> list[str]:
    """Return the recipes that begin so.

    >>> recipes("smollm2-135m-h")
    ['smollm2-135m-heads', 'smollm2-135m-heads-512', 'smollm2-135m-heads-512-recall']
    """
    return [name for name in recipe_names() if name.startswith(incomplete)]
