"""One token by Triton against PyTorch in float64, which `test_causal_linear` checks against the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_linattn.backends import use_backend
from hf_linattn.mechanisms import MECHANISMS, Mechanism
from hf_linattn.mechanisms.linear import LinearMechanism
from hf_linattn.ops.hybrid import triton_decode as hybrid_step
from hf_linattn.ops.linear import triton as linear_triton
from hf_linattn.ops.linear import triton_decode as causal_step
from hf_linattn.ops.linear import triton_features as features
from hf_linattn.ops.linear.torch import LinearState
from tests.ops.triton.cases import ON_TRITON, make_mechanism

MADE = [  # features that Triton makes
    name for name in ON_TRITON
    if issubclass(MECHANISMS.get(name), LinearMechanism) and make_mechanism(name).maps[0].native
]  # fmt: skip
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3}


@pytest.fixture
def steps(monkeypatch):
    """Small tiles, and the number of groups and tokens of every step."""
    monkeypatch.setattr(causal_step, "MOST_VALUES", 4)
    found, step = [], linear_triton.step_attention
    counted = lambda query, *rest: found.append(query.shape[2:4]) or step(query, *rest)  # noqa: E731
    monkeypatch.setattr(linear_triton, "step_attention", counted)
    return found


@pytest.mark.covering(1)
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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_values_decays_and_masks_lie_as_they_come(monkeypatch, scaled, decayed, masked):
    """As slices of a fused projection and expanded, beside sizes that are no powers of two, against the formula."""
    monkeypatch.setattr(causal_step, "MOST_VALUES", 4)
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))  # noqa: E731
    query, key = draw(2, 3, 2, 1, 17).abs(), draw(2, 3, 1, 17).abs()
    value = draw(2, 1, 3, 10)[..., 4:9].transpose(1, 2)
    state = LinearState(draw(2, 3, 17, 6).abs(), draw(2, 3) * (scaled or decayed))
    mask = torch.tensor([[True, False], [False, True]])[:, 1:] if masked else None
    real = torch.ones(2, 1) if mask is None else mask
    # a hidden key has no say in the largest exponent
    log_scale = torch.where(real[:, :, None] > 0, 3 * draw(2, 3, 1), 200.0) if scaled else None
    log_decay = draw(3).abs().neg()[None, :, None].expand(2, 3, 1) if decayed else None
    output, after = causal_step.step_attention(query, key, log_scale, value, log_decay, mask, state)
    values = torch.cat([value, torch.ones(2, 3, 1, 1)], dim=-1).double()
    power, passed = (torch.zeros(2, 3, 1) if x is None else x.double() for x in (log_scale, log_decay))
    total = state.kv.double() * (state.log_max[..., None] + passed).double().exp()[..., None]
    total += key.double().mT * values * (power.exp() * real[:, :, None])[..., None]
    want = query.double() @ total[:, :, None]
    torch.testing.assert_close(output.double(), want[..., :-1] / want[..., -1:], rtol=1e-5, atol=1e-5)
    got = after.kv.double() * after.log_max.double().exp()[..., None, None]
    torch.testing.assert_close(got, total, rtol=1e-5, atol=1e-5)


class Kernels(TorchDispatchMode):
    """Names what runs on a GPU: launches, and operations that make a tensor which is neither a view nor empty."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        for module in (features, causal_step, hybrid_step):
            monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: self.found.append(kernel.__name__))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = any(isinstance(x, torch.Tensor) for x in tree_leaves(result))
        if made and not function.is_view and "empty" not in function.name():
            self.found.append(function.name())
        return result


@torch.no_grad()
def kernels_of_a_step(monkeypatch: pytest.MonkeyPatch, mechanism: Mechanism, masked: bool) -> list[str]:
    """Of heads in half precision, grouped, that are slices of one projection."""
    use_backend(mechanism.eval(), "triton")
    token = torch.randn(2, 1, 4, 8).half().transpose(1, 2).split([2, 1, 1], 1)
    mask = torch.tensor([[True], [False]]) if masked else None
    _, state = mechanism(*token, mask)
    with Kernels(monkeypatch) as kernels:
        mechanism(*token, mask, state=state)
    return kernels.found


@pytest.mark.covering(2)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["linear", "hedgehog", "performer"])
def test_a_step_is_three_kernels(monkeypatch, name, own, masked):
    """Whatever dtype the weights have, of which no copy is made, nor of values that lie beside queries and keys."""
    kernels = kernels_of_a_step(monkeypatch, make_mechanism(name).to(own), masked)
    assert kernels == ["write_features", "write_features", "step_token"]


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_so_is_one_of_a_window_before_a_far_part(monkeypatch, own):
    kernels = kernels_of_a_step(monkeypatch, make_mechanism("hybrid").to(own), masked=False)
    assert kernels == ["write_features", "write_features", "step_hybrid"]


def test_a_decay_costs_a_step_no_more_than_its_bounded_rate(monkeypatch):
    kernels = kernels_of_a_step(monkeypatch, make_mechanism("linear", decay="learned"), masked=False)
    assert kernels == ["aten::clamp", "aten::exp", "aten::neg", "write_features", "write_features", "step_token"]


@torch.no_grad()
def test_a_row_without_keys_is_zero(steps):
    mechanism = make_mechanism("performer").eval()
    use_backend(mechanism, "triton")
    output, state = mechanism(*(torch.randn(1, h, 1, 8) for h in (2, 1, 1)), torch.zeros(1, 1, dtype=torch.bool))
    assert steps and not output.any() and not state.kv.any()
