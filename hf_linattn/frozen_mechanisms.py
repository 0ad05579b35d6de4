"""A warning where adapters are trained and the mechanisms' own parameters are not, as PEFT leaves them by default."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn

from .mechanisms import Mechanism

logger = logging.getLogger(__name__)


def warn_of_frozen(model: nn.Module, mechanisms: Iterable[Mechanism]) -> bool:
    """Warn if parameters of a model are trained and those of its mechanisms are not; return whether that is settled.

    It is settled where mechanisms have no parameters, where some are trained, and after the warning; it is not while
    nothing is trained at all, as before PEFT wraps the model.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    own = {id(p): p for mechanism in mechanisms for p in mechanism.parameters()}
    if not own or any(p.requires_grad for p in own.values()):
        return not own
    if not any(p.requires_grad for p in model.parameters() if id(p) not in own):
        return False
    logger.warning(
        "%s: %d parameters of mechanisms are frozen while others are trained, so the new attention stays as it is;"
        " with PEFT patch first, and give LoraConfig(..., modules_to_save=['hf_linattn']); else call"
        " requires_grad_(True) on them",
        type(model).__name__, sum(p.numel() for p in own.values()),
    )  # fmt: skip
    return True
