"""Runs of whole recipes end as quickly here as in their own tests."""

from __future__ import annotations

from tests.recipes.conftest import quick_reports

__all__ = ["quick_reports"]
