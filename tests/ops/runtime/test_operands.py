"""Operands that do not fit are refused before the C has seen them; those that do are read inside their bounds.

Built with sanitizers (`make test-asan`) this is a search for what is read or written anywhere else: FUZZ_CALLS says
how many calls of the C, right ones and wrong ones, there are.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hf_linattn import OperandError
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer
from hf_linattn.ops.block_softmax.cpu import block_softmax
from hf_linattn.ops.runtime import cpu as library
from hf_linattn.ops.runtime import operands
from tests.ops.exact_operands import ExactOperands, exact

CALLS = int(os.environ.get("FUZZ_CALLS", "300"))
MISFITS_OF_A_CALL = 4
NAMES = (
    "linear", "performer", "hedgehog", "t2r", "learned_exp", "retention", "gla", "hybrid", "local", "bigbird",
    "linformer", "lsh", "streaming", "hard keys", "hard keys by the delta rule",
)  # fmt: skip
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {  # of what is no name of a mechanism
    "hard keys": ("hybrid", {"window_size": 9, "num_hard_keys": 70}),
    "hard keys by the delta rule": ("hybrid", {"linear": "gated_deltanet", "window_size": 9, "num_hard_keys": 5}),
}

sizes = st.tuples(
    st.integers(1, 3), st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 1)]), st.sampled_from([1, 2, 7, 33, 65, 130, 600]),
    st.sampled_from([2, 8, 16, 20]), st.sampled_from([1, 4, 16, 20]),
)  # fmt: skip
CHANGES = {
    "a row less": lambda x, dim: x.narrow(dim, 0, x.shape[dim] - 1),
    "one alone": lambda x, dim: x.narrow(dim, 0, 1),
    "a row more": lambda x, dim: torch.cat([x, x.narrow(dim, 0, 1)], dim),
    "double": lambda x, _: x.double() if x.is_floating_point() else x.float(),
    "half": lambda x, _: x.half() if x.is_floating_point() else x.short(),
    "a dimension less": lambda x, dim: x.select(dim, 0),
    "a dimension more": lambda x, dim: x.unsqueeze(dim),
    "strided": lambda x, dim: torch.stack([x, x], -1)[..., 0],
    "turned": lambda x, dim: x.transpose(dim, -1),
    "shared rows": lambda x, dim: x.narrow(dim, 0, 1).expand_as(x),
    "absent": lambda x, dim: None,
    "numbers too large": lambda x, dim: x + 1000 if not x.is_floating_point() else x.narrow(dim, 0, 0),
    "numbers below zero": lambda x, dim: x - 1000 if not x.is_floating_point() else x.mT if x.dim() > 1 else x[:0],
}


def try_misfits(generator: torch.Generator, found: set[str]):
    """Return what calls the same operation with one wrong operand, several times, on copies."""

    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    def attempt(func: Any, args: list[Any], names: list[str]) -> None:
        places = [place for place, x in enumerate(args) if isinstance(x, torch.Tensor) and x.dim() and x.numel()]
        for _ in range(MISFITS_OF_A_CALL if places else 0):
            place, change = places[draw(len(places))], list(CHANGES)[draw(len(CHANGES))]
            wrong = [exact(x) for x in args]
            changed = CHANGES[change](wrong[place], draw(wrong[place].dim()))
            wrong[place] = changed if changed is None else exact(changed)
            try:
                func(*wrong)
            except OperandError as error:
                found.add(f"{func._schema.name} {names[place]}")
                assert func._schema.name.removeprefix("hf_linattn::").removesuffix("_forward") in str(error)
            except RuntimeError as error:  # PyTorch knows that an operand must be there
                assert changed is None, (change, names[place], error)

    return attempt


def run(name: str, scenario: tuple[Any, ...], masked: bool, packed: bool, causal: bool, seed: int, mode) -> None:
    """A forward and a backward pass, then a step, of a small mechanism."""
    batch, (heads, shared), length, dim, value_dim = scenario
    name, options = OPTIONS.get(name, (name, {}))
    if (mode_name := "causal" if causal else "bidirectional") not in MECHANISMS.get(name).modes:
        raise AssertionError(mode_name)
    layer = AttentionLayer(0, heads, shared, dim, causal, dim**-0.5, torch.device("cpu"), torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mechanism = MECHANISMS.get(name)(make_config(name, options), layer)
        shapes = ((heads, dim), (shared, dim), (shared, value_dim))
        round_to = 16 if seed % 2 else 1  # or heads are the first columns of rows as wide as the C reads them
        rows = [torch.randn(batch, length, count, -(-width // round_to) * round_to) for count, width in shapes]
        call = [x[..., :width].transpose(1, 2).requires_grad_() for x, (_, width) in zip(rows, shapes, strict=True)]
        mask = torch.rand(batch, length) > 0.3 if masked else None
    ids = (torch.arange(length)[None] // 17).expand(batch, -1) if packed else None
    with mode:
        output, _ = mechanism(*call, mask, ids)
        output.square().sum().backward()
        if not causal:
            return
        mechanism.eval()
        with torch.no_grad():
            _, state = mechanism(*(x.detach() for x in call), mask, ids)
            mechanism(*(x.detach()[:, :, :1] for x in call), None, None, state)


def test_calls_stay_inside_their_operands():
    found: set[str] = set()
    mode = ExactOperands()
    counted = [0]

    @settings(
        max_examples=max(CALLS // 5, 10), deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(NAMES), sizes, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2**30))
    @example("local", (1, (1, 1), 192, 24, 40), False, False, True, 1)  # whole blocks of keys that lie so
    @example("hard keys", (2, (4, 2), 130, 16, 20), False, False, True, 1)  # few lengths have a block that leaves
    @example("hard keys by the delta rule", (1, (3, 3), 192, 8, 4), True, False, True, 2)
    def search(name, scenario, masked, packed, causal, seed):
        causal = causal or name in OPTIONS or "bidirectional" not in MECHANISMS.get(name).modes
        if counted[0] >= CALLS:
            return
        mode.before = try_misfits(torch.Generator().manual_seed(seed), found)
        run(name, scenario, masked, packed, causal, seed, mode)
        counted[0] = mode.calls * (1 + MISFITS_OF_A_CALL)

    with library.KEPT.paused():
        search()
    assert counted[0] >= min(CALLS, 200)
    assert len(found) > 20 and any("hard_keys" in name for name in found), found


@pytest.mark.parametrize("function", operands.FORMS)
def test_every_function_refuses_what_is_missing_and_what_is_of_another_dtype(function):
    with pytest.raises(OperandError, match=f"{function}: there is no '"):
        library.check_operands(function, {}, ())
    for name, form in operands.FORMS[function].items():
        given = dict.fromkeys(operands.FORMS[function])
        given |= {x: torch.empty(0) for x, own in operands.FORMS[function].items() if x not in operands.OPTIONAL}
        if name in operands.OPTIONAL:
            continue
        with pytest.raises(OperandError, match=function):
            library.check_operands(function, given | {name: torch.zeros([2] * len(form.dims), dtype=torch.bool)}, ())


def test_no_call_passes_the_check(monkeypatch):
    monkeypatch.setattr(library, "check_operands", lambda *_: (_ for _ in ()).throw(OperandError("seen")))
    for name in ("linear", "local", "lsh"):
        layer = AttentionLayer(0, 2, 2, 8, True, 0.35, torch.device("cpu"), torch.float32)
        with pytest.raises(OperandError, match="seen"):
            MECHANISMS.get(name)(make_config(name, {}), layer)(*torch.randn(3, 2, 2, 70, 8))


@pytest.mark.parametrize("name", ["query_weight", "key_weight"])
def test_weights_with_fewer_columns_than_are_read_are_refused(monkeypatch, name):
    """They are read in whole vectors of columns."""
    calls, check = [], library.check_operands
    monkeypatch.setattr(library, "check_operands", lambda *call: calls.append(call) or check(*call))
    layer = AttentionLayer(0, 2, 2, 8, True, 0.35, torch.device("cpu"), torch.float32)
    MECHANISMS.get("performer")(make_config("performer", {"num_features": 20}), layer)(*torch.randn(3, 2, 2, 70, 8))
    function, given, sizes = next(call for call in calls if call[1].get(name) is not None)
    check(function, given, sizes)
    with pytest.raises(OperandError, match=name):
        check(function, {**given, name: given[name][..., :-1]}, sizes)


def test_numbers_that_the_c_cannot_count_with_are_named():
    query, key = torch.randn(1, 2, 1, 64, 16), torch.randn(1, 2, 64, 16)
    out, log, table = torch.full_like(query, 7.0), torch.zeros(1, 2, 1, 64), torch.full((1, 1, 1), 2**40)
    with pytest.raises(OperandError, match="block_softmax: 'table' has numbers that are no 32-bit ones"):
        block_softmax(
            query, key, key, out, log, None, None, 0, key[:, :, :0], key[:, :, :0], None, table, 0, 64, 0.3, True
        )
    assert (out == 7).all() and not log.any()
