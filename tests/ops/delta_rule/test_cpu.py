"""The gated delta rule in PyTorch and in C against its recurrence, token by token in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import hf_linattn
from hf_linattn.errors import DerivativeError
from hf_linattn.evaluation.memory import LiveBytes
from hf_linattn.mechanisms import AttentionLayer
from hf_linattn.mechanisms.gated_deltanet import GatedDeltanetConfig, GatedDeltanetMechanism
from hf_linattn.ops.delta_rule import cpu, cpu_kernels
from hf_linattn.ops.delta_rule.interface import gated_delta_rule
from hf_linattn.ops.dispatch import Policy, recording
from hf_linattn.testing.counters import flops_of
from tests.ops.cpu_cases import kept_for_backward

AUTO = Policy("auto")


class Problem(NamedTuple):
    """What the delta rule is called with; log_gate and memory may be None."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    log_gate: Tensor | None
    memory: Tensor | None

    def to(self, dtype: torch.dtype) -> Problem:
        """The same in another dtype, with gradients."""
        return Problem(*(x if x is None else x.detach().to(dtype).requires_grad_() for x in self))

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self if x is not None]


# batch, query heads, key/value heads, tokens, features, values: parts of tiles, chunks and segments
SIZES = [(2, 4, 2, 75, 24, 20), (1, 2, 2, 33, 64, 64), (2, 2, 1, 545, 16, 8), (1, 3, 1, 32, 7, 5), (2, 6, 2, 2, 9, 40)]


