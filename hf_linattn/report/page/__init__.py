"""A run as one page of HTML that needs nothing beside itself."""

from .build import page, save_page
from .evidence import Evidence, read_evidence

__all__ = ["Evidence", "page", "read_evidence", "save_page"]
