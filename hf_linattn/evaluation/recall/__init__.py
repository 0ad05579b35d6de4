"""Recall: tasks made without data, which ask for what stands somewhere in a long prompt."""

from .answers import OwnAnswer, RecallAnswer, answer_prompts, own_answers, share_found
from .measure import RecallRow, recall, recall_rows, wilson_interval
from .prompts import RecallPrompt, make_prompts
from .tasks import RECALL_TASKS

__all__ = [
    "RECALL_TASKS",
    "OwnAnswer",
    "RecallAnswer",
    "RecallPrompt",
    "RecallRow",
    "answer_prompts",
    "make_prompts",
    "own_answers",
    "recall",
    "recall_rows",
    "share_found",
    "wilson_interval",
]
