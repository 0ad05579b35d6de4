"""Gradients through a state, of every parameter, of gradients, and several at once: right, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_linattn import DerivativeError, list_mechanisms
from hf_linattn.backends import use_backend
from hf_linattn.mechanisms import MECHANISMS, Mechanism
from hf_linattn.testing.models import Case
from tests.helpers import each_of

LENGTH = 75  # more than a block of every mechanism, none of them full at the end
OPTIONS = {"performer": {"num_features": 16}, "mixed_chunk": {"block_size": 32}, "hybrid": {"window_size": 16}}
ARCHITECTURE = {"causal": ("llama", True), "bidirectional": ("llama", False), "cross": ("whisper", False)}
FORMS = [
    pytest.param(Case(name, *ARCHITECTURE[mode], OPTIONS.get(name, {})), id=f"{name}-{mode}", marks=marks)
    for (name,), marks, _ in each_of(list_mechanisms())
    for mode in sorted(MECHANISMS.get(name).modes)
]


def directions(tensors: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in tensors]


def slope(mechanism: Mechanism, tensors: list[Tensor], create_graph: bool, real: int | None = None) -> Tensor:
    """The derivative along fixed directions of a number made from the outputs, of heads and of all parameters.

    real: how many tokens of a second row are not padding; None: there is one row, without a mask.
    """
    mask = None if real is None else torch.arange(LENGTH) < torch.tensor([[LENGTH], [real]])
    output, _ = mechanism(*tensors[:3], mask)
    gradients = torch.autograd.grad(output.sin().sum(), tensors, create_graph=create_graph, materialize_grads=True)
    return sum((x * way).sum() for x, way in zip(gradients, directions(tensors, 1), strict=True))


def leaves(case: Case, mechanism: Mechanism, dtype: torch.dtype, rows: int, length: int = LENGTH) -> list[Tensor]:
    heads = case.heads(length, batch=rows, dtype=dtype)
    return [*(x.requires_grad_() for x in heads), *(p for p in mechanism.parameters() if p.requires_grad)]


def second_derivative(case: Case, backend: str, dtype: torch.dtype, real: int | None = None) -> Tensor:
    """The derivative of `slope` along other directions."""
    mechanism = case.make(dtype)
    use_backend(mechanism, backend)
    tensors = leaves(case, mechanism, dtype, 1 if real is None else 2)
    found = torch.autograd.grad(slope(mechanism, tensors, True, real), tensors, materialize_grads=True)
    return sum((x * way).sum() for x, way in zip(found, directions(tensors, 2), strict=True))


def measured(case: Case, real: int | None = None, step: float = 1e-5) -> Tensor:
    """The same by central differences of first derivatives in float64."""
    mechanism = case.make()
    tensors = leaves(case, mechanism, torch.float64, 1 if real is None else 2)
    start, ends = [x.detach().clone() for x in tensors], []
    for sign in (1, -1):
        with torch.no_grad():
            for x, at, way in zip(tensors, start, directions(tensors, 2), strict=True):
                x.copy_(at + sign * step * way)
        ends.append(slope(mechanism, tensors, False, real))
    return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("case", FORMS)
def test_second_derivatives_are_those_of_central_differences_or_refused(case):
    want = measured(case)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(second_derivative(case, "torch", torch.float64), want, rtol=1e-5, atol=1e-5)
    try:
        found = second_derivative(case, "auto", torch.float32)
    except DerivativeError as error:
        assert "create_graph=True" in str(error) and "SDPBackend.MATH" in str(error)
    else:
        torch.testing.assert_close(found.double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("linear", ["gated_deltanet", "performer"])
def test_second_derivatives_are_finite_where_rows_of_zeros_stand_for_padding(linear):
    """The length of such a row has no derivative, also where a loss looks at what comes out for it."""
    case = Case("hybrid", *ARCHITECTURE["causal"], {"window_size": 16, "num_hard_keys": 4, "linear": linear})
    found = second_derivative(case, "torch", torch.float64, real=3)
    torch.testing.assert_close(found, measured(case, real=3), rtol=1e-5, atol=1e-5)


PIECES = [9, 1, 12, 1, 2]  # those of one token end no block


def piecewise(mechanism: Mechanism, tensors: list[Tensor]) -> Tensor:
    """The outputs of pieces that are read one after another."""
    outputs, state = [], None
    for heads in zip(*(x.split(PIECES, dim=2) for x in tensors[:3]), strict=True):
        output, state = mechanism(*heads, state=state)
        outputs.append(output)
    return torch.cat(outputs, dim=2)


@pytest.mark.parametrize("case", [x for x in FORMS if x.values[0].mode == "causal"])
def test_gradients_through_a_state_are_those_of_one_piece(case):
    found = []
    for dtype, read in ((torch.float64, lambda own, tensors: own(*tensors[:3])[0]), (torch.float32, piecewise)):
        mechanism = case.make(dtype)
        tensors = leaves(case, mechanism, dtype, 2, sum(PIECES))
        found.append(torch.autograd.grad(read(mechanism, tensors).sin().sum(), tensors, materialize_grads=True))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("case", FORMS)
def test_several_gradients_at_once_are_those_of_each_or_refused(case, backend):
    mechanism = case.make(torch.float32).eval()
    use_backend(mechanism, backend)
    heads = [x.requires_grad_() for x in case.heads(LENGTH, batch=1, dtype=torch.float32)]
    output, vjp = torch.func.vjp(lambda *x: mechanism(*x)[0], *heads)
    ways = torch.stack([output.sin(), output.cos()]).detach()
    output, _ = mechanism(*heads)
    each = [torch.autograd.grad(output, heads, way, retain_graph=True) for way in ways]
    want = [torch.stack(x) for x in zip(*each, strict=True)]
    torch.testing.assert_close(torch.vmap(vjp)(ways), tuple(want), rtol=1e-3, atol=1e-4)
    try:
        found = torch.autograd.grad(output, heads, ways, is_grads_batched=True)
    except DerivativeError as error:
        assert "is_grads_batched=True" in str(error) and "torch.func.jacrev" in str(error)
    else:
        torch.testing.assert_close(found, tuple(want), rtol=1e-3, atol=1e-4)


TRAINED = {
    **{name: [{}] for name in list_mechanisms()},
    "linear": [{"decay": "learned", "self_weight": "learned"}],
    "hedgehog": [{}, {"decay": "learned"}],
    "hybrid": [{}, {"num_hard_keys": 64}, {"linear": "deltanet"}, {"linear": "gated_deltanet", "num_hard_keys": 5}],
    "mixed_chunk": [{"inside": "relu2", "linear_options": {"decay": "learned"}}, {"sink_logit": "learned"}],
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_every_parameter_has_a_gradient_at_every_length(length, backend):
    """What data-parallel training waits for: rows of one token, shorter than a block, padded and packed."""
    pads = torch.arange(length) < torch.tensor([[length], [max(length // 2, 1)]])
    packed = (torch.arange(length) // 3).expand(2, -1)
    missing = []
    for name, every in TRAINED.items():
        for options in every:
            narrow = name == "hybrid" and options
            others = {"cross", "bidirectional"} if narrow else {"cross"} if "decay" in options else set()
            for mode in MECHANISMS.get(name).modes.difference(others):
                case = Case(name, *ARCHITECTURE[mode], options)
                mechanism = case.make(torch.float32)
                use_backend(mechanism, backend)
                heads = [x.requires_grad_() for x in case.heads(length, dtype=torch.float32)]
                for mask, ids in ((None, None), (pads, None), (None, None if mode == "cross" else packed)):
                    mechanism.zero_grad()
                    mechanism(*heads, mask, ids)[0].sum().backward()
                    missing += [(name, mode, key) for key, p in mechanism.named_parameters() if p.grad is None]
    assert not missing
