"""What is particular to linear attention: the state it keeps and the maps it takes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from hf_linattn import UnknownNameError, patch_model
from hf_linattn.cache import state_bytes
from hf_linattn.config import make_config
from hf_linattn.testing import Case, random_tokens, tiny_model


def test_recurrent_form_is_the_papers_recurrence():
    """S_i = S_{i-1} + phi(k_i) v_i^T, z_i = z_{i-1} + phi(k_i), o_i = phi(q_i) S_i / (phi(q_i) . z_i)."""
    case = Case("linear", "llama", True)
    mechanism = case.make()
    query, key, value = case.heads(9, batch=1)
    s, z, state = torch.zeros(2, 8, 8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.float64), None
    for i in range(9):
        here = slice(i, i + 1)
        got, state = mechanism(query[:, :, here], key[:, :, here], value[:, :, here], None, None, state)
        k, v = F.elu(key[0, :, i]) + 1, value[0, :, i]
        s, z = s + k[:, :, None] * v[:, None, :], z + k
        for head in range(4):
            q = F.elu(query[0, head, i]) + 1
            torch.testing.assert_close(got[0, head, 0], q @ s[head // 2] / (q @ z[head // 2]))
        torch.testing.assert_close(state.kv[0], torch.cat([s, z[..., None]], -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("architecture", "kv_heads"), [("gpt2", 4), ("llama", 2)])
def test_state_is_float32_per_key_value_head_and_of_constant_size(architecture, kv_heads, dtype):
    model = patch_model(tiny_model(architecture, True, dtype), "linear")
    sizes = []
    for length in (3, 300):
        cache = DynamicCache()
        with torch.no_grad():
            model(random_tokens(2, length), past_key_values=cache, use_cache=True)
        assert cache.layers[0].state.kv.shape == (2, kv_heads, 8, 9)
        assert all(t.dtype == torch.float32 for t in cache.layers[0].state)
        sizes.append(state_bytes(cache))
    assert sizes[0] == sizes[1] == 2 * 4 * (2 * kv_heads * 8 * 9 + 2 * kv_heads)  # layers, bytes, S and z, maxima


def test_unknown_feature_map_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean elu"):
        make_config("linear", {"feature_map": "eluu"})
