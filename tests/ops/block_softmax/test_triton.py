"""Triton's block softmax against the formula, and the mechanisms on it against PyTorch's operations in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hf_linattn import explain_backend, patch_model, set_backend
from hf_linattn.backends import use_backend
from hf_linattn.config import make_config
from hf_linattn.ops.block_softmax import triton as blocks_triton
from hf_linattn.ops.block_softmax.autograd import Keys, attend_blocks
from hf_linattn.ops.block_softmax.triton import TRITON_BLOCKS, meet
from hf_linattn.ops.common.numerics import LOWEST
from hf_linattn.ops.hybrid import fused as hybrid_parts
from hf_linattn.ops.hybrid import triton as hybrid_triton
from hf_linattn.ops.hybrid import triton_prompt as hybrid_prompts
from hf_linattn.ops.slots import triton as slots_triton
from hf_linattn.testing.counters import flops_of
from tests.helpers import assert_close, logits_of, make_tokens
from tests.models import make_model
from tests.ops.block_softmax.cases import check_what_was_read_before
from tests.ops.linear.test_triton import SUMS
from tests.ops.triton_cases import ON_TRITON, each_form, make_mechanism, require_fit

BLOCKS = [name for name in ON_TRITON if name not in SUMS]
BOTH = [(x, mode) for x in BLOCKS for mode in ("causal", "bidirectional")]
BOTH.remove(("linformer", "bidirectional"))  # large products, which PyTorch makes
LENGTHS = [41, pytest.param(107, marks=pytest.mark.exhaustive)]
SMALL = {"block_size": 8, "window_size": 11, "num_sink_tokens": 2, "num_slots": 6}
LENGTH = 29


def make_small(name: str, causal: bool, **options: Any):
    """Return a mechanism whose windows and blocks are SMALL, where it has such."""
    known = vars(make_config(name, {}))
    return make_mechanism(name, causal, **{x: size for x, size in {**SMALL, **options}.items() if x in known})


@pytest.fixture
def calls(small_tiles, monkeypatch):
    """The lengths of calls of the operation, whose blocks for `hybrid` are small, too."""
    lengths, blocks, attend = [], TRITON_BLOCKS, hybrid_prompts.attend_prompt

    def count(operation):
        return operation._replace(forward=lambda *x: lengths.append(x[0].shape[3]) or operation.forward(*x))

    counted = count(blocks)._replace(window=count(blocks.window))
    monkeypatch.setattr(blocks_triton, "TRITON_BLOCKS", counted)
    monkeypatch.setattr(slots_triton, "TRITON_BLOCKS", counted)
    monkeypatch.setattr(hybrid_triton, "PARTS", hybrid_triton.PARTS._replace(blocks=counted))
    monkeypatch.setattr(hybrid_parts, "BLOCK_SIZE", 8)
    for module in (blocks_triton, hybrid_prompts):  # without gradients the window's kernel takes a prompt
        monkeypatch.setattr(module, "attend_prompt", lambda *x, **y: lengths.append(x[0].shape[2]) or attend(*x, **y))
    return lengths


@pytest.mark.parametrize("length", LENGTHS)
def test_outputs_logs_and_all_gradients(small_tiles, length):
    check_what_was_read_before(TRITON_BLOCKS, 1e-5, block_size=12, length=length, batch=2)


@pytest.mark.parametrize("heads", [pytest.param(1, marks=pytest.mark.exhaustive), 4])
def test_tables_and_biases_of_their_own(small_tiles, heads):
    """For every row, block and head, some pairs and queries hidden; a block that nobody names, one named twice."""
    batch, kv_heads, groups, length, size, shared = 2, 2, 2, 29, 8, 3
    generator = torch.Generator().manual_seed(0)
    shapes = [(kv_heads, groups, length, 12), (kv_heads, length, 12), (kv_heads, length, 9), (kv_heads, shared, 12)]
    operands = [torch.randn(batch, *shape, generator=generator) for shape in (*shapes, (kv_heads, shared, 9))]
    weight = torch.randn(batch, kv_heads, groups, length, 9, generator=generator)
    table = torch.tensor([[3, -1, 0], [-1, 3, 1], [3, 0, 0], [0, 3, -1]])[:, None].repeat(1, heads, 1)
    table[1::2, 0] = table[1::2, 0].flip(-1)
    bias = torch.randn(batch, 4, heads, size, shared + 3 * size, generator=generator)
    bias[torch.rand(bias.shape, generator=generator) < 0.4] = LOWEST
    bias[0, :, :, 5] = LOWEST  # sees nothing

    def in_blocks(query, key, value, *alone):
        part = Keys(0, table, bias, alone)
        return attend_blocks(TRITON_BLOCKS, query, key, value, [part], block_size=size, scaling=0.4, causal=False)

    def by_formula(query, key, value, alone_key, alone_value):
        outputs, logs = [], []
        for row, head, group, place in itertools.product(*map(range, query.shape[:4])):
            block, own = place // size, (head * groups + group) % heads
            numbers = (table[block, own, :, None] * size + torch.arange(size)).flatten()
            there = (table[block, own] >= 0).repeat_interleave(size) & (numbers < length)
            keys, values = (
                torch.cat([first[row, head], x[row, head, numbers.clamp(0, length - 1)]])
                for first, x in ((alone_key, key), (alone_value, value))
            )
            shown = bias[row, block, own, place % size].double()
            shown[shared:][~there] = LOWEST
            seen = shown > LOWEST / 2
            scores = 0.4 * keys[seen] @ query[row, head, group, place] + shown[seen]
            outputs.append(scores.softmax(0) @ values[seen])
            logs.append(scores.logsumexp(0).clamp(min=LOWEST))
        return torch.stack(outputs).view(weight.shape), torch.stack(logs).view(weight.shape[:-1])

    results = []
    for attend, precision in ((in_blocks, torch.float32), (by_formula, torch.float64)):
        given = [x.to(precision).requires_grad_() for x in operands]
        output, log = attend(*given)
        loss = (output * weight).sum() + log.clamp(min=-99).sin().sum()
        results.append([output, log, *torch.autograd.grad(loss, given)])
    for got, want in zip(*results, strict=True):
        assert_close(got.double(), want, 1e-5)
    assert not results[0][0][0, :, :, 5::8].any()


def test_a_table_is_read_from_the_side_of_the_keys():
    table = torch.tensor([[[0, -1], [1, 0]], [[1, 0], [-1, 1]]])  # two query blocks, two heads
    met_by, met_from = meet(table, 3)
    found = [
        [[tuple(x) for x in met_by[start:end].tolist()] for start, end in itertools.pairwise(row)]
        for row in met_from.tolist()
    ]
    assert found == [[[(0, 0), (1, 1)], [(1, 0)], []], [[(0, 1)], [(0, 0), (1, 1)], []]]


@pytest.mark.parametrize("name", ["local", "longformer", "bigbird"])
def test_pieces_give_what_a_whole_row_gives(calls, name):
    """Blocks of an earlier call stand before the new ones, with gradients through what was kept of them."""
    given = [torch.randn(1, h, 45, 8, generator=torch.Generator().manual_seed(h)) for h in (2, 1, 1)]
    results = []
    for backend, dtype, ends in (("torch", torch.float64, (0, 45)), ("triton", torch.float32, (0, 19, 45))):
        mechanism = make_small(name, True).to(dtype)
        use_backend(mechanism, backend)
        heads, state, outputs = [x.to(dtype).requires_grad_() for x in given], None, []
        for start, end in itertools.pairwise(ends):
            output, state = mechanism(*(x[:, :, start:end] for x in heads), state=state)
            outputs.append(output)
        whole = torch.cat(outputs, dim=2)
        results.append([whole, *torch.autograd.grad(whole.sin().sum(), heads)])
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want, 2e-5)
    assert calls[0] == 19 < calls[-1]  # the second call reads a row of what was kept and what is new


@pytest.mark.parametrize(("name", "mode"), each_form(BOTH))
def test_every_mechanism_on_it(calls, name, mode):
    """Outputs, the gradients of heads and parameters, and the tokens that follow; rows padded on either side."""
    generator, causal = torch.Generator().manual_seed(0), mode == "causal"
    given = [torch.randn(2, h, LENGTH + 2, 8, generator=generator) for h in (2, 1, 1)]
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :9], mask[1, 20:] = False, False
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        mechanism = make_small(name, causal).to(dtype)
        use_backend(mechanism, backend)
        heads, real = [x.to(dtype).requires_grad_() for x in given], mask[:, None, :, None]
        output, state = mechanism(*(x[:, :, :LENGTH] for x in heads), mask)
        outputs = [output * real]
        if causal:
            outputs.append(mechanism(*(x[:, :, LENGTH:] for x in heads), state=state)[0])
        wanted = {**dict(zip("qkv", heads, strict=True)), **dict(mechanism.named_parameters())}
        loss = sum((x * torch.arange(x.numel()).cos().view_as(x)).sum() for x in outputs)
        gradients = torch.autograd.grad(loss, wanted.values(), allow_unused=True)
        results.append([*outputs, *(x for x in gradients if x is not None)])
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want, 1e-4 * max(1.0, float(want.detach().abs().max())))
    # a pattern with parameters has gradients, which the operation has not; rows of one length go beyond the window
    assert calls or name in ("learned_sparse", "hybrid")
    with torch.no_grad():
        mechanism(*(x[:1, :, :LENGTH] for x in heads))
    assert calls


@pytest.mark.parametrize("name", ["local", "random_blocks"])  # by the kernel of windows and by that of blocks
@torch.no_grad()
def test_what_is_not_finite_shows_where_it_is_seen(calls, name):
    mechanism = make_small(name, True)
    use_backend(mechanism, "triton")
    for part, number in itertools.product(range(3), (torch.nan, torch.inf)):
        heads = [torch.randn(1, h, LENGTH, 8, generator=torch.Generator().manual_seed(h)) for h in (2, 1, 1)]
        heads[part][:, :, 19] = number
        output, _ = mechanism(*heads)
        assert not output[:, :, 19].isfinite().any(-1).any(), (part, number)
        assert part or output[:, :, :19].isfinite().all(), number  # of later tokens' values in a tile, 0 times them
    assert calls


@pytest.mark.covering(1)
@pytest.mark.parametrize("window_size", [1, 11])
@pytest.mark.parametrize("decay", [None, "learned"])
@pytest.mark.parametrize(("linear", "sizes"), [("hedgehog", {}), ("performer", {"num_features": 16})])
def test_what_hybrid_remembers_of_a_row(calls, linear, sizes, decay, window_size):
    """The state after a row, what is read after it, and gradients through both."""
    options = {"linear": linear, "linear_options": {"decay": decay, **sizes}, "window_size": window_size}
    given = [torch.randn(2, h, LENGTH + 3, 8, generator=torch.Generator().manual_seed(h)) for h in (2, 1, 1)]
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        mechanism = make_small("hybrid", True, num_sink_tokens=1, **options).to(dtype)
        use_backend(mechanism, backend)
        heads = [x.to(dtype).requires_grad_() for x in given]
        first, state = mechanism(*(x[:, :, :LENGTH] for x in heads))
        second, _ = mechanism(*(x[:, :, LENGTH:] for x in heads), state=state)
        wanted = [*heads, *mechanism.parameters()]
        gradients = torch.autograd.grad(first.sin().sum() + second.cos().sum(), wanted)
        total = state.kv * state.log_max.exp()[..., None, None]
        results.append([first, second, total, *state[:4], state.length, *gradients])
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want.double(), 1e-4 * max([1.0, *want.detach().abs().flatten().tolist()]))
    assert calls == [LENGTH]


WINDOWS = {"local": 1, "streaming": 1, "longformer": 1, "atrous": 0, "checkerboard": 0, "sparse_transformer": 0}


@pytest.mark.covering(2)
@pytest.mark.parametrize("length", [5, LENGTH])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_that_are_all_that_is_seen_are_left_to_their_operation(small_tiles, monkeypatch, name, causal, length):
    """With more sinks than tokens, too, and a sink in the denominator; what differs from a window stays in blocks."""
    taken, window = [], TRITON_BLOCKS.window
    counted = window._replace(forward=lambda *x: taken.append(x[10:12]) or window.forward(*x))
    blocks = TRITON_BLOCKS._replace(window=counted)
    monkeypatch.setattr(blocks_triton, "TRITON_BLOCKS", blocks)
    generator, shared = torch.Generator().manual_seed(1), 7
    given = [torch.randn(2, h, length, 8, generator=generator) for h in (2, 1, 1)]
    mask = torch.arange(length) < torch.tensor([[length], [length // 2]])
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        mechanism = make_small(name, causal, num_sink_tokens=shared, num_global=shared, sink_logit="learned").to(dtype)
        use_backend(mechanism, backend)
        heads = [x.to(dtype).requires_grad_() for x in given]
        output = mechanism(*heads, mask)[0] * mask[:, None, :, None]
        results.append([output, *torch.autograd.grad(output.sin().sum(), [*heads, mechanism.sink_logit])])
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want, 2e-5 * max(1.0, float(want.detach().abs().max())))
    assert taken == [(11, 0 if name == "local" else min(shared, length))] * WINDOWS[name]


@torch.no_grad()
def test_segments_that_stay_open(calls):
    """The softmax begins with the segment that is open before each block, and is read on from there."""
    heads = [torch.randn(2, h, 61, 8) for h in (2, 1, 1)]
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        mechanism = make_small("linformer", causal=True, num_slots=2).to(dtype).eval()
        use_backend(mechanism, backend)
        output, state = mechanism(*(x[:, :, :60].to(dtype) for x in heads))
        results.append([output, mechanism(*(x[:, :, 60:].to(dtype) for x in heads), state=state)[0], *state])
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want.double(), 1e-5)
    assert len(calls) > 2


def test_the_future_does_not_come_through(calls):
    """Whatever follows, even a thousand times larger, the outputs before it are the same bits."""
    heads = [torch.randn(1, h, 50, 8) for h in (2, 1, 1)]
    for name in ("streaming", "hybrid"):
        mechanism = make_small(name, causal=True)
        use_backend(mechanism, "triton")
        with torch.no_grad():
            want, _ = mechanism(*heads)
            for place in (1, 8, 29):
                changed = [torch.cat([x[:, :, :place], 1000 * x[:, :, place:]], dim=2) for x in heads]
                got, _ = mechanism(*changed)
                assert torch.equal(got[:, :, :place], want[:, :, :place]) and got.isfinite().all()
    assert calls


def test_a_model_prefills_and_decodes_by_it(calls):
    hybrid, local = {"window_size": 5, "num_sink_tokens": 2}, {"window_size": 7, "block_size": 8}
    plan = {"hybrid": {"layers": [0], **hybrid}, "local": {"layers": [1], **local}}
    model = patch_model(make_model("llama"), plan).eval()
    prompt = make_tokens(1, 30)
    set_backend(model, "torch")  # the blocks of the C are not small
    want = [model.generate(prompt, max_new_tokens=4, do_sample=False), logits_of(model, prompt)]
    set_backend(model, "triton")
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), want[0])
    assert_close(logits_of(model, prompt), want[1], 1e-4)
    assert calls


def test_what_runs_on_it_is_explained(calls):
    plan = {"linear": [0], "hybrid": {"layers": [1], "window_size": 5, "num_sink_tokens": 2}}
    model = patch_model(make_model("llama"), plan)
    set_backend(model, "triton")
    rows = explain_backend(model, make_tokens(1, 12)).rows
    assert [[row.backend(x) for x in ("forward", "backward", "decode")] for row in rows] == [["triton"] * 3] * 2
    assert calls and explain_backend(model, make_tokens(1, 6)).rows[1].backend("forward") == "triton"


def test_its_products_are_counted(calls):
    counts = {}
    for backend in ("torch", "triton"):
        mechanism = make_small("bigbird", causal=True)
        use_backend(mechanism, backend)
        heads = [torch.randn(1, h, LENGTH, 8) for h in (2, 1, 1)]
        with torch.no_grad():
            counts[backend] = flops_of(lambda mechanism=mechanism, heads=heads: mechanism(*heads))
    assert 0.5 < counts["triton"] / counts["torch"] < 2


# compiles the kernels as they run on a GPU, each once or all ways, and says how much shared memory they take
PROGRAM = """
import itertools, json, sys, torch
from triton.compiler import ASTSource
from tests.ops.gpu_compiler import compile_for
from hf_linattn.ops.block_softmax import triton_kernels as block_kernels
from hf_linattn.ops.block_softmax.triton import sizes_for

