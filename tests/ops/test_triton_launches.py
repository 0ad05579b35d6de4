"""How many kernels a layer runs on a GPU, PyTorch's included; those of Triton are counted and not run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hf_linattn.backends import use_backend
from hf_linattn.ops.common.tracing import begin_forward, end_forward
from hf_linattn.ops.hybrid import triton as hybrid  # noqa: F401 - all that launches is there
from hf_linattn.ops.runtime import triton as launching
from tests.ops.triton_cases import make_mechanism

LENGTH = 1100  # several segments of chunks
FEATURES, SLOPES = ["write_features"] * 2, ["write_slopes"] * 2
SUMS = ["write_states", "read_states"]
# what gives a view or a number to Python, and what does nothing where a tensor is as it should be
NO_KERNELS = set(
    "view _unsafe_view _reshape_alias reshape transpose t numpy_T permute expand unsqueeze squeeze slice select narrow"
    " split split_with_sizes unbind unflatten flatten as_strided detach alias lift_fresh"
    " resize_ set_ resolve_conj resolve_neg to promote_types result_type scalar_tensor is_nonzero item".split()
)


def replace_launch(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., None]) -> None:
    """Have something else done where kernels are launched."""
    own = launching.launch
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_linattn.ops") and vars(module).get("launch") is own:
            monkeypatch.setattr(module, "launch", launch)


@pytest.fixture
def kernels_of(monkeypatch) -> Callable[..., list[str]]:
    """Return what names the kernels that a function runs, in their order: Triton's, and PyTorch's by operation."""

    def launch(kernel: Any, *_: Any, **__: Any) -> None:
        with record_function(f"triton::{kernel.__name__}"):
            pass

    replace_launch(monkeypatch, launch)

    def find(event: Any) -> list[str]:
        kind, _, name = event.name.partition("::")
        if kind == "triton":
            return [name]
        if "empty" in name:  # tests of operations fill it
            return []
        found = [name for x in event.cpu_children for name in find(x)]
        return found or ([name] if kind == "aten" and name not in NO_KERNELS else [])

    def run(function: Callable[[], Any]) -> list[str]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            function()
        return [name for event in profiler.events() if event.cpu_parent is None for name in find(event)]

    return run


def make_heads(length: int, grouped: bool) -> tuple[torch.Tensor, ...]:
    """Heads in half precision that are slices of one projection."""
    sizes = [2, 1, 1] if grouped else [1, 1, 1]
    return torch.randn(2, length, sum(sizes), 8).half().transpose(1, 2).split(sizes, 1)


def left_padded(length: int, padded: bool) -> torch.Tensor | None:
    return (torch.arange(length) >= torch.tensor([[length // 3], [0]])) if padded else None


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("linear", [*FEATURES, *SUMS]),
        ("performer", [*FEATURES, "write_scales", *SUMS]),
        ("hedgehog", [*FEATURES, *SUMS]),
    ],
)
@torch.no_grad()
def test_a_prompt(kernels_of, name, want, padded):
    """Of which nothing was read before; masked keys are hidden where features are made."""
    mechanism = make_mechanism(name).half().eval()
    use_backend(mechanism, "triton")
    heads, mask = make_heads(LENGTH, True), left_padded(LENGTH, padded)
    assert kernels_of(lambda: mechanism(*heads, mask)) == want


NEAR = ["attend_window", "keep_prompt"]
PROMPTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "local": ({}, ["attend_window", "keep_window"]),
    "streaming": ({}, ["attend_window", "keep_window"]),
    "hybrid": ({}, [*FEATURES, *SUMS, *NEAR]),
    "hybrid, no gate": ({"initial_share": 1}, [*FEATURES, *SUMS, *NEAR]),
    "hybrid, log scales": (
        {"linear": "performer", "linear_options": {"num_features": 128}},
        [*FEATURES, "write_scales", *SUMS, "add", *NEAR],
    ),
    "hybrid, decay": (
        {"linear_options": {"decay": "learned"}},
        ["copy_", "clamp", "exp", "neg", *FEATURES, "write_scales", *SUMS, *NEAR],
    ),
    "hybrid, window as long": ({"window_size": LENGTH}, ["write_features", "zero_", "fill_", *NEAR]),
}  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", PROMPTS)
@torch.no_grad()
def test_a_prompt_of_a_window(kernels_of, case, padded):
    """What lies beyond it, attention, copies of what is remembered; rows are read where they lie.

    Where they begin is found by the first layer of a forward.
    """
    (options, want), name = PROMPTS[case], case.partition(",")[0]
    mechanism = make_mechanism(name, **options).half().eval()
    use_backend(mechanism, "triton")
    heads, mask = make_heads(LENGTH, True), left_padded(LENGTH, padded)
    begin_forward(positioned=False)
    mechanism(*heads, mask)
    found = kernels_of(lambda: mechanism(*heads, mask))
    end_forward()
    if padded and "neg" in want:  # pads take nothing from what was read: a product with a mask
        want = [*want[:4], "copy_", *want[4:]]
    assert found == want


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_of_linear(kernels_of, grouped, padded):
    """What the groups of a key give it is added up by PyTorch, and rounded."""
    mechanism = make_mechanism("linear")
    use_backend(mechanism, "triton")
    heads, mask = [x.detach().requires_grad_() for x in make_heads(LENGTH, grouped)], left_padded(LENGTH, padded)
    found: list[torch.Tensor] = []
    forward = kernels_of(lambda: found.append(mechanism(*heads, mask)[0]))
    assert forward == [*FEATURES, *SUMS]
    (output,), gradient = found, torch.randn(found[0].shape).half()
    backward = kernels_of(lambda: torch.autograd.grad(output, heads, gradient))
    sums = ["multiply_rows", "read_states", "write_scales", "write_states", "read_states", "read_states"]
    assert [x for x in backward if x not in ("fill_", "copy_")] == [*sums, *SLOPES]
    assert len(backward) == (12 if grouped else 8), backward


STEPS = {
    "linear": "step_token", "hedgehog": "step_token", "performer": "step_token", "hybrid": "step_hybrid",
    "local": "step_window", "streaming": "step_window",
}  # fmt: skip


@pytest.mark.covering(2)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", STEPS)
@torch.no_grad()
def test_a_step_is_one_kernel(kernels_of, name, own, padded):
    """Whatever dtype the weights have, of which no copy is made, nor of values that lie beside queries and keys."""
    mechanism = make_mechanism(name).to(own).eval()
    use_backend(mechanism, "triton")
    token = make_heads(1, True)
    mask = torch.tensor([[True], [False]]) if padded else None
    _, state = mechanism(*token)
    around = ["copy_"] if padded and STEPS[name] != "step_token" else []  # a mask as numbers, and outputs times it
    assert kernels_of(lambda: mechanism(*token, mask, state=state)) == [*around, STEPS[name], *around]


@torch.no_grad()
def test_a_decay_costs_a_step_no_more_than_its_bounded_rate(kernels_of):
    mechanism = make_mechanism("linear", decay="learned").eval()
    use_backend(mechanism, "triton")
    token = make_heads(1, True)
    _, state = mechanism(*token)
    found = kernels_of(lambda: mechanism(*token, state=state))
    assert found == ["clamp", "exp", "neg", "step_token"]


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        *itertools.product(["performer", "hybrid", "fixed_pattern", "bigbird", "local"], [True, False]),
        ("linformer", True),
    ],
)
def test_only_the_first_dimension_of_a_grid_grows_with_the_length(name, causal, monkeypatch):
    """The others end at 65,535: a row of a million tokens has more blocks and tiles."""
    grids: list[tuple[str, tuple[int, ...]]] = []
    replace_launch(monkeypatch, lambda kernel, grid, *_, **__: grids.append((kernel.__name__, grid[1:])))
    mechanism = make_mechanism(name, causal)
    use_backend(mechanism, "triton")

    def rest_of_grids(length: int) -> set[tuple[str, tuple[int, ...]]]:
        grids.clear()
        heads = [x.contiguous().requires_grad_() for x in make_heads(length, True)]
        mechanism(*heads)[0].sum().backward()
        with torch.no_grad():
            mechanism(*heads)
        return set(grids)

    assert rest_of_grids(700) == rest_of_grids(2100) != set()
