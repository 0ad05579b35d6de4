"""Models whose weights accelerate keeps elsewhere between calls: patched, and offloaded after it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import accelerate
import pytest
import torch

from hf_linattn import OptionError, UnsupportedModelError, calibrate, get_mechanisms, patch_model, unpatch_model
from hf_linattn.evaluation import check_generation, perplexity, state_bytes_by_length
from hf_linattn.evaluation.next_token import token_losses
from tests.helpers import KINDS, OPTIONS, each_once, generate, logits_of, make_patched, make_tokenizer, make_tokens
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


def test_zero3_gathers_what_a_mechanism_reads_with_it_and_not_for_each_call_of_a_part(monkeypatch):
    """As DeepSpeed marks modules and parameters; `make test-zero3` has the real one."""
    gathered: list[int] = []

    def register(module, parameter):
        module.__dict__.setdefault("_external_params", {})[id(parameter)] = parameter

    def gather(*_):
        pass

    gather.__module__ = "deepspeed.runtime.zero.parameter_offload"
    monkeypatch.setitem(
        sys.modules, "deepspeed", SimpleNamespace(zero=SimpleNamespace(register_external_parameter=register))
    )
    model = patch_model(make_model("llama"), "hybrid", **HYBRID)
    mechanism = get_mechanisms(model)["model.layers.0.self_attn"]
    seen: list[str] = []
    for name, part in mechanism.named_modules():
        part.ds_id = len(name)
        part.register_forward_pre_hook(gather)
        part.register_forward_hook(lambda *_, name=name: seen.append(name))  # somebody else's
    for parameter in mechanism.parameters():
        parameter.ds_status, parameter.ds_active_sub_modules = SimpleNamespace(name="NOT_AVAILABLE"), set()
        parameter.all_gather = lambda parameter=parameter: gathered.append(id(parameter))
    for _ in range(2):
        logits_of(model, make_tokens(2, 9))
    own = {id(x) for x in mechanism.parameters(recurse=False)}
    others = {id(x): x for x in mechanism.parameters() if id(x) not in own}
    assert others and sorted(gathered) == sorted(others) and mechanism._external_params == others
    assert all(x.ds_active_sub_modules == {mechanism.ds_id} for x in others.values())
    hooks = {name: list(part._forward_pre_hooks.values()) for name, part in mechanism.named_modules()}
    assert hooks.pop("") == [gather] and not any(hooks.values())
    assert "" in seen and any(name for name in seen)


@pytest.mark.parametrize("offload", [accelerate.cpu_offload, accelerate.disk_offload], ids=["cpu", "disk"])
def test_what_is_offloaded_is_measured_where_it_runs(offload, tmp_path):
    """Its weights are on the meta device between calls, where no token can go."""
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(range(5, 20))]
    found = []
    for offloaded in (False, True):
        model = make_patched("llama", "linear")
        if offloaded:
            where = (str(tmp_path),) if offload is accelerate.disk_offload else ()
            offload(model, *where, execution_device=torch.device("cpu"))
        found.append(
            [
                token_losses(model, make_tokens(2, 9)).losses.tolist(),
                state_bytes_by_length(model, [8])[0],
                perplexity(model, tokenizer, texts, max_length=8),
                check_generation(model, [[3, 4, 5]], new_tokens=3),
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("mechanism", ["hedgehog", "vq"])
def test_what_is_offloaded_is_not_fitted(mechanism):
    model = make_patched("llama", mechanism)
    ids = make_tokens(2, 9)
    expected = logits_of(model, ids)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    with pytest.raises(OptionError, match=r"on the meta device.*load the model whole, or patch it after"):
        calibrate(model, [{"input_ids": ids}], steps=2)
    assert torch.equal(logits_of(model, ids), expected)