memory = {}
kinds = {"table": "*i64", "met_by": "*i64", "met_from": "*i64", "scaling": "fp32"}
HEADS = ("query", "key", "value", "out", "before", "shared_key", "shared_value", "grad", "d_query")
flags = {"CAUSAL": True, "BEGINS": True, "BIASED": True}
numbers = ("batch", "head", "group", "token", "row", "block", "part", "heads", "groups", "length", "first", "size",
           "width", "shared", "offset", "begun", "count", "blocks", "columns", "rows")
KERNELS = block_kernels.attend_blocks, block_kernels.reverse_queries, block_kernels.reverse_keys
ways = list(itertools.product((128, 256), (torch.float32, torch.bfloat16), (80, 90)))
for kernel, way in itertools.product(KERNELS, ways if sys.argv[1] == "all" else ways[-1:]):
    size, dtype, capability = way
    heads = torch.empty(1, size, dtype=dtype)
    kinds |= dict.fromkeys(HEADS, "*bf16" if dtype == torch.bfloat16 else "*fp32")
    sizes = {**sizes_for(heads, heads), **flags}
    options = {"num_stages": sizes.pop("num_stages")}
    sizes = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    def kind(name):
        return kinds.get(name, "i32" if name.endswith(numbers) else "*fp32")
    signature = {name: "constexpr" if name in sizes else kind(name) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=sizes)
    compiled = compile_for(capability, source, options)
    memory[f"{kernel.__name__} {size} {dtype} {capability}"] = compiled.metadata.shared
print(json.dumps(memory))
"""


@pytest.mark.exhaustive
def test_kernels_compile_for_gpus_and_fit_their_shared_memory():
    require_fit(PROGRAM, 24)
