"""The mechanisms, one per file; importing a file registers what it defines."""

from ..registry import MECHANISMS
from .base import Mechanism
from .capabilities import ExactnessLimit
from .inputs import PLAIN, AttentionLayer, CallOptions, Pairs
from .registration import list_mechanisms, register_mechanism
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
