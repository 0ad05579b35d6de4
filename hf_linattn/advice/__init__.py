"""Advice before a conversion: what candidate plans keep of a model, on the text, length and machine at hand."""

from .advise import Advice, advise, recommend
from .candidates import candidate_plans
from .trial import Settings, Trial

__all__ = ["Advice", "Settings", "Trial", "advise", "candidate_plans", "recommend"]
