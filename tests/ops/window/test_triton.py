"""Triton's window softmax against the formula in float64, and its kernels compiled for GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_linattn.ops.block_softmax.autograd import Before
from hf_linattn.ops.common.grad_accumulator import GradAccumulator
from hf_linattn.ops.common.numerics import LOWEST
from hf_linattn.ops.window import triton as window_softmax
from hf_linattn.ops.window.autograd import Window, attend_window
from hf_linattn.ops.window.triton import TRITON_WINDOW
from hf_linattn.testing.counters import flops_of
from tests.helpers import assert_close
from tests.ops.triton_cases import require_fit

LENGTH, GROUPS, SIZES = 59, 2, (12, 9)  # of keys, of values


@pytest.fixture(autouse=True)
def small_window_tiles(monkeypatch):
    """Several tiles with a rest of queries, keys and sinks; more queries than keys in one and the other way round."""
    options = {"ROWS": 32, "COLUMNS": 16, "num_stages": 1}
    turned = {"ROWS": 16, "COLUMNS": 32, "num_stages": 1}
    for known in (window_softmax.HALF, window_softmax.OTHERS):
        for name in known:
            monkeypatch.setitem(known, name, turned if name.endswith("keys") else options)


def make_operands(begun: int | None, kind: torch.dtype, heads: int = 2) -> list[Tensor]:
    """Query, key and value of two rows, in layouts that are not dense, and what queries from `begun` on begin with."""
    generator, (keys, values) = torch.Generator().manual_seed(5), SIZES
    query = torch.randn(2, LENGTH, heads, GROUPS, keys, generator=generator).permute(0, 2, 3, 1, 4)
    key, value = (torch.randn(2, heads, LENGTH + 3, x, generator=generator)[:, :, 1:-2] for x in SIZES)
    if begun is None:
        return [x.to(kind) for x in (query, key, value)]
    rows = 2, heads, GROUPS, LENGTH - begun + 1  # one more than there are queries
    before = torch.randn(*rows, values, generator=generator)
    log = torch.randn(rows, generator=generator).masked_fill(torch.rand(rows, generator=generator) < 0.3, LOWEST)
    return [*(x.to(kind) for x in (query, key, value, before)), log]


def by_formula(window: Window, begun: int | None, query: Tensor, key: Tensor, value: Tensor, *before: Tensor):
    """The output and the log of all weights; a query without keys gets zero."""
    place = torch.arange(LENGTH)
    distance = place[:, None] - place
    seen = (distance.abs() < window.size) | (place < window.sinks)
    seen = seen & (distance >= 0) if window.causal else seen
    seen = seen.expand(2, 1, 1, LENGTH, LENGTH)
    seen = seen if window.ends is None else seen & (place < window.ends.view(-1, 1, 1, 1, 1))
    scores = (0.4 * query @ key[:, :, None].mT).masked_fill(~seen, LOWEST)
    values = value[:, :, None].expand(*query.shape[:3], -1, -1)
    if begun is None:
        return scores.softmax(-1) @ values, scores.logsumexp(-1)
    output, log = (F.pad(x[:, :, :, :-1], (*(0, 0) * (x.dim() - 4), begun, 0), value=y)
                   for x, y in zip(before, (0.0, LOWEST), strict=True))  # fmt: skip
    joint = torch.cat([log[..., None], scores], -1)
    shares = joint.softmax(-1)
    return shares[..., :1] * output + shares[..., 1:] @ values, joint.logsumexp(-1)


CASES = [
    (Window(11, 3, True), 14),
    (Window(11, 3, True), None),
    (Window(1, 0, True), 1),
    (Window(33, 20, True), 53),  # sinks in two tiles
    (Window(200, 0, True), None),
    (Window(11, 3, False), 14),
    (Window(40, 17, False), None),
    (Window(11, 3, False, torch.tensor([LENGTH, 31])), 14),
    (Window(20, 0, False, torch.tensor([40, 2])), None),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("window", "begun"), CASES)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_outputs_logs_and_all_gradients(window, begun, kind):
    operands = make_operands(begun, kind, 2 if begun == 14 else 1)
    real = torch.ones(2, LENGTH) if window.ends is None else (torch.arange(LENGTH) < window.ends[:, None]).float()
    real, generator = real[:, None, None, :, None], torch.Generator().manual_seed(1)
    weights = [torch.randn(*operands[0].shape[:-1], x, generator=generator) * real for x in (SIZES[1], 1)]

    def by_triton(query, key, value, *before):
        sources = [GradAccumulator(x) for x in (query, key, value)]
        whole, begin = [x.whole for x in sources], Before(*before, begun) if before else None
        return *attend_window(TRITON_WINDOW, *whole, window, scaling=0.4, before=begin, sources=sources), *(
            x.narrow(2, 1, 1) for x in sources
        )

    def by_reference(query, key, value, *before):
        attended = by_formula(window, begun, query, key, value, *before)
        return *attended, *(x.narrow(2, 1, 1) for x in (query, key, value))

    results = []
    for attend, dtype in ((by_triton, kind), (by_reference, torch.float64)):
        given = [(x.to(dtype) if x.dtype == kind or dtype == torch.float64 else x).detach() for x in operands]
        given = [x.requires_grad_() for x in given]
        output, log, *used = attend(*given)
        loss = (output * weights[0]).sum() + (log[..., None] * weights[1]).sum() + sum(x.sum() for x in used)
        results.append([output * real, log * real[..., 0], *torch.autograd.grad(loss, given)])
    for got, want in zip(*results, strict=True):
        assert_close(got.double(), want, 1e-5 if kind == torch.float32 else 2e-3 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_the_same_bits_with_and_without_gradients(kind):
    query, key, value, *before = make_operands(14, kind)
    with torch.no_grad():
        want = attend_window(
            TRITON_WINDOW, query, key, value, Window(11, 3, True), scaling=0.4, before=Before(*before, 14)
        )
    got = attend_window(
        TRITON_WINDOW, query.requires_grad_(), key, value, Window(11, 3, True), scaling=0.4, before=Before(*before, 14)
    )
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert got[0].dtype == kind and got[1].dtype == torch.float32


def test_the_rest_of_a_rounded_output_counts():
    """Where values are large and alike, gradients of scores are small differences to the output."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, 1, *x, generator=generator) for x in ((1, 40, 16), (40, 16), (40, 16)))
    value, grad = value + 1000, torch.tensor([1.0, -1.0]).repeat(8).expand(1, 1, 1, 40, 16)
    results = []
    for dtype in (torch.float16, torch.float64):
        given = [x.half().to(dtype).requires_grad_() for x in (query, key, value)]
        if dtype == torch.float16:
            output, _ = attend_window(TRITON_WINDOW, *given, Window(9, 2, True), scaling=0.4)
        else:
            place = torch.arange(40)
            distance = place[:, None] - place
            seen = ((distance < 9) | (place < 2)) & (distance >= 0)
            output = (0.4 * given[0] @ given[1][:, :, None].mT).masked_fill(~seen, LOWEST).softmax(-1)
            output = output @ given[2][:, :, None]
        results.append(torch.autograd.grad(output, given[:2], grad.to(dtype)))
    for got, want in zip(*results, strict=True):
        assert_close(got.double(), want, 0.02 * float(want.abs().max()))


