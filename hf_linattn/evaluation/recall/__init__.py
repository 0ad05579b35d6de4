"""Recall: tasks made without data, which ask for what stands somewhere in a long prompt."""

from .prompts import RecallPrompt, make_prompts
from .tasks import RECALL_TASKS

__all__ = ["RECALL_TASKS", "RecallPrompt", "make_prompts"]
