"""Backends: slabs give what one call gives, and are taken where they are promised."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from hf_linattn import (
    OptionError,
    PatchError,
    UnknownNameError,
    backends,
    explain_backend,
    get_mechanisms,
    patch_model,
    set_backend,
)
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer, base
from hf_linattn.ops import dispatch
from hf_linattn.ops.runtime import slabs as slabs_of_calls
from tests.helpers import assert_close, logits_of, make_tokens, pad
from tests.models import make_model

COMPILING = [name for name in MECHANISMS.names() if "compile" in MECHANISMS.get(name).backends]
SLAB, LENGTH = 70, 3 * 70 + 33


@pytest.fixture
def slabs(monkeypatch):
    """Shorter slabs, whose programs are run without C++; returns the lengths that were read by them."""
    taken, programs = [], {}

    def compiled(read):
        program = programs.setdefault(read, torch.compile(read, backend="aot_eager", dynamic=False))
        return lambda call: taken.append(call.query.shape[2]) or program(call)

    torch.compiler.reset()
    monkeypatch.setattr(slabs_of_calls, "SLAB_SIZE", SLAB)
    monkeypatch.setattr(slabs_of_calls, "compiled", compiled)
    return taken


def make_mechanism(name: str, dtype: torch.dtype = torch.float64):
    layer = AttentionLayer(
        index=0, num_heads=4, num_key_value_heads=2, head_dim=8, causal=True, scaling=8**-0.5,
        device=torch.device("cpu"), dtype=dtype,
    )  # fmt: skip
    return MECHANISMS.get(name)(make_config(name, {}), layer).to(dtype)


def run_both(mechanism, dtype=torch.float64, length=LENGTH):
    """Return outputs, states' tensors and gradients of both backends."""
    generator = torch.Generator().manual_seed(0)
    results = []
    heads = [torch.randn(2, h, length, 8, generator=generator, dtype=dtype).requires_grad_() for h in (4, 2, 2)]
    for backend in ("torch", "compile"):
        backends.use_backend(mechanism, backend)
        output, state = mechanism(*heads)
        weights = torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)
        results.append([output, *state, *torch.autograd.grad((output * weights).sum(), heads)])
    return results


@pytest.mark.parametrize(
    "name",
    [x if x in ("linear", "performer", "hybrid") else pytest.param(x, marks=pytest.mark.slow) for x in COMPILING],
)
def test_slabs_give_output_state_and_gradients_of_one_call(name, slabs):
    whole, parts = run_both(make_mechanism(name))
    assert slabs == [SLAB] * 2  # not the first and not the rest
    for want, got in zip(whole, parts, strict=True):
        assert_close(got, want, 1e-9)


@pytest.mark.slow  # half a minute of the C++ compiler for each
@pytest.mark.parametrize("name", COMPILING)
def test_compiled_slabs_of_full_size_give_output_state_and_gradients_of_one_call(name):
    torch.compiler.reset()
    whole, parts = run_both(make_mechanism(name, torch.float32), torch.float32, 2 * slabs_of_calls.SLAB_SIZE + 5)
    for want, got in zip(whole, parts, strict=True):
        assert_close(got, want, 1e-4 * max(1.0, float(want.detach().abs().max())))


def test_a_model_prefills_in_slabs_and_decodes_and_pads_as_before(slabs):
    model = patch_model(make_model("llama", max_position_embeddings=1024), {"linear": [0], "softmax": [1]}).eval()
    prompt = make_tokens(1, 3 * SLAB + 5)
    batch, mask = pad([prompt[0], prompt[0, :50]], 0, side="left")
    want = model.generate(prompt, max_new_tokens=5, do_sample=False)
    padded = logits_of(model, batch, attention_mask=mask)
    set_backend(model, "compile")
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), want)
    assert slabs == [SLAB] * 2
    assert torch.equal(logits_of(model, batch, attention_mask=mask), padded) and slabs == [SLAB] * 2
    assert all("backend" not in m.config.to_options() for m in get_mechanisms(model).values())
    set_backend(model, "torch")
    logits_of(model, prompt)
    assert slabs == [SLAB] * 2


def test_programs_are_explained_where_they_run(slabs):
    model = patch_model(make_model("llama", max_position_embeddings=1024), "linear").eval()
    set_backend(model, "compile")
    rows = explain_backend(model, make_tokens(1, 3 * SLAB + 5)).rows
    assert slabs == [SLAB] * 2 * 3 * len(rows)  # forward, backward, and the state for one more token
    for row in rows:
        assert (row.backend("forward"), row.backend("backward")) == ("compile", "compile")
        (decision,) = row.decode
        assert decision.passed_over["compile"] == f"fewer than {2 * SLAB} tokens" and decision.backend != "compile"


def test_what_cannot_be_chosen_is_refused_and_nothing_changes():
    model = patch_model(make_model("llama"), {"linear": [0], "local": [1]})
    with pytest.raises(UnknownNameError, match="compile"):
        set_backend(model, "compiled")
    with pytest.raises(OptionError, match="'local' of layer 1 has no backend 'compile'; use one of auto, torch"):
        set_backend(model, "compile")
    assert all(m.backend == "auto" for m in get_mechanisms(model).values())
    with pytest.raises(PatchError, match="not patched"):
        set_backend(make_model("llama"), "compile")


def imported_anew():
    """Return another copy of the module that reads the environment when it is imported."""
    spec = importlib.util.spec_from_file_location(f"{dispatch.__name__}_anew", dispatch.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_environment_names_the_backend_that_mechanisms_are_made_with(monkeypatch):
    monkeypatch.setenv("HF_LINATTN_BACKEND", "torch")
    monkeypatch.setattr(base, "DEFAULT_BACKEND", imported_anew().DEFAULT_BACKEND)
    model = patch_model(make_model("llama"), {"linear": "0", "fusion": "1"})
    assert {mechanism.backend for mechanism in get_mechanisms(model).values()} == {"torch"}
    monkeypatch.setenv("HF_LINATTN_BACKEND", "triton")
    with pytest.raises(OptionError, match="HF_LINATTN_BACKEND must be 'auto' or 'torch', got 'triton'"):
        imported_anew()
