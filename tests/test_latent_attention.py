"""Latent attention: keys wider than values, and than the rotary part that configs call head_dim."""

from __future__ import annotations

import pytest
import torch

from hf_linattn import patch_model, set_backend
from hf_linattn.mechanisms import MECHANISMS
from tests.helpers import assert_close, make_tokens
from tests.models import LATENT, make_latent

LENGTH, PROMPT = 19, 11
NAMES = ("linear", "performer", "hedgehog", "gla", "hybrid", "local", "linformer", "lsh")
EXACT = [name for name in ("softmax", "local", "hybrid", "lsh") if MECHANISMS.get(name).limit.equal]

# every mechanism on one architecture, and one with parameters as wide as the keys on all of them
PAIRS = [("deepseek_v3", name) for name in NAMES] + [(name, "performer") for name in LATENT if name != "deepseek_v3"]


def outputs_of(model, **inputs):
    return model(**inputs)[0]


def gradients_of(model, ids):
    model.zero_grad()
    outputs_of(model, input_ids=ids, use_cache=False).square().mean().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize(("model_type", "mechanism"), PAIRS)
def test_both_backends_and_decoding_give_the_same(model_type, mechanism):
    model, ids = patch_model(make_latent(model_type), mechanism), make_tokens(2, LENGTH)
    gradients = gradients_of(model, ids)
    with torch.no_grad():
        whole = outputs_of(model, input_ids=ids, use_cache=False)
        read = model(ids[:, :PROMPT], use_cache=True)
        parts = [read[0]]
        for place in range(PROMPT, LENGTH):
            read = model(ids[:, place : place + 1], past_key_values=read.past_key_values)
            parts.append(read[0])
    assert_close(torch.cat(parts, dim=1), whole)
    set_backend(model, "torch")
    assert_close(outputs_of(model, input_ids=ids, use_cache=False), whole)
    others = gradients_of(model, ids)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        scale = others[name].abs().max()
        torch.testing.assert_close(gradient, others[name], atol=1e-4 * float(scale) + 1e-7, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("mechanism", EXACT)
@pytest.mark.parametrize("model_type", ["deepseek_v2", "minicpm3"])
def test_limits_are_reached(model_type, mechanism):
    model, ids = make_latent(model_type), make_tokens(2, LENGTH)
    want = outputs_of(model, input_ids=ids, use_cache=False)
    limit = MECHANISMS.get(mechanism).limit.equal
    patch_model(model, mechanism, **limit(LENGTH))
    assert_close(outputs_of(model, input_ids=ids, use_cache=False), want)