def make(sizes: tuple[int, ...], decay: bool, padded: bool) -> Problem:
    """Heads as models give them, [B, N, H, D] in memory; the first row padded on the left, the last on the right."""
    batch, heads, shared, length, features, width = sizes
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = (
        draw(batch, length, count, size).transpose(1, 2)
        for count, size in ((heads, features), (shared, features), (shared, width))
    )
    beta, log_gate = 2 * draw(batch, shared, length).sigmoid(), -0.3 * draw(batch, shared, length).square()
    if padded:
        real = torch.ones(batch, 1, length)
        real[0, :, : length // 3], real[-1, :, length - length // 4 :] = 0, 0
        beta, log_gate = beta * real, log_gate * real
    return Problem(query, key, value, beta, log_gate if decay else None, draw(batch, shared, features, width))


def by_token(problem: Problem) -> tuple[Tensor, Tensor]:
    """The formula."""
    query, key, value, beta, log_gate, state = problem
    key, query = (x / x.norm(dim=-1, keepdim=True) for x in (key, query))
    query, identity = query.unflatten(1, (key.shape[1], -1)), torch.eye(key.shape[3], dtype=key.dtype)
    outputs = []
    for t in range(key.shape[2]):
        k, strength = key[:, :, t, :, None], beta[:, :, t, None, None]
        kept = 1 if log_gate is None else log_gate[:, :, t].exp()[..., None, None]
        state = kept * (identity - strength * k @ k.mT) @ state + strength * k @ value[:, :, t, None]
        outputs.append((query[:, :, :, t] @ state).flatten(1, 2))
    return torch.stack(outputs, dim=2), state


def results(run: Any, problem: Problem) -> list[Tensor]:
    """Output, last state and the gradients of both with respect to everything."""
    output, state = run(problem)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = (output * weight.to(output)).sum() + state.sin().sum()
    return [output.detach(), state.detach(), *torch.autograd.grad(total, problem.tensors)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_forward_and_backward_are_the_recurrence(sizes, decay, padded):
    problem = make(sizes, decay, padded)
    want = results(by_token, problem.to(torch.float64))
    for policy, dtype, backend, tolerance in (
        (Policy("torch"), torch.float64, "torch", 1e-11), (AUTO, torch.float32, "cpu", 3e-6),
    ):  # fmt: skip
        with recording() as decisions:
            got = results(lambda given, policy=policy: gated_delta_rule(*given, policy=policy), problem.to(dtype))
        assert [x.backend for x in decisions] == [backend]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * float(b.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("decay", [False, True])
def test_calls_of_any_size_and_steps_go_on_from_the_state(decay):
    problem = make((2, 4, 2, 560, 24, 20), decay, True)
    want, last = by_token(problem)
    narrow = [x if x is None else x.float() for x in problem]
    memory, parts = narrow[-1], []
    for span in torch.arange(560).split([513, 1, 1, 5, 40]):
        heads = [x if x is None else x[:, :, span] for x in narrow[:5]]
        with recording() as decisions:
            part, memory = gated_delta_rule(*heads, memory, policy=AUTO)
        assert [x.backend for x in decisions] == ["cpu"]
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 2).double(), want, rtol=0, atol=3e-6 * float(want.abs().max()))
    torch.testing.assert_close(memory.double(), last, rtol=0, atol=3e-6 * float(last.abs().max()))


def test_feature_maps_are_divided_by_their_length(monkeypatch):
    """Made for a few tokens at a time, of queries and of keys, in both passes."""
    monkeypatch.setattr(cpu, "MAPPED_SIZE", 40)
    problem = make((2, 4, 2, 75, 24, 20), True, False)
    weight = torch.randn(2, 24, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def mapped(given: Problem) -> tuple[Tensor, Tensor]:
        query = given.query.unflatten(1, (2, -1)) @ weight[:, None].to(given.query)
        return by_token(given._replace(query=query.relu().flatten(1, 2), key=(given.key @ weight.to(given.key)).exp()))

    def run(given: Problem) -> tuple[Tensor, Tensor]:
        own = weight.to(given.key)
        maps = (lambda x: (x @ own[:, None]).relu()), (lambda x: (x @ own).exp())
        return gated_delta_rule(*given, *maps, policy=AUTO)

    problem = problem._replace(memory=torch.zeros(2, 2, 30, 20, dtype=torch.float64))
    want = results(mapped, problem.to(torch.float64))
    for a, b in zip(results(run, problem.to(torch.float32)), want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5 * float(b.abs().max()))


def test_alike_keys_and_full_strength_stay_exact():
    """The triangular systems are then furthest from the identity."""
    problem = make((1, 2, 2, 500, 32, 16), False, False)
    problem = problem._replace(key=problem.key[:, :, :1] + 1e-3 * problem.key, beta=torch.ones_like(problem.beta))
    want = results(by_token, problem.to(torch.float64))
    got = results(lambda given: gated_delta_rule(*given, policy=AUTO), problem.to(torch.float32))
    for a, b in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_keys_that_all_but_vanish_are_nothing_and_have_gradients(backend):
    """A length of 1e-20 has a square above zero, and a derivative of its inverse that is no number."""
    problem = make((1, 2, 2, 75, 24, 20), True, False)
    zeros = problem._replace(query=0 * problem.query, key=0 * problem.key)
    run = lambda given: gated_delta_rule(*given, policy=Policy(backend))  # noqa: E731
    for size in (1e-14, 1e-20):
        small = problem._replace(query=size * problem.query, key=size * problem.key)
        got, want = (results(run, given.to(torch.float32)) for given in (small, zeros))
        assert all(x.isfinite().all() for x in got)
        torch.testing.assert_close(got[:2], want[:2])


def test_no_tokens_leave_the_state_and_its_gradient():
    problem = make((2, 4, 2, 0, 24, 20), True, True).to(torch.float32)
    output, memory = gated_delta_rule(*problem, policy=AUTO)
    (gradient,) = torch.autograd.grad((memory * 3).sum() + output.sum(), problem.memory)
    assert output.shape == (2, 4, 0, 20) and torch.equal(memory, problem.memory)
    assert torch.equal(gradient, torch.full_like(gradient, 3))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("length", [1, 75])
def test_no_state_before_is_one_of_zeros(length, backend):
    """In outputs, states and gradients; of a single token without gradients, too."""
    problem = make((2, 4, 2, length, 24, 20), True, False)
    problem = problem._replace(memory=torch.zeros_like(problem.memory)).to(torch.float32)
    outcomes = []
    for memory in (problem.memory, None):
        given = *problem[:5], memory
        output, state = gated_delta_rule(*given, policy=Policy(backend, True))
        gradients = torch.autograd.grad(output.sin().sum() + state.sin().sum(), problem[:5])
        with torch.no_grad():
            outcomes.append([output, state, *gradients, *gated_delta_rule(*given, policy=Policy(backend))])
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("length", [cpu_kernels.SEGMENT, cpu_kernels.SEGMENT + 1])
def test_training_keeps_no_state_before_the_first_token(length, continued):
    """Unless one was given."""
    problem = make((2, 2, 2, length, 16, 8), True, False).to(torch.float32)
    problem = problem if continued else problem._replace(memory=None)
    with kept_for_backward() as kept:
        gated_delta_rule(*problem, policy=AUTO)
    states = 2 * 2 * (length // (cpu_kernels.SEGMENT + 1)) * 16 * 8
    assert sum(kept.values()) == sum(x.nbytes for x in problem.tensors) + 4 * states


def test_a_second_derivative_is_refused():
    problem = make((1, 2, 2, 33, 8, 8), True, False).to(torch.float32)
    output, _ = gated_delta_rule(*problem, policy=AUTO)
    with pytest.raises(DerivativeError):
        torch.autograd.grad(output.sum(), problem.key, create_graph=True)


@pytest.mark.parametrize("options", [{}, {"output_gate": True}], ids=str)
def test_inference_holds_one_output(options):
    """It is scaled where it stands, to what it is with gradients, and heads stay as they are."""
    layer = AttentionLayer(
        index=0, num_heads=4, num_key_value_heads=2, head_dim=32, causal=True, scaling=32**-0.5,
        device=torch.device("cpu"), dtype=torch.float32, hidden_size=8,
    )  # fmt: skip
    mechanism = GatedDeltanetMechanism(GatedDeltanetConfig(**options), layer).eval()
    torch.nn.init.uniform_(mechanism.output_scale, 0.5, 2.0)
    heads, hidden = [torch.randn(1, n, 2048, 32) for n in (4, 2, 2)], torch.randn(1, 2048, 8)
    before = [x.clone() for x in heads]
    given = {"hidden_states": hidden} if mechanism.reads_hidden else {}
    with torch.no_grad(), LiveBytes() as count:
        output, _ = mechanism(*heads, **given)
    assert count.peak < 1.3 * output.nbytes, count.peak / output.nbytes
    assert all(torch.equal(*pair) for pair in zip(heads, before, strict=True))
    torch.testing.assert_close(output, mechanism(*heads, **given)[0].detach())


def test_products_are_counted():
    """Beside PyTorch's operations for the same, whose chunks are twice as long and solved by an inverse."""
    problem = make((1, 4, 2, 512, 64, 64), True, False).to(torch.float32)

    def train(policy: Policy) -> None:
        output, _ = gated_delta_rule(*problem, policy=policy)
        output.sum().backward()

    counts = [flops_of(lambda policy=policy: train(policy)) for policy in (AUTO, Policy("torch"))]
    assert 0.35 < counts[0] / counts[1] < 1.7, counts
    step = Problem(*(x if i == 5 else x[:, :, :1] for i, x in enumerate(problem)))
    with torch.no_grad():
        both = AUTO, Policy("torch")
        counts = [flops_of(lambda policy=policy: gated_delta_rule(*step, policy=policy)) for policy in both]
    assert 0.7 < counts[0] / counts[1] < 1.5, counts


def test_the_sizes_of_chunks_are_those_of_the_c():
    header = (Path(hf_linattn.__file__).parent / "csrc/delta_rule/delta_rule.h").read_text()
    assert f"#define CHUNK {cpu_kernels.CHUNK} " in header and f"#define SEGMENT {cpu_kernels.SEGMENT} " in header
