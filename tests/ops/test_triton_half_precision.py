"""Heads in half precision on Triton's kernels against float64: in float16, as its interpreter has no bfloat16."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.backends import use_backend
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.ops.block_softmax.triton import TRITON_BLOCKS
from hf_linattn.ops.linear import triton as linear_triton
from tests.ops.block_softmax.cases import check_what_was_read_before, kept_numbers
from tests.ops.block_softmax.test_triton import BOTH, LENGTH, LENGTHS, calls, make_small  # noqa: F401 - calls is a fixture
from tests.ops.linear.test_triton import SUMS
from tests.ops.triton_cases import each_map, make_mechanism

HALF = [(name, mode) for name, mode in BOTH if MECHANISMS.get(name).takes_half and name != "learned_sparse"]  # trained
# a window, tables beside shared keys, a far part, slots: what kernels tell apart
USUAL = {("local", "causal"), ("bigbird", "bidirectional"), ("hybrid", "causal"), ("hybrid", "bidirectional")}
USUAL.add(("linformer", "causal"))
FORMS = [pytest.param(*x, marks=[] if x in USUAL else [pytest.mark.exhaustive]) for x in HALF]
MAPS = [name for name in SUMS if MECHANISMS.get(name).takes_half]


def compare(make, padded: bool, kind: torch.dtype, tolerance: float, length: int = LENGTH) -> None:
    """Outputs, states and the gradients of heads and parameters, of rows that are whole or padded on either side."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, h, length, 8, generator=generator).to(kind) for h in (2, 1, 1)]
    mask = torch.ones(2, length, dtype=torch.bool)
    if padded:
        mask[0, :9], mask[1, 20:] = False, False
    weight = torch.randn(2, 2, length, 8, generator=generator).to(kind) * mask[:, None, :, None]
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", kind)):
        mechanism = make().to(torch.promote_types(dtype, torch.float32))
        use_backend(mechanism, backend)
        heads = [x.to(dtype).requires_grad_() for x in given]
        output, state = mechanism(*heads, mask)
        assert output.dtype == dtype
        wanted = [*heads, *mechanism.parameters()]
        gradients = torch.autograd.grad((output * weight.to(dtype)).sum(), wanted, allow_unused=True)
        found = [x for x in gradients if x is not None]
        results.append([output * mask[:, None, :, None], *kept_numbers(state, dtype), *found])
    for want, got in zip(*results, strict=True):
        assert (got.double() - want).norm() < tolerance * want.norm().clamp(min=1.0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "mode"), FORMS)
def test_softmax_over_blocks(calls, name, mode, padded):  # noqa: F811
    compare(lambda: make_small(name, mode == "causal"), padded, torch.float16, 2e-3)
    assert calls or padded


@pytest.mark.covering(1)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", each_map(MAPS))
def test_sums_over_keys(small_tiles, monkeypatch, name, padded):
    kinds, sums = [], linear_triton.SUMS
    counted = sums._replace(attend=lambda *x: kinds.append(x[2].dtype) or sums.attend(*x))
    monkeypatch.setattr(linear_triton, "SUMS", counted)
    compare(lambda: make_mechanism(name), padded, torch.float16, 2e-3, length=41)  # several segments
    assert kinds == [torch.float16]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["linear", "performer"])
@pytest.mark.parametrize("decay", [None, "learned"])
def test_what_cancels_keeps_its_digits(small_tiles, name, decay):
    """Values with a large mean, which no gradient of a query or key has anything of."""
    given = [torch.randn(2, h, 59, 8, generator=torch.Generator().manual_seed(h)).half() for h in (2, 1, 1)]
    given[2] += 100
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float16)):
        mechanism = make_mechanism(name, decay=decay).to(torch.promote_types(dtype, torch.float32))
        use_backend(mechanism, backend)
        heads = [x.to(dtype).requires_grad_() for x in given]
        output, _ = mechanism(*heads)
        weight = torch.arange(output.numel()).sin().view_as(output).half().to(dtype)
        results.append(torch.autograd.grad((output * weight).sum(), heads))
    for want, got in zip(*results, strict=True):
        assert (got.double() - want).norm() < 2e-3 * want.norm()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(("name", "size"), [("linear", 20), ("hybrid", 0.002)])  # whose window has several keys
def test_sums_go_beyond_float16(calls, name, size, causal):  # noqa: F811
    """Of features over keys, and over the features of two large heads."""
    given = [torch.randn(1, h, 59, 8, generator=torch.Generator().manual_seed(h)) for h in (2, 1, 1)]
    given = [(size * given[0]).half(), (4000 * given[1].abs()).half(), given[2].half()]
    assert given[1][:, :, :32].float().sum(2).min() > torch.finfo(torch.float16).max
    options = {"linear": "linear"} if name == "hybrid" else {}
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float16)):
        mechanism = make_small(name, causal, **options).to(torch.promote_types(dtype, torch.float32))
        use_backend(mechanism, backend)
        heads = [x.to(dtype).requires_grad_() for x in given]
        output, _ = mechanism(*heads)
        weight = torch.arange(output.numel()).sin().view_as(output).to(dtype)
        results.append([output, *torch.autograd.grad((output * weight).sum(), heads)])
    for want, got in zip(*results, strict=True):
        assert (got.double() - want).norm() < 3e-3 * want.norm()


@pytest.mark.parametrize("length", LENGTHS)
def test_what_was_read_before(small_tiles, length):
    check_what_was_read_before(TRITON_BLOCKS, 2e-3, block_size=12, length=length, kind=torch.float16, batch=2)


@pytest.mark.parametrize("name", ["local", "hedgehog", "hybrid"])
def test_bfloat16_is_widened_in_the_interpreter(small_tiles, name):
    compare(lambda: make_small(name, causal=True), False, torch.bfloat16, 1e-2)