def test_products_are_counted():
    heads = [torch.randn(1, 2, *x) for x in ((1, 64, 8), (64, 8), (64, 8))]
    for causal, pairs in ((True, 64 * 14), (False, 64 * 25)):
        window = Window(12, 2, causal)
        with torch.no_grad():
            count = flops_of(lambda w=window: attend_window(TRITON_WINDOW, *heads, w, scaling=1.0))
        assert count == 2 * 2 * pairs * 16


# compiles the kernels as they run on a GPU, each once or all ways, and says how much shared memory they take
PROGRAM = """
import json, sys, torch
from triton.compiler import ASTSource
from tests.ops.gpu_compiler import compile_for
from hf_linattn.ops.window import triton_kernels as window_kernels
from hf_linattn.ops.window import triton as window_softmax

memory = {}
HEADS = ("query", "key", "value", "out", "rest", "before", "grad", "d_query", "d_key", "d_value", "d_before")
FLAGS = {"CAUSAL": True, "BEGINS": True, "ENDS": False, "SINKS": 16, "SPLIT": True}
PROMPT = {"ENDS": True, "SPLIT": False, **dict.fromkeys(("STARTS", "BESIDE", "FAR", "DECAYED", "GATED"), True)}
numbers = ("batch", "head", "token", "heads", "groups", "length", "window", "sinks", "begun", "rows")
for name, flags in (
    ("attend_window", FLAGS), ("attend_window", FLAGS | PROMPT), ("reverse_window_queries", FLAGS),
    ("reverse_window_keys", FLAGS),
):
    kernel = getattr(window_kernels, name)
    flags = dict.fromkeys(PROMPT, False) | flags if name == "attend_window" else flags
    for size, dtype in ((64, torch.float32), (128, torch.float32), (128, torch.bfloat16), (256, torch.bfloat16)):
        heads = torch.empty(1, size, dtype=dtype)
        kinds = dict.fromkeys(HEADS, "*bf16" if dtype == torch.bfloat16 else "*fp32")
        kinds |= {"starts": "*i64", "ends": "*i64", "scaling": "fp32"}
        sizes = {**window_softmax.sizes_for(kernel, heads, heads, window=64), **flags}
        def kind(name):
            return kinds.get(name, "i32" if name.endswith(numbers) else "*fp32")
        signature = {x: "constexpr" if x in sizes else kind(x) for x in kernel.arg_names}
        aligned = [x for x, y in signature.items() if y[0] == "*" or x.endswith(("batch", "head", "token"))]
        attributes = {(kernel.arg_names.index(x),): [["tt.divisibility", 16]] for x in aligned}  # loads of 16 bytes
        targets = [("usual", 80, {}), ("usual", 90, {})]
        if (size, dtype) == (128, torch.bfloat16):
            targets += [(x, 90, getattr(window_softmax, x)[name]) for x in ("NARROW", "WIDE")]
        if sys.argv[1] == "once":
            targets = targets[1:2] * (size == 256)
        for label, capability, own in targets:
            own = {**sizes, **own}
            options = {x: own[x] for x in ("num_stages", "num_warps", "maxnreg") if x in own}
            constants = {x: own[x] for x in kernel.arg_names if x in own}
            source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
            compiled = compile_for(capability, source, options)
            memory[f"{name} {flags['ENDS']} {size} {dtype} {capability} {label}"] = compiled.metadata.shared
print(json.dumps(memory))
"""


@pytest.mark.exhaustive
def test_kernels_compile_for_gpus_and_fit_their_shared_memory():
    require_fit(PROGRAM, 40)
