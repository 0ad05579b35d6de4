"""Heads in half precision against float64: read as they are, their products by the matrix unit or without it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.composite import CompositeMechanism
from hf_linattn.ops.block_softmax.cpu import NATIVE_BLOCKS
from hf_linattn.ops.common.numerics import LOWEST
from hf_linattn.ops.runtime import cpu as library
from tests.helpers import is_plain_pattern
from tests.ops import cpu_cases
from tests.ops.block_softmax.cases import check_what_was_read_before, kept_numbers
from tests.ops.cpu_cases import make_heads, make_mask, make_mechanism

KINDS = {name: MECHANISMS.get(name) for name in MECHANISMS.names()}
NAMES = [x for x, kind in KINDS.items() if kind.takes_half and not issubclass(kind, CompositeMechanism)]
CASES = [  # to the C a plain pattern is a table
    pytest.param(name, causal, marks=[pytest.mark.exhaustive] if is_plain_pattern(name) else [])
    for name in NAMES for causal in (True, False)
]  # fmt: skip
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 1e-3}  # of all numbers together; rounding is 2e-3 and 2e-4
KINKS = {"t2r": 4}  # of its gradients: what is rounded comes to lie on either side of a step
LENGTH = 205
SMALL = {"window_size": 37, "block_size": 64}


@pytest.fixture(params=["as it is"] + ["without the unit"] * library.has_matrix_unit())
def unit(request, variant, monkeypatch):
    """With the matrix unit, if this processor and the build have one, and without."""
    if request.param == "without the unit":
        monkeypatch.setattr(library, "has_matrix_unit", lambda: False)


def make_small(name: str, causal: bool):
    known = vars(MECHANISMS.get(name).config_class())
    return make_mechanism(name, causal, **{x: size for x, size in SMALL.items() if x in known})


def results_of(mechanism, heads, backend: str, mask=None):
    """Outputs, the gradients of all heads, and what is kept."""
    dtype = heads[0].dtype
    mechanism.to(torch.promote_types(dtype, torch.float32)).backend = backend
    given, real = [x.detach().requires_grad_() for x in heads], 1 if mask is None else mask[:, None, :, None]
    output, state = mechanism(*given, mask)
    assert output.dtype == dtype
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    gradients = torch.autograd.grad((output * real * weight.to(dtype)).sum(), given)
    return [output.detach() * real, *gradients, *kept_numbers(state, dtype)]


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm().clamp(min=1e-3))


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_every_mechanism_that_takes_it(unit, name, causal, kind):
    """Outputs, states and the gradients of all heads, of rows that are whole, or padded on either side."""
    heads, mechanism = [x.to(kind) for x in make_heads(3, LENGTH)], make_small(name, causal)
    for mask in (None, make_mask(LENGTH)):
        want = results_of(mechanism, [x.double() for x in heads], "torch", mask)
        for exact, got in zip(want, results_of(mechanism, heads, "auto", mask), strict=True):
            assert error_of(got, exact) < TOLERANCE[kind] * KINKS.get(name, 1)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize(("name", "causal"), [("local", True), ("bigbird", False), ("hybrid", True), ("linear", True)])
def test_heads_that_fill_whole_tiles(unit, monkeypatch, name, causal, kind):
    """They are put into the tiles of a matrix unit from where they lie."""
    monkeypatch.setattr(cpu_cases, "DIM", 64)
    monkeypatch.setattr(cpu_cases, "VALUE_DIM", 96)
    heads, mechanism = [x.to(kind) for x in make_heads(2, LENGTH)], make_small(name, causal)
    want = results_of(mechanism, [x.double() for x in heads], "torch")
    for exact, got in zip(want, results_of(mechanism, heads, "auto"), strict=True):
        assert error_of(got, exact) < TOLERANCE[kind]


@pytest.mark.covering(2)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["linear", "hedgehog", "performer", "local", "hybrid"])
def test_what_cancels_keeps_its_digits(unit, name, causal):
    """Gradients of queries and keys are differences to the mean of the values, which is large here."""
    heads, mechanism = [x.bfloat16() for x in make_heads(2, 700)], make_small(name, causal)
    heads[2] = (heads[2].float() + 16).bfloat16()
    want = results_of(mechanism, [x.double() for x in heads], "torch")
    errors = [error_of(got, exact) for exact, got in zip(want, results_of(mechanism, heads, "auto"), strict=True)]
    assert max(errors) < 4e-2, errors


@pytest.mark.parametrize("size", [96, 128])
@pytest.mark.parametrize("name", ["local", "hybrid"])
def test_large_scores_lose_no_digits_to_a_scaling_that_is_no_power_of_two(unit, monkeypatch, name, size):
    """Queries of bfloat16 that had it would be rounded once more than PyTorch's."""
    monkeypatch.setattr(cpu_cases, "DIM", size)
    heads, mechanism = [x.bfloat16() for x in make_heads(1, LENGTH)], make_small(name, causal=True)
    heads[0], heads[1] = 4 * heads[0], 4 * heads[1]
    want = results_of(mechanism, [x.double() for x in heads], "torch")[:4]
    theirs, ours = (results_of(mechanism, heads, backend)[:4] for backend in ("torch", "auto"))
    for exact, other, got in zip(want, theirs, ours, strict=True):
        assert error_of(got, exact) < 3 * error_of(other, exact)


