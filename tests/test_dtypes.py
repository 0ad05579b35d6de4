"""A processor without instructions for a model's dtype: the library computes in float32 there, and gives it back.

A device without float64 gets none.
"""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn

from hf_linattn import OptionError, calibrate, choose_plan, list_mechanisms, patch_model, set_backend
from hf_linattn.cli.common import read_model
from hf_linattn.dtypes import in_fast_dtype, is_fast
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.testing.models import random_tokens, tiny_model
from tests.helpers import WithoutFloat64, make_tokens
from tests.models import make_model
from tests.plan_search.retriever import WINDOW, make_prompts, make_retriever

SAID = "bfloat16: float32 is taken, as this processor has no instructions"


@pytest.fixture(params=[True, False], ids=["with", "without"])
def has_instructions(request, monkeypatch) -> bool:
    """Whether the processor has instructions for products of bfloat16; it has none for those of float16."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: request.param)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    return request.param


def seen_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return a set that gets the dtypes of what linear layers read from now on."""
    seen: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, given: seen.add(given[0].dtype))
    return seen


def assert_same(model: nn.Module, other: nn.Module) -> None:
    """Compare all parameters and buffers bit for bit, and their dtypes."""
    expected = dict([*other.named_parameters(), *other.named_buffers()])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def test_a_dtype_is_fast_where_there_are_instructions_for_it(has_instructions):
    cpu = torch.device("cpu")
    assert [is_fast(dtype, cpu) for dtype in (torch.float32, torch.bfloat16)] == [True, has_instructions]
    assert not is_fast(torch.float16, cpu) and is_fast(torch.float16, torch.device("cuda"))


def test_all_tensors_have_their_dtypes_again(has_instructions, caplog):
    model = make_model("llama").to(torch.bfloat16)
    model.model.rotary_emb.float()
    before, seen = copy.deepcopy(model), seen_dtypes(model)
    for ended in (KeyError, None):
        try:
            with in_fast_dtype(model):
                model(make_tokens(1, 5))
                if ended:
                    raise ended
        except KeyError:
            pass
        assert_same(model, before)
    assert seen == {torch.bfloat16 if has_instructions else torch.float32}
    assert (SAID in caplog.text) is not has_instructions


def test_a_plan_is_chosen_in_a_fast_dtype(has_instructions, caplog):
    model = make_retriever().to(torch.bfloat16)
    given = {"replace": WINDOW, "prompts": make_prompts()}
    expected = choose_plan(make_retriever().to(torch.bfloat16).float(), None, 1, **given)
    before, seen = copy.deepcopy(model), seen_dtypes(model)
    chosen = choose_plan(model, None, 1, **given)
    assert_same(model, before)
    assert seen == {torch.bfloat16 if has_instructions else torch.float32}
    assert (SAID in caplog.text) is not has_instructions
    assert (chosen.record.scores == expected.record.scores) is not has_instructions


def test_maps_are_fitted_in_a_fast_dtype(has_instructions, caplog):
    model = patch_model(make_model("llama").to(torch.bfloat16), "hedgehog")
    seen = seen_dtypes(model)
    calibrate(model, [{"input_ids": make_tokens(4, 12, seed)} for seed in range(2)], steps=2)
    assert (torch.bfloat16 in seen) is has_instructions
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (SAID in caplog.text) is not has_instructions


def test_a_command_reads_a_model_in_a_fast_dtype_unless_one_is_named(tmp_path, has_instructions, caplog):
    make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert read_model("model", str(tmp_path), "bfloat16").dtype == torch.bfloat16 and not caplog.text
    found = torch.bfloat16 if has_instructions else torch.float32
    assert read_model("model", str(tmp_path), None).dtype == found
    assert (SAID in caplog.text) is not has_instructions


MEASURED = [(name, {"decay": "measured"}) for name in ("hedgehog", "linear", "performer")]
ACROSS = [name for name in list_mechanisms() if "cross" in MECHANISMS.get(name).modes]


@pytest.mark.parametrize(("mechanism", "options"), [*((name, {}) for name in list_mechanisms()), *MEASURED])
def test_no_mechanism_needs_float64(mechanism, options):
    modes = MECHANISMS.get(mechanism).modes
    for name, mode in (("llama", "causal"), ("bert", "bidirectional")):
        if mode not in modes:
            continue
        model = patch_model(make_model(name, num_hidden_layers=1), mechanism, **options)
        set_backend(model, "torch")
        with WithoutFloat64():
            with suppress(OptionError):  # nothing to fit
                calibrate(model, [{"input_ids": make_tokens(2, 12)}], steps=1)
            with torch.no_grad():
                cache = model(make_tokens(2, 12)).get("past_key_values")
                if cache is not None:
                    model(make_tokens(2, 1), past_key_values=cache)


@pytest.mark.parametrize("mechanism", ACROSS)
def test_no_cross_attention_needs_float64(mechanism):
    model = patch_model(tiny_model("bart", False, torch.float32), "softmax", cross_attention=mechanism)
    set_backend(model, "torch")
    with WithoutFloat64():
        model.generate(random_tokens(2, 12), max_new_tokens=2)
