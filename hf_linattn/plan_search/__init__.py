"""Which few key/value heads, or layers, of a model must stay exact for it to find what stands far back."""

from .choose import SEARCHES, SIGNALS, choose_plan
from .gates import UNITS, Gates
from .options import SearchOptions, Signal

__all__ = ["SEARCHES", "SIGNALS", "UNITS", "Gates", "SearchOptions", "Signal", "choose_plan"]
