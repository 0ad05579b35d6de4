"""Mechanisms side by side on one model: quality, speed and memory, each measured beside softmax in the same run."""

from .deadline import TimeIsUpError, time_limit
from .measure import Comparison, ComparisonOptions, Entry, Material, Quality, compare, read_original
from .picture import comparison_figure
from .table import csv_text, head_lines, markdown_lines, records

__all__ = [
    "Comparison",
    "ComparisonOptions",
    "Entry",
    "Material",
    "Quality",
    "TimeIsUpError",
    "compare",
    "comparison_figure",
    "csv_text",
    "head_lines",
    "markdown_lines",
    "read_original",
    "records",
    "time_limit",
]
