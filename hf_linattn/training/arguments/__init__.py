"""Options of the recipes: dataclasses by group, whose help texts are the documentation, and what reads them."""

from .data import DataArguments
from .distillation import ALONE, BESIDE, DistillationArguments
from .model import AUTO, ModelArguments
from .parsing import (
    DISTILLATION,
    FINETUNING,
    Arguments,
    check_budget,
    known_options,
    long_step,
    parse_arguments,
    read_arguments,
    tokens_per_step,
)
from .recipe import FULL, LORA, NONE, WINDOW, RecipeArguments
from .trainer import FinetuningArguments

__all__ = [
    "ALONE", "AUTO", "BESIDE", "DISTILLATION", "FINETUNING", "FULL", "LORA", "NONE", "WINDOW", "Arguments",
    "DataArguments", "DistillationArguments", "FinetuningArguments", "ModelArguments", "RecipeArguments",
    "check_budget", "known_options", "long_step", "parse_arguments", "read_arguments", "tokens_per_step",
]  # fmt: skip
