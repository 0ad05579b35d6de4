"""What the C counts as its products, beside PyTorch's operations for the same: costs are seen to grow as they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_linattn.ops.linear.cpu_kernels import causal_sums
from hf_linattn.ops.slots.cpu_kernels import segment_means_forward
from hf_linattn.testing.counters import flops_of
from tests.ops.cpu_cases import make_heads, make_mechanism, share_of_products

CASES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}), ("performer", {"num_features": 24}), ("local", {"window_size": 64}), ("lsh", {"num_buckets": 4}),
    ("linformer", {"num_slots": 16}),
]  # fmt: skip


def training(mechanism: Any, heads: list[torch.Tensor]) -> None:
    """A forward and a backward pass."""
    output, _ = mechanism(*(x.detach().requires_grad_() for x in heads))
    output.sum().backward()


def step(mechanism: Any, heads: list[torch.Tensor], state: Any) -> None:
    with torch.no_grad():
        mechanism(*(x[:, :, -1:] for x in heads), state=state)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_training(name, options, causal):
    """The C leaves out pairs of a chunk that nobody sees, and makes maps again in the backward pass."""
    mechanism, heads = make_mechanism(name, causal, **options), make_heads(2, 500)
    assert 0.35 < share_of_products(mechanism, lambda: training(mechanism, heads)) < 1.7


@pytest.mark.parametrize(("name", "options"), CASES[:2])
def test_a_step(name, options):
    mechanism, heads = make_mechanism(name, True, **options), make_heads(2, 65)
    with torch.no_grad():
        _, state = mechanism(*(x[:, :, :-1] for x in heads))
    assert 0.7 < share_of_products(mechanism, lambda: step(mechanism, heads, state)) < 1.5


def test_formulas_get_arguments_by_name():
    """However many of them the caller leaves to their defaults, or names."""
    heads = torch.randn(2, 1, 1, 4, 3), torch.randn(2, 1, 4, 3), torch.randn(2, 1, 4, 5)
    sums, rows = torch.empty(2, 1, 1, 4, 5), torch.empty(2, 2, 1, 1, 4).unbind()
    state = torch.empty(2, 1, 3, 6), torch.empty(2, 1)
    given = (*heads, None, None, None, sums, *rows, None, None, *state, True, False)
    causal, both_ways = (flops_of(lambda x=x: causal_sums(*given, bidirectional=x)) for x in (False, True))
    assert causal == flops_of(lambda: causal_sums(*given)) > both_ways > 0


def test_means_of_segments():
    """Which are few beside the products of `linformer`: each token is multiplied by its weight and added."""
    rows, weight = torch.randn(2, 3, 64, 8), torch.rand(2, 3, 64)
    means = torch.empty(2, 3, 4, 8), torch.empty(2, 3, 4)
    assert flops_of(lambda: segment_means_forward(rows, weight, *means, 16)) == 2 * rows.numel()
