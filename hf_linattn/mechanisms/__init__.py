"""The mechanisms, one per file; importing a file registers what it defines."""

from .base import (
    MECHANISMS,
    AttentionLayer,
    ExactnessLimit,
    Mechanism,
    Pairs,
    SequenceMechanism,
    list_mechanisms,
    register_mechanism,
)

__all__ = [
    "MECHANISMS",
    "AttentionLayer",
    "ExactnessLimit",
    "Mechanism",
    "Pairs",
    "SequenceMechanism",
    "list_mechanisms",
    "register_mechanism",
]
