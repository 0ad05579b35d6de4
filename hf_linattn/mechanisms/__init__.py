"""The mechanisms, one per file; importing a file registers what it defines."""

from .base import (
    MECHANISMS,
    PLAIN,
    AttentionLayer,
    CallOptions,
    ExactnessLimit,
    Mechanism,
    Pairs,
    list_mechanisms,
    register_mechanism,
)
from .sequence import SequenceMechanism

__all__ = [
    "MECHANISMS",
    "PLAIN",
    "AttentionLayer",
    "CallOptions",
    "ExactnessLimit",
    "Mechanism",
    "Pairs",
    "SequenceMechanism",
    "list_mechanisms",
    "register_mechanism",
]
