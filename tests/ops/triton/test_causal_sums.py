"""Triton's causal sums against PyTorch's in float64, which `test_causal_linear` checks against the formula."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch

from hf_linattn import OptionError, patch_model, set_backend
from hf_linattn.backends import load_triton, use_backend
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.block_sparse import BlockSparseMechanism
from hf_linattn.mechanisms.hybrid import HybridMechanism
from hf_linattn.mechanisms.linformer import LinformerMechanism
from hf_linattn.ops.causal_linear import causal_linear_attention
from hf_linattn.ops.chunk_sums import LinearState
from hf_linattn.ops.triton import causal_sums, operations
from hf_linattn.testing.counters import flops_of
from tests.helpers import assert_close, logits_of, make_tokens, pad
from tests.models import make_model
from tests.ops.feature_maps import elu_map, exp_map
from tests.ops.triton.cases import ON_TRITON, make_mechanism, run

HEADS, KV_HEADS, VALUE_DIM, LENGTH = 4, 2, 20, 41
OTHERS = (BlockSparseMechanism, HybridMechanism, LinformerMechanism)  # on block softmax
SUMS = [name for name in ON_TRITON if not issubclass(MECHANISMS.get(name), OTHERS)]


# decay, masked, packed, continued
KINDS = [(0, 0, 0, 0), (1, 1, 1, 1), (1, 1, 0, 1), (0, 1, 1, 0), (0, 0, 0, 1), (1, 0, 1, 0)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("feature_map", [elu_map, exp_map])
def test_outputs_states_and_all_gradients(small_tiles, feature_map, kind):
    """An odd length, grouped queries, a slow and a fast rate; what came before, if anything."""
    decay, masked, packed, continued = kind
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    dim, scaled = 17, decay or feature_map is exp_map
    heads = [draw(2, h, LENGTH, d).requires_grad_() for h, d in ((HEADS, dim), (KV_HEADS, dim), (KV_HEADS, VALUE_DIM))]
    rates = torch.tensor([0.02, 3.0], dtype=torch.float64, requires_grad=True)
    kv = draw(2, KV_HEADS, dim, VALUE_DIM + 1).abs().requires_grad_()
    log_max = draw(2, KV_HEADS) * scaled
    mask = torch.rand(2, LENGTH, generator=generator) > 0.3 if masked else None
    if masked:
        mask[0, :20], mask[1, -20:] = False, False
    ids = torch.stack([torch.arange(LENGTH) // 7, torch.arange(LENGTH) // 39]) if packed else None
    weights = draw(2, HEADS, LENGTH, VALUE_DIM), draw(*kv.shape)
    wanted = [*heads, *([rates] if decay else []), *([kv] if continued else [])]
    results = []
    for dtype, sums in ((torch.float64, None), (torch.float32, load_triton().causal_sums)):
        rate = -rates.to(dtype)[None, :, None].expand(2, -1, LENGTH)
        rate = (rate if mask is None else rate * mask[:, None]) if decay else None
        state = LinearState(kv.to(dtype), log_max.to(dtype)) if continued else None
        operands = [*(x.to(dtype) for x in heads), feature_map, feature_map, mask, ids, state, rate]
        output, after = causal_linear_attention(*operands, causal_sums=sums)
        with torch.no_grad():  # written in place
            inferred, _ = causal_linear_attention(*operands, causal_sums=sums)
        loss = (output * weights[0]).sum() + (after.kv * weights[1]).sum()
        results.append([output, inferred, *after, *torch.autograd.grad(loss, wanted)])
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want, 5e-5 * max(1.0, float(want.detach().abs().max())))


@pytest.mark.parametrize("name", SUMS)
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


@pytest.mark.parametrize(("length", "packed"), [(1, False), (2, True), (37, False), (37, True)])
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
    lengths, sums = [], causal_sums.TRITON_SUMS
    counted = sums._replace(operation=lambda *x: lengths.append(x[0].shape[3]) or sums.operation(*x))
    monkeypatch.setattr(operations, "TRITON", operations.TRITON._replace(causal_sums=counted))
    set_backend(model, "triton")
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), want[0]) and lengths == [40]
    assert_close(logits_of(model, batch, attention_mask=mask), want[1], 1e-4)
    assert lengths == [40, 40]
    assert_close(logits_of(model, prompt, position_ids=packed), want[2], 1e-4)
    assert lengths == [40, 40, 40]


def test_its_products_are_counted():
    """As many as PyTorch's operations have, and those of the larger blocks of pairs."""
    counts = {}
    for backend in ("torch", "triton"):
        mechanism = make_mechanism("performer")
        use_backend(mechanism, backend)
        heads = [torch.randn(1, h, 256, 8) for h in (2, 1, 1)]
        with torch.no_grad():
            counts[backend] = flops_of(lambda mechanism=mechanism, heads=heads: mechanism(*heads))
    assert 1 < counts["triton"] / counts["torch"] < 5


