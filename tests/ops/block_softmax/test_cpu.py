"""Block-sparse attention in C against PyTorch's operations in float64, which other tests check against dense masks."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.block_sparse import BlockSparseMechanism
from hf_linattn.ops.block_softmax.autograd import Keys, continue_blocks
from hf_linattn.ops.block_softmax.cpu import NATIVE_BLOCKS
from hf_linattn.ops.common.numerics import LOWEST
from tests.helpers import assert_close
from tests.ops.block_softmax.cases import check_what_was_read_before
from tests.ops.cpu_cases import (
    HEADS,
    KV_HEADS,
    check_gradients,
    make_heads,
    make_mask,
    make_mechanism,
    share_of_products,
)

NAMES = [name for name in MECHANISMS.names() if issubclass(MECHANISMS.get(name), BlockSparseMechanism)]
LENGTH = 333
pytestmark = pytest.mark.usefixtures("products")


def make_pattern(name: str, causal: bool, **options):
    small = {"window_size": 37} if hasattr(make_config(name, {}), "window_size") else {}
    return make_mechanism(name, causal, **{"block_size": 64, **small, **options})


@pytest.mark.covering(2)
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
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_whole_blocks_of_one_sign_are_weighed(variant, sign):
    """What is added to all pairs of a block, so that no pair of it tells that something is."""
    mechanism, heads = make_pattern("learned_sparse", True, reach=2), make_heads(3, LENGTH)
    mechanism.log_weight = lambda query, key: sign * ((query - key) // 64 == 1).expand(-1, HEADS, -1, -1)
    results = []
    for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
        mechanism.to(dtype).backend = backend
        results.append(mechanism(*(x.to(dtype) for x in heads))[0].double())
    assert_close(*results, 1e-5)


@torch.no_grad()
def test_it_goes_on_from_what_was_read_before(variant):
    """Some keys first, by the formula, then the others: softmax over all; rows that read nothing before, too."""
    query, key, value = (x.double() for x in make_heads(3, LENGTH))
    query, first = query.unflatten(1, (KV_HEADS, -1)), 128
    scores = query @ key[:, :, None].mT
    scores[:, :, 0, :, :first] = -torch.inf  # one head of each group sees nothing of them
    want = scores.softmax(-1) @ value[:, :, None]
    log = scores[..., :first].logsumexp(-1).clamp(min=LOWEST)
    before = (scores[..., :first] - log[..., None]).exp() @ value[:, :, None, :first]
    out, operands = before.float(), [x.float() for x in (query, key, value)]
    count = -(-LENGTH // 64)
    table = torch.arange(first // 64, count).expand(count, 1, -1)
    bias = torch.zeros(1, 1, 1, table.shape[2] * 64)
    part, after = Keys(0, table, bias), log.float()
    continue_blocks(NATIVE_BLOCKS, *operands, part, out, after, block_size=64, scaling=1.0, causal=False)
    assert_close(out.double(), want, 1e-5)
    assert_close(after.double(), scores.logsumexp(-1), 1e-5)


@torch.no_grad()
def test_its_products_are_counted(variant):
    mechanism, heads = make_pattern("local", True), make_heads(3, LENGTH)
    assert 0.7 < share_of_products(mechanism, lambda: mechanism(*heads)) < 1.1


@pytest.mark.covering(2)
@pytest.mark.parametrize("block_size", [16, 64, 100])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "learned_sparse"])
def test_gradients(variant, name, causal, block_size):
    mechanism, heads = make_pattern(name, causal, block_size=block_size), make_heads(3, LENGTH)
    check_gradients(mechanism, heads, 1e-5)
    assert variant


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_what_was_read_before(variant, gated):
    check_what_was_read_before(NATIVE_BLOCKS, 1e-5, gated=gated)
    assert variant


def test_those_of_a_pattern_are_left_to_others(variant):
    mechanism, heads = make_mechanism("learned_sparse", True), make_heads(3, LENGTH)
    assert torch.autograd.grad(mechanism(*heads)[0].sum(), list(mechanism.parameters()))[0].any()
    assert not variant
    with torch.no_grad():
        training = mechanism.train()(*heads)[0]
        assert not variant  # in training, where the same bits must come as with gradients
        assert_close(mechanism.eval()(*heads)[0], training, 1e-5)
    assert variant
