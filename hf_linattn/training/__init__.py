"""Training: options (`arguments`), stages of a recipe (`stages`), losses (`losses`), text and packed rows (`data`).

`Finetuning`, and `Distillation` with `Calibrate`, `Align`, `Distill` and `Lengthen`, are the recipes from Python;
`load_adapter` gives a model what a recipe with adapters has trained.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Align", "Calibrate", "Distill", "Distillation", "Finetuning", "Lengthen", "load_adapter"]


def __getattr__(name: str) -> Any:
    """Import the recipe when it is asked for: data sets and adapters take seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_linattn.training import adapter_files, api

    return getattr(adapter_files if name == "load_adapter" else api, name)
