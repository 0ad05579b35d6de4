"""How many heads a plan keeps: a share, a number, or as many as fit into a number of bytes."""

from __future__ import annotations

import json
import re

import pytest
import torch

from hf_linattn import OptionError, UnsupportedModeError, choose_plan, patch_model
from hf_linattn.cache import state_bytes
from hf_linattn.ops.common.growing import SPARE
from hf_linattn.plan_search import SEARCHES
from hf_linattn.plan_search.options import SearchOptions
from tests.helpers import make_tokens
from tests.models import make_model
from tests.plan_search.retriever import WINDOW, choose, make_retriever


@pytest.mark.parametrize(
    ("keep", "unit", "count"),
    [(0.25, "head", 1), (0.01, "head", 1), (0.99, "head", 3), (3, "head", 3), (0.5, "layer", 1), (1, "layer", 1)],
)
def test_keep_is_a_share_or_a_number(keep, unit, count):
    record = choose(make_retriever(), keep, unit=unit).record
    assert record.num_kept == count * (1 if unit == "head" else 2)


@pytest.mark.parametrize("keep", [0, 4, 7, -1, 0.0, 1.0, -0.5, True, "0.1", None])
def test_nothing_everything_and_more_than_there_is_are_refused(keep):
    with pytest.raises(OptionError, match="keep must be a share above 0 and below 1, or a number from 1 to 3"):
        choose(make_retriever(), keep)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("unit", ["head", "layer"])
def test_of_one_place_there_is_nothing_to_choose(unit, search):
    model = make_model("llama", num_hidden_layers=1, num_key_value_heads=1)
    options = {"signal": "divergence", "batches": [{"input_ids": make_tokens(2, 12)}], "replace": WINDOW}
    with pytest.raises(OptionError, match=f"keep=0.5: the model has 1 {unit} to choose from"):
        choose_plan(model, None, 0.5, unit=unit, search=search, **options)


@torch.no_grad()
@pytest.mark.parametrize("replace", [WINDOW, {"gated_deltanet": {"gate_input": "hidden"}}], ids=["window", "hidden"])
def test_keep_in_bytes_is_what_the_cache_has_of_a_prompt_and_a_token(replace):
    length, ids = 32, make_tokens(1, 32) % 30
    with pytest.raises(OptionError, match="state_bytes must be from") as refused:
        choose(make_retriever(), state_bytes=10, length=length, replace=replace)
    one, most = (int(n.replace(",", "")) for n in re.search(r"from ([\d,]+) to ([\d,]+)", str(refused.value)).groups())
    added, unused = (most + 1 - one) // 3, []
    for limit, count in ((one, 1), (one + added - 1, 1), (one + added, 2), (most, 3)):
        chosen = choose(make_retriever(), state_bytes=limit, length=length, replace=replace)
        assert chosen.record.num_kept == count and chosen.record.options["keep"] is None
        model = patch_model(make_retriever(), chosen)
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        model(ids[:, -1:], past_key_values=cache)
        unused.append(limit - state_bytes(cache))
    assert min(unused) >= 0 and unused[0] == length + SPARE, "a byte for each token, as none was a pad"


def test_bytes_that_no_number_of_heads_has_are_refused():
    length = 32
    for wrong in (10, 10**9):
        with pytest.raises(OptionError, match=r"state_bytes must be from .* at 32 tokens, for one head to all"):
            choose(make_retriever(), state_bytes=wrong, length=length)
    with pytest.raises(UnsupportedModeError, match="bidirectional and keeps no decoding state"):
        choose(make_model("bert"), state_bytes=10, length=length, batches=[{"input_ids": make_tokens(2, 12)}])


@pytest.mark.parametrize("given", [range(256, 1024, 256), (256, 512, 768), {256: 1, 512: 1, 768: 1}.keys()], ids=str)
def test_lengths_in_any_collection_are_recorded_as_a_list(given):
    recorded = SearchOptions(lengths=given).recorded()
    assert json.loads(json.dumps(recorded))["lengths"] == [256, 512, 768]
