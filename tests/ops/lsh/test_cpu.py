"""LSH attention in C against PyTorch's operations in float64, which other tests check against its definition."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.ops.lsh import cpu as lsh
from tests.helpers import assert_close
from tests.ops.cpu_cases import (
    check_gradients,
    make_heads,
    make_mask,
    make_mechanism,
    share_of_products,
)

SIZES = [  # buckets, bucket_size, rounds
    (8, 16, 4),  # runs of many lengths in every tile
    (1, 7, 1),  # a band
    (2, 150, 3),  # runs longer than what is multiplied at a time, most keys found several times
    (64, 3, 2),  # more buckets than many have keys
]


@pytest.fixture
def calls(monkeypatch):
    """How often the operation was taken."""
    taken, attend = [], lsh.attend_buckets
    monkeypatch.setattr(lsh, "attend_buckets", lambda *x, **y: (taken.append(1), attend(*x, **y))[1])
    return taken


@pytest.fixture
def products_of_halves():
    """Products on the matrix unit, if there is one."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def make_lsh(causal: bool, sizes: tuple[int, int, int], shared_qk: bool = False):
    named = dict(zip(("num_buckets", "bucket_size", "num_rounds"), sizes, strict=True))
    return make_mechanism("lsh", causal, **named, shared_qk=shared_qk)


@pytest.mark.covering(2)
@torch.no_grad()
@pytest.mark.parametrize("length", [1, 61, 333])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("shared_qk", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_outputs_and_states(variant, calls, causal, shared_qk, sizes, length):
    """Odd lengths, grouped queries, padding on either side and down to a single key; more tokens from the state."""
    mechanism, heads = make_lsh(causal, sizes, shared_qk), make_heads(3, length)
    for key_padding_mask in (None, make_mask(length)):
        results = []
        for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
            mechanism.to(dtype).backend = backend
            operands = [x.to(dtype) for x in heads]
            output, state = mechanism(*operands, key_padding_mask)
            real = 1 if key_padding_mask is None else key_padding_mask[:, None, :, None]
            results.append([output * real, *(state or ())])
            if causal:
                results[-1].append(mechanism(*(x[:, :, -1:] for x in operands), state=state)[0])
        for got, want in zip(*results, strict=True):
            assert_close(got.double(), want.double(), 1e-5)
    assert calls


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
def test_its_products_are_counted(variant, causal):
    """As many as there are pairs to look at; PyTorch's operations look at some more than they need."""
    mechanism, heads = make_lsh(causal, (8, 64, 4)), make_heads(3, 1999)
    assert 0.4 < share_of_products(mechanism, lambda: mechanism(*heads)) <= 1


@pytest.mark.covering(2)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("shared_qk", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients(variant, calls, causal, shared_qk, sizes):
    mechanism, heads = make_lsh(causal, sizes, shared_qk).train(), make_heads(3, 333)
    check_gradients(mechanism, heads, 2e-5)
    assert calls


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_in_memory_that_has_no_numbers(variant, calls, products_of_halves, causal):
    """Fewer queries than a tile has, where memory that was freed is full of NaN."""
    mechanism, operands = make_lsh(causal, (8, 16, 4)).train(), [x.requires_grad_() for x in make_heads(2, 31)]
    output, _ = mechanism(*operands)
    freed = [torch.full((2**size + 16,), float("nan")) for size in range(8, 23) for _ in range(3)]
    del freed
    assert all(x.isfinite().all() for x in torch.autograd.grad(output.sum(), operands))
    assert calls


def test_what_goes_on_from_a_state_is_left_to_others(variant, calls):
    mechanism, heads = make_lsh(True, (8, 16, 4)), make_heads(3, 61)
    _, state = mechanism(*heads)
    calls.clear()
    with torch.no_grad():
        mechanism(*heads, state=state)
        mechanism.double()(*(x.double() for x in heads))
    assert not calls
