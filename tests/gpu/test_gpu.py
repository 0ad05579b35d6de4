"""What only a GPU can get wrong: half precision, device placement, memory. `make gpu` runs it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linattn import AttentionLayer, Mechanism, list_mechanisms, patch_model
from hf_linattn.backends import use_backend
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.ops import reference as naive
from tests.models import VOCAB_SIZE, make_model

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
CASES = [(name, mode) for name in list_mechanisms() for mode in sorted(MECHANISMS.get(name).modes)]
ON_TRITON = [
    (name, mode) for name, mode in CASES if "triton" in MECHANISMS.get(name).backends and mode != "cross"
]  # fmt: skip
# the reference sees the rounded inputs and parameters; what counts is the rounding of the output and softmax's own
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BATCH, HEADS, KEY_VALUE_HEADS, LENGTH, HEAD_DIM = 2, 4, 2, 173, 32


def make_mechanism(name: str, mode: str, dtype: torch.dtype, **options: Any) -> Mechanism:
    """Return a mechanism of a layer with grouped queries on the GPU."""
    layer = AttentionLayer(
        index=0,
        num_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=HEAD_DIM,
        causal=mode == "causal",
        scaling=HEAD_DIM**-0.5,
        device=DEVICE,
        dtype=dtype,
    )
    return MECHANISMS.get(name)(make_config(name, options), layer).to(DEVICE, dtype)


def make_heads(length: int = LENGTH, batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query, key, value in float64 on the CPU, and a key mask with padding on the left of the first row."""
    generator = torch.Generator().manual_seed(1)
    heads = [
        torch.randn(batch, count, length, HEAD_DIM, generator=generator, dtype=torch.float64)
        for count in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    ]
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, : length // 5] = False
    return (*heads, mask)


