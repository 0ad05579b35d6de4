"""One token by Triton against PyTorch in float64, which `test_causal_linear` checks against the formula."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.backends import use_backend
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.linear import LinearMechanism
from hf_linattn.ops.triton import causal_step, operations
from tests.ops.triton.cases import ON_TRITON, make_mechanism

MADE = [  # features that Triton makes
    name for name in ON_TRITON
    if issubclass(MECHANISMS.get(name), LinearMechanism) and make_mechanism(name).maps[0].native()
]  # fmt: skip
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3}


@pytest.fixture
def steps(monkeypatch):
    """Small tiles, and the number of groups and tokens of every step."""
    monkeypatch.setattr(causal_step, "MOST_VALUES", 4)
    found, sums = [], operations.TRITON.causal_sums
    counted = sums._replace(step=lambda query, *rest: found.append(query.shape[2:4]) or sums.step(query, *rest))
    monkeypatch.setattr(operations, "TRITON", operations.TRITON._replace(causal_sums=counted))
    return found


@pytest.mark.parametrize("kind", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_steps_are_what_pytorch_makes_of_them(steps, name, kind):
    """From nothing, then with a token of one row hidden, then with what earlier steps left; of grouped queries."""
    given = [torch.randn(2, h, 4, 8, generator=torch.Generator().manual_seed(h)).to(kind) for h in (2, 1, 1)]
    hidden = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", kind)):
        mechanism = make_mechanism(name).to(torch.promote_types(dtype, torch.float32)).eval()
        use_backend(mechanism, backend)
        state, outputs = None, []
        for token in range(4):
            before = None if state is None else [x.clone() for x in state]
            last, heads = state, [x[:, :, token : token + 1].to(dtype) for x in given]
            output, state = mechanism(*heads, hidden[:, token : token + 1], state=state)
            assert output.dtype == dtype and state.kv.dtype == torch.promote_types(dtype, torch.float32)
            assert before is None or all(map(torch.equal, before, last))  # another beam may go on from it
            outputs.append(output)
        total = state.kv.double() * state.log_max.double().exp()[..., None, None]
        results.append([torch.cat(outputs, dim=2), total])
    for want, got in zip(*results, strict=True):
        assert (got.double() - want).norm() < TOLERANCES[kind] * want.norm()
    assert steps == [(2, 1)] * 4


@torch.no_grad()
def test_a_row_without_keys_is_zero(steps):
    mechanism = make_mechanism("performer").eval()
    use_backend(mechanism, "triton")
    output, state = mechanism(*(torch.randn(1, h, 1, 8) for h in (2, 1, 1)), torch.zeros(1, 1, dtype=torch.bool))
    assert steps and not output.any() and not state.kv.any()
