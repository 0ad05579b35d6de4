"""The invariants catch what other libraries got wrong: each fault below is one that was found in the wild."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import pytest
import torch
from rich.console import Console
from torch.autograd.gradcheck import GradcheckError

from hf_linattn import OptionError, UnknownNameError, UnsupportedModeError
from hf_linattn.config import MechanismConfig
from hf_linattn.mechanisms import MECHANISMS, ExactnessLimit, Mechanism
from hf_linattn.mechanisms.linear import LinearConfig, LinearMechanism
from hf_linattn.ops import reference
from hf_linattn.ops.linear.interface import Features, causal_linear_attention
from hf_linattn.ops.linear.types import LinearState
from hf_linattn.testing import (
    CROSS_INVARIANTS,
    INVARIANTS,
    Case,
    InvariantError,
    Report,
    check_mechanism,
    checks_of,
)
from hf_linattn.testing.expectations import InvariantError as SameError
from hf_linattn.testing.expectations import expect_close
from tests.helpers import ask_only


class PaddingInValuesOnly(LinearMechanism):
    """Zeroes the values of masked keys and leaves the keys in the normaliser."""

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        if key_padding_mask is not None:
            value = value * key_padding_mask[:, None, :, None]
        return super().causal_attention(query, key, value, None, sequence_ids, state)


class MaximumOverAllPositions(LinearMechanism):
    """Shifts the keys by their maximum over all positions and adds an epsilon, which does not cancel."""

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        top = key.amax((2, 3), keepdim=True)

        def key_map(x):
            return Features((x - top).exp() + 1e-4)

        def query_map(x):
            return Features(x.exp() + 1e-4)

        return causal_linear_attention(query, key, value, query_map, key_map, key_padding_mask, sequence_ids, state)


class ForgetsTheState(LinearMechanism):
    """Decodes from the current tokens only."""

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        return super().causal_attention(query, key, value, key_padding_mask, sequence_ids, None)


class IgnoresPacking(LinearMechanism):
    """Lets packed documents see each other."""

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        return super().causal_attention(query, key, value, key_padding_mask, None, state)


class MixesTheBatch(LinearMechanism):
    """Scales by a maximum over the whole batch, as a pseudo-inverse with one norm for all does."""

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        return super().causal_attention(query, key / key.abs().amax(), value, key_padding_mask, sequence_ids, state)


class SeedsTheGlobalGenerator(LinearMechanism):
    """Resets the random state of the whole process."""

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        torch.manual_seed(12345)
        return super().causal_attention(query, key, value, key_padding_mask, sequence_ids, state)


class NotSaved(LinearMechanism):
    """Random features that are no buffers."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.random = float(torch.rand((), device="cpu"))

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        return super().causal_attention(query * self.random, key, value, key_padding_mask, sequence_ids, state)


class Quadratic(LinearMechanism):
    """Right, but by way of the N x N matrix."""

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        _, state = super().causal_attention(query, key, value, key_padding_mask, sequence_ids, state)
        return reference.attend(self.attention_matrix(query, key, key_padding_mask, sequence_ids), value), state


class HalfPrecisionState(LinearMechanism):
    """Accumulates in the model's precision, where sums overflow."""

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        output, state = super().causal_attention(
            (query * 1e4).half().float(), (key * 1e5).half().float(), value, key_padding_mask, sequence_ids, state
        )
        return output, LinearState(state.kv.half().float(), state.log_max)


FAULTS = {
    PaddingInValuesOnly: "2 padding",
    MaximumOverAllPositions: "1 causality",
    ForgetsTheState: "4 decoding",
    IgnoresPacking: "5 packing",
    MixesTheBatch: "3 batch independence",
    SeedsTheGlobalGenerator: "6 determinism",
    NotSaved: "7 save and undo",
    Quadratic: "11 linear cost",
    HalfPrecisionState: "10 finite",
}


