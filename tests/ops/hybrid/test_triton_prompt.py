"""A prompt of `hybrid` by Triton without gradients, padded in any way, against the formula in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linattn.backends import use_backend
from hf_linattn.ops.hybrid import triton_prompt
from hf_linattn.ops.window import triton_decode
from tests.ops.hybrid import test_triton_decode as steps
from tests.ops.hybrid.test_triton_decode import CASES, PERFORMER, make

BATCH, LENGTH, GROUPS = 3, 43, 2
NUMBER = torch.arange(LENGTH)
FIRST, COUNT = torch.tensor([[5], [0], [30]]), torch.tensor([[36], [0], [1]])
HOLES = torch.ones(BATCH, LENGTH, dtype=torch.bool)
HOLES[0, 7], HOLES[1, 30:35], HOLES[2] = False, False, NUMBER % 3 > 0
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2}
MASKS: dict[str, Tensor | None] = {
    "whole": None,
    "left": torch.tensor([[0], [9], [37]]) <= NUMBER,
    "right": torch.tensor([[LENGTH], [31], [2]]) > NUMBER,
    "both, and no token": (FIRST <= NUMBER) & (NUMBER < FIRST + COUNT),
    "holes": HOLES,
}
PROMPTS = {x: options for x, options in CASES.items() if options.get("window_scale") != "maximum"}
PROMPTS["a map by PyTorch"] = {"window_size": 4, "num_sink_tokens": 1, "linear": "taylor"}
PROMPTS["wide"] = {"window_size": 20, "num_sink_tokens": 3, "sink_logit": "learned", **PERFORMER}


@pytest.fixture(autouse=True)
def small(small_tiles, monkeypatch):
    """Several segments, tiles of queries, keys and what is copied, all with a rest; heads of several numbers."""
    monkeypatch.setattr(triton_decode, "COPIED", 64)
    monkeypatch.setattr(steps, "BATCH", BATCH)


@pytest.fixture
def prompts(monkeypatch) -> list[tuple[bool, bool]]:
    """Of each prompt that kernels read, whether rows end earlier, and begin further on."""
    found, own = [], triton_prompt.attend

    def attend(call: Any) -> Any:
        found.append((call.lengths is not None, call.starts is not None))
        return own(call)

    monkeypatch.setattr(triton_prompt, "attend", attend)
    return found


def check(mechanism: Any, heads: list[Tensor], mask: Tensor | None, tolerance: float) -> None:
    """Outputs, the state, and a token more are what the formula says, and PyTorch remembers; pads get zero."""
    length = heads[0].shape[2] - 1
    real = torch.ones(BATCH, length + 1, dtype=torch.bool)
    if mask is not None:
        real[:, :-1] = mask
    exact, wide = copy.deepcopy(mechanism).double(), [x.double() for x in heads]
    use_backend(exact, "torch")
    want = exact.attention_matrix(*wide[:2], real) @ wide[2].repeat_interleave(GROUPS, dim=1)
    use_backend(mechanism, "triton")
    output, state = mechanism(*(x[:, :, :-1] for x in heads), mask)
    _, known = exact(*(x[:, :, :-1] for x in wide), mask)
    assert output.dtype == heads[2].dtype
    token, _ = mechanism(*(x[:, :, -1:] for x in heads), state=state)
    shown = real[:, None, :, None]
    got = torch.cat([output, token], dim=2).double()
    assert not got.masked_select(~shown).any()
    assert ((got - want) * shown).abs().max() < tolerance * (want * shown).abs().max()
    for name in ("ring_key", "ring_value", "sink_key", "sink_value", "length"):
        assert torch.equal(getattr(state, name), getattr(known, name).to(getattr(state, name).dtype)), name
    assert state.ring_key.dtype == heads[1].dtype and state.length.dtype == torch.long
    got, want = (x.kv.double() * x.log_max.double().exp()[..., None, None] for x in (state, known))
    assert (got - want).norm() <= 3 * tolerance * want.norm()


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("case", PROMPTS)
@torch.no_grad()
def test_prompts_are_what_the_formula_says(prompts, case, padding, kind):
    """In every padding; kernels read rows that stand side by side where they lie."""
    mask = MASKS[padding]
    check(make(**PROMPTS[case]).to(kind), steps.make_heads(LENGTH + 1, kind), mask, TOLERANCES[kind])
    assert prompts == [(mask is not None, mask is not None and padding != "holes")]


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("padding", MASKS)
@torch.no_grad()
def test_prompts_no_longer_than_window_and_sinks(prompts, padding, length):
    """Of no far key, and of one that leaves the window as the next token comes."""
    mask = MASKS[padding]
    check(make(**PROMPTS["decay"]), steps.make_heads(length + 1), mask if mask is None else mask[:, :length], 1e-5)
    assert len(prompts) == 1


@pytest.mark.parametrize("part", [0, 1])
@torch.no_grad()
def test_what_is_no_number_shows_where_it_is_seen(prompts, part):
    """In its own query, or in all from its own on, as a near key and as a far one."""
    mechanism, heads = make(**PROMPTS["hedgehog"]), steps.make_heads(LENGTH)
    use_backend(mechanism, "triton")
    heads[part][:, :, 9] = torch.nan
    finite = mechanism(*heads)[0].isfinite().all(-1)
    assert torch.equal(finite, ((NUMBER < 9) | ((NUMBER > 9) & (part == 0))).expand_as(finite))
    assert prompts == [(False, False)]
