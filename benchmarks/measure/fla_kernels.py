"""The linear attention of flash-linear-attention, module `fla`, for GPUs: what ours is timed beside, forward.

It has no feature map in its kernel: one competitor gets heads and maps them in PyTorch as fla's layer does, the other
gets features and is spared the map that ours makes. Its kernels are tuned as they come, every candidate for their
sizes among them; the candidates are compiled ahead by several processes, which takes minutes in one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FLA_MAPPED, FLA_ALONE = "fla, elu + 1 and `chunk_linear_attn`", "fla, `chunk_linear_attn` alone"
FLA = (FLA_MAPPED, FLA_ALONE)
PACKAGES = ("flash-linear-attention", "fla-core")  # that have the module
TUNING_LENGTH = 16384  # tokens of the call that tunes
WARMUP, REPEATS = 5, 20  # milliseconds that a candidate runs before and while it is timed


def fla_version() -> str | None:
    """Return the version of fla; null if it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    for package in PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(importlib.import_module("fla").__version__)


def attend_features(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """fla's causal linear attention of features [B, N, H, F] and values [B, N, H, Dv]."""
    from fla.ops.linear_attn import chunk_linear_attn  # here: it is rarely installed

    return chunk_linear_attn(query, key, value, scale=1.0, normalize=True)[0]


def attend_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same of heads [B, N, H, D], features elu + 1."""
    return attend_features(F.elu(query) + 1, F.elu(key) + 1, value)


def fla_competitors(heads: list[Tensor]) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Return name -> operation and its operands: those of ours [B, H, N, D] in fla's layout."""
    query, key, value = (x.transpose(1, 2).contiguous() for x in heads)
    mapped = [F.elu(query) + 1, F.elu(key) + 1, value.clone()]
    return {FLA_MAPPED: (attend_heads, [query, key, value]), FLA_ALONE: (attend_features, mapped)}


@torch.no_grad()
def step(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
    """Run both competitors."""
    heads = [torch.rand(shape, device=device, dtype=dtype) for _ in range(3)]
    for attend, operands in fla_competitors(heads).values():
        attend(*operands)


# -- tuning -----------------------------------------------------------------------------------------------------------


@contextmanager
def instead(name: str, value: Any) -> Iterator[None]:
    """Give Triton's tuner another attribute for a while."""
    from triton.runtime.autotuner import Autotuner

    own = Autotuner.__dict__[name]
    setattr(Autotuner, name, value)
    try:
        yield
    finally:
        setattr(Autotuner, name, own)


def compile_share(
    part: int, parts: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, until: float
) -> int:
    """Compile every `parts`-th candidate of every kernel, from the one of number `part` on, into Triton's cache.

    Nothing is launched, so that what comes out is of no use. Returns how many were left when `time.time()` passed
    `until`. A candidate that does not compile is the tuner's business.
    """
    left = 0

    def run(tuner: Any, *args: Any, **options: Any) -> None:
        nonlocal left
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for config in tuner.prune_configs(options)[part::parts]:
            if time.time() > until:
                left += 1
                continue
            try:
                tuner.fn.run(*args, **{**options, **config.all_kwargs(), "warmup": True})
            except Exception:  # whatever is wrong with it, the tuner will find again
                continue

    with instead("run", run):
        step(shape, device, dtype)
    return left


def tune(batch: int, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
    """Let the kernels choose among their candidates at `TUNING_LENGTH` tokens, each timed for `REPEATS` ms."""
    from triton.testing import do_bench

    timed = functools.partial(do_bench, warmup=WARMUP, rep=REPEATS)
    with instead("do_bench", property(lambda _: timed)):
        step((batch, num_heads, TUNING_LENGTH, head_dim), device, dtype)
