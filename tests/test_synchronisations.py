"""No layer looks at a number on a device, for which everything would be waited; masks are read once in a forward.

A model on the device "meta" has no numbers: whoever looks at one there raises.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from hf_linattn import patch_model, set_backend
from hf_linattn import transformers_bridge as bridge
from hf_linattn.ops.block_softmax import patterns
from hf_linattn.ops.dispatch import recording
from tests.helpers import make_tokens
from tests.models import make_model
from tests.test_static_cache import PADDED, each_plan, make_planned

BY_PYTHON = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
BY_SIZE = {"nonzero", "_unique2", "masked_select"}  # operations that make as much as the numbers say


class PythonLooks(TorchFunctionMode):
    """Counts what hands numbers of tensors to Python."""

    def __init__(self, count: Counter[str]) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(function, "__name__", "")) in BY_PYTHON:
            self.count[name] += 1
        return function(*args, **kwargs or {})


class SizeLooks(TorchDispatchMode):
    """Counts what looks at numbers of tensors for the sizes of others."""

    def __init__(self, count: Counter[str]) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in BY_SIZE or any(x is not None and x.dtype == torch.bool for x in indices):
            self.count[name] += 1
        return function(*args, **kwargs or {})


def looks_of(plan: str, layers: int, monkeypatch: pytest.MonkeyPatch, ids: torch.Tensor, **inputs: Any) -> Any:
    """Return what a model of that depth looks at; tables of blocks lie on the CPU wherever the model is."""
    model, make_parts = make_planned(plan, num_hidden_layers=layers), patterns.make_parts
    set_backend(model, "torch")
    count: Counter[str] = Counter()

    def unseen(*given: Any) -> Any:
        before = dict(count)
        parts = make_parts(*given)
        count.clear()
        count.update(before)
        return parts

    with monkeypatch.context() as patch, torch.no_grad(), PythonLooks(count), SizeLooks(count):
        patch.setattr(patterns, "make_parts", unseen)
        model(ids, **inputs)
    return count


@each_plan
def test_a_padded_prefill_is_looked_at_once_whatever_the_number_of_layers(plan, monkeypatch):
    ids, mask = PADDED
    position = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": mask, "position_ids": position, "use_cache": True}
    two, four = (looks_of(plan, layers, monkeypatch, ids, **inputs) for layers in (2, 4))
    assert two == four and two["__int__"] > 0


@pytest.mark.covering(1)
@each_plan
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_prefill_and_steps_need_no_number(plan, kind, monkeypatch):
    """Steps behind a static cache with a mask, too, whatever it says. Positions are read once, as is tested above."""
    monkeypatch.setattr(bridge, "sequence_ids", lambda *given: None)
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: nullcontext())  # which knows no such device
    model = make_planned(plan).to("meta")
    set_backend(model, "torch")
    cache = StaticCache(model.config, max_cache_len=32) if kind == "static" else DynamicCache(config=model.config)
    for length in (9, 1, 1):
        model(torch.zeros(2, length, dtype=torch.long, device="meta"), past_key_values=cache)
    if kind == "static":
        mask = torch.ones(2, 12, dtype=torch.long, device="meta")
        logits = model(mask[:, :1], attention_mask=mask, past_key_values=cache).logits
        assert logits.shape == (2, 1, 96) and logits.device.type == "meta"


class LengthLooks(TorchFunctionMode):
    """Counts what looks at one of the lengths [B] of rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.count = rows, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        looks = name == "tolist" or (name == "__getitem__" and isinstance(args[1], int))
        self.count += looks and args[0].shape == (self.rows,)
        return function(*args, **kwargs or {})


@torch.no_grad()
def test_kernels_look_once_in_a_layer_at_what_was_read():
    """Where windows are read by pieces: how much came before decides what is launched."""
    model = patch_model(make_model("llama"), "local", window_size=8, block_size=4)
    set_backend(model, "triton")
    cache, looks = DynamicCache(config=model.config), LengthLooks(rows=3)
    model(make_tokens(3, 9), past_key_values=cache)
    with looks, recording() as decisions:
        model(make_tokens(3, 14), past_key_values=cache)
    assert [x.backend for x in decisions] == ["triton"] * model.config.num_hidden_layers
    assert looks.count == model.config.num_hidden_layers
