"""Hybrid attention in C against PyTorch's operations in float64, which `tests/ops/test_hybrid.py` checks."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer
from hf_linattn.ops.native import hybrid
from tests.helpers import assert_close

HEADS, KV_HEADS, LENGTH, DIM, VALUE_DIM = 4, 2, 219, 24, 20
MIXES = [("hedgehog", None), ("learned_exp", None), ("learned_exp", "learned"), ("linear", "learned")]


def make_mechanism(linear: str, decay: str | None, window_size: int, num_sinks: int):
    layer = AttentionLayer(
        index=0, num_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, causal=True, scaling=DIM**-0.5,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    options = {"linear": linear, "linear_options": {"decay": decay}}
    config = make_config("hybrid", {**options, "window_size": window_size, "num_sinks": num_sinks})
    mechanism, generator = MECHANISMS.get("hybrid")(config, layer), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return mechanism.eval()


def make_heads(length: int):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, dim) for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.fixture
def calls(monkeypatch):
    """How often the operation was taken."""
    taken, attend = [], hybrid.causal_hybrid_attention
    monkeypatch.setattr(hybrid, "causal_hybrid_attention", lambda *heads: (taken.append(1), attend(*heads))[1])
    return taken


@torch.no_grad()
@pytest.mark.parametrize(("window_size", "num_sinks"), [(16, 4), (64, 1), (100, 70), (1, 0), (65, 64)])
@pytest.mark.parametrize(("linear", "decay"), MIXES)
def test_outputs_states_and_what_comes_after(variant, calls, linear, decay, window_size, num_sinks):
    """Windows and sinks inside a block, over several and at their borders; then more tokens from the state."""
    mechanism, heads = make_mechanism(linear, decay, window_size, num_sinks), make_heads(LENGTH)
    results = []
    for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
        mechanism.to(dtype).backend = backend
        first, state = mechanism(*(x[:, :, :-9].to(dtype) for x in heads))
        second, after = mechanism(*(x[:, :, -9:].to(dtype) for x in heads), state=state)
        total = state.kv.double() * state.log_max.double().exp()[..., None, None]
        results.append([first, second, total, *state[:4], state.length, after.length])
    assert calls == [1]
    for got, want in zip(*results, strict=True):
        assert_close(got.double(), want.double(), 2e-5 * max(1.0, float(want.abs().max()) if want.numel() else 1.0))


def test_what_it_cannot_do_is_left_to_others(variant, calls):
    mechanism, heads = make_mechanism("hedgehog", None, 16, 4), make_heads(LENGTH)
    mechanism(*heads)  # gradients
    with torch.no_grad():
        mechanism(*make_heads(20))  # nothing beyond the window
        mask = torch.ones(2, LENGTH, dtype=torch.bool)
        mask[0, :5] = False
        mechanism(*heads, key_padding_mask=mask)
        make_mechanism("taylor", None, 16, 4)(*heads)
        mechanism.far_shut = True
        assert not calls
        shut, _ = mechanism(*heads)
        assert calls
        mechanism.backend = "torch"
        assert_close(shut, mechanism(*heads)[0], 1e-5)
