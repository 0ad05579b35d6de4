"""Models whose weights accelerate keeps elsewhere between calls: patched, and offloaded after it."""

from __future__ import annotations

import accelerate
import pytest
import torch

from hf_linattn import UnsupportedModelError, get_mechanisms, patch_model, unpatch_model
from tests.helpers import KINDS, OPTIONS, each_once, generate, logits_of, make_patched, make_tokens
from tests.models import SPINE, make_model

HYBRID = {"window_size": 3, "linear": "learned_exp"}


@pytest.mark.parametrize("name", SPINE)
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_dispatched_model_is_patched(name, place, tmp_path):
    ids = make_tokens(2, 9)
    expected = logits_of(make_patched(name), ids)
    original = make_model(name)
    softmax = logits_of(original, ids)
    if place == "cpu":
        model = accelerate.dispatch_model(original, {"": "cpu"}, force_hooks=True)
    else:
        model = accelerate.disk_offload(original, str(tmp_path), execution_device=torch.device("cpu"))
    patch_model(model, "performer", **OPTIONS["performer"])
    assert torch.equal(logits_of(model, ids), expected)
    if model.can_generate():
        assert generate(model, ids)[0].tolist() == generate(make_patched(name), ids)[0].tolist()
    assert torch.equal(logits_of(unpatch_model(model), ids), softmax)


@pytest.mark.parametrize(("name", "mechanism"), each_once(SPINE, KINDS))
def test_a_patched_model_is_offloaded(name, mechanism):
    ids = make_tokens(2, 9)
    model = make_patched(name, mechanism)
    expected = logits_of(model, ids), *(generate(model, ids) if model.can_generate() else ())
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    got = logits_of(model, ids), *(generate(model, ids) if model.can_generate() else ())
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert all(p.is_meta for p in model.parameters()), "what was loaded for a call is put away after it"


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        ("hybrid", HYBRID),
        ("mixed_chunk", {"linear": "learned_exp"}),
        ("fusion", {"members": {"hybrid": HYBRID, "gla": {}}}),
        ("linformer", {"sharing": "layers"}),  # the second layer reads the weights of the first
    ],
    ids=["hybrid", "mixed_chunk", "fusion", "linformer"],
)
def test_what_reads_weights_of_other_mechanisms_is_offloaded_with_these(mechanism, options):
    ids = make_tokens(2, 9)
    model = patch_model(make_model("llama"), mechanism, **options)
    expected = generate(model, ids)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(torch.equal(x, y) for x, y in zip(generate(model, ids), expected, strict=True))


def test_weights_that_are_nowhere_are_an_error_and_no_numbers():
    model = make_patched("llama", "hedgehog")
    for mechanism in get_mechanisms(model).values():
        mechanism.to("meta")
    with pytest.raises(UnsupportedModelError, match="weights on the device 'meta', where they have no values"):
        logits_of(model, make_tokens(2, 9))
