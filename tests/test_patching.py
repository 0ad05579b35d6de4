"""patch_model and unpatch_model: what they change, undo and refuse."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_linattn
from hf_linattn import (
    MechanismConfig,
    OptionError,
    PatchConfig,
    PatchError,
    UnknownNameError,
    UnsupportedModeError,
    UnsupportedModelError,
    get_mechanisms,
    get_patch_config,
    is_patched,
    list_mechanisms,
    original_attention,
    patch_model,
    register_mechanism,
    unpatch_model,
)
from hf_linattn import transformers_bridge as bridge
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, Mechanism
from tests.helpers import (
    KINDS,
    OPTIONS,
    Snapshot,
    assert_close,
    each_once,
    gradients,
    logits_of,
    make_patched,
    make_tokens,
)
from tests.models import NUM_LAYERS, SPINE, make_model

each_family = pytest.mark.parametrize("name", SPINE)
each_patch = pytest.mark.parametrize(("name", "mechanism"), each_once(SPINE, KINDS))


@pytest.fixture
def registered(monkeypatch):
    """Return a function that registers a mechanism until the end of the test."""
    monkeypatch.setattr(MECHANISMS, "_entries", {name: MECHANISMS.get(name) for name in list_mechanisms()})

    def register(name, **attributes):
        config = dataclass(type("Config", (MechanismConfig,), {"__annotations__": {}}))
        return register_mechanism(name)(type(name, (Mechanism,), {"config_class": config, **attributes}))

    return register


@each_patch
def test_unpatching_restores_everything(name, mechanism):
    model = make_model(name)
    before = Snapshot.of(model)
    assert patch_model(model, mechanism, **OPTIONS.get(mechanism, {})) is model
    assert is_patched(model)
    logits_of(model, make_tokens(2, 9))
    assert unpatch_model(model) is model
    assert not is_patched(model)
    before.assert_kept(model)


@each_patch
def test_unpatching_keeps_the_weights_that_training_made(name, mechanism):
    model = make_patched(name, mechanism).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids = make_tokens(2, 9)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    unpatch_model(model.eval())
    twin = make_model(name)
    fresh = logits_of(twin, ids)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(logits_of(model, ids), logits_of(twin, ids))
    assert not torch.allclose(logits_of(model, ids), fresh)


@each_family
def test_a_plan_patches_the_layers_it_names(name):
    model = patch_model(make_model(name), {"performer": {"layers": -1, "num_features": 16}})
    first, last = get_mechanisms(model).values()
    assert (first.config.mechanism, last.config.mechanism) == ("softmax", "performer")
    assert last.feature_map.projection.shape[0] == 16
    assert list(get_patch_config(model).layers) == [NUM_LAYERS - 1]
    with_config = patch_model(make_model(name), make_config("performer", {"num_features": 16}), layers=[1])
    assert torch.equal(logits_of(model, make_tokens(2, 9)), logits_of(with_config, make_tokens(2, 9)))


@each_patch
def test_the_same_seed_gives_the_same_model_and_leaves_the_global_one_alone(name, mechanism):
    one, other = make_model(name), make_model(name)
    state = torch.get_rng_state()
    for model in (one, other):
        logits_of(patch_model(model, mechanism, **OPTIONS.get(mechanism, {})), make_tokens(2, 9))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits_of(one, make_tokens(2, 9)), logits_of(other, make_tokens(2, 9)))


BAD_CALLS = [
    ("perfomer", {}, UnknownNameError, "did you mean performer"),
    ("performer", {"num_feature": 3}, OptionError, "no option 'num_feature'; did you mean num_features"),
    ("performer", {"num_features": 0}, OptionError, "num_features must be an integer >= 1, got 0"),
    ("performer", {"layers": [0, 2]}, OptionError, "layer 2, but the model has layers 0 to 1"),
    ("performer", {"layers": []}, OptionError, "at least one layer"),
    ({"performer": "0-1", "softmax": [1]}, {}, OptionError, "layer 1 to both"),
    ({}, {}, OptionError, "plan is empty"),
    ({"performer": 0}, {"layers": 1}, OptionError, "remove the argument 'layers'"),
    (make_config("linear", {}), {"seed": 3}, OptionError, "remove the argument 'seed'"),
    (PatchConfig({}, num_layers=9), {}, PatchError, "for 9 attention layers, the model has 2"),
    (PatchConfig({}, num_layers=2), {"layers": 1}, OptionError, "remove the argument 'layers'"),
    (PatchConfig({}, num_layers=2), {"seed": 1}, OptionError, "remove the argument 'seed'"),
]


@pytest.mark.covering(1)
@each_family
@pytest.mark.parametrize(("mechanism", "options", "error", "message"), BAD_CALLS)
def test_a_bad_call_changes_nothing(name, mechanism, options, error, message):
    model = make_model(name)
    before = Snapshot.of(model)
    with pytest.raises(error, match=message):
        patch_model(model, mechanism, **options)
    before.assert_kept(model)


@each_family
def test_patching_twice_is_refused_and_changes_nothing(name):
    model = make_patched(name)
    before = Snapshot.of(model)
    with pytest.raises(PatchError, match=r"patched already \(performer\); call unpatch_model"):
        patch_model(model, "linear")
    before.assert_kept(model)


@each_family
@pytest.mark.parametrize("function", [unpatch_model, get_mechanisms, get_patch_config])
def test_an_unpatched_model_is_named(name, function):
    model = make_model(name)
    before = Snapshot.of(model)
    with pytest.raises(PatchError, match="is not patched; call patch_model"):
        function(model)
    with pytest.raises(PatchError, match="is not patched"), original_attention(model):
        pass
    before.assert_kept(model)


TINY = {"vocab_size": 96, "hidden_size": 32}
UNREACHABLE = {
    "Bloom": (lambda: BloomForCausalLM(BloomConfig(**TINY, n_layer=2, n_head=4)), "BloomForCausalLM declares no att"),
    "Mamba": (lambda: MambaForCausalLM(MambaConfig(**TINY, num_hidden_layers=2)), "MambaForCausalLM declares no att"),
    "T5": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
        "T5ForConditionalGeneration: .*position bias",
    ),
}


@pytest.mark.parametrize("name", UNREACHABLE)
def test_a_model_without_reachable_attention_is_named_with_the_reason(name):
    make, message = UNREACHABLE[name]
    model = make().eval()
    before = Snapshot.of(model)
    with pytest.raises(UnsupportedModelError, match=message):
        patch_model(model, "performer")
    before.assert_kept(model)


@pytest.mark.parametrize("given", [torch.nn.Linear(2, 2), "gpt2", None], ids=lambda given: type(given).__name__)
def test_something_else_than_a_transformers_model_is_refused(given):
    for take in (lambda: patch_model(given, "performer"), lambda: is_patched(given), lambda: get_mechanisms(given)):
        with pytest.raises(UnsupportedModelError, match=rf"PreTrainedModel .*got {type(given).__name__}"):
            take()


@pytest.mark.parametrize(("name", "mode", "missing"), [("bert", "causal", "bidirectional"),
                                                       ("llama", "bidirectional", "causal")])  # fmt: skip
def test_a_mode_the_mechanism_lacks_is_refused_with_an_alternative(registered, name, mode, missing):
    registered("one_sided", modes=frozenset({mode}))
    model = make_model(name)
    before = Snapshot.of(model)
    with pytest.raises(UnsupportedModeError, match=f"'one_sided' has no {missing} form, .*use one of .*performer"):
        patch_model(model, {"softmax": [0], "one_sided": [1]})
    before.assert_kept(model)


@each_family
def test_nothing_is_attached_when_a_layer_fails_to_build(registered, name):
    def fail_on_the_second(self, config, layer):
        Mechanism.__init__(self, config, layer)
        if layer.index == 1:
            raise ZeroDivisionError("layer 1")

    registered("fragile", __init__=fail_on_the_second)
    model = make_model(name)
    before = Snapshot.of(model)
    with pytest.raises(ZeroDivisionError):
        patch_model(model, "fragile")
    before.assert_kept(model)


@each_family
@pytest.mark.parametrize("step", ["base_models", "set_implementation"])
def test_an_attachment_that_stops_half_way_is_undone(monkeypatch, name, step):
    model = make_model(name)
    before = Snapshot.of(model)

    def stop(*args):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(bridge, step, stop)
    with pytest.raises(KeyboardInterrupt):
        patch_model(model, "performer")
    before.assert_kept(model)


@each_family
def test_models_made_from_one_config_stay_apart(name):
    model = make_model(name)
    twin = type(model)(model.config).eval()
    before = Snapshot.of(twin)
    patch_model(model, "performer")
    before.assert_kept(twin)
    patch_model(twin, "linear")
    unpatch_model(model)
    assert {m.config.mechanism for m in get_mechanisms(twin).values()} == {"linear"}
    assert not torch.allclose(logits_of(twin, make_tokens(2, 9)), before.logits)
    before.assert_kept(unpatch_model(twin))


def saved_and_loaded(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [("hedgehog", {}), ("gated_deltanet", {}), ("linformer", {"max_positions": 70}), ("vq", {}), ("hybrid", {})],
)
def test_what_was_patched_inside_inference_mode_is_trained(mechanism, options):
    grads = []
    for mode in (torch.enable_grad, torch.inference_mode):
        model, ids = make_model("gpt2").train(), make_tokens(2, 9)
        with mode():
            patch_model(model, mechanism, **options)
        assert not any(tensor.is_inference() for tensor in chain(model.parameters(), model.buffers()))
        torch.manual_seed(0)
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(gradient is not None for gradient in grads[0].values())
    torch.testing.assert_close(grads[1], grads[0])


@each_family
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_a_model_of_its_own(name, way):
    model, ids = make_patched(name), make_tokens(2, 9)
    expected = logits_of(model, ids)
    copied = COPIES[way](model)
    unpatch_model(model)
    assert is_patched(copied)
    assert torch.equal(logits_of(copied, ids), expected)
    assert torch.equal(logits_of(unpatch_model(copied), ids), logits_of(model, ids))


# -- wrapped models ---------------------------------------------------------------------------------------------------


@each_family
def test_a_model_inside_peft_is_patched(name):
    expected = logits_of(make_patched(name), make_tokens(2, 9))
    original = make_model(name)
    softmax = logits_of(original, make_tokens(2, 9))
    wrapped = get_peft_model(original, LoraConfig(r=2, target_modules="all-linear")).eval()
    assert patch_model(wrapped, "performer", **OPTIONS["performer"]) is wrapped
    assert is_patched(wrapped)
    assert_close(logits_of(wrapped, make_tokens(2, 9)), expected, tolerance=1e-5)
    unpatch_model(wrapped)
    assert_close(logits_of(wrapped, make_tokens(2, 9)), softmax, tolerance=1e-5)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("gpt2", "eager"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt2", "aot_eager"), ("bert", "eager"))),
        pytest.param("llama", "eager", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_is_patched_and_unpatched(name, backend):
    torch.compiler.reset()
    ids, one_layer = make_tokens(2, 9), {"n_layer" if name == "gpt2" else "num_hidden_layers": 1}
    expected = logits_of(make_patched(name, **one_layer), ids)
    original = make_model(name, **one_layer)
    softmax = logits_of(original, ids)
    compiled = torch.compile(original, backend=backend)
    assert_close(logits_of(compiled, ids), softmax)
    patch_model(compiled, "performer", **OPTIONS["performer"])
    assert_close(logits_of(compiled, ids), expected)
    with original_attention(compiled):
        assert_close(logits_of(compiled, ids), softmax)
    assert_close(logits_of(unpatch_model(compiled), ids), softmax)


@pytest.mark.slow  # all of them together; the invariants compile the attention modules alone
@each_patch
def test_a_patched_model_is_compiled_as_a_whole(name, mechanism):
    torch.compiler.reset()
    model, ids = make_patched(name, mechanism).train(), make_tokens(2, 9)
    want = model(ids, use_cache=False).logits
    want.sin().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    got = torch.compile(model, backend="aot_eager")(ids, use_cache=False).logits
    got.sin().sum().backward()
    assert_close(got, want)
    for path, gradient in gradients(model).items():
        assert_close(gradient, expected[path])


def test_what_changes_a_model_in_place_returns_it():
    model = make_model("gpt2")
    steps = {"extend_positions": 200, "patch_model": "linear", "set_backend": "torch", "chunk_feed_forward": 8}
    assert [getattr(hf_linattn, name)(model, value) is model for name, value in steps.items()] == [True] * 4
    assert unpatch_model(model) is model


@pytest.mark.parametrize(("name", "mechanism"), [("bert", "linear"), *(("llama", kind) for kind in KINDS)])
def test_a_patched_model_that_nobody_has_any_more_is_freed_at_once(name, mechanism):
    """As one that is not: on a GPU its memory would be in use until Python looks for rings."""
    model, ids = make_patched(name, mechanism).train(), make_tokens(2, 9)
    model(input_ids=ids).logits.sin().sum().backward()
    parts = [weakref.ref(part) for part in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert not any(part() for part in parts)
    finally:
        gc.enable()
