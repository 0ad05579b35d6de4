"""Block-sparse attention in C against PyTorch's operations in float64, which other tests check against dense masks."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.block_sparse import BlockSparseMechanism
from hf_linattn.ops.native.block_softmax import attend_blocks
from hf_linattn.testing.counters import flops_of
from tests.helpers import assert_close
from tests.ops.native.cases import KV_HEADS, make_heads, make_mask, make_mechanism

NAMES = [name for name in MECHANISMS.names() if issubclass(MECHANISMS.get(name), BlockSparseMechanism)]
LENGTH = 333


def make_pattern(name: str, causal: bool, **options):
    small = {"window_size": 37} if hasattr(make_config(name, {}), "window_size") else {}
    return make_mechanism(name, causal, **{"block_size": 64, **small, **options})


@torch.no_grad()
@pytest.mark.parametrize("block_size", [16, 64, 100])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_pattern(variant, name, causal, block_size):
    """Odd lengths, grouped queries, rows that are padded on either side or have a single key."""
    mechanism, heads = make_pattern(name, causal, block_size=block_size), make_heads(3, LENGTH)
    for key_padding_mask in (None, make_mask(LENGTH)):
        mechanism.float().backend = "auto"
        got, _ = mechanism(*heads, key_padding_mask)
        used = len(variant)
        mechanism.double().backend = "torch"
        want, _ = mechanism(*(x.double() for x in heads), key_padding_mask)
        real = 1 if key_padding_mask is None else key_padding_mask[:, None, :, None]
        assert_close((got * real).double(), want * real, 1e-5)
        assert used > 0


@torch.no_grad()
def test_it_goes_on_from_what_was_read_before(variant):
    """Some keys first, by the formula, then the others: softmax over all; rows that read nothing before, too."""
    query, key, value = (x.double() for x in make_heads(3, LENGTH))
    query, first = query.unflatten(1, (KV_HEADS, -1)), 128
    scores = query @ key[:, :, None].mT
    scores[:, :, 0, :, :first] = -torch.inf  # one head of each group sees nothing of them
    want = scores.softmax(-1) @ value[:, :, None]
    log = scores[..., :first].logsumexp(-1).clamp(min=-1e30)
    before = (scores[..., :first] - log[..., None]).exp() @ value[:, :, None, :first]
    out, operands = before.float(), [x.float() for x in (query, key, value)]
    count = -(-LENGTH // 64)
    table = torch.arange(first // 64, count).expand(count, 1, -1)
    bias = torch.zeros(1, 1, 1, table.shape[2] * 64)
    attend_blocks(*operands, bias, table, out, first=0, block_size=64, shared=0, scaling=1.0, log=log.float())
    assert_close(out.double(), want, 1e-5)


@torch.no_grad()
def test_its_products_are_counted(variant):
    mechanism, heads = make_pattern("local", True), make_heads(3, LENGTH)
    counts = []
    for backend in ("torch", "auto"):
        mechanism.backend = backend
        counts.append(flops_of(lambda: mechanism(*heads)))
    assert 0.7 < counts[1] / counts[0] < 1.1


def test_gradients_are_left_to_others(variant):
    heads = [x.requires_grad_() for x in make_heads(3, LENGTH)]
    output, _ = make_pattern("local", True)(*heads)
    assert all(x.isfinite().all() and x.any() for x in torch.autograd.grad(output.sum(), heads))
