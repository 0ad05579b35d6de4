"""A step of decoding in a static cache, compiled by Inductor; `tests/test_static_cache.py` counts the graphs."""

from __future__ import annotations

import pytest
import torch
from transformers import CompileConfig

from tests.helpers import assert_close, generate
from tests.test_static_cache import PADDED, PLANS, make_planned


@pytest.mark.slow  # the C++ compiler
@pytest.mark.parametrize("plan", PLANS)
def test_the_compiled_graph_of_a_step_says_the_same(plan):
    model, (ids, mask) = make_planned(plan), PADDED
    want = generate(model, ids, attention_mask=mask)
    torch.compiler.reset()
    config = CompileConfig(mode="default", fullgraph=True)
    config._compile_all_devices = True
    got = generate(model, ids, attention_mask=mask, cache_implementation="static", compile_config=config)
    assert torch.equal(got[0], want[0])
    assert_close(got[1], want[1])
