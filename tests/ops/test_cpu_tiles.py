"""Products of float32 by the matrix unit of a processor, each number in three parts, beside those of vectors."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.ops.block_softmax import cpu as block_softmax
from hf_linattn.ops.linear import cpu_kernels as causal_sums
from hf_linattn.ops.runtime import cpu as library
from tests.ops import cpu_cases
from tests.ops.cpu_cases import HEADS, make_heads, make_mechanism
from tests.ops.test_cpu_half_precision import error_of, results_of

NAMES = ["local", "longformer", "bigbird", "linformer", "hybrid", "linear", "hedgehog", "performer", "retention"]
LENGTH = 333
WAYS = ["by vectors"] + ["in parts"] * library.has_matrix_unit()


def errors_of(monkeypatch, mechanism, heads) -> dict[str, list[float]]:
    """Of outputs, gradients and what is kept, made in either way."""
    want = results_of(mechanism, [x.double() for x in heads], "torch")
    monkeypatch.setattr(block_softmax, "LEAST_KEYS", 0)
    monkeypatch.setattr(causal_sums, "LEAST_FEATURES", 0)
    errors = {}
    for way in WAYS:
        with monkeypatch.context() as patched:
            if way == "by vectors":
                patched.setattr(library, "has_matrix_unit", lambda: False)
            got = results_of(mechanism, heads, "auto")
        errors[way] = [error_of(x, exact) for x, exact in zip(got, want, strict=True)]
    return errors


@pytest.mark.covering(2)
@pytest.mark.parametrize("dim", [64, 24])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_they_are_as_exact(variant, monkeypatch, name, causal, dim):
    """Outputs and all gradients, where heads are read in place, and where they are copied first."""
    monkeypatch.setattr(cpu_cases, "DIM", dim)
    monkeypatch.setattr(cpu_cases, "VALUE_DIM", dim + 32)
    options = {"block_size": 64} if name in ("local", "longformer", "bigbird") else {}
    errors = errors_of(monkeypatch, make_mechanism(name, causal, **options), make_heads(2, LENGTH))
    for way in WAYS:
        assert max(errors[way]) < 2e-6
        # sums over keys are made of shorter chunks by vectors, which is a little more exact
        assert all(x < 2 * y + 1e-8 for x, y in zip(errors[way], errors["by vectors"], strict=True))


@pytest.mark.parametrize("shared", ["heads", "rows"])
@pytest.mark.parametrize("name", ["local", "streaming"])
def test_heads_with_the_same_keys_have_values_of_their_own(variant, monkeypatch, name, shared):
    """Forward and back, where keys are expanded and values are not: no tiles of one head are taken for another's."""
    query, key, value = make_heads(2, LENGTH)
    key = (key[:, :1] if shared == "heads" else key[:1]).expand_as(key)
    errors = errors_of(monkeypatch, make_mechanism(name, True, window_size=64), [query, key, value])
    assert all(max(found) < 2e-6 for found in errors.values()), errors


def test_numbers_of_all_magnitudes(variant, monkeypatch):
    """Every column of the values has its own: none is rounded to the precision of a larger one beside it."""
    monkeypatch.setattr(cpu_cases, "VALUE_DIM", 64)
    mechanism, heads = make_mechanism("local", True, window_size=200), make_heads(1, LENGTH)
    scale = 10.0 ** torch.linspace(-30, 30, 64)
    heads[2] = heads[2] * scale
    want = mechanism.double()(*(x.double() for x in heads))[0] / scale.double()
    assert not variant
    got = mechanism.float()(*heads)[0].double() / scale.double()
    assert variant
    assert all(error_of(got[..., column], want[..., column]) < 1e-6 for column in range(64))


def test_the_same_bits_each_time(variant):
    """Whatever tasks a thread had before, and in whatever memory; also of the keys that stand by themselves."""
    mechanism, heads = make_mechanism("streaming", True, window_size=128), make_heads(2, 700)
    first = mechanism(*heads)[0]
    other = make_heads(3, 900)
    for _ in range(3):
        mechanism(*(x + 1 for x in other))
        assert torch.equal(mechanism(*heads)[0], first)


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_hidden_is_seen(variant, causal):
    """The future, and what is padded, by bits, whatever stands there."""
    mechanism, heads = make_mechanism("local", causal, window_size=200), make_heads(2, LENGTH)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    if not causal:
        mask[:, 200:] = False
    seen = mechanism(*heads, mask)[0]
    for x in heads[1:]:
        x[:, :, 200:] = 1e4
    assert torch.equal(mechanism(*heads, mask)[0][:, :, :200], seen[:, :, :200])
    assert seen.shape[1] == HEADS
