"""Models whose layers have learned sinks in the denominator of their softmax, as gpt-oss: patched, they keep them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_linattn import OptionError, calibrate, get_mechanisms, is_patched, patch_model
from hf_linattn.attention_call import intercept_attention
from hf_linattn.support.tiny import architectures, tiny_inputs, tiny_model
from hf_linattn.testing import random_tokens
from hf_linattn.testing.models import positions_of
from hf_linattn.training.losses.attention_transfer import AttentionTransfer
from tests.helpers import generate
from tests.mechanisms.test_softmax_type import NAMES
from tests.ops.cpu_cases import make_heads, make_mechanism

# all that were in transformers when this was written but two that choose their keys themselves, and cannot be patched
FAMILIES = [
    name
    for name in ("gpt_oss", "granite_swa", "granitemoe_swa", "flint", "mimo_v2_flash", "openai_privacy_filter")
    if name in architectures()
]
FULL = {"gpt_oss": 1, "granite_swa": 0, "flint": 0, "mimo_v2_flash": 0}  # the layer without a sliding window, of two
WINDOW = 8
LENGTH = 37
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


def make(family: str) -> PreTrainedModel:
    """Return a small model with its own eager attention, whose sinks differ by head and weigh as much as keys do."""
    model = tiny_model(family)  # their experts know no float64
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data = torch.randn(parameter.shape, generator=generator) + 1.0
    return model


def run(model: PreTrainedModel, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the first output [B, N, ...] at real tokens."""
    positions = {} if "PrivacyFilter" in type(model).__name__ else {"position_ids": positions_of(mask)}
    return model(input_ids=tokens, attention_mask=mask, **positions)[0][mask.bool()]


def sinks_of(model: PreTrainedModel) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("sinks")]


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_layers_that_stay_softmax_are_as_before(family, padding):
    model, tokens = make(family), random_tokens(2, LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, {"none": slice(0, 0), "left": slice(0, 5), "right": slice(30, None)}[padding]] = 0
    want = run(model, tokens, mask)
    want_grads = torch.autograd.grad(want.sin().sum(), sinks_of(model))
    assert want_grads and all(bool(grad.any()) for grad in want_grads)
    patch_model(model, "softmax")
    got = run(model, tokens, mask)
    torch.testing.assert_close(got, want, **CLOSE)
    grads = torch.autograd.grad(got.sin().sum(), sinks_of(model))
    for got_grad, want_grad in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad, want_grad, atol=1e-4, rtol=1e-3)


