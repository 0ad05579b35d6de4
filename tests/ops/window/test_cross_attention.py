"""The window of `local` across, which moves over the encoder's tokens."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.ops.window.cross_attention import EncoderTokens, moving_window_attention, window_centre


def test_a_moving_window_read_key_by_key():
    """Against a loop over queries in float64, over several calls; one row has no tokens."""
    generator = torch.Generator().manual_seed(0)
    heads, shared, count, total, window, rate = 4, 2, 83, 61, 6, 0.7
    query = torch.randn(3, heads, count, 5, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(3, shared, total, n, generator=generator, dtype=torch.float64) for n in (5, 7))
    length = torch.tensor([61, 37, 0])
    state, outputs = EncoderTokens(key, value, length, torch.zeros(3, dtype=torch.long)), []
    for part in query.split([70, 1, 12], dim=2):
        output, state = moving_window_attention(part, state, window_size=window, keys_per_query=rate, scaling=0.4)
        outputs.append(output)
    got = torch.cat(outputs, dim=2)
    for b in range(2):
        for h in range(heads):
            for i in range(count):
                centre = min(int(i * rate), int(length[b]) - 1)
                seen = [j for j in range(int(length[b])) if abs(j - centre) < window]
                weights = (key[b, h // 2, seen] @ query[b, h, i] * 0.4).softmax(0)
                assert torch.allclose(got[b, h, i], weights @ value[b, h // 2, seen], rtol=0, atol=1e-12), (b, h, i)
    assert not got[2].any()


@pytest.mark.parametrize(("rate", "parts"), [(0.29, 29), (1.07, 107), (999.99, 99999)])
def test_a_window_moves_on_by_whole_tokens_as_the_rate_is_written(rate, parts):
    """0.29 of 100 tokens are 29, where a product of floats is less, and far behind the whole numbers of float32."""
    position = torch.tensor([0, 1, 99, 100, 101, 10**9 - 1, 10**9])
    centre = window_centre(position, torch.tensor([2**62]), rate)
    assert centre.tolist() == [x * parts // 100 for x in position.tolist()]
