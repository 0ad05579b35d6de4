"""The tasks by name."""

from __future__ import annotations

from collections.abc import Callable

from .draft import Question, Source
from .needles import Needles

RECALL_TASKS: dict[str, Callable[[Source], Question]] = {
    "single_noise": Needles(text=False),
    "single_text": Needles(),
    "single_uuid": Needles(kind="uuid"),
}
