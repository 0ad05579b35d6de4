"""Hard keys in C against PyTorch's operations in float64, which `tests/mechanisms/test_hard_keys.py` checks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linattn import OperandError
from hf_linattn.evaluation.memory import LiveBytes
from hf_linattn.mechanisms.inputs import CallOptions
from hf_linattn.ops.dispatch import Policy, recording
from hf_linattn.ops.hybrid import cpu_kernels, hard_keys
from hf_linattn.ops.hybrid.interface import causal_hybrid_attention
from hf_linattn.ops.hybrid.types import HardKeyState
from hf_linattn.ops.runtime import cpu as library
from hf_linattn.testing.counters import flops_of
from tests.helpers import assert_close
from tests.ops.cpu_cases import make_heads, make_mechanism

LENGTH = 459
MAPS: dict[str, dict[str, Any]] = {  # each activation, with and without a weight, a bias and decay
    "hedgehog": {}, "linear": {"decay": "learned"}, "performer": {"num_features": 10, "decay": "learned"},
    "learned_exp": {}, "t2r": {},
}  # fmt: skip
DELTA: dict[str, dict[str, Any]] = {"deltanet": {"gate": True}, "gated_deltanet": {"expand_key": 2, "beta_range": 2}}
SIZES = [  # of the window, the sinks and the hard keys: the block that leaves is in part one of sinks; several pieces
    (100, 3, 7), (1, 70, 64), (65, 0, 130),
]  # fmt: skip
EACH_MAP, EACH_SIZE = pytest.mark.parametrize("linear", MAPS), pytest.mark.parametrize("sizes", SIZES, ids=str)


def make_hard(linear: str, sizes: tuple[int, int, int] = SIZES[0], **options: Any) -> Any:
    names = ("window_size", "num_sink_tokens", "num_hard_keys")
    given = {"initial_share": 0.5, **dict(zip(names, sizes, strict=True)), **options}
    return make_mechanism("hybrid", True, linear=linear, linear_options={**MAPS, **DELTA}[linear], **given)


def read(mechanism: Any, heads: list[Tensor], ends: list[int], backend: str) -> tuple[Tensor, HardKeyState]:
    """Return what a backend makes of rows that are read up to `ends`, one call after the other."""
    outputs, state = [], None
    for part in itertools.pairwise((0, *ends)):
        with recording() as decisions:
            output, state = mechanism(*(x[:, :, slice(*part)] for x in heads), state=state)
        assert {x.backend for x in decisions} == {backend}, decisions
        outputs.append(output)
    return torch.cat(outputs, 2), state


@torch.no_grad()
@pytest.mark.covering(2)
@EACH_MAP
@EACH_SIZE
@pytest.mark.parametrize("error", ["relative", "absolute"])
@pytest.mark.parametrize("share", [0.5, 1])
def test_outputs_states_and_choices(variant, products, linear, sizes, error, share):
    mechanism = make_hard(linear, sizes, recall_error=error, initial_share=share)
    heads = make_heads(2, LENGTH)
    got, state = read(mechanism, heads, [LENGTH], "cpu")
    mechanism.double().backend = "torch"
    want, exact = read(mechanism, [x.double() for x in heads], [LENGTH], "torch")
    assert_close(got.double(), want, 5e-5)
    assert torch.equal(state.hard_position, exact.hard_position) and (state.hard_position >= 0).any()
    for name in ("ring_key", "ring_value", "sink_key", "sink_value", "hard_key", "hard_value", "length"):
        assert torch.equal(getattr(state, name).double(), getattr(exact, name).double()), name
    sums = [x.kv.double() * x.log_max.double().exp()[..., None, None] for x in (state, exact)]
    assert_close(sums[0], sums[1], 5e-5 * max(1.0, float(sums[1].abs().max())))


@torch.no_grad()
@pytest.mark.parametrize("shared", ["heads", "rows"])
def test_heads_with_the_same_keys_have_values_of_their_own(variant, products, shared):
    """Of the call, the ring and the sinks, where keys are expanded and values are not."""
    query, key, value = make_heads(2, LENGTH)
    heads = [query, (key[:, :1] if shared == "heads" else key[:1]).expand_as(key), value]
    mechanism = make_hard("performer")
    got, _ = read(mechanism, heads, [70, LENGTH], "cpu")
    mechanism.double().backend = "torch"
    want, _ = read(mechanism, [x.double() for x in heads], [70, LENGTH], "torch")
    assert_close(got.double(), want, 5e-5)


@torch.no_grad()
@pytest.mark.covering(2)
@EACH_MAP
@EACH_SIZE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pieces_and_steps_make_the_same_state_to_the_last_bit(variant, products, linear, sizes, dtype):
    mechanism, heads = make_hard(linear, sizes).to(dtype), [x.to(dtype) for x in make_heads(2, 331)]
    whole, state = read(mechanism, heads, [331], "cpu")
    for ends in ([1, 71, 72, 128, 129, 200, 331], [190, *range(191, 261), 331]):
        pieces, after = read(mechanism, heads, ends, "cpu")
        assert_close(pieces, whole, {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype])
        assert all(torch.equal(*pair) for pair in zip(state, after, strict=True))


@torch.no_grad()
@pytest.mark.covering(2)
@pytest.mark.parametrize("linear", DELTA)
@pytest.mark.parametrize("sizes", [*SIZES, (65, 3, 0)], ids=str)
def test_a_state_by_the_delta_rule(variant, products, linear, sizes):
    """What it is read and written with comes from PyTorch, whose last bits depend on how many tokens there are."""
    mechanism, heads = make_hard(linear, sizes), make_heads(2, 331)
    results = [
        read(mechanism, heads, ends, "cpu")
        for ends in ([331], [1, 71, 72, 128, 129, 200, 331], [190, *range(191, 261), 331])
    ]
    mechanism.double().backend = "torch"
    want, exact = read(mechanism, [x.double() for x in heads], [331], "torch")
    for got, state in results:
        assert_close(got.double(), want, 5e-5)
        assert torch.equal(state.hard_position, exact.hard_position)
        for name in ("ring_key", "sink_value", "hard_key", "hard_value", "kv", "log_max"):
            assert_close(getattr(state, name).double(), getattr(exact, name).double(), 5e-5)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("linear", ["performer", "gated_deltanet"])
def test_padded_rows_are_read_as_alone(variant, linear, side):
    """Then in a piece and in steps, in which a block of one row leaves and none of the other."""
    mechanism, heads, pads = make_hard(linear), make_heads(2, 310), 37
    mask = torch.ones(2, 230, dtype=torch.bool)
    mask[1, slice(0, pads) if side == "left" else slice(230 - pads, 230)] = False
    outputs, state = [], None
    for number, part in enumerate(itertools.pairwise((0, 230, 270, *range(271, 311)))):
        own = [x[:, :, slice(*part)] for x in heads]
        output, state = mechanism(*own, None if number else mask, state=state)
        outputs.append(output)
    for row in range(2):
        real = torch.cat([mask[row], torch.ones(80, dtype=torch.bool)])
        want, alone = read(mechanism, [x[row : row + 1, :, real] for x in heads], [int(real.sum())], "cpu")
        assert_close(torch.cat(outputs, 2)[row : row + 1, :, real], want, 1e-5)
        assert torch.equal(state.hard_position[row], alone.hard_position[0])
        for x, y in zip(state, alone, strict=True):
            assert torch.equal(x[row], y[0]) if linear in MAPS else torch.allclose(x[row], y[0], atol=1e-5)


@torch.no_grad()
def test_packed_rows_are_read_as_alone(variant):
    mechanism, heads = make_hard("hedgehog"), make_heads(1, 500)
    ids = (torch.arange(500) >= 241).long()[None]
    output, state = mechanism(*heads, None, ids)
    for part in (slice(0, 241), slice(241, 500)):
        want, alone = read(mechanism, [x[:, :, part] for x in heads], [part.stop - part.start], "cpu")
        assert_close(output[:, :, part], want, 1e-5)
    assert all(torch.equal(*pair) for pair in zip(state, alone, strict=True))


@torch.no_grad()
def test_a_learned_sink_takes_its_share(variant):
    mechanism, heads = make_hard("linear"), make_heads(2, 301)
    sink = torch.randn(heads[0].shape[1])
    weights, results = mechanism.pair_weights(heads[1], CallOptions(sink=sink)), []
    for policy, dtype in ((Policy("auto"), torch.float32), (Policy("torch"), torch.float64)):
        own = [x.to(dtype) for x in heads]
        results.append(causal_hybrid_attention(*own, weights, policy=policy)[0].double())
    assert_close(*results, 5e-5)


@torch.no_grad()
def test_the_first_of_equals_are_kept_and_what_has_no_value_is_none(variant):
    """Where the state is empty all errors are 1, but that of a value of zero, which is nothing to forget."""
    mechanism, (query, key, value) = make_hard("linear", (5, 0, 3)), make_heads(2, 129)
    value[:, 0, 0] = 0
    _, state = read(mechanism, [query, key, value], [129], "cpu")
    assert state.hard_position[:, 0].tolist() == [[1, 2, 3]] * 2
    assert state.hard_position[:, 1].tolist() == [[0, 1, 2]] * 2


@pytest.mark.covering(2)
@pytest.mark.parametrize("linear", [*MAPS, *DELTA])
@pytest.mark.parametrize("sizes", [*SIZES, (65, 3, 0)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_gradients(variant, products, linear, sizes, padded, monkeypatch):
    """Of blocks that are made again, two by two."""
    monkeypatch.setattr(hard_keys, "chunks_at_once", lambda *_: 1)
    mechanism = make_hard(linear, sizes if sizes[2] or linear in DELTA else SIZES[0])
    heads, lengths = make_heads(2, LENGTH), torch.tensor([LENGTH, 203]) if padded else None
    sink = torch.linspace(-1.0, 1.0, heads[0].shape[1])
    results = []
    for name, dtype in (("auto", torch.float32), ("torch", torch.float64)):
        inputs = [x.to(dtype).requires_grad_() for x in (*heads, sink)]
        weights = mechanism.to(dtype).pair_weights(inputs[1], CallOptions(sink=inputs[3]))
        with recording() as decisions:
            output, state = causal_hybrid_attention(*inputs[:3], weights, lengths, policy=Policy(name, training=True))
        assert decisions[0].backend == {"auto": "cpu"}.get(name, name)
        output = torch.cat([output[0], output[1, :, :203]] if padded else [*output], dim=1)
        loss = output.sin().sum() + state.kv.sin().sum() + (state.hard_key.sum(-1) * state.hard_value.sum(-1)).sum()
        inputs += [x for x in mechanism.parameters() if x.requires_grad]
        results.append([output.detach(), *torch.autograd.grad(loss, inputs, allow_unused=True)])
    assert all(x is not None for x in results[0])
    for got, want in zip(*results, strict=True):
        assert_close(got.double(), want, 1e-4 * max(1.0, float(want.abs().max())))


def test_memory_of_training_is_that_of_a_few_blocks():
    """Between the passes less than the heads themselves is kept of a block, and all in all little more is needed."""
    kept, peaks = [], []
    for blocks in (32, 64):
        mechanism, heads = make_hard("hedgehog", (65, 0, 64)), [x.requires_grad_() for x in make_heads(2, 64 * blocks)]
        with LiveBytes() as count:
            loss = mechanism(*heads)[0].sum()
            kept.append(count.live)
            loss.backward()
        peaks.append(count.peak)
        del loss
        assert count.live == sum(x.grad.nbytes for x in (*heads, *mechanism.parameters()) if x.grad is not None)
    more = sum(x.nbytes for x in heads) / 2
    assert kept[1] - kept[0] < more / 2 and peaks[1] - peaks[0] < 1.5 * more, (kept, peaks, more)


def test_maps_that_the_c_does_not_know_are_pytorchs_and_say_why():
    mechanism, heads = make_mechanism("hybrid", True, linear="taylor", num_hard_keys=3), make_heads(1, 200)
    _, state = mechanism(*heads)
    for grad, before, reason in ((False, None, "a feature map"), (True, state, "tokens after a state with gradients")):
        with torch.set_grad_enabled(grad), recording() as decisions:
            mechanism(*heads, state=before)
        assert decisions[0].backend == "torch" and decisions[0].passed_over["cpu"].startswith(reason)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("start", -1), ("end", 2), ("hard_position", 130), ("start", 2**31), ("start", 192)],
)
def test_numbers_that_no_row_has_are_refused(monkeypatch, name, wrong):
    """Nor is a block let go whose keys have no features."""
    mechanism, heads, calls = make_hard("gated_deltanet", (1, 0, 7)), make_heads(2, 131), []
    kept = library.call
    monkeypatch.setattr(cpu_kernels, "call", lambda *args: (calls.append(args), kept(*args)))
    read(mechanism, heads, [130, 131], "cpu")
    function, operands, sizes, describe = calls[-1]
    assert operands["key_features"] is None
    operands[name].view(-1)[-1] = wrong
    with pytest.raises(OperandError, match=r"hard_keys: .*'hard_position'.*'key_features' is missing; nothing was"):
        kept(function, operands, sizes, describe)


@torch.no_grad()
def test_costs_are_counted():
    mechanism, heads = make_hard("performer"), make_heads(2, 640)
    counts = [flops_of(lambda: mechanism(*heads)) for mechanism.backend in ("torch", "auto")]
    assert 0.5 < counts[1] / counts[0] < 1.5, counts
