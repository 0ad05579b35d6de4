"""What a report says of classifiers: metrics, and how the original reads documents that are longer than its table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MetricRow:
    """A metric of four classifiers on the test texts; the models are those of `Perplexities`."""

    metric: str
    original: float
    control: float | None
    converted: float
    recovered: float


@dataclass(frozen=True)
class ReadingRow:
    """The original with the positions it came with, on documents that are longer.

    Attributes:
        reading: `cut`, to its first window, or `windows`, overlapping, the logits pooled by their tokens.
        max_length: tokens of a window. stride: by how many windows advance; None where there is one.
        perplexity, squared_error: on the test texts; the one of the two that the report has. metrics: by name.
    """

    reading: str
    max_length: int
    stride: int | None
    perplexity: float | None
    metrics: dict[str, float]
    squared_error: float | None = None
