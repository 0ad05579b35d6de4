"""Triton's causal sums against PyTorch's in float64, which `test_torch.py` checks against the formula."""

from __future__ import annotations

import copy
import itertools
import json
import sys

import pytest
import torch
import triton

from hf_linattn import OptionError, patch_model, set_backend
from hf_linattn.backends import use_backend
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.block_sparse import BlockSparseMechanism
from hf_linattn.mechanisms.hybrid import HybridMechanism
from hf_linattn.mechanisms.linformer import LinformerMechanism
from hf_linattn.ops.dispatch import Policy
from hf_linattn.ops.linear import triton as linear_triton
from hf_linattn.ops.linear.interface import causal_linear_attention, linear_attention
from hf_linattn.ops.linear.types import Features, LinearState
from hf_linattn.testing.counters import flops_of
from tests.helpers import assert_close, logits_of, make_tokens, pad
from tests.models import make_model
from tests.ops.feature_maps import elu_map, exp_map
from tests.ops.triton_cases import ON_TRITON, each_map, make_mechanism, run

VALUE_DIM, LENGTH = 20, 41
OTHERS = (BlockSparseMechanism, HybridMechanism, LinformerMechanism)  # on block softmax
SUMS = [name for name in ON_TRITON if not issubclass(MECHANISMS.get(name), OTHERS)]


# decay, masked, packed, continued: every pair of them, on and off
KINDS = [(0, 0, 0, 0), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)]


# each kind with one map, one of them with two heads of keys; the rest of the product is exhaustive
USUAL = {kind: ((elu_map, exp_map)[place % 2], (4, 2) if place == 1 else (2, 1)) for place, kind in enumerate(KINDS)}
CASES = [
    pytest.param(*heads, x, kind, marks=[] if USUAL[kind] == (x, heads) else [pytest.mark.exhaustive])
    for kind, x, heads in itertools.product(KINDS, (elu_map, exp_map), ((2, 1), (4, 2)))
]


