"""Model cards: what a converted model is, in plain words and as metadata for the Hub."""

from .base import Base, check_hub_id, is_hub_id, read_base
from .conversion import (
    Calibrated,
    Conversion,
    attention_table,
    card_of,
    conversion_card,
    mechanism_names,
    sources,
    title,
    uses_and_limits,
)
from .loading import PIPELINE_TAGS, SENTENCES, WRITTEN, library_of, loader_of, loading_lines, packages_of, with_name
from .wording import Measured, changed_options, in_bytes, layers_in_words, measured_sentence

CARD_FILE = "README.md"

__all__ = [
    "CARD_FILE",
    "PIPELINE_TAGS",
    "SENTENCES",
    "WRITTEN",
    "Base",
    "Calibrated",
    "Conversion",
    "Measured",
    "attention_table",
    "card_of",
    "changed_options",
    "check_hub_id",
    "conversion_card",
    "in_bytes",
    "is_hub_id",
    "layers_in_words",
    "library_of",
    "loader_of",
    "loading_lines",
    "measured_sentence",
    "mechanism_names",
    "packages_of",
    "read_base",
    "sources",
    "title",
    "uses_and_limits",
    "with_name",
]