def reference(mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return the output by the N x N formula in float64 on the CPU, with the mechanism's own rounded parameters."""
    exact = copy.deepcopy(mechanism).cpu().double()
    return naive.attend(exact.attention_matrix(query, key, mask, value=value), value)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_output_matches_the_reference(name: str, mode: str, dtype: torch.dtype) -> None:
    mechanism = make_mechanism(name, mode, dtype)
    *heads, mask = make_heads()
    rounded = [x.to(DEVICE, dtype) for x in heads]
    output, _ = mechanism(*rounded, mask.to(DEVICE))
    expected = reference(mechanism, *(x.cpu().double() for x in rounded), mask)
    assert output.dtype == dtype and output.device.type == DEVICE.type
    real = mask[:, None, :, None]  # outputs of pads mean nothing
    output, expected = output.cpu().double() * real, expected * real
    torch.testing.assert_close(output, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_gradients_match_the_reference(name: str, mode: str) -> None:
    mechanism = make_mechanism(name, mode, torch.float32)
    *heads, mask = make_heads()
    on_gpu = [x.to(DEVICE, torch.float32).requires_grad_() for x in heads]
    exact = [x.detach().cpu().double().requires_grad_() for x in on_gpu]
    weight = torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    weight *= mask[:, None, :, None]
    (mechanism(*on_gpu, mask.to(DEVICE))[0] * weight.to(DEVICE)).sum().backward()
    (reference(mechanism, *exact, mask) * weight).sum().backward()
    for measured, expected in zip(on_gpu, exact, strict=True):
        scale = expected.grad.abs().max()
        assert (measured.grad.cpu() - expected.grad).abs().max() < 1e-4 * scale


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("name", "mode"), ON_TRITON)
def test_triton_computes_what_pytorch_does(name: str, mode: str, dtype: torch.dtype) -> None:
    """Outputs, and the gradients of heads and parameters, over several segments, a rest and padding."""
    mechanism = make_mechanism(name, mode, dtype)
    exact = copy.deepcopy(mechanism).double()
    use_backend(mechanism, "triton")
    *heads, mask = make_heads(length=600)
    rounded, results = [x.to(DEVICE, dtype) for x in heads], []
    for module, precision in ((mechanism, dtype), (exact, torch.float64)):
        given = [x.to(precision, copy=True).requires_grad_() for x in rounded]
        output, _ = module(*given, mask.to(DEVICE))
        weight = torch.arange(output.numel(), device=DEVICE).cos().view_as(output)
        gradients = torch.autograd.grad((output * weight).sum(), [*given, *module.parameters()])
        results.append([output.detach(), *gradients])
    for measured, expected in zip(*results, strict=True):
        scale = expected.abs().max()
        assert (measured.double() - expected).abs().max() < 10 * TOLERANCES[dtype] * scale


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", ["linear", "performer", "hedgehog", "hybrid"])
@torch.no_grad()
def test_steps_by_triton_are_pytorchs_in_float64(name: str, dtype: torch.dtype) -> None:
    """After prompts of two lengths, one shorter than a window; what is remembered, too."""
    options = {"window_size": 32, "initial_share": 0.5} if name == "hybrid" else {}  # some keys are far
    mechanism = make_mechanism(name, "causal", dtype, **options).eval()
    exact = copy.deepcopy(mechanism).double()
    *heads, _ = make_heads()
    rounded, results = [x.to(DEVICE, dtype) for x in heads], []
    mask = torch.arange(80, device=DEVICE) < torch.tensor([[80], [50]], device=DEVICE)
    for module, backend, precision in ((mechanism, "triton", dtype), (exact, "torch", torch.float64)):
        given = [x.to(precision) for x in rounded]
        use_backend(module, "torch")
        _, state = module(*(x[:, :, :80] for x in given), mask)
        use_backend(module, backend)
        outputs = []
        for place in range(80, 100):
            output, state = module(*(x[:, :, place : place + 1] for x in given), state=state)
            outputs.append(output)
        results.append([torch.cat(outputs, dim=2), state.kv * state.log_max.exp()[..., None, None]])
    for measured, expected in zip(*results, strict=True):
        assert (measured.double() - expected).norm() < TOLERANCES[dtype] * expected.norm()


@pytest.mark.parametrize("mode", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", ["linear", "performer", "hedgehog", "retention", "hybrid", "local"])
def test_long_rows_of_wide_heads(name: str, mode: str) -> None:
    """Outputs and gradients as by PyTorch's operations: large kernels are what assemblers get wrong."""
    layer = AttentionLayer(
        index=0, num_heads=4, num_key_value_heads=4, head_dim=128, causal=mode == "causal", scaling=128**-0.5,
        device=DEVICE, dtype=torch.bfloat16,
    )  # fmt: skip
    mechanism = MECHANISMS.get(name)(make_config(name, {}), layer).to(DEVICE, torch.bfloat16)
    generator = torch.Generator(DEVICE).manual_seed(0)
    heads = [torch.randn(2, 4, 4200, 128, generator=generator, device=DEVICE).bfloat16() for _ in range(4)]
    results = []
    for backend in ("torch", "triton"):
        use_backend(mechanism, backend)
        given = [x.clone().requires_grad_() for x in heads[:3]]
        output, _ = mechanism(*given)
        results.append([output, *torch.autograd.grad(output, given, heads[3])])
    for want, got in zip(*results, strict=True):
        assert (got.float() - want.float()).norm() < 3e-2 * want.float().norm()


@pytest.mark.parametrize("name", list_mechanisms())
@pytest.mark.parametrize("moved", ["before", "after"])
def test_everything_is_on_the_gpu_and_computes_what_the_cpu_does(name: str, moved: str) -> None:
    model = make_model("llama")
    tokens = torch.arange(2 * 37).view(2, 37) % VOCAB_SIZE
    with torch.no_grad():
        expected = patch_model(copy.deepcopy(model), name)(tokens).logits
        model = patch_model(model.to(DEVICE), name) if moved == "before" else patch_model(model, name).to(DEVICE)
        logits = model(tokens.to(DEVICE)).logits
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {DEVICE.type}
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", list_mechanisms())
def test_generate_with_cache_equals_without(name: str) -> None:
    model = patch_model(make_model("llama").to(DEVICE), name)
    tokens = torch.arange(2 * 9).view(2, 9).to(DEVICE) % (VOCAB_SIZE - 5) + 5
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    generated = [
        model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*generated)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list_mechanisms())
def test_a_training_step_under_autocast_is_finite_and_close_to_float32(name: str, dtype: torch.dtype) -> None:
    model = patch_model(make_model("gpt2").to(DEVICE), name).train()
    tokens = torch.arange(2 * 40).view(2, 40).to(DEVICE) % VOCAB_SIZE
    with torch.no_grad():
        expected = model(tokens, labels=tokens).loss
    with torch.autocast(DEVICE.type, dtype=dtype):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    torch.testing.assert_close(loss.detach().float(), expected, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize(("name", "mode"), [case for case in CASES if MECHANISMS.get(case[0]).growth < 4])
def test_memory_grows_linearly(name: str, mode: str) -> None:
    """Twice the length takes twice the memory, forward and backward; N x N weights would take four times."""
    mechanism = make_mechanism(name, mode, torch.bfloat16)
    peaks = []
    for length in (1024, 8192, 16384):  # the first call also makes what stays, as workspaces of products
        *heads, _ = make_heads(length, batch=1)
        on_gpu = [x.to(DEVICE, torch.bfloat16).requires_grad_() for x in heads]
        del heads
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        mechanism(*on_gpu)[0].sum().backward()
        peaks.append(torch.cuda.max_memory_allocated(DEVICE) - before)
        del on_gpu
    assert peaks[2] < 2.5 * peaks[1]
