"""Block-sparse rows that go on, in pieces, against whole ones by PyTorch's operations in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_linattn.ops.block_softmax import in_place
from hf_linattn.ops.runtime.cpu import refusal
from tests.helpers import assert_close
from tests.ops.block_softmax.test_cpu import NAMES, make_pattern
from tests.ops.cpu_cases import make_heads

LENGTH = 333
PIECES = {  # where calls end, with blocks of 16
    "whole blocks": (0, 96, 160, LENGTH),
    "inside blocks": (0, 37, 38, 150, 160, 171, 300, LENGTH),
    "before the global tokens": (0, 3, 100, 101, LENGTH),
}


@pytest.fixture
def pieces(monkeypatch):
    """How many tokens the C went on with in each call."""
    counts, attend = [], in_place.attend_after

    def count(blocks, call, *where):
        counts.append(call.query.shape[2])
        return attend(blocks, call, *where)

    monkeypatch.setattr(in_place, "attend_after", count)
    return counts


@pytest.mark.covering(1)
@pytest.mark.parametrize("ends", PIECES)
@pytest.mark.parametrize("name", NAMES)
def test_pieces_give_what_a_whole_row_gives(pieces, name, ends):
    """Outputs, the gradients of heads, and the same state as block by block; with a sink in the denominator, too."""
    mechanism, heads = make_pattern(name, True, block_size=16, sink_logit="one"), make_heads(2, LENGTH)
    weight = torch.randn(2, 4, LENGTH, 20, generator=torch.Generator().manual_seed(3))
    results = []
    for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
        mechanism.to(dtype).backend = backend
        operands = [x.to(dtype).requires_grad_() for x in heads]
        state, outputs = None, []
        for start, end in itertools.pairwise(PIECES[ends]):
            output, state = mechanism(*(x[:, :, start:end] for x in operands), state=state)
            outputs.append(output)
        whole = torch.cat(outputs, dim=2)
        want, _ = mechanism(*operands)
        assert_close(whole.double(), want.double(), 1e-5)
        results.append([*state, *torch.autograd.grad((whole * weight).sum(), operands)])
        if backend == "auto":
            trained = any(x != "sink_logit" for x, _ in mechanism.named_parameters())  # the C has no gradients of it
            assert bool(pieces) != trained
    for got, want in zip(*results, strict=True):
        assert_close(got.double(), want.double(), 2e-5)


@pytest.mark.covering(1)
@torch.no_grad()
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_goes_on_in_it(pieces, name, kind):
    mechanism, heads = make_pattern(name, True, block_size=16), [x.to(kind) for x in make_heads(2, LENGTH)]
    state, outputs = None, []
    for start, end in itertools.pairwise(PIECES["inside blocks"]):
        output, state = mechanism(*(x[:, :, start:end] for x in heads), state=state)
        assert output.dtype == state.key.dtype == state.value.dtype == kind
        outputs.append(output)
    assert pieces
    mechanism.double().backend = "torch"
    want, _ = mechanism(*(x.double() for x in heads))
    assert_close(torch.cat(outputs, dim=2).double(), want, 2e-2)


@torch.no_grad()
def test_rows_that_stand_at_different_places_go_block_by_block(pieces):
    mechanism, heads = make_pattern("local", True, block_size=16), make_heads(2, LENGTH)
    mask = torch.ones(2, 100, dtype=torch.bool)
    mask[0, :33] = False
    _, state = mechanism(*(x[:, :, :100] for x in heads), mask)
    got, _ = mechanism(*(x[:, :, 100:] for x in heads), state=state)
    alone, _ = mechanism(*(x[:1, :, 33:] for x in heads))
    assert not pieces
    assert_close(got[:1], alone[:, :, 67:], 1e-5)


def test_few_tokens_are_not_worth_it(pieces):
    """Less than a block behind the open one is read by one product."""
    mechanism, heads = make_pattern("local", True, block_size=64), make_heads(1, 200)
    state = None
    for start, end in ((0, 100), (100, 191), (191, 200)):
        _, state = mechanism(*(x[:, :, start:end] for x in heads), state=state)
    assert not pieces and refusal(*heads) is None
