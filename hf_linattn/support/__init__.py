"""Which architectures of transformers can be patched, found out on small random models of all of them."""

from .check import CHECKS, Support, check_architecture
from .tiny import architectures

__all__ = ["CHECKS", "Support", "architectures", "check_architecture"]
