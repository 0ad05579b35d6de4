"""Turning heads back, for the layouts of rotary positions there are."""

from __future__ import annotations

import pytest
import torch
from accelerate import init_empty_weights
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, DynamicCache

from hf_linattn import UnsupportedModeError, UnsupportedModelError, get_mechanisms, patch_model
from hf_linattn.attention_modules import self_attention_modules
from hf_linattn.positions.rope import find_rotation

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
}  # fmt: skip
FAMILIES = {
    "llama": {"head_dim": 8},
    "cohere": {},  # neighbouring pairs
    # half the width turns
    "glm": {"head_dim": 8, "partial_rotary_factor": 0.5, "num_key_value_heads": 2, "pad_token_id": 0},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 2},
    "qwen3": {"head_dim": 8, "num_key_value_heads": 2},
    "llama-yarn": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                            "original_max_position_embeddings": 64},
    },
}  # fmt: skip

# layers without rotary positions, by a flag of the attention, by its window, or as the model gives them no angles
PARTLY = {
    "smollm3": {"no_rope_layer_interval": 2, "num_key_value_heads": 2, "pad_token_id": 0},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "num_key_value_heads": 2},
    "granite_swa": {"layer_rope_theta": [1e4, 0], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
# whose matrices beside those of hidden states have 160 to 470 MB
LARGE = {
    "qwen3": {"hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
    "deepseek_v3": {"first_k_dense_replace": 1},
}
# why the heads of others cannot be turned back
HINDERED = {
    "hunyuan_v1_dense": ({"head_dim": 8}, "HunYuanDenseV1Attention changes its keys after it has turned them"),
    "llama4_text": ({"head_dim": 8, "no_rope_layers": [1, 1]}, "has no apply_rotary_pos_emb"),
    "granite_swa": (
        {"layer_rope_theta": [1e4, 5e5], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "layer_rope_theta gives it another base",
    ),
    "qwen3_vl_text": (
        {"head_dim": 8, "num_key_value_heads": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        r"positions have several axes \(mrope_section\).*; use (rotation='kept'|positions='model')",
    ),
}  # fmt: skip


def make(name, **options):
    return AutoModel.from_config(AutoConfig.for_model(name, **SMALL, **options)).eval()


def rotations(model):
    return [find_rotation(model, path, x) for path, x in self_attention_modules(model).items()]


@pytest.mark.parametrize("name", FAMILIES)
def test_back_gives_what_the_model_gives_at_the_earlier_position(name):
    model = make(name.split("-")[0], **FAMILIES[name])
    heads = torch.randn(2, 4, 5, 8)
    position = torch.tensor([[9, 30, 31, 40, 52], [7, 8, 20, 21, 60]])
    steps = torch.tensor([[0, 1, 30, 17, 52], [7, 0, 3, 21, 5]])
    for path, module in self_attention_modules(model).items():
        rotation = find_rotation(model, path, module)
        assert rotation.obstacle(8, heads.device) is None
        extra = () if rotation.layer_type is None else (rotation.layer_type,)
        here, earlier = (
            rotation.apply(heads, heads, *rotation.embedding(heads, at, *extra))[0]
            for at in (position, position - steps)
        )
        torch.testing.assert_close(rotation.back(here, steps), earlier, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(here, earlier, atol=1e-2)


def test_heads_turn_back_where_they_lie_whatever_device_the_embedding_is_on():
    """As with Accelerate's hook, which leaves what the embedding returns on its own device."""
    model = make("llama", **FAMILIES["llama"])
    rotation, heads = rotations(model)[1], torch.randn(2, 4, 5, 8, device="meta")
    at_home = lambda module, args, angles: tuple(torch.ones(x.shape) for x in angles)  # noqa: E731
    rotation.embedding.register_forward_hook(at_home)
    turned = rotation.back(heads, torch.zeros(2, 5, dtype=torch.long, device="meta"))
    assert turned.device == heads.device and turned.shape == heads.shape


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_models_without_rotary_positions_have_none(name):
    model = AutoModel.from_config(AutoConfig.for_model(name))
    path, module = next(iter(self_attention_modules(model).items()))
    assert find_rotation(model, path, module) is None


@pytest.mark.parametrize("name", PARTLY)
def test_layers_whose_keys_do_not_turn_have_no_rotation(name):
    """Also of a model that is being loaded: on the meta device, in its own dtype."""
    model, caches = make(name, **PARTLY[name]), (DynamicCache(), DynamicCache())
    with torch.no_grad():
        for first, cache in zip((0, 3), caches, strict=True):
            model(torch.arange(5)[None], position_ids=torch.arange(first, first + 5)[None], past_key_values=cache)
    # distances are the same, so the second layer has the same input
    first, second = ([cache.layers[i].keys for cache in caches] for i in (0, 1))
    assert not torch.allclose(*first, atol=1e-3) and torch.allclose(*second, atol=1e-5)
    assert [x is None for x in rotations(model)] == [False, True]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert [x is None for x in rotations(make(name, **PARTLY[name]))] == [False, True]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", PARTLY)
def test_gated_deltanet_takes_the_heads_of_such_layers_as_they_are(name):
    undone, kept = (
        list(get_mechanisms(patch_model(make(name, **PARTLY[name]), "gated_deltanet", rotation=rotation)).values())
        for rotation in ("undone", "kept")
    )
    layer = undone[0].layer
    shapes = [(2, heads, 9, layer.head_dim) for heads in (layer.num_heads, *[layer.num_key_value_heads] * 2)]
    heads = [torch.randn(shape) for shape in shapes]
    same = [torch.equal(one(*heads)[0], other(*heads)[0]) for one, other in zip(undone, kept, strict=True)]
    assert same == [False, True]
    with pytest.raises(UnsupportedModeError, match="needs a causal layer with rotary positions, which layer 1 is not"):
        patch_model(make(name, **PARTLY[name]), "streaming", positions="streaming", window_size=8)


@pytest.mark.parametrize("name", ["llama", "cohere2"])
def test_a_model_made_without_weights_has_the_rotations_of_one_with_weights(name):
    """Accelerate has every parameter that is registered moved to the meta device."""
    options = PARTLY.get(name, {})
    with init_empty_weights():
        model = make(name, **options)
        made = [None if x is None else x.obstacle(8, torch.device("meta")) for x in rotations(model)]
        patch_model(model, "gated_deltanet")
    whole = [None if x is None else x.obstacle(8, torch.device("cpu")) for x in rotations(make(name, **options))]
    assert made == whole and all(p.is_meta for p in model.parameters())


class Bytes(TorchDispatchMode):
    """How many the largest tensor has that was made in memory."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type != "meta":
            self.largest = max(self.largest, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize(("name", "options"), LARGE.items())
def test_a_trial_of_a_layer_costs_nothing_however_large_the_model_is(name, options):
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(name, num_hidden_layers=1, **options))
    with Bytes() as made:
        rotations(model)
    assert 0 < made.largest < 1e6


@pytest.mark.parametrize("name", HINDERED)
def test_a_layer_that_cannot_turn_its_heads_back_says_why(name):
    options, why = HINDERED[name]
    for mechanism, chosen in (("gated_deltanet", {}), ("streaming", {"positions": "streaming", "window_size": 8})):
        with pytest.raises(UnsupportedModelError, match=why):
            patch_model(make(name, **options), mechanism, **chosen)
    patch_model(make(name, **options), "gated_deltanet", rotation="kept")
