"""The tasks by name."""

from __future__ import annotations

from .chains import MultiHop, VariableTracking
from .draft import RecallTask
from .lists import CommonWords, Copying, FrequentWords, PhoneBook
from .needles import MultipleChoice, Needles

RECALL_TASKS: dict[str, RecallTask] = {
    "single_noise": Needles(text=False),
    "single_text": Needles(),
    "single_uuid": Needles(kind="uuid"),
    "multi_key": Needles(keys=4),
    "multi_value": Needles(values=4),
    "multi_query": Needles(keys=4, queries=4),
    "variable_tracking": VariableTracking(),
    "multi_hop": MultiHop(),
    "common_words": CommonWords(),
    "frequent_words": FrequentWords(),
    "phone_book": PhoneBook(),
    "copying": Copying(),
    "multiple_choice": MultipleChoice(),
}
