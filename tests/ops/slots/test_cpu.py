"""Causal linformer in C against PyTorch's operations in float64, which other tests check against its definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_linattn.ops.slots import causal_blocks as bounded_memory
from tests.helpers import assert_close
from tests.ops.cpu_cases import (
    HEADS,
    VALUE_DIM,
    make_heads,
    make_mask,
    make_mechanism,
    share_of_products,
)

pytestmark = pytest.mark.usefixtures("products")


LONG = pytest.param(1000, marks=pytest.mark.exhaustive)  # in pieces, the next test has as many


@pytest.fixture
def calls(monkeypatch):
    """How often the operation was taken."""
    taken, attend = [], bounded_memory.whole_rows
    monkeypatch.setattr(bounded_memory, "whole_rows", lambda *x, **y: (taken.append(1), attend(*x, **y))[1])
    return taken


@pytest.mark.covering(2)
@torch.no_grad()
@pytest.mark.parametrize("length", [1, 64, 65, 333, LONG])
@pytest.mark.parametrize(("num_slots", "block_size"), [(8, 16), (64, 16), (4, 4), (33, 64), (70, 128), (1, 1)])
def test_outputs_and_states(variant, calls, num_slots, block_size, length):
    """Segments shorter and longer than blocks, and open ones; rows with a single key; more tokens from the state."""
    mechanism = make_mechanism("linformer", True, num_slots=num_slots, block_size=block_size, sharing="none")
    heads = make_heads(3, length)
    for key_padding_mask in (None, make_mask(length)):
        results = []
        for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
            mechanism.to(dtype).backend = backend
            operands = [x.to(dtype) for x in heads]
            output, state = mechanism(*operands, key_padding_mask)
            after, _ = mechanism(*(x[:, :, -1:] for x in operands), state=state)
            real = 1 if key_padding_mask is None else key_padding_mask[:, None, :, None]
            results.append([output * real, after])
        for got, want in zip(*results, strict=True):
            assert_close(got.double(), want, 1e-5)
    assert calls


@pytest.mark.covering(1)
@torch.no_grad()
@pytest.mark.parametrize("ends", [(0, 64, 256, 640, 1000), (0, 37, 38, 201, 264, 777, 1000), (0, 700, 1000)], ids=str)
@pytest.mark.parametrize(("num_slots", "block_size"), [(8, 16), (64, 16), (4, 4), (33, 64), (70, 128), (1, 1), (7, 8)])
def test_pieces_give_what_a_whole_row_gives(variant, calls, num_slots, block_size, ends):
    """Slots that merge inside a piece or where it begins, segments that stay open, blocks that do; states as well."""
    options = {"num_slots": num_slots, "block_size": block_size, "sharing": "none", "sink_logit": "one"}
    mechanism, heads, results = make_mechanism("linformer", True, **options), make_heads(2, 1000), []
    for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
        mechanism.to(dtype).backend = backend
        state, outputs = None, []
        for start, end in itertools.pairwise(ends):
            output, state = mechanism(*(x[:, :, start:end].to(dtype) for x in heads), state=state)
            outputs.append(output)
        results.append([torch.cat(outputs, dim=2), *state])
    whole, _ = mechanism(*(x.double() for x in heads))
    for got, want in ((results[0][0], whole), *zip(*results, strict=True)):
        assert_close(got.double(), want.double(), 1e-5)
    assert len(calls) > 1  # not the first call alone


@torch.no_grad()
def test_its_products_are_counted(variant):
    mechanism, heads = make_mechanism("linformer", True, num_slots=64), make_heads(3, 2000)
    assert 0.7 < share_of_products(mechanism, lambda: mechanism(*heads)) < 1.3


@pytest.mark.covering(2)
@pytest.mark.parametrize("length", [1, 64, 65, 333])
@pytest.mark.parametrize(("num_slots", "block_size"), [(8, 64), (64, 16), (33, 64)])
def test_gradients(variant, calls, num_slots, block_size, length):
    mechanism = make_mechanism("linformer", True, num_slots=num_slots, block_size=block_size, sharing="none").train()
    heads, gradients = make_heads(3, length), []
    weight = torch.randn(3, HEADS, length, VALUE_DIM, generator=torch.Generator().manual_seed(2))
    for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
        mechanism.to(dtype).backend = backend
        operands = [x.to(dtype).requires_grad_() for x in heads]
        trained = [*operands, *mechanism.parameters()]
        gradients.append(torch.autograd.grad((mechanism(*operands)[0] * weight).sum(), trained))
    assert calls == [1]
    for got, want in zip(*gradients, strict=True):
        assert_close(got.double(), want, 2e-5)


def test_what_it_cannot_do_is_left_to_others(variant, calls):
    mechanism, heads = make_mechanism("linformer", True, num_slots=4, block_size=16), make_heads(3, 333)
    _, state = mechanism(*heads)  # gradients where segments stay open
    with torch.no_grad():
        mechanism.train()(*heads)
        mechanism(*heads, state=state)
        mechanism.double()(*(x.double() for x in heads))
    assert not calls