@pytest.fixture
def registered(monkeypatch):
    """Register a mechanism for the time of a test."""
    MECHANISMS.names()

    def enter(mechanism: type[Mechanism]) -> str:
        name = mechanism.__name__
        config = dataclass(type(f"{name}Config", (LinearConfig,), {"mechanism": name}))
        monkeypatch.setattr(mechanism, "config_class", config, raising=False)
        monkeypatch.setitem(MECHANISMS._entries, name, mechanism)
        return name

    return enter


@pytest.mark.covering(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_known_fault_is_caught(registered, fault, architecture):
    case = Case(registered(fault), architecture, causal=True)
    with pytest.raises(InvariantError):
        INVARIANTS[FAULTS[fault]](case)


def test_the_sound_parent_of_these_faults_passes_the_same_invariants():
    for name in FAULTS.values():
        INVARIANTS[name](Case("linear", "gpt2", causal=True))


def test_a_false_claim_about_the_exactness_limit_is_caught(registered, monkeypatch):
    class Boastful(LinearMechanism):
        limit = ExactnessLimit("softmax attention, it says", equal=lambda length: {})

    with pytest.raises(InvariantError, match="exactness limit"):
        INVARIANTS["8 exactness limit"](Case(registered(Boastful), "gpt2", causal=True))


class Detached(LinearMechanism):
    """Sends no gradient to the keys."""

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        return super().causal_attention(query, key.detach(), value, key_padding_mask, sequence_ids, state)


class HalfTheGradient(LinearMechanism):
    """Sends half of the gradient to the keys."""

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        key = torch.lerp(key, key.detach(), 0.5)
        return super().causal_attention(query, key, value, key_padding_mask, sequence_ids, state)


@pytest.mark.parametrize(
    ("fault", "message"),
    [(Detached, "output does not depend on key at all"), (HalfTheGradient, "gradient of k against the reference")],
)
def test_a_wrong_gradient_is_caught(registered, fault, message):
    with pytest.raises(InvariantError, match=message):
        INVARIANTS["9 reference"](Case(registered(fault), "gpt2", causal=True))


def test_gradients_that_small_differences_deny_are_caught(registered, monkeypatch):
    def deny(*_, **__):
        raise GradcheckError("Jacobian mismatch")

    monkeypatch.setattr(torch.autograd, "gradcheck", deny)
    for architecture, invariants in (("gpt2", INVARIANTS), ("bart", CROSS_INVARIANTS)):
        with pytest.raises(InvariantError, match="gradcheck: Jacobian mismatch"):
            invariants["9 reference"](Case("linear", architecture, causal=False))


class Raises(LinearMechanism):
    """Fails in its own code."""

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        return [][1]


def test_what_a_mechanism_raises_is_the_error_of_its_check_and_the_others_are_made(registered, monkeypatch):
    ask_only(monkeypatch, "1 causality", "2 padding")
    report = check_mechanism(registered(Raises), ["gpt2"])
    errors = {(check.invariant, check.case.mode): check.error for check in report.checks}
    raised = "IndexError: list index out of range"
    assert errors == {
        ("1 causality", "causal"): raised, ("2 padding", "causal"): raised, ("2 padding", "bidirectional"): None,
    }
    with pytest.raises(IndexError):
        report.failures[0].run()


def test_costs_are_those_of_a_mechanism_as_it_is_now(registered):
    class Redefined(LinearMechanism):
        pass

    case = Case(registered(Redefined), "gpt2", causal=True)
    INVARIANTS["11 linear cost"](case)

    class Slower(LinearMechanism):
        def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
            for part in query.split(64, 2):
                part @ key.transpose(-1, -2)
            return super().causal_attention(query, key, value, key_padding_mask, sequence_ids, state)

    Slower.__name__ = "Redefined"
    registered(Slower)
    with pytest.raises(InvariantError, match=r"FLOPs grew from [0-9,]+ to [0-9,]+ when"):
        INVARIANTS["11 linear cost"](case)


def test_check_mechanism_reports_every_check_and_names_the_failures(registered):
    name = registered(ForgetsTheState)
    report = check_mechanism(name, architectures=["gpt2"])
    failed = {(check.invariant, check.case.mode) for check in report.failures}
    assert ("4 decoding", "causal") in failed
    assert all(mode == "causal" for _, mode in failed)
    assert len(report.checks) == 2 * len(INVARIANTS) - 2  # causality and decoding exist in one mode only
    assert report.table().row_count == len(INVARIANTS)
    assert check_mechanism(MECHANISMS.get(name), architectures=[]).checks == []


class StatesNothing(LinearMechanism):
    """Says neither what it is equal to nor that it is cheap, and has a form of one kind."""

    limit = Mechanism.limit
    subquadratic = False
    modes = frozenset({"bidirectional", "cross"})


@pytest.mark.parametrize("architecture", ["gpt2", "bart"])
def test_the_table_says_where_nothing_was_asked(registered, monkeypatch, architecture):
    asked, asks_nothing = "3 batch independence", ["8 exactness limit", "11 linear cost"]
    ask_only(monkeypatch, asked, *asks_nothing)
    report = check_mechanism(registered(StatesNothing), [architecture])
    names, results = (list(column.cells) for column in report.table().columns)
    assert report.failures == []
    assert dict(zip(names, results, strict=True)) == {asked: "holds"} | dict.fromkeys(asks_nothing, "nothing to check")


def test_a_table_of_80_columns_cuts_no_name():
    report = Report(checks_of("linear"))
    report.checks[0].error = error = "unbrokenwordofanerror" * 2
    console = Console(file=io.StringIO(), width=80)
    console.print(report.table())
    shown = console.file.getvalue()
    assert "…" not in shown and all(f" {name} " in shown for name in INVARIANTS)
    column = [line.split("│")[1 + 1].strip() for line in shown.splitlines() if "│" in line]
    assert error in "".join(column)


@pytest.mark.parametrize(
    ("architectures", "options", "error", "message"),
    [
        (["mistral", "phi3"], {}, UnsupportedModeError, "that mistral, phi3 could ask for: .*bidirectional, cross;"),
        (["bert", "brt"], {}, UnknownNameError, "unknown architecture 'brt'; did you mean bert or bart"),
        (["bert"], {"decai": "learned"}, OptionError, "no option 'decai'; did you mean decay"),
    ],
)
def test_what_leaves_nothing_to_check_is_refused(registered, architectures, options, error, message):
    with pytest.raises(error, match=message):
        check_mechanism(registered(StatesNothing), architectures, **options)


@pytest.mark.parametrize("name", ["2 padding", "4 decoding", "9 reference", "11 linear cost"])
def test_what_reads_the_input_of_a_layer_is_given_one(name):
    checks = checks_of("gated_deltanet", ["llama"], gate_input="hidden", output_gate=True)
    next(check for check in checks if check.invariant == name).run()


def test_modes_that_options_leave_out_are_not_checked():
    checks = checks_of("hybrid", ["llama"], num_hard_keys=5, window_size=2)
    assert checks and {check.case.mode for check in checks} == {"causal"}


@pytest.mark.parametrize("parent", [LinearMechanism, Mechanism])
def test_a_class_that_is_not_registered_is_refused_in_place_of_its_parent_checked(parent):
    with pytest.raises(OptionError, match=r"mechanism must be .*@register_mechanism\(name\).*Unregistered"):
        check_mechanism(type("Unregistered", (parent,), {}), ["gpt2"])


def test_invariant_errors_are_assertion_errors():
    assert issubclass(InvariantError, AssertionError) and InvariantError is SameError
    assert MechanismConfig.mechanism == ""


@pytest.mark.parametrize(("got", "want"), [(math.inf, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_nothing_is_close_to_what_is_not_finite(got, want):
    with pytest.raises(InvariantError, match="not finite"):
        expect_close(torch.tensor([got, 2.0]), torch.tensor([want, 2.0]), "output against the reference")
