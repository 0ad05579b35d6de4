"""A decoding step waits for nothing: CUDA graphs can capture no copy to the host or from it.

Tensors without values stand for those on a GPU: a number that is looked at raises, and what is made on the CPU shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_linattn.backends import use_backend
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.ops.hybrid import triton as hybrid_triton
from hf_linattn.ops.linear import triton as linear_triton
from hf_linattn.ops.linear import triton_features as features
from hf_linattn.ops.linear.types import spec_of
from tests.ops.triton_cases import make_mechanism

# positions, or how full a memory is, decide there what is computed
LOOK_AT_NUMBERS = {
    "cosformer", "dynamic_sparse", "mixed_chunk", "learned_sparse", "linformer", "nystrom", "synthesizer", "vq",
}  # fmt: skip
OTHER_STATE = {"by_head", "fusion", "softmax"}  # of several mechanisms, or none
STEPS = [
    name
    for name in MECHANISMS.names()
    if "causal" in MECHANISMS.get(name).modes and name not in LOOK_AT_NUMBERS | OTHER_STATE
]


class OnTheHost(TorchDispatchMode):
    """Names the operations that read or make a tensor on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor))
        if any(x.device.type == "cpu" for x in tensors):
            self.found.append(str(function))
        return result


@pytest.fixture
def known_maps(monkeypatch):
    """Maps are known without values, too."""
    for module in (linear_triton, hybrid_triton, features):
        monkeypatch.setattr(module, "specs_of", lambda *maps: [spec_of(x) for x in maps])


@torch.no_grad()
@pytest.mark.usefixtures("known_maps")
@pytest.mark.parametrize(("name", "backend"), [*((name, "torch") for name in STEPS), ("hybrid", "triton")])
def test_a_step_waits_for_nothing(name, backend):
    mechanism = make_mechanism(name).eval()
    use_backend(mechanism, "torch")
    heads = [torch.randn(2, h, 101, 8) for h in (2, 1, 1)]
    _, state = mechanism(*(x[:, :, :100] for x in heads))
    state = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, state)
    use_backend(mechanism.to("meta"), backend)
    token = [x[:, :, 100:].to("meta") for x in heads]
    with OnTheHost() as host:
        output, _ = mechanism.causal_attention(*token, None, None, state)
    assert output.shape == token[0].shape and not host.found
