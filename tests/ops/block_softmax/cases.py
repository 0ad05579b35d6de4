"""What every operation for block softmax is checked with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_linattn.ops.block_softmax.autograd import Before, BlockSoftmax, Keys, attend_blocks
from hf_linattn.ops.block_softmax.types import KeptKeys
from hf_linattn.ops.common.grad_accumulator import GradAccumulator
from hf_linattn.ops.common.numerics import LOWEST
from hf_linattn.ops.hybrid.types import HybridState
from tests.helpers import assert_close
from tests.ops.cpu_cases import HEADS, KV_HEADS, VALUE_DIM, make_heads


def check_what_was_read_before(
    blocks: BlockSoftmax, tolerance: float, block_size: int = 64, length: int = 333,
    kind: torch.dtype = torch.float32, gated: bool = False, batch: int = 3,
) -> None:  # fmt: skip
    """Compare outputs, logs and all gradients, of heads in dtype `kind`, with the formula in float64.

    Rows from some place on begin with a value, some of no weight, and two more rows are there than queries. Blocks are
    seen twice by the first two of them, and tokens that stand by themselves by the others. Parts of the heads are used
    elsewhere, too. With a gate some heads let in hardly anything of what is there before, and one all of it.
    """
    generator, first = torch.Generator().manual_seed(3), block_size + 6
    rows = (batch, KV_HEADS, HEADS // KV_HEADS, length - first + 2)
    value_before = torch.randn(*rows, VALUE_DIM, generator=generator)
    weightless = torch.rand(rows, generator=generator) < 0.3
    log_before = torch.randn(rows, generator=generator).masked_fill(weightless, LOWEST)
    query, *others = make_heads(batch, length)
    operands = [*(x.to(kind) for x in (query.unflatten(1, (KV_HEADS, -1)), *others, value_before)), log_before]
    gate = [torch.linspace(1e-3, 1, HEADS).view(KV_HEADS, -1)] * gated
    weights = [torch.randn(*operands[0].shape[:-1], size, generator=generator) for size in (VALUE_DIM, 1)]
    table = torch.arange(-(-length // block_size))[:, None, None]
    parts = [Keys(0, table[:2], None), Keys(2, torch.cat([table[2:], table[:-2]], -1), None, 5)]

    def in_blocks(query: Tensor, key: Tensor, value: Tensor, *begun: Tensor) -> tuple[Tensor, ...]:
        sources, (output, log, *gate) = [GradAccumulator(x) for x in (query, key, value)], begun
        before, whole = Before(output, log, first, *gate), (source.whole for source in sources)
        attended = attend_blocks(
            blocks, *whole, parts, block_size=block_size, scaling=0.3, causal=True, before=before, sources=sources
        )
        return *attended, *(source.narrow(2, 1, 1) for source in sources)

    def by_formula(query: Tensor, key: Tensor, value: Tensor, output: Tensor, log: Tensor, *gate: Tensor) -> Any:
        place = torch.arange(length)
        block, keys = place[:, None] // block_size, place // block_size
        times = ((block == keys) & (place <= place[:, None])).double() + (block - keys == 2)
        times += (block > 1) & (place < 5)  # stand by themselves
        scores = 0.3 * query @ key[:, :, None].mT + times.log()
        own = torch.full_like(scores[..., 0], -torch.inf)
        own[..., first:] = log[..., :-2]
        joint = torch.cat([own[..., None], scores], -1)
        shares, begun = joint.softmax(-1), F.pad(output[:, :, :, :-2], (0, 0, first, 0))
        attended, logs = shares[..., :1] * begun + shares[..., 1:] @ value[:, :, None], joint.logsumexp(-1)
        if gate:
            attended = torch.lerp(scores.softmax(-1) @ value[:, :, None], attended, gate[0][..., None, None])
            logs = scores.logsumexp(-1)
        return attended, logs, *(x.narrow(2, 1, 1) for x in (query, key, value))

    results = []
    for attend, dtype in ((in_blocks, None), (by_formula, torch.float64)):
        heads = [x.to(dtype or x.dtype).detach().requires_grad_() for x in (*operands, *gate)]
        attended, log, *used = attend(*heads)
        loss = (attended * weights[0]).sum() + (log[..., None] * weights[1]).sum() + sum(x.sum() for x in used)
        results.append([attended, log, *torch.autograd.grad(loss, heads)])
    for got, want in zip(*results, strict=True):
        assert_close(got.double(), want, tolerance * (1 if kind == torch.float32 else float(want.abs().max())))


def kept_numbers(state, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the numbers of a state after heads of a dtype: windows are kept in it, sums in float32 or wider."""
    kept = {name: x for name, x in (state._asdict() if state else {}).items() if x.is_floating_point()}
    has_window, wide = isinstance(state, KeptKeys | HybridState), torch.promote_types(dtype, torch.float32)
    for name, x in kept.items():
        assert x.dtype == (dtype if has_window and name.endswith(("key", "value")) else wide)
    return list(kept.values())
