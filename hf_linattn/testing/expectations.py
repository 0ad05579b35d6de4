"""What invariants expect of tensors, gradients and costs, as functions that raise `InvariantError`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from ..mechanisms import Mechanism
from .models import Case

LENGTH = 150  # odd parts of several chunks: chunk borders fall inside it, and the last chunk is not full
TIGHT = 1e-9  # float64


class InvariantError(AssertionError):
    """An invariant does not hold; the message says which quantity differs and by how much."""


def expect(condition: bool, message: str) -> None:
    """Raise `InvariantError` with the message unless the condition holds."""
    if not condition:
        raise InvariantError(message)


def expect_close(got: Tensor, want: Tensor, what: str, tolerance: float = TIGHT) -> None:
    """Raise unless |got - want| <= tolerance * (1 + max |want|) everywhere, and both are finite."""
    expect(got.shape == want.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}")
    got, want = got.detach().double(), want.detach().double()
    expect(bool(torch.isfinite(got).all()), f"{what}: not finite")
    expect(bool(torch.isfinite(want).all()), f"{what}: what it is compared with is not finite")
    error = (got - want).abs().max().item() if want.numel() else 0.0
    limit = tolerance * (1 + (want.abs().max().item() if want.numel() else 0.0))
    expect(error <= limit, f"{what}: differs by {error:.3g}, allowed {limit:.3g}")


@torch.no_grad()
def expect_continued(mechanism: Mechanism, heads: Sequence[Tensor]) -> None:
    """Raise unless a state goes on with the sequences of real tokens, whatever ids the pads among 11 tokens have."""
    ids, mask = torch.tensor([[6, 0, 0, 1, 7, 1, 8]]), torch.tensor([[0, 1, 1, 1, 0, 1, 0]]).bool()
    parts = zip(*(x.split([3, 7, 1], 2) for x in heads), strict=True)
    state, outputs = None, []
    for part, packing in zip(parts, [(), (mask, ids), ()], strict=True):
        output, state = mechanism(*part, *packing, state=state)
        outputs.append(output)
    for places in ([0, 1, 2, 4, 5], [6, 8, 10]):
        want, _ = mechanism(*(x[:, :, places] for x in heads))
        expect_close(torch.cat(outputs, 2)[:, :, places], want, "a packed sequence between pads, read in pieces")


def expect_equal(got: Tensor, want: Tensor, what: str) -> None:
    """Raise unless the tensors are equal bit for bit."""
    expect(torch.equal(got, want), f"{what}: not bit-equal, differs by {(got - want).abs().max().item():.3g}")


def head_gradients(output: Tensor, heads: Sequence[Tensor], what: str = "output") -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v; raise where the output does not depend on one of them."""
    expect(output.requires_grad, f"{what} has no gradient")
    found = torch.autograd.grad(output.sum(), heads, allow_unused=True)
    for name, gradient in zip(("query", "key", "value"), found, strict=True):
        expect(gradient is not None and bool(gradient.any()), f"{what} does not depend on {name} at all")
    return found


def expect_gradcheck(case: Case) -> None:
    """Raise unless gradients of a short input are what small differences of it say."""
    small, mechanism = [x.requires_grad_() for x in case.heads(5, batch=1, size=0.5)], case.make()
    try:
        torch.autograd.gradcheck(lambda *heads: mechanism(*heads)[0], small, fast_mode=True)
    except GradcheckError as error:
        raise InvariantError(f"gradcheck: {error}") from error


def expect_growth(what: str, short: int, long: int, most: float, least: float = 0.0) -> None:
    """Raise unless a cost grew by such a factor when the length doubled; there may be none of it."""
    grew = short == long == 0 or least * short < long < most * short
    expect(grew, f"{what} grew from {short:,} to {long:,} when the length doubled")


def expect_finite(case: Case) -> None:
    """Raise unless the bare mechanism keeps "10 finite"."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for size, length in ((1.0, LENGTH), (30.0, LENGTH), (1.0, 1)):
            mechanism = case.make(dtype)
            heads = [x.requires_grad_() for x in case.heads(length, dtype=dtype, size=size)]
            mask = torch.ones(2, length, dtype=torch.bool)
            mask[1] = False
            output, _ = mechanism(*heads, mask)
            expect(output.dtype == dtype, f"output is {output.dtype} for {dtype} inputs")
            expect(bool(torch.isfinite(output).all()), f"output not finite: {dtype}, size {size}, length {length}")
            expect(not output[1].any(), "a row without any key is not zero")
            output.float().sum().backward()
            for name, x in zip("qkv", heads, strict=True):
                finite = x.grad is not None and bool(torch.isfinite(x.grad).all())
                expect(finite, f"gradient of {name} not finite: {dtype}, size {size}")
            span = heads[2][0].detach().abs().max() * 1.01
            inside = not mechanism.averages or bool((output[0].abs() <= span).all())
            expect(inside, f"output beyond the values' range: {dtype}, size {size}")
