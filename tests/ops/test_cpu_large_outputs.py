"""Outputs that caches do not hold, which are written past them and into pages that all threads have fetched."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer
from hf_linattn.ops.runtime import cpu as library

HEADS, LENGTH, DIM = 8, 4111, 64  # 8.4 MB, of which one head has 1 MB


@pytest.mark.covering(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["linear", "local"])
def test_all_heads_together_are_what_each_is_alone(variant, name, causal):
    generator = torch.Generator().manual_seed(0)
    # from the third row of a larger tensor on, in the order of models: rows begin on whole vectors, tokens are apart
    heads = [torch.randn(1, LENGTH + 2, HEADS, DIM, generator=generator)[:, 2:].transpose(1, 2) for _ in range(3)]
    weights = torch.randn(1, HEADS, LENGTH, DIM, generator=generator)
    assert weights.nbytes >= library.LARGE_BYTES > weights[:, :1].nbytes
    together = output_and_gradients(name, causal, heads, weights)
    for head in (0, HEADS - 1):
        part = slice(head, head + 1)
        alone = output_and_gradients(name, causal, [x[:, part] for x in heads], weights[:, part])
        assert all(torch.equal(x[:, part], y) for x, y in zip(together, alone, strict=True))


def output_and_gradients(name, causal, heads, weights):
    """Return the output without gradients, the one with them, and the gradients of query, key and value."""
    layer = AttentionLayer(
        index=0, num_heads=weights.shape[1], num_key_value_heads=weights.shape[1], head_dim=DIM, causal=causal,
        scaling=DIM**-0.5, device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    mechanism = MECHANISMS.get(name)(make_config(name, {}), layer)
    with torch.no_grad():
        inferred = mechanism(*heads)[0]
    heads = [x.detach().requires_grad_() for x in heads]
    output = mechanism(*heads)[0]
    return inferred, output, *torch.autograd.grad((output * weights).sum(), heads)


def test_pages_are_fetched_inside_the_memory_alone(variant):
    before = torch.full((8 << 20,), 1.1)  # no byte of it is zero, which is what is written
    after = before.clone()
    start, end = (1 << 20) + 3, (7 << 20) - 5  # neither begins nor ends on a large page
    library.fetch_pages(after[start:end])
    assert torch.equal(after[:start], before[:start]) and torch.equal(after[end:], before[end:])
    assert (after != before).sum() <= 12  # one number of each large page of 24 MB at most