@pytest.mark.parametrize(("heads", "kv_heads", "feature_map", "kind"), CASES)
def test_outputs_states_and_all_gradients(small_tiles, heads, kv_heads, feature_map, kind):
    """An odd length, grouped queries, a slow and a fast rate; what came before, if anything."""
    decay, masked, packed, continued = kind
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    dim, scaled = 17, decay or feature_map is exp_map
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, VALUE_DIM)
    given = [draw(2, h, LENGTH, size).requires_grad_() for h, size in shapes]
    rates = torch.tensor([3.0, 0.02][:kv_heads], dtype=torch.float64, requires_grad=True)
    kv = draw(2, kv_heads, dim, VALUE_DIM + 1).abs().requires_grad_()
    log_max = draw(2, kv_heads) * scaled
    mask = torch.rand(2, LENGTH, generator=generator) > 0.3 if masked else None
    if masked:
        mask[0, :20], mask[1, -20:] = False, False
    ids = torch.stack([torch.arange(LENGTH) // 7, torch.arange(LENGTH) // 39]) if packed else None
    weights = draw(2, heads, LENGTH, VALUE_DIM), draw(*kv.shape)
    wanted = [*given, *([rates] if decay else []), *([kv] if continued else [])]
    results = []
    for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton")):
        rate = -rates.to(dtype)[None, :, None].expand(2, -1, LENGTH)
        rate = (rate if mask is None else rate * mask[:, None]) if decay else None
        state = LinearState(kv.to(dtype).mT.contiguous().mT, log_max.to(dtype)) if continued else None  # not dense
        operands = [*(x.to(dtype) for x in given), feature_map, feature_map, mask, ids, state, rate]
        output, after = causal_linear_attention(*operands, policy=Policy(backend))
        with torch.no_grad():  # written in place
            inferred, _ = causal_linear_attention(*operands, policy=Policy(backend))
        loss = (output * weights[0]).sum() + (after.kv * weights[1]).sum()
        results.append([output, inferred, *after, *torch.autograd.grad(loss, wanted)])
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want, 5e-5 * max(1.0, float(want.detach().abs().max())))


@pytest.mark.parametrize("name", each_map(SUMS))
def test_every_mechanism_on_it(small_tiles, name):
    """Outputs, states and the gradients of heads and parameters, masked, in two calls."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :19] = False  # no key in the first call
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, h, LENGTH, 8, generator=generator) for h in (2, 1, 1)]
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        mechanism = make_mechanism(name).to(dtype)
        use_backend(mechanism, backend)
        heads, state, outputs = [x.to(dtype).requires_grad_() for x in given], None, []
        for part in (slice(None, 19), slice(19, None)):
            output, state = mechanism(*(x[:, :, part] for x in heads), mask[:, part], state=state)
            outputs.append(output)
        output = torch.cat(outputs, dim=2)
        wanted = {**dict(zip("qkv", heads, strict=True)), **dict(mechanism.named_parameters())}
        loss = (output * torch.arange(output.numel()).cos().view_as(output)).sum()
        gradients = torch.autograd.grad(loss, wanted.values())
        total = state.kv.double() * state.log_max.double().exp()[..., None, None]
        results.append({"output": output, "state": total, **dict(zip(wanted, gradients, strict=True))})
    for place, want in results[0].items():
        tolerance = 1e-3 if "decay" in place else 5e-5  # a small difference of large sums
        assert_close(results[1][place].double(), want, tolerance * max(1.0, float(want.detach().abs().max())))


ALL_KEYS = [name for name in SUMS if "bidirectional" in MECHANISMS.get(name).modes]


@pytest.mark.covering(1)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", each_map(ALL_KEYS))
def test_every_query_sees_all_keys(small_tiles, monkeypatch, name, kind, padded):
    """Outputs and the gradients of heads and parameters; one row without keys; with and without gradients."""
    taken, attend = [], linear_triton._attend  # which causal calls reach through `SUMS`
    monkeypatch.setattr(linear_triton, "_attend", lambda *x, **y: taken.append(x[2].dtype) or attend(*x, **y))
    mask = torch.ones(2, 35, dtype=torch.bool)
    if padded:
        mask[0, :11], mask[0, 30:], mask[1] = False, False, False
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, h, 35, 8, generator=generator).to(kind) for h in (2, 1, 1)]
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", kind)):
        mechanism = make_mechanism(name, causal=False).to(torch.promote_types(dtype, torch.float32))
        use_backend(mechanism, backend)
        heads = [x.to(dtype).requires_grad_() for x in given]
        output, _ = mechanism(*heads, mask)
        with torch.no_grad():
            inferred, _ = mechanism(*heads, mask)
        wanted = [*heads, *mechanism.parameters()]
        weight = torch.arange(output.numel()).cos().view_as(output).to(dtype)
        results.append([output, inferred, *torch.autograd.grad((output * weight).sum(), wanted)])
    for want, got in zip(*results, strict=True):
        assert (got.double() - want).norm() < {torch.float32: 1e-5, torch.float16: 3e-3}[kind] * want.norm()
    assert len(taken) == (0 if name in ("gla", "retention") else 2)  # whose weights decay


def permuted_map(x: torch.Tensor) -> Features:
    """Features whose log scale [..., N] does not lie in memory as it is read."""
    return Features(x.exp(), x[..., 0].mT.contiguous().mT)


@torch.no_grad()
def test_every_query_sees_keys_of_scales_that_are_not_dense(small_tiles):
    """A length of whole chunks, which no padding copies."""
    heads = [torch.randn(2, 2, 32, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    want, got = (
        linear_attention(*(x.to(dtype) for x in heads), elu_map, permuted_map, policy=Policy(backend))
        for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton"))
    )
    assert_close(got.double(), want, 1e-5)


@pytest.mark.parametrize(
    ("length", "packed"), [(1, False), (2, True), (37, True), pytest.param(37, False, marks=pytest.mark.exhaustive)]
)
def test_weights_that_decay_both_ways(small_tiles, length, packed):
    """Outputs and the gradients of heads and parameters, masked."""
    ids = torch.stack([torch.arange(length) // 9, torch.arange(length) // 36]) if packed else None
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, length // 2 :] = False
    given = [torch.randn(2, h, length, 8) for h in (2, 1, 1)]
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        mechanism = make_mechanism("hedgehog", causal=False, decay="learned").to(dtype)
        use_backend(mechanism, backend)
        heads = [x.to(dtype).requires_grad_() for x in given]
        output, _ = mechanism(*heads, mask, ids)
        gradients = torch.autograd.grad(output.sin().sum(), [*heads, *mechanism.parameters()])
        results.append([output, *gradients])
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want, 5e-5 * max(1.0, float(want.detach().abs().max())))


def test_the_future_does_not_come_through_and_nothing_overflows(small_tiles):
    """Whatever follows, even a thousand times larger, the outputs before it are the same bits."""
    mechanism = make_mechanism("performer")
    use_backend(mechanism, "triton")
    heads = [torch.randn(1, h, 50, 8) for h in (2, 1, 1)]
    with torch.no_grad():
        want, _ = mechanism(*heads)
        for place in (1, 16, 33):
            changed = [torch.cat([x[:, :, :place], 1000 * x[:, :, place:]], dim=2) for x in heads]
            got, state = mechanism(*changed)
            assert torch.equal(got[:, :, :place], want[:, :, :place])
            assert got.isfinite().all() and state.kv.isfinite().all()


KINDS_OF_MAPS = [  # elu, relu
    pytest.param(name, marks=[] if name in ("linear", "t2r") else [pytest.mark.exhaustive]) for name in ALL_KEYS
]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", KINDS_OF_MAPS)
@torch.no_grad()
def test_what_is_not_finite_shows_where_it_is_seen(small_tiles, name, causal):
    mechanism = make_mechanism(name, causal)
    use_backend(mechanism, "triton")
    for part, number in itertools.product(range(3), (torch.nan, torch.inf)):
        heads = [torch.randn(1, h, 21, 8, generator=torch.Generator().manual_seed(h)) for h in (2, 1, 1)]
        heads[part][:, :, 19] = number
        output, _ = mechanism(*heads)
        assert not output[:, :, 19].isfinite().any(), (part, number)
        assert part or output[:, :, :19].isfinite().all(), number


@torch.no_grad()
def test_a_weight_that_is_no_number_shows(small_tiles):
    """Of sums of features that are infinite, one above and one below zero, beside those of values, which are not."""
    query, key = torch.ones(1, 1, 33, 2), torch.tensor([2e38, -2e38]).expand(1, 1, 33, 2)
    output, _ = causal_linear_attention(query, key, query / 100, Features, Features, policy=Policy("triton"))
    assert output[:, :, -1].isnan().all()


def test_a_row_without_keys_is_zero_and_has_no_gradient(small_tiles):
    mechanism = make_mechanism("performer")
    use_backend(mechanism, "triton")
    heads = [torch.randn(2, h, 24, 8, requires_grad=True) for h in (2, 1, 1)]
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0], mask[1, :20] = False, False
    output, _ = mechanism(*heads, key_padding_mask=mask)
    assert not output[0].any() and not output[1, :, :20].any() and output[1, :, 20:].abs().gt(0).all()
    for gradient in torch.autograd.grad(output.square().sum(), heads):
        assert gradient.isfinite().all() and not gradient[0].any() and not gradient[1, :, :20].any()
        assert gradient[1, :, 20:].any()


def test_a_model_prefills_by_it_and_decodes_pads_and_packs_as_before(small_tiles, monkeypatch):
    """Where the kernels are not made for an input, the answer is the one of other backends."""
    model = patch_model(make_model("llama"), {"linear": [0], "softmax": [1]}).eval()
    prompt = make_tokens(1, 40)
    batch, mask = pad([prompt[0], prompt[0, :25]], 0, side="left")
    packed = torch.cat([torch.arange(17), torch.arange(23)])[None]
    want = [
        model.generate(prompt, max_new_tokens=5, do_sample=False),
        logits_of(model, batch, attention_mask=mask),
        logits_of(model, prompt, position_ids=packed),
    ]
    lengths, sums = [], linear_triton.SUMS
    counted = sums._replace(attend=lambda *x: lengths.append(x[2].shape[3]) or sums.attend(*x))
    monkeypatch.setattr(linear_triton, "SUMS", counted)
    set_backend(model, "triton")
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), want[0]) and lengths == [40]
    assert_close(logits_of(model, batch, attention_mask=mask), want[1], 1e-4)
    assert lengths == [40, 40]
    assert_close(logits_of(model, prompt, position_ids=packed), want[2], 1e-4)
    assert lengths == [40, 40, 40]


def test_its_products_are_counted():
    """As many as PyTorch's operations have, but for pairs behind a query, which these count."""
    counts = {}
    for backend in ("torch", "triton"):
        mechanism = make_mechanism("performer")
        use_backend(mechanism, backend)
        heads = [torch.randn(1, h, 256, 8) for h in (2, 1, 1)]
        with torch.no_grad():
            counts[backend] = flops_of(lambda mechanism=mechanism, heads=heads: mechanism(*heads))
    assert 0.4 < counts["triton"] / counts["torch"] < 1


# compiles the kernels as they run on a GPU, each once or all ways, and says how much shared memory they take
PROGRAM = """
import json, sys, torch
from triton.compiler import ASTSource
from tests.ops.gpu_compiler import compile_for
from hf_linattn.ops.linear import triton_kernels as causal_kernels
from hf_linattn.ops.linear import triton_launch as causal_sums
from hf_linattn.ops.linear import triton_feature_kernels as feature_kernels
from hf_linattn.ops.linear import triton_features as features
from hf_linattn.ops.linear import triton_decode as steps
from hf_linattn.ops.linear import triton_decode_kernels as step_kernels
from hf_linattn.ops.linear import triton_scale_kernels as scale_kernels
from hf_linattn.ops.linear import triton_scales as scales
from hf_linattn.ops.linear.types import FeatureMapSpec

NUMBERS = ("batch", "head", "group", "token", "row", "column", "heads", "groups", "shared_by", "length", "chunks",
           "segments", "repeats", "count")
PRECISE = {"least_weight": "fp32", "scale": "fp32", "quadratic": "fp32", "offset": "fp32", "starts": "*i32",
           "mask": "*i1"}
HEADS = ("query", "key", "value", "sums", "rest", "x", "features", "gradient", "slopes")

def compile_kernel(kernel, sizes, options, precision, capability):
    sizes = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    def kind(name):
        if kernel is causal_kernels.read_states and name == "features":
            return "i32"
        heads = f"*{precision}" if name in HEADS else "*fp32"
        return PRECISE.get(name, "i32" if name.endswith(NUMBERS) else heads)
    signature = {name: "constexpr" if name in sizes else kind(name) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=sizes)
    return compile_for(capability, source, options).metadata.shared

def cases(precision, capability):
    itemsize, large = {"fp32": 4, "bf16": 2, "fp16": 2}[precision], capability == 90
    tiles = (causal_sums.TILES if large else causal_sums.SMALL_TILES)[causal_sums.MOST_BYTES]
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    size = causal_sums.MOST_BYTES // itemsize
    walk = {"KEY_SIZE": size, "VALUE_SIZE": size, "ROWS": tiles.rows, "KEYS": size, "VALUES": tiles.values}
    walk |= dict.fromkeys(("ADDS", "BEGINS", "ENDS", "ZEROED", "SCALED", "PACKED", "PAIRS"), True) | {"GOES_ON": False}
    forward = walk | {"FEATURES_FIRST": True, "NORMALISE": True, "WEIGHED": False, "EXTRA": None, "EXACT": True,
                      "LOGS": True, "TOPS": True, "REVERSE": False}
    back = walk | {"FEATURES_FIRST": False, "NORMALISE": False, "WEIGHED": True, "EXTRA": "keys", "EXACT": False,
                   "LOGS": False, "TOPS": False, "REVERSE": True}
    states = walk | {"KEYS": causal_sums.STATE_KEYS, "VALUES": causal_sums.STATE_VALUES, "EXTRA": True,
                     "REVERSE": True}
    def maps(columns, numbers, **how):
        split = itemsize == 2
        return {"INPUT_SIZE": 128, "SIZE": columns, "ROWS": features.row_tile(columns, numbers),
                "TILES": features.TILES, "INPUTS": features.input_tile(128, columns, itemsize, split, large),
                "COLUMNS": columns, "WEIGHED": True, "BIASED": True, "SPLIT": split,
                "MASKED": True, "SCALED": True, **how}
    numbers, warps = steps.NUMBERS[True]
    def step(activation):
        spec = FeatureMapSpec(activation, torch.empty(4, 128, 256), torch.empty(4, 256), 1.0)
        row = features.OneRow.of([spec, spec], 4, 1, 128)
        values = min(steps.MOST_VALUES, numbers // row.tile)
        own = {"NUM_FEATURES": row.width, "VALUE_SIZE": 128, "VALUES": values, "DECAYED": True, "MASKED": True}
        return {**row.sizes, **own}
    names = ("SCALED", "DECAYED", "SHARES", "TOPPED", "PACKED", "BEGINS", "TOPS", "FACTORS", "REVERSE")
    scale = {"SIZE": tiles.rows, "CHUNKS": scales.TILE // tiles.rows, "SEGMENT": 8, **dict.fromkeys(names, True)}
    yield causal_kernels.read_states, forward, options
    yield causal_kernels.read_states, back, options
    yield causal_kernels.write_states, states, causal_sums.STATE_OPTIONS[large]
    pairs = maps(256, features.PAIR_NUMBERS, ACTIVATION="softmax_pair")
    yield feature_kernels.write_features, pairs, features.PAIR_OPTIONS
    for columns in (256, 512):
        powers = maps(columns, features.NUMBERS, ACTIVATION="exponential")
        yield feature_kernels.write_features, powers, features.OPTIONS
    yield feature_kernels.write_slopes, pairs | {"ROWS": 32}, {}
    for activation in ("exponential", "softmax_pair"):
        yield step_kernels.step_token, step(activation), {"num_warps": warps}
    rows = {"SIZE": 128, "ROWS": 32, "COLUMNS": 128, **dict.fromkeys(("EXACT", "NEGATIVE", "BESIDE"), True)}
    yield causal_kernels.multiply_rows, rows, {}
    yield scale_kernels.write_scales, scale, {"num_warps": 8}

def all_of(capability):
    own = [("fp16", *case) for case in cases("fp16", capability) if case[0] is causal_kernels.read_states]
    return own + [(precision, *case) for precision in ("fp32", "bf16") for case in cases(precision, capability)]

def once(capability):
    return list({case[1]: case for case in all_of(capability)}.values())

chosen = {80: all_of, 90: all_of} if sys.argv[1] == "all" else {80: once}
print(json.dumps({capability: [
    compile_kernel(kernel, sizes | {"PRECISION": "tf32x3"}, options, precision, capability)
    for precision, kernel, sizes, options in choose(capability)
] for capability, choose in chosen.items()}))
"""


@pytest.mark.exhaustive
def test_kernels_compile_for_gpus_and_fit_their_shared_memory():
    """99 KiB is what a program may have on the smallest of them, from Ampere on, and 227 on Hopper."""
    done = run(PROGRAM, "all")
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)
    assert {x: len(sizes) for x, sizes in memory.items()} == {"80": 24, "90": 24}
    for capability, sizes in memory.items():
        assert all(size <= {"80": 99, "90": 227}[capability] * 1024 for size in sizes), memory


def test_on_a_cpu_without_the_interpreter_it_says_what_to_do(monkeypatch):
    model = patch_model(make_model("gpt2"), "linear").eval()
    set_backend(model, "triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(OptionError, match=r"got heads on 'cpu'.*set_backend\(model, 'auto'\)"):
        model(make_tokens(1, 9))


def test_without_triton_nothing_changes(monkeypatch):
    monkeypatch.setitem(sys.modules, "hf_linattn.ops.runtime.triton", None)
    model = patch_model(make_model("llama"), "linear")
    before = copy.deepcopy([vars(x)["backend"] for x in model.modules() if "backend" in vars(x)])
    with pytest.raises(OptionError, match="pip install triton"):
        set_backend(model, "triton")
    assert [vars(x)["backend"] for x in model.modules() if "backend" in vars(x)] == before == ["auto", "auto"]
