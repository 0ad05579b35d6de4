"""PyTorch's default device and dtype are the user's: nothing that a mechanism computes depends on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hf_linattn import list_mechanisms
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.ops.linear.attention_distance import matching_decay_rate
from hf_linattn.testing import Case

ARCHITECTURES = {"causal": "llama", "bidirectional": "llama", "cross": "whisper"}
FURTHER = {
    ("causal", "hybrid"): {"num_hard_keys": 3, "window_size": 65},
    ("causal", "learned_sparse"): {"block_size": 8, "reach": 4, "top_blocks": 2},
    ("cross", "local"): {"window_size": 5, "keys_per_query": 1.3},
}
OF_THE_SEED = {"linear": {"decay": "learned"}, "synthesizer": {"max_length": 16}}
CASES = [
    (mode, name, options)
    for mode in ARCHITECTURES
    for name in list_mechanisms()
    if mode in MECHANISMS.get(name).modes
    for options in ({}, FURTHER.get((mode, name)))
    if options is not None
]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# a tensor on the meta device that is read, or meets another one, is an error
OTHER_DEFAULTS = {"device": lambda: torch.device("meta"), "dtype": lambda: default_dtype(torch.bfloat16)}


@pytest.mark.parametrize(("mode", "name", "options"), CASES, ids=lambda x: x if isinstance(x, str) else len(x))
@torch.no_grad()
def test_outputs_are_those_with_other_defaults(mode, name, options):
    case, length = Case(name, ARCHITECTURES[mode], mode == "causal", options), 300 if options else 45
    mechanism, heads = case.make(torch.float32).eval(), case.heads(length, dtype=torch.float32)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :17] = False
    calls = [(*heads, mask)]
    calls += [] if mode == "cross" else [(*heads, None, torch.arange(length)[None].expand(2, -1) // 23)]
    for call in calls:
        want, _ = mechanism(*call)
        for other in OTHER_DEFAULTS.values():
            with other():
                got, _ = mechanism(*call)
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", list_mechanisms())
def test_parameters_and_buffers_are_made_on_a_cpu(name):
    mode = min(MECHANISMS.get(name).modes)
    case = Case(name, ARCHITECTURES[mode], mode == "causal")
    case.make()  # and the model that it is made for
    with torch.device("meta"):
        mechanism = case.make()
    assert not any(x.is_meta for x in (*mechanism.parameters(), *mechanism.buffers()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list_mechanisms())
def test_parameters_and_buffers_are_those_with_another_default_dtype(name, dtype):
    mode = min(MECHANISMS.get(name).modes)
    case = Case(name, ARCHITECTURES[mode], mode == "causal", OF_THE_SEED.get(name, {}))
    want = case.make(dtype).state_dict()
    with default_dtype(dtype):
        got = case.make(dtype).state_dict()
    digits = 1e-6 if dtype == torch.float64 else 0.0  # of numbers that were float32 before
    torch.testing.assert_close(got, want, rtol=digits, atol=digits)


@torch.no_grad()
def test_rates_fitted_to_long_rows_do_not_depend_on_the_default_dtype():
    query, key = torch.randn(2, 1, 2, 999, 8)
    want = matching_decay_rate(query, key, 1.0, True)
    with default_dtype(torch.bfloat16):
        assert torch.equal(matching_decay_rate(query, key, 1.0, True), want)
