"""Hybrid attention in C against PyTorch's operations in float64, which `tests/ops/hybrid/test_torch.py` checks."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_linattn.ops.hybrid import cpu as hybrid
from hf_linattn.ops.hybrid import fused as hybrid_parts
from tests.helpers import assert_close
from tests.ops.cpu_cases import make_heads, make_mechanism

LENGTH = 219
MIXES = [("hedgehog", None), ("learned_exp", None), ("learned_exp", "learned"), ("linear", "learned")]
WINDOWS = [(16, 4), (64, 1), (100, 70), (1, 0), (65, 64)]  # inside a block, over several and at their borders


def make_hybrid(causal: bool, linear: str, decay: str | None, window_size: int, num_sink_tokens: int):
    # with a gate half open, and with none
    options = {"linear": linear, "linear_options": {"decay": decay}, "initial_share": 0.5 if num_sink_tokens else 1}
    return make_mechanism("hybrid", causal, **options, window_size=window_size, num_sink_tokens=num_sink_tokens)


@pytest.fixture
def calls(monkeypatch):
    """How often an operation was taken."""
    taken = []

    def count(attend):
        return lambda *heads: (taken.append(1), attend(*heads))[1]

    for name in ("_bidirectional_rows", "_causal_rows", "continued_attention"):
        monkeypatch.setattr(hybrid, name, count(getattr(hybrid, name)))
    for name in ("causal_attention", "bidirectional_attention"):
        monkeypatch.setattr(hybrid_parts, name, count(getattr(hybrid_parts, name)))
    return taken


@pytest.mark.covering(2)
@torch.no_grad()
@pytest.mark.parametrize(("window_size", "num_sink_tokens"), WINDOWS)
@pytest.mark.parametrize(("linear", "decay"), MIXES)
def test_outputs_states_and_what_comes_after(variant, calls, linear, decay, window_size, num_sink_tokens):
    mechanism, heads = make_hybrid(True, linear, decay, window_size, num_sink_tokens), make_heads(2, LENGTH)
    results = []
    for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
        mechanism.to(dtype).backend = backend
        state, result = None, []
        for ends in itertools.pairwise((0, 135, 141, 216, 217, LENGTH)):
            output, state = mechanism(*(x[:, :, slice(*ends)].to(dtype) for x in heads), state=state)
            total = state.kv.double() * state.log_max.double().exp()[..., None, None]
            result += [output, total, *state[:4], state.length]
        results.append(result)
    # what goes on after a full window is read as a row, unless it is one token; a window of one token keeps no row
    assert len(calls) == (1 if window_size == 1 else 8 if window_size + num_sink_tokens < 135 else 3)
    for got, want in zip(*results, strict=True):
        assert_close(got.double(), want.double(), 2e-5 * max(1.0, float(want.abs().max()) if want.numel() else 1.0))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("linear", ["linear", "hedgehog"])
def test_what_is_not_finite_beyond_the_window_is_not_taken_for_nothing(variant, calls, linear, causal, training):
    mechanism, heads = make_hybrid(causal, linear, None, 16, 0).float(), make_heads(2, LENGTH)
    heads[1][:, :, 50 if causal else [50, 200]] = torch.nan
    with torch.set_grad_enabled(training):
        output, state = mechanism(*(x.requires_grad_(training) for x in heads))
    assert calls and output[:, :, 67 if causal else 100 :].isnan().all() and (causal or output.isnan().all())
    if causal and not training:
        assert mechanism(*(x[:, :, :1] for x in make_heads(2, 1)), state=state)[0].isnan().all()


@pytest.mark.covering(2)
@torch.no_grad()
@pytest.mark.parametrize(("window_size", "num_sink_tokens"), [(16, 4), (5, 9), (2, 0), (1, 1)])
@pytest.mark.parametrize(("linear", "decay"), MIXES)
def test_token_by_token(variant, calls, linear, decay, window_size, num_sink_tokens):
    """From the first one: the sinks and the window fill up, then steps in C follow."""
    mechanism, heads = make_hybrid(True, linear, decay, window_size, num_sink_tokens), make_heads(2, 40)
    state, outputs = None, []
    for place in range(40):
        output, state = mechanism(*(x[:, :, place : place + 1] for x in heads), state=state)
        outputs.append(output)
    mechanism.double().backend = "torch"
    want, _ = mechanism(*(x.double() for x in heads))
    assert_close(torch.cat(outputs, dim=2).double(), want, 2e-5)
    assert len(calls) == (40 - window_size + 1 - num_sink_tokens if window_size > 1 else 0)


@pytest.mark.covering(2)
@torch.no_grad()
@pytest.mark.parametrize("length", [LENGTH, 128, 101])
@pytest.mark.parametrize(("window_size", "num_sink_tokens"), WINDOWS)
@pytest.mark.parametrize(("linear", "decay"), MIXES)
def test_both_directions(variant, calls, linear, decay, window_size, num_sink_tokens, length):
    """Also where no query has far keys on both sides, and where none has any."""
    mechanism, heads = make_hybrid(False, linear, decay, window_size, num_sink_tokens), make_heads(2, length)
    got, _ = mechanism(*heads)
    mechanism.double().backend = "torch"
    want, _ = mechanism(*(x.double() for x in heads))
    assert_close(got.double(), want, 2e-5)
    assert calls == [1] * (length > window_size + num_sink_tokens)


@pytest.mark.covering(2)
@pytest.mark.parametrize("length", [LENGTH, 128])
@pytest.mark.parametrize(("window_size", "num_sink_tokens"), WINDOWS)
@pytest.mark.parametrize(("linear", "decay"), [*MIXES, ("taylor", None)])
def test_gradients_in_both_directions(variant, calls, linear, decay, window_size, num_sink_tokens, length):
    """Also where hardly any query has far keys on both sides; the same bits come without gradients."""
    mechanism, heads = make_hybrid(False, linear, decay, window_size, num_sink_tokens).train(), make_heads(2, length)
    results = []
    for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
        mechanism.to(dtype).backend = backend
        operands = [x.to(dtype).requires_grad_() for x in heads]
        output, _ = mechanism(*operands)
        if backend == "auto":
            with torch.no_grad():
                assert torch.equal(mechanism(*operands)[0], output)
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        trained = {**dict(zip("qkv", operands, strict=True)), **dict(mechanism.named_parameters())}
        results.append(dict(zip(trained, torch.autograd.grad((output * weight).sum(), trained.values()), strict=True)))
    assert calls == [1, 1] * (length > window_size + num_sink_tokens)
    got, want = results
    for name in got:
        tolerance = 1e-3 if "decay" in name else 5e-5
        assert_close(got[name].double(), want[name], tolerance * max(1.0, float(want[name].abs().max())))


@pytest.mark.covering(2)
@pytest.mark.parametrize(("window_size", "num_sink_tokens"), WINDOWS)
@pytest.mark.parametrize(("linear", "decay"), [*MIXES, ("taylor", None)])
def test_gradients(variant, calls, linear, decay, window_size, num_sink_tokens):
    """In training; the same bits come without gradients."""
    mechanism, heads = make_hybrid(True, linear, decay, window_size, num_sink_tokens).train(), make_heads(2, LENGTH)
    with torch.no_grad():
        plain, _ = mechanism(*heads)
    weight = torch.randn(plain.shape, generator=torch.Generator().manual_seed(2))
    results = []
    for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
        mechanism.to(dtype).backend = backend
        operands = [x.to(dtype).requires_grad_() for x in heads]
        output, state = mechanism(*operands)
        after, _ = mechanism(*(x[:, :, -9:] for x in operands), state=state)  # through what the state holds
        trained = {**dict(zip("qkv", operands, strict=True)), **dict(mechanism.named_parameters())}
        loss = (output * weight).sum() + (after * weight[:, :, -9:]).sum()
        results.append((output, dict(zip(trained, torch.autograd.grad(loss, trained.values()), strict=True))))
    (output, got), (_, want) = results
    assert torch.equal(output, plain) and calls == [1, 1]
    for name in got:
        # what decays cost is a small difference of large sums
        tolerance = 1e-3 if "decay" in name else 5e-5
        assert_close(got[name].double(), want[name], tolerance * max(1.0, float(want[name].abs().max())))


@pytest.mark.covering(2)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window_size", "num_sink_tokens"), [(16, 4), (70, 1), (1, 0)])
def test_packed_and_padded_rows_of_which_no_state_is_kept(variant, calls, causal, window_size, num_sink_tokens):
    """As in training: what stands behind a sequence is no matter of its outputs and gradients."""
    mechanism, heads = make_hybrid(causal, "hedgehog", "learned", window_size, num_sink_tokens), make_heads(2, LENGTH)
    mechanism.train()
    places, mask = torch.arange(LENGTH), torch.ones(2, LENGTH, dtype=torch.bool)
    ids, mask[1, :5] = torch.stack([places // 90, places // 120]), False
    results = []
    for backend, dtype in (("auto", torch.float32), ("torch", torch.float64)):
        mechanism.to(dtype).backend = backend
        operands = [x.to(dtype).requires_grad_() for x in heads]
        output, state = mechanism(*operands, mask, ids, keep_state=False)
        trained = {**dict(zip("qkv", operands, strict=True)), **dict(mechanism.named_parameters())}
        gradients = torch.autograd.grad(output.sin().sum(), trained.values())
        results.append({"output": output, **dict(zip(trained, gradients, strict=True))})
        assert state is None
    assert calls  # by the groups of sequences that have keys beyond the window
    got, want = results
    for name in got:
        tolerance = 1e-3 if "decay" in name else 5e-5
        assert_close(got[name].double(), want[name], tolerance * max(1.0, float(want[name].abs().max())))


@pytest.mark.parametrize("causal", [True, False])
def test_what_it_cannot_do_is_left_to_others(variant, calls, causal):
    mechanism, heads = make_hybrid(causal, "hedgehog", None, 16, 4), make_heads(2, LENGTH)
    with torch.no_grad():
        mechanism(*make_heads(2, 20))  # nothing beyond the window
        mask = torch.ones(2, LENGTH, dtype=torch.bool)
        mask[0, :5] = False
        if causal:  # whose state depends on the lengths
            mechanism(*heads, key_padding_mask=mask)
        make_hybrid(causal, "hedgehog", None, 3, 4)(*heads)
        mechanism.far_shut = True
        assert not calls
        shut, _ = mechanism(*heads)
        assert calls
        mechanism.backend = "torch"
        assert_close(shut, mechanism(*heads)[0], 1e-5)