@pytest.mark.parametrize("kind", TOLERANCE)
def test_what_was_read_before(unit, kind):
    check_what_was_read_before(NATIVE_BLOCKS, TOLERANCE[kind], kind=kind, gated=kind == torch.bfloat16)


@pytest.mark.parametrize("name", ["hedgehog", "local"])
def test_float32_is_rounded_where_its_user_allows_it(variant, name):
    """By `torch.set_float32_matmul_precision("medium")`, and then on a matrix unit only; never else."""
    mechanism, heads = make_small(name, causal=True), [x.requires_grad_() for x in make_heads(1, LENGTH)]
    want = mechanism.double()(*(x.double() for x in heads))[0]
    errors, before = {}, torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            output = mechanism.float()(*heads)[0]
            errors[precision] = error_of(output, want)
            assert all(x.isfinite().all() for x in torch.autograd.grad(output.sum(), heads))
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 1e-5 and errors["high"] < 1e-5
    assert 1e-4 < errors["medium"] < 1.5e-2 if library.has_matrix_unit() else errors["medium"] < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", TOLERANCE)
def test_numbers_are_rounded_as_pytorch_rounds_them(variant, kind):
    """To the nearest, ties to even; what is too large is infinite, and what is no number stays none."""
    value = torch.randn(1, 1, 70, 21) * 10.0 ** torch.randint(-9, 9, (1, 1, 70, 1))
    value[0, 0, :5, 0] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 3e38])
    value[0, 0, 6] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    value[0, 0, 7] = -torch.inf
    table, log = torch.zeros(1, 1, 1, dtype=torch.int64), torch.empty(1, 1, 1, 70)
    bias = torch.full((1, 1, 1, 70, 70), LOWEST).diagonal_scatter(torch.zeros(1, 1, 1, 70), dim1=3, dim2=4)
    for place in range(70):  # one query that sees one value, and nothing else in its products
        row, seen = value[:, :, place : place + 1].contiguous(), bias[..., :1, :1].contiguous()
        out, exact = torch.empty(1, 1, 1, 1, 21, dtype=kind), torch.empty(1, 1, 1, 1, 21)
        for to in (out, exact):
            key = torch.zeros(1, 1, 1, 8)
            shared = key[:, :, :0], row[:, :, :0]
            one = log[..., :1].contiguous()
            NATIVE_BLOCKS.forward(
                key[:, :, None], key, row, to, one, None, None, 0, *shared, seen, table, 0, 1, 1.0, False
            )
        assert torch.equal(out.view(torch.int16)[~exact.isnan()], exact.to(kind).view(torch.int16)[~exact.isnan()])
        assert torch.equal(out.isnan(), exact.isnan())


class Widest(TorchDispatchMode):
    """Notes how many numbers the largest float32 tensor has that an operation makes."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                self.count = max(self.count, x.numel())
        return made


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "hedgehog", "performer", "local", "streaming", "hybrid"])
def test_no_copy_in_float32_is_made(variant, name):
    mechanism, heads = make_small(name, causal=True), [x.bfloat16() for x in make_heads(1, 3000)]
    with Widest() as widest:
        mechanism(*heads, keep_state=False)
    assert widest.count < 0.7 * min(x.numel() for x in heads)


@torch.no_grad()
def test_the_matrix_unit_is_left_to_others_as_it_was(variant):
    """PyTorch's own products, which may use it between two of our calls, come to the same bits."""
    left, right = (torch.randn(70, 70, generator=torch.Generator().manual_seed(0)).bfloat16() for _ in range(2))
    want = left @ right
    mechanism, heads = make_small("hedgehog", causal=True), [x.bfloat16() for x in make_heads(1, LENGTH)]
    first, _ = mechanism(*heads)
    assert torch.equal(left @ right, want)
    assert torch.equal(mechanism(*heads)[0], first)
