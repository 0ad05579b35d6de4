"""Turning heads back, for the layouts of rotary positions there are."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel

from hf_linattn import architecture
from hf_linattn.rope import find_rotation

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


@pytest.mark.parametrize("name", FAMILIES)
def test_back_gives_what_the_model_gives_at_the_earlier_position(name):
    model = AutoModel.from_config(AutoConfig.for_model(name.split("-")[0], **SMALL, **FAMILIES[name])).eval()
    heads = torch.randn(2, 4, 5, 8)
    position = torch.tensor([[9, 30, 31, 40, 52], [7, 8, 20, 21, 60]])
    steps = torch.tensor([[0, 1, 30, 17, 52], [7, 0, 3, 21, 5]])
    for path, module in architecture.self_attention_modules(model).items():
        rotation = find_rotation(model, path, module)
        assert rotation.obstacle(8, heads.device) is None
        extra = () if rotation.layer_type is None else (rotation.layer_type,)
        here, earlier = (
            rotation.apply(heads, heads, *rotation.embedding(heads, at, *extra))[0]
            for at in (position, position - steps)
        )
        torch.testing.assert_close(rotation.back(here, steps), earlier, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(here, earlier, atol=1e-2)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_models_without_rotary_positions_have_none(name):
    model = AutoModel.from_config(AutoConfig.for_model(name))
    path, module = next(iter(architecture.self_attention_modules(model).items()))
    assert find_rotation(model, path, module) is None
