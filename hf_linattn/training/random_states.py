"""Global random states, which a Trainer sets to its seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Give Python, NumPy and PyTorch, on a CPU and on GPUs, the random states back that they had."""
    drawn, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(of_numpy)
