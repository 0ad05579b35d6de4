"""Which architectures of transformers can be patched, found out on small random models of all of them."""

from .check import CHECKS, Support, check_architecture
from .table import support_table
from .tiny import architectures

__all__ = ["CHECKS", "Support", "architectures", "check_architecture", "support_table"]