def at_limit(name: str, family: str) -> dict[str, Any]:
    """Return the plan that gives the full layer to a mechanism at its exactness limit; the window stays softmax."""
    limit: Any = get_mechanisms(patch_model(make(family), name))
    options = next(iter(limit.values())).limit.equal(LENGTH)
    return {name: {"layers": FULL[family], **options}}


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "softmax"])
def test_at_its_limit_every_mechanism_is_the_original(family, name):
    if family not in FAMILIES:
        return
    model, tokens = make(family), random_tokens(2, LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    with torch.no_grad():
        want = run(model, tokens, mask)
        got = run(patch_model(model, at_limit(name, family)), tokens, mask)
    torch.testing.assert_close(got, want, **CLOSE)


def test_windows_become_local_and_decoding_is_as_the_original(tmp_path):
    """A sliding layer is `local` with its window; without its sinks nothing of this would hold."""
    model, tokens = make("gpt_oss"), random_tokens(2, LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    want = generate(model, tokens, 9, attention_mask=mask, use_cache=False)
    plan = {"local": {"layers": 0, "window_size": WINDOW}, "hybrid": {"layers": 1, "window_size": 64}}
    patch_model(model, plan)
    for use_cache in (False, True):
        got = generate(model, tokens, 9, attention_mask=mask, use_cache=use_cache)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], **CLOSE)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(generate(loaded, tokens, 9, attention_mask=mask)[1], got[1])


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"linear": "learned_exp", "initial_share": 0.5}], ids=["default", "open"])
def test_a_hybrid_beside_a_sink_takes_half_precision(causal, kind, options):
    """The sink makes the near part float32; what is far came in the dtype of the heads."""
    mechanism = make_mechanism("hybrid", causal, window_size=9, sink_logit="one", **options)
    heads = [x.to(kind) for x in make_heads(2, 70)]
    exact = copy.deepcopy(mechanism).double()
    exact.backend = "torch"
    want = exact(*(x.double() for x in heads))[0]
    got = mechanism(*heads)[0]
    assert got.dtype == kind
    assert float((got.double() - want).norm() / want.norm()) < {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[kind]


def test_a_fit_leaves_no_gradient_on_the_sinks_of_the_layer():
    """They are in the error; a first step of training would begin with it."""
    model = patch_model(make("gpt_oss"), "hybrid", window_size=4, initial_share=0.5)
    calibrate(model, [{"input_ids": random_tokens(4, LENGTH)}], steps=2)
    assert sinks_of(model) and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("plan", [{"softmax": 0, "linformer": 1}, {"streaming": {"layers": 0}, "lsh": 1}], ids=str)
def test_generation_with_a_cache_is_that_without(plan):
    model, tokens = patch_model(make("gpt_oss"), plan), random_tokens(2, LENGTH)
    with_cache, without = (generate(model, tokens, 9, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(with_cache[0], without[0])
    torch.testing.assert_close(with_cache[1], without[1], **CLOSE)


@pytest.mark.parametrize(
    ("family", "plan", "losing"),
    [
        ("gpt_oss", "linear", "model.layers.0.self_attn, model.layers.1.self_attn"),
        ("gpt_oss", {"linear": 1}, "model.layers.1.self_attn"),
        ("gpt_oss", {"local": {"layers": 0, "heads": 0}, "performer": {"layers": 1, "heads": 0}}, "model.layers.1"),
        ("mimo_v2_flash", "linear", "model.layers.1.self_attn"),  # the full layer has none
        ("gpt_oss", "hybrid", ""),
        ("llama", "linear", ""),
    ],
)
def test_what_leaves_them_out_says_so(caplog, family, plan, losing):
    with caplog.at_level("WARNING", "hf_linattn"):
        patch_model(make(family), plan)
    messages = [record.getMessage() for record in caplog.records if record.name == "hf_linattn.building"]
    assert len(messages) == bool(losing)
    if losing:
        assert f": {losing}" in messages[0] and "leaves out" in messages[0] and "hybrid" in messages[0]


def test_an_option_beside_a_layers_own_sinks_is_refused_and_changes_nothing():
    model = make("gpt_oss")
    with pytest.raises(OptionError, match="sink_logit must be None for layer 0"):
        patch_model(model, "local", sink_logit="one")
    assert not is_patched(model)


def test_what_mechanisms_are_fitted_to_has_the_sinks():
    """At its limit a mechanism is what it would be fitted to, so nothing is left to fit."""
    model = make("gpt_oss")
    inputs = tiny_inputs(model)
    patch_model(model, {"hybrid": {"layers": 1, "window_size": 64}})
    parameters = {name: p.clone() for name, p in model.named_parameters()}
    assert max(max(errors) for errors in calibrate(model, [inputs], steps=2).values()) < 1e-9
    found = AttentionTransfer(model)(**inputs)
    assert float(found["loss"].detach()) < 1e-6
    assert all(torch.equal(p, parameters[name]) or "hf_linattn" in name for name, p in model.named_parameters())


def test_where_all_layers_are_intercepted_a_softmax_with_a_sink_is_the_original():
    model = make("llama")
    tokens = random_tokens(2, LENGTH)
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        want = run(model, tokens, mask)
        patch_model(model, "softmax", sink_logit="one")
        assert float((run(model, tokens, mask) - want).abs().max()) > 1e-2
        with intercept_attention(get_mechanisms(model)):
            torch.testing.assert_close(run(model, tokens, mask), want, **CLOSE)