# compiles the kernels, without a GPU, as they run on one, and says how much shared memory they take
PROGRAM = """
import itertools, json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_linattn.ops.triton import causal_kernels, causal_step, causal_sums, features
from hf_linattn.ops.triton.feature_kernels import write_features

NUMBERS = ("batch", "head", "group", "token", "row", "heads", "groups", "length", "segments")
PRECISE = {"least_weight": "fp32", "quadratic": "fp32", "offset": "fp32", "starts": "*i32"}

def compile_kernel(kernel, sizes, heads, precision, capability):
    sizes = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    kinds = PRECISE | dict.fromkeys(heads, f"*{precision}")
    def kind(name):
        return kinds.get(name, "i32" if name.endswith(NUMBERS) else "*fp32")
    signature = {name: "constexpr" if name in sizes else kind(name) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=sizes)
    options = features.OPTIONS if kernel is write_features else {}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared

sums = {"SEGMENT": causal_sums.SEGMENT, "ROWS": causal_sums.ROWS, "SCALED": True, "PACKED": True}
of_states = {"KEYS": causal_sums.STATE_TILE, "VALUES": causal_sums.STATE_TILE}
of_rows = {"KEYS": causal_sums.KEYS, "VALUES": causal_sums.VALUES}
forward = sums | {"KEY_SIZE": 256, "VALUE_SIZE": 128, "NORMALISE": True, "WEIGHED": False, "REVERSE": False}
backward = sums | {"KEY_SIZE": 130, "VALUE_SIZE": 256, "NORMALISE": False, "WEIGHED": True, "REVERSE": True}
maps = {"INPUT_SIZE": 128, "SIZE": 256, "ROWS": 64, "INPUTS": features.INPUTS, "COLUMNS": 256, "WEIGHED": True,
        "BIASED": True}
step = {"KEY_SIZE": 256, "KEYS": 256, "VALUE_SIZE": 128, "VALUES": causal_step.VALUES, "SCALED": True, "DECAYED": True}
cases = [
    (causal_kernels.step_token, step, ("query", "key", "value", "sums")),
    *((kernel, sizes | tiles, heads)
      for sizes, heads in ((forward, ("query", "key", "value", "sums")), (backward, ("query", "key", "value")))
      for kernel, tiles in ((causal_kernels.write_states, of_states), (causal_kernels.read_states, of_rows))),
    *((write_features, maps | {"ACTIVATION": activation}, ("x", "features")) for activation in features.GRADIENTS),
]
memory = [
    compile_kernel(kernel, sizes | {"PRECISION": "tf32x3"}, heads, precision, capability)
    for (kernel, sizes, heads), precision, capability in itertools.product(cases, ("fp32", "bf16"), (80, 90))
]
print(json.dumps(memory))
"""


def test_kernels_compile_for_gpus_and_fit_their_shared_memory():
    """99 KiB is what a program may have on the smallest of them, from Ampere on."""
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)
    assert len(memory) == 36 and all(size <= 99 * 1024 for size in memory), memory


def test_on_a_cpu_without_the_interpreter_it_says_what_to_do():
    program = """
import torch, hf_linattn
from transformers import GPT2Config, GPT2LMHeadModel
model = hf_linattn.patch_model(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50)), "linear")
hf_linattn.set_backend(model.eval(), "triton")
try:
    model(torch.arange(9)[None])
except hf_linattn.OptionError as error:
    print(error)
"""
    done = run(program)
    assert "got heads on 'cpu'" in done.stdout and "set_backend(model, 'auto')" in done.stdout, done.stderr


def test_without_triton_nothing_changes(monkeypatch):
    monkeypatch.setitem(sys.modules, "hf_linattn.ops.triton.operations", None)
    model = patch_model(make_model("llama"), "linear")
    before = copy.deepcopy([vars(x)["backend"] for x in model.modules() if "backend" in vars(x)])
    with pytest.raises(OptionError, match="pip install triton"):
        set_backend(model, "triton")
    assert [vars(x)["backend"] for x in model.modules() if "backend" in vars(x)] == before == ["auto", "auto"]
