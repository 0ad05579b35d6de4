"""Hybrid with hard keys: which keys stay exact, by a definition written out token by token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_linattn import OptionError, UnsupportedModeError, patch_model, set_backend
from hf_linattn.config import make_config
from hf_linattn.mechanisms.deltanet import DeltanetMechanism
from hf_linattn.ops import reference
from hf_linattn.ops.dispatch import recording
from hf_linattn.ops.hybrid import hard_keys
from hf_linattn.ops.hybrid.types import HardKeyState
from hf_linattn.testing import Case
from hf_linattn.testing.counters import flops_of
from tests.helpers import make_tokens
from tests.models import make_model

BLOCK = 64
SIZES = {"window_size": 9, "num_sink_tokens": 3, "num_hard_keys": 6, "initial_share": 0.4}
KERNEL = {"linear": "performer", "linear_options": {"num_features": 16, "decay": "learned"}, **SIZES}
DELTA = {"linear": "deltanet", "linear_options": {"feature_map": "elu", "gate": True}, **SIZES}
ABSOLUTE = {**KERNEL, "recall_error": "absolute"}
EACH = pytest.mark.parametrize("options", [KERNEL, ABSOLUTE, DELTA], ids=["kernel", "absolute", "delta rule"])
Chosen = dict[tuple[int, int], list[list[int]]]  # by row and head, block by block


class Simulation:
    """One row of one key/value head: lists of the hard keys, and of those in the state in the order they entered."""

    def __init__(self, mechanism: Any, head: int, key: Tensor, value: Tensor, given: list[list[int]] | None):
        self.mechanism, self.head, self.key, self.value, self.given = mechanism, head, key, value, given
        self.hard: list[int] = []
        self.entered: list[int] = []
        self.chosen: list[list[int]] = []
        self.features = mechanism.linear.maps[1].exact(key)
        self.memory = value.new_zeros(self.features.shape[1], value.shape[1])
        self.total = value.new_zeros(self.features.shape[1])

    @property
    def left(self) -> int:
        """How many tokens have left the window."""
        return BLOCK * len(self.chosen)

    def leave(self) -> None:
        """The window loses its next block."""
        config = self.mechanism.config
        block = range(max(self.left, config.num_sink_tokens), self.left + BLOCK)
        candidates = [*self.hard, *block]
        errors = {j: float((self.value[j] - self.recall(j)).norm() / self.size(j)) for j in candidates}
        worst = sorted(sorted(candidates, key=lambda j: -errors[j])[: config.num_hard_keys])
        self.hard = worst if self.given is None else self.given[len(self.chosen)]
        self.chosen.append(self.hard)
        self.entered = self.entered + [j for j in candidates if j not in self.hard]
        (self.write_delta if isinstance(self.mechanism.linear, DeltanetMechanism) else self.write_sums)()

    def recall(self, j: int) -> Tensor:
        phi = self.features[j]
        if isinstance(self.mechanism.linear, DeltanetMechanism):
            return self.memory.T @ (phi / phi.norm())
        return self.memory.T @ phi / (phi @ self.total) if self.entered else torch.zeros_like(self.value[j])

    def size(self, j: int) -> Tensor | float:
        return 1.0 if self.mechanism.config.recall_error == "absolute" else self.value[j].norm()

    def write_sums(self) -> None:
        rate = self.mechanism.linear.log_decay_rate[self.head].exp()
        decayed = [self.features[j] * torch.exp(-rate * (self.left - j)) for j in self.entered]
        self.total = torch.stack(decayed).sum(0)
        self.memory = torch.stack([torch.outer(x, self.value[j]) for x, j in zip(decayed, self.entered, strict=True)])
        self.memory = self.memory.sum(0)

    def write_delta(self) -> None:
        linear, head, self.memory = self.mechanism.linear, self.head, torch.zeros_like(self.memory)
        for j in self.entered:
            k, v, phi = self.key[j], self.value[j], self.features[j] / self.features[j].norm()
            beta = torch.sigmoid(k @ linear.write_weight[head] + linear.write_bias[head])
            memory = self.memory * torch.exp(-F.softplus(k @ linear.gate.weight[head] + linear.gate.bias[head]))
            self.memory = memory + beta * torch.outer(phi, v - memory.T @ phi)

    def answer(self, query: Tensor, h: int, i: int) -> Tensor:
        mechanism, linear = self.mechanism, self.mechanism.linear
        exact = sorted({*range(min(mechanism.config.num_sink_tokens, i + 1)), *self.hard, *range(self.left, i + 1)})
        weights = (mechanism.layer.scaling * self.key[exact] @ query).exp()
        summed, phi = weights @ self.value[exact], linear.maps[0].exact(query)
        if isinstance(linear, DeltanetMechanism):
            far = linear.output_scale[h] * self.memory.T @ (phi / phi.norm())
            far = far if self.entered else summed / weights.sum()
        else:
            factor = torch.exp(mechanism.log_mix[h] - linear.log_decay_rate[self.head].exp() * (i - self.left))
            far = (summed + factor * self.memory.T @ phi) / (weights.sum() + factor * phi @ self.total)
        return torch.lerp(summed / weights.sum(), far, torch.sigmoid(10 * mechanism.far_gate[h]))


def by_definition(mechanism, query: Tensor, key: Tensor, value: Tensor, given: Chosen | None = None):
    """Return the output [B, H, N, Dv] and the `Chosen`; `given` are taken in their place."""
    rows, chosen = [], {}
    groups = query.shape[1] // key.shape[1]
    for row in range(len(key)):
        for head in range(key.shape[1]):
            place = row, head
            own = Simulation(mechanism, head, key[place], value[place], None if given is None else given[place])
            outputs = []
            for i in range(key.shape[2]):
                if i % BLOCK == 0 and i // BLOCK > math.ceil((mechanism.config.window_size - 1) / BLOCK):
                    own.leave()
                shared = range(head * groups, (head + 1) * groups)
                outputs.append(torch.stack([own.answer(query[row, h, i], h, i) for h in shared]))
            rows.append(torch.stack(outputs, dim=1))
            chosen[place] = own.chosen
    return torch.stack(rows).unflatten(0, key.shape[:2]).flatten(1, 2), chosen


def trained(options: dict[str, Any]):
    """Return a mechanism whose parameters are not where they start, and its case."""
    case = Case("hybrid", "llama", True, options)
    mechanism = case.make()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return mechanism, case


@EACH
def test_equals_the_definition_in_one_call_in_pieces_and_in_steps(options):
    mechanism, case = trained(options)
    heads = case.heads(203)
    with torch.no_grad():
        want, chosen = by_definition(mechanism, *heads)
        states = []
        for sizes in ([203], [71, 1, 1, 64, 66], [1] * 203):
            outputs, state = [], None
            for parts in zip(*(x.split(sizes, 2) for x in heads), strict=True):
                output, state = mechanism(*parts, state=state)
                outputs.append(output)
            torch.testing.assert_close(torch.cat(outputs, 2), want, rtol=1e-9, atol=1e-9)
            states.append(state)
    last = torch.tensor([[chosen[row, head][-1] for head in range(2)] for row in range(2)])
    assert isinstance(states[0], HardKeyState)
    assert all(torch.equal(state.hard_position, last) for state in states)
    assert len(chosen[0, 0]) == 2 and chosen[0, 0] != chosen[1, 1]


@EACH
def test_gradients_are_those_of_the_definition_with_the_choice_held(options, monkeypatch):
    """Of blocks that are made again one by one."""
    monkeypatch.setattr(hard_keys, "chunks_at_once", lambda *_: 1)
    mechanism, case = trained(options)
    heads = [x.requires_grad_() for x in case.heads(201, batch=1)]
    parameters = [x for x in mechanism.parameters() if x.requires_grad]
    generator = torch.Generator().manual_seed(2)
    draw = lambda x: torch.randn(x.shape, dtype=x.dtype, generator=generator)  # noqa: E731
    output, _ = mechanism(*heads)
    weight = draw(output)
    gradients = torch.autograd.grad((output * weight).sum(), [*heads, *parameters])
    inputs, step = [*heads, *parameters], 1e-5
    with torch.no_grad():
        chosen = by_definition(mechanism, *heads)[1]
        directions = [draw(x) for x in inputs]
        sums = []
        for sign in (1, -2):  # from one side to the other
            for x, direction in zip(inputs, directions, strict=True):
                x.add_(direction, alpha=sign * step)
            sums.append((by_definition(mechanism, *heads, chosen)[0] * weight).sum())
    want = (sums[0] - sums[1]) / (2 * step)
    got = sum((x * direction).sum() for x, direction in zip(gradients, directions, strict=True))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@EACH
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_pass_blocks_that_are_made_again_and_states(options, padded, monkeypatch):
    """They are those of a call that is read at once, and so are their derivatives."""
    mechanism, case = trained(options)
    heads, mask = [x.requires_grad_() for x in case.heads(331)], torch.ones(2, 331, dtype=torch.bool)
    mask[1, 201:] = not padded
    inputs = [*heads, *(x for x in mechanism.parameters() if x.requires_grad)]

    def slopes(ends: list[int]) -> list[Tensor]:
        outputs, state = [], None
        for first, last in itertools.pairwise((0, *ends)):
            output, state = mechanism(*(x[:, :, first:last] for x in heads), mask[:, first:last], state=state)
            outputs.append(output)
        output = torch.cat(outputs, 2).mT.masked_fill(~mask[:, None, None], 0.0)
        loss = output.sin().sum() + state.kv.cos().sum() + (state.hard_key * state.hard_value).sum()
        gradients = torch.autograd.grad(loss, inputs, create_graph=not padded)
        again = [] if padded else torch.autograd.grad(sum(x.square().sum() for x in gradients), inputs)
        return [*gradients, *again]

    want = slopes([331])
    for most, ends in ((1, [331]), (2, [331]), (1, [131, 331]), (3, [190, *range(191, 201), 331])):
        monkeypatch.setattr(hard_keys, "chunks_at_once", lambda *_, most=most: most)
        for got, expected in zip(slopes(ends), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@EACH
@pytest.mark.parametrize("exact", [{"num_hard_keys": 200}, {"window_size": 200}], ids=str)
def test_as_many_hard_keys_as_tokens_are_softmax_attention(options, exact):
    case = Case("hybrid", "llama", True, {**options, **exact})
    query, key, value = case.heads(199)
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(case.make()(query, key, value)[0], want, rtol=1e-9, atol=1e-9)


@EACH
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_choose_and_decode_as_alone(options, side):
    """Then in a piece and in steps, in which a block of one row leaves and none of the other."""
    mechanism, case = trained(options)
    heads, pads = case.heads(205), 37
    mask = torch.ones(2, 130, dtype=torch.bool)
    mask[1, slice(0, pads) if side == "left" else slice(130 - pads, 130)] = False
    with torch.no_grad():
        outputs, state = [], None
        for number, parts in enumerate(zip(*(x.split([130, 40] + [1] * 35, 2) for x in heads), strict=True)):
            output, state = mechanism(*parts, None if number else mask, state=state)
            outputs.append(output)
        for row in range(2):
            real = torch.cat([mask[row], torch.ones(75, dtype=torch.bool)])
            want, alone = mechanism(*(x[row : row + 1, :, real] for x in heads))
            got = torch.cat(outputs, 2)[row : row + 1, :, real]
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
            assert torch.equal(state.hard_position[row], alone.hard_position[0])


def test_keys_lie_in_the_dtype_of_the_model_and_steps_choose_the_same():
    case = Case("hybrid", "llama", True, KERNEL)
    mechanism = case.make(torch.bfloat16)
    heads = case.heads(150, dtype=torch.bfloat16)
    with torch.no_grad():
        _, whole = mechanism(*heads)
        state = None
        for parts in zip(*(x.split(1, 2) for x in heads), strict=True):
            _, state = mechanism(*parts, state=state)
    assert {x.dtype for x in (*whole[:4], whole.hard_key, whole.hard_value)} == {torch.bfloat16}
    assert whole.kv.dtype == torch.float32
    for name in ("hard_position", "hard_key", "hard_value", "ring_key"):
        assert torch.equal(getattr(whole, name), getattr(state, name)), name


def test_a_key_whose_value_no_other_has_is_kept_and_the_first_of_equals_are():
    """All others are recalled without an error; where the state is empty all errors are 1, and the first are kept."""
    options = {"linear": "linear", "window_size": 5, "num_sink_tokens": 0, "num_hard_keys": 2}
    case = Case("hybrid", "llama", True, options)
    query, key, value = case.heads(64 * 4 + 5)
    value[:] = torch.arange(1.0, 9.0, dtype=torch.float64)
    value[0, 1, 150] = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    _, state = case.make()(query, key, value)
    assert 150 in state.hard_position[0, 1] and 150 not in state.hard_position[1]
    _, first = case.make()(*(x[:, :, :129] for x in (query, key, value)))
    assert first.hard_position.flatten(0, 1).tolist() == [[0, 1]] * 4


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("error", ["relative", "absolute"])
def test_steps_through_a_model_choose_as_a_prompt_does_where_tokens_repeat(error, backend):
    """Projections of a prompt and of a token are rounded apart, so equal tokens are recalled equally but for that."""
    options = {**SIZES, "linear": "gated_deltanet", "recall_error": error}
    model = set_backend(patch_model(make_model("llama", std=0.4), "hybrid", **options), backend)
    ids = make_tokens(1, 7, seed=3).repeat(1, 40)
    with torch.no_grad():
        whole, out, steps = model(ids, use_cache=False).logits, None, []
        for i in range(ids.shape[1]):
            out = model(ids[:, i : i + 1], past_key_values=out and out.past_key_values, use_cache=True)
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("hard", "window"), [(0, 9), (6, 9), (64, 70), (253, 64)])
def test_the_length_up_to_which_it_equals_softmax(hard, window):
    linear = "deltanet" if not hard else "hedgehog"
    options = {"linear": linear, **SIZES, "window_size": window, "num_hard_keys": hard}
    case = Case("hybrid", "llama", True, options)
    mechanism = case.make(torch.float64)
    longest = mechanism.limit.window(mechanism.config)
    heads = case.heads(longest + BLOCK, batch=1)
    query, key, value = heads
    output = mechanism(*heads)[0]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    softmax = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=mechanism.layer.scaling)
    differs = (output - softmax).abs().amax((0, 1, 3)) > 1e-9
    assert not differs[:longest].any() and differs[longest]


def test_a_displaced_key_enters_the_state():
    """What is in the window, in the state or a hard key adds up to all that was read, wherever the blocks end."""
    case = Case("hybrid", "llama", True, {"linear": "linear", "window_size": 9, "num_hard_keys": 11})
    mechanism, heads = case.make(), case.heads(300)
    for length in (9, 64, 128, 129, 201, 299):
        _, state = mechanism(*(x[:, :, :length] for x in heads))
        left = max(0, (length - 1) // BLOCK - 1) * BLOCK
        assert (state.hard_position >= 0).sum(-1).eq(min(11, max(0, left - 4))).all()
        features = mechanism.linear.maps[1].exact(heads[1][:, :, 4:left]).sum(2) if left else 0
        for row in range(2):
            for head in range(2):
                hard = state.hard_position[row, head][state.hard_position[row, head] >= 0]
                kept = mechanism.linear.maps[1].exact(heads[1][row, head, hard]).sum(0)
                want = features[row, head] - kept if left else torch.zeros_like(kept)
                torch.testing.assert_close(state.kv[row, head, :, -1], want, rtol=1e-9, atol=1e-9)


def test_other_backends_say_why_they_do_not_compute_it():
    for options, reason in ((KERNEL, "hard keys"), ({**DELTA, "num_hard_keys": 0}, "a state by the delta rule")):
        case = Case("hybrid", "llama", True, options)
        mechanism = case.make(torch.float32)
        for backend, name in (("auto", "cpu"), ("compile", "compile"), ("triton", "triton")):
            mechanism.backend = backend
            with recording() as decisions:
                mechanism(*case.heads(80, dtype=torch.float32))
            (decision,) = [x for x in decisions if x.operation == "hybrid"]
            assert decision.backend == ("torch" if name == "triton" else "cpu")
            assert name == "cpu" or decision.passed_over[name] == reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hard_keys": -1}, "num_hard_keys must be an integer >= 0, got -1"),
        ({"num_hard_keys": 2.0}, "num_hard_keys must be an integer >= 0, got 2.0"),
        ({"recall_error": "squared"}, "recall_error must be 'relative' or 'absolute', got 'squared'"),
        ({"linear": "deltanet", "initial_share": 1}, "initial_share must be below 1 beside 'deltanet'.*got 1"),
        ({"linear": "deltanet", "window_scale": "maximum"}, "window_scale must be 'exact' beside 'deltanet', got"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(OptionError, match=message):
        make_config("hybrid", options)


def test_gated_deltanet_is_a_state_whose_keys_enter_by_their_positions():
    options = {**SIZES, "linear": "gated_deltanet", "linear_options": {"expand_key": 2, "beta_range": 2}}
    mechanism, case = trained(options)
    query, key, value = case.heads(203)
    with torch.no_grad():
        want = reference.attend(mechanism.attention_matrix(query, key, value=value), value)
        outputs, state = [], None
        for parts in zip(*(x.split([130, 1, 1, 71], 2) for x in (query, key, value)), strict=True):
            output, state = mechanism(*parts, state=state)
            outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 2), want, rtol=1e-9, atol=1e-9)
    with pytest.raises(UnsupportedModeError, match="has conv_size, with which 'gated_deltanet'"):
        Case("hybrid", "llama", True, {"linear": "gated_deltanet", "linear_options": {"conv_size": 3}}).make()


@pytest.mark.parametrize("linear", ["deltanet", "gated_deltanet"])
def test_the_matrix_of_a_delta_rule_without_hard_keys_needs_no_values(linear):
    mechanism, case = trained({**SIZES, "linear": linear, "num_hard_keys": 0})
    query, key, value = case.heads(139)  # the first block has left the window
    with torch.no_grad():
        matrix = mechanism.attention_matrix(query, key)
        want, _ = mechanism(query, key, value)
    torch.testing.assert_close(reference.attend(matrix, value), want, rtol=1e-9, atol=1e-9)


def test_forms_that_cannot_be_are_refused():
    with pytest.raises(UnsupportedModeError, match=r"num_hard_keys=3 are chosen as a sequence goes on.*bidirectional"):
        Case("hybrid", "bert", False, {"num_hard_keys": 3}).make()
    mechanism, case = trained(KERNEL)
    with pytest.raises(UnsupportedModeError, match=r"pass value=\.\.\. to attention_matrix"):
        mechanism.attention_matrix(*case.heads(5)[:2])


@pytest.mark.parametrize("linear", ["hedgehog", "performer", "gated_deltanet"])
def test_the_operations_of_a_training_step_are_counted(linear):
    """The counter hooks into what maps are given, also where keys are chosen without gradients."""
    model = patch_model(make_model("llama"), "hybrid", window_size=9, num_hard_keys=4, linear=linear).train()
    ids = make_tokens(2, 200)
    assert flops_of(lambda: model(input_ids=ids, labels=ids).loss.backward()) > 0
