"""The choice of a backend: the first in the order that can, said by explain_backend as it was made."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_linattn import OptionError, PatchError, explain_backend, get_mechanisms, patch_model, set_backend
from hf_linattn.config import make_config
from hf_linattn.inference import kept_generators
from hf_linattn.mechanisms import MECHANISMS, Mechanism
from hf_linattn.ops import dispatch
from hf_linattn.ops.dispatch import OPERATIONS, POLICIES, Decision, Operation, Policy, recording
from hf_linattn.ops.linear.interface import LINEAR
from hf_linattn.ops.linear.types import LinearCall
from tests.helpers import each_of, make_tokens
from tests.models import make_model
from tests.ops.feature_maps import elu_map

LENGTH = 90
SMALL = {
    "window_size": 16, "block_size": 16, "num_slots": 16, "bucket_size": 16, "num_buckets": 4, "num_features": 8,
}  # fmt: skip
CASES = [
    pytest.param(name, architecture, marks=marks)
    for (name,), marks, _ in each_of(MECHANISMS.names())
    for architecture, mode in (("llama", "causal"), ("bert", "bidirectional"))
    if mode in MECHANISMS.get(name).modes
]


def make_patched(name: str, architecture: str) -> torch.nn.Module:
    known = vars(make_config(name, {}))
    options = {option: size for option, size in SMALL.items() if option in known}
    return patch_model(make_model(architecture, max_position_embeddings=256), name, **options).eval()


@pytest.fixture
def entered(monkeypatch):
    """(operation, backend) of every `run` that was entered, in order."""
    found: list[tuple[str, str]] = []

    def count(operation: str, backend: str, module: Any) -> Any:
        def run(call: Any) -> Any:
            found.append((operation, backend))
            return module.run(call)

        return SimpleNamespace(unsupported=module.unsupported, run=run)

    for operation in OPERATIONS.values():
        counted = {x: y if isinstance(y, str) else count(operation.name, x, y) for x, y in operation.backends.items()}
        monkeypatch.setattr(operation, "backends", counted)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "architecture"), CASES)
def test_what_is_explained_is_what_runs(entered, name, architecture, padded, backend):
    model = make_patched(name, architecture)
    set_backend(model, backend)
    inputs = {"input_ids": make_tokens(2, LENGTH)}
    if padded:
        inputs["attention_mask"] = (torch.arange(LENGTH) >= torch.tensor([[0], [7]])).long()
    before = {path: x.clone() for path, x in model.state_dict().items()}
    rows = explain_backend(model, inputs).rows
    assert all(torch.equal(x, before[path]) for path, x in model.state_dict().items()) and not model.training
    assert [row.path for row in rows] == list(get_mechanisms(model))

    def said(kind: str) -> list[tuple[str, str]]:
        return [(x.operation, x.backend) for row in rows for x in getattr(row, kind) or ()]

    cached = architecture == "llama"
    entered.clear()
    with torch.no_grad():
        after = model(**inputs, **({"use_cache": False} if cached else {}))
    assert entered == said("forward")
    for mechanism in (x for x in model.modules() if isinstance(x, Mechanism)):
        mechanism.train()
    entered.clear()
    model(**inputs, **({"use_cache": False} if cached else {}))
    assert entered == said("backward")
    if cached:
        model.eval()
        with torch.no_grad():
            after = model(**inputs, use_cache=True)
            entered.clear()
            model(make_tokens(2, 1), past_key_values=after.past_key_values, **longer(inputs))
        # what keeps softmax decodes from the cache's keys, in which nothing is chosen
        assert entered == said("decode")


def longer(inputs: dict[str, Any]) -> dict[str, Any]:
    mask = inputs.get("attention_mask")
    return {} if mask is None else {"attention_mask": torch.cat([mask, mask[:, -1:]], dim=1)}


def test_every_operation_has_all_that_a_choice_needs():
    assert set(OPERATIONS) == {"linear", "hybrid", "block_softmax", "slots", "lsh", "delta_rule"}
    for operation in OPERATIONS.values():
        assert set(operation.backends) <= {x for order in POLICIES.values() for x in order}
        for name in operation.backends:
            module = operation.backend(name)
            assert module.__name__ == f"hf_linattn.ops.{operation.name}.{name}"
            assert module.unsupported and module.run
        assert operation.backend("torch").unsupported(None) is None


def stub(reason: str | None, name: str) -> Any:
    return SimpleNamespace(unsupported=lambda call: reason, run=lambda call: name)


def make_call(policy: str = "auto") -> Any:
    return SimpleNamespace(query=torch.zeros(1, 2, 3, 4), policy=Policy(policy))


@pytest.fixture
def alone(monkeypatch):
    """Operations that a test makes are not kept."""
    monkeypatch.setattr(dispatch, "OPERATIONS", {})


def test_the_first_in_the_order_that_can_runs(alone):
    able = Operation("sum", torch=stub(None, "torch"), cpu=stub(None, "cpu"), compile=stub("small", "compile"))
    with recording() as decisions:
        ran = [able.run(make_call(policy)) for policy in ("auto", "torch", "compile", "triton")]
    assert ran == ["cpu", "torch", "cpu", "torch"]
    found = [able.run_kernels(make_call(policy)) for policy in ("auto", "torch", "compile", "triton")]
    assert found == ["cpu", None, "cpu", None]
    assert decisions == [
        Decision("sum", "cpu", {}), Decision("sum", "torch", {}), Decision("sum", "cpu", {"compile": "small"}),
        Decision("sum", "torch", {}),
    ]  # fmt: skip


def test_only_pytorchs_operations_run_where_they_are_watched(alone):
    operation = Operation("sum", cpu=stub(None, "cpu"), torch=stub(None, "torch"))

    def read(x: torch.Tensor) -> torch.Tensor:
        assert operation.run(make_call()) == "torch"
        return x

    with recording() as decisions:
        torch.func.vmap(read)(torch.ones(2))
    assert decisions == [Decision("sum", "torch", {"cpu": dispatch.WATCHED})]


def test_a_compiled_model_says_once_that_it_has_no_kernels_of_triton(caplog):
    """In one program without a break, which does not say it again."""
    dispatch._tell_watched.cache_clear()
    torch.compiler.reset()
    model, ids = patch_model(make_model("llama", num_hidden_layers=1), "linear").eval(), make_tokens(2, 9)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for backend, times in (("auto", 0), ("triton", 1), ("triton", 1)):
        set_backend(model, backend)
        with torch.no_grad():
            compiled(ids, use_cache=False)
        assert caplog.text.count("set_backend(model, 'triton') has no effect") == times


@pytest.mark.parametrize(
    ("backends", "policy", "words"),
    [
        ({"torch": stub(None, "torch")}, "tritn", "which must be one of auto, torch, compile, triton"),
        ({}, "auto", "it has none of these"),
        ({"cpu": stub("float64", "cpu")}, "auto", "cpu: float64"),
    ],
)
def test_what_cannot_be_computed_names_the_operation_the_call_and_the_remedy(alone, backends, policy, words):
    with pytest.raises(OptionError) as caught:
        Operation("sum", **backends).run(make_call(policy))
    message = str(caught.value)
    assert "operation 'sum'" in message and "queries [1, 2, 3, 4] of float32 on cpu" in message
    assert words in message and "set_backend(model, 'auto')" in message


def test_only_the_choices_of_the_own_thread_are_recorded():
    heads = torch.ones(1, 1, 5, 2)
    call = LinearCall(heads, heads, heads, elu_map, elu_map)
    with recording() as decisions:
        other = threading.Thread(target=lambda: LINEAR.run(call))
        other.start()
        other.join()
        assert not decisions
        with recording() as inner:
            LINEAR.run(call)
        LINEAR.run(call)
    assert [x.backend for x in (*inner, *decisions)] == ["torch", "torch"]


def heads_of(length: int = 90, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, h, length, 8, generator=torch.Generator().manual_seed(h)).to(dtype) for h in (4, 2, 2)]


ENDS = torch.arange(90) < torch.tensor([[90], [9]])
REASONS = {
    "float64": ("linear", {}, lambda m: m.double()(*heads_of(dtype=torch.float64)), "float64"),
    "a step in training": ("linear", {}, lambda m: m.train()(*heads_of(1)), "one token with gradients or in training"),
    "an unknown map": ("taylor", {}, lambda m: m(*heads_of(1)), "a feature map that the C does not know"),
    "a short row": ("hybrid", {"window_size": 100}, lambda m: m(*heads_of()), "no keys beyond the window"),
    "padded rows": ("hybrid", {"window_size": 9}, lambda m: m(*heads_of(), ENDS),
                    "padded rows"),
    "a scaled window": ("hybrid", {"window_size": 9, "window_scale": "maximum"}, lambda m: m(*heads_of()),
                        "window_scale='maximum'"),
    "a pattern in training": ("learned_sparse", {}, lambda m: m.train()(*heads_of()),
                              "a pattern with parameters, in training"),
    "a token after a block": ("local", {}, lambda m: m(*heads_of(1), state=m(*heads_of())[1]),
                              "no whole block after a state"),
    "open segments": ("linformer", {"num_slots": 2, "block_size": 16}, lambda m: m.train()(*heads_of()),
                      "segments longer than blocks, with gradients or in training"),
    "a token after buckets": ("lsh", {}, lambda m: m(*heads_of(1), state=m(*heads_of())[1]), "tokens after a state"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["performer", "hybrid", "gla"])
def test_inside_inference_mode_the_same_is_explained(name):
    model = make_patched(name, "llama")
    inputs = {"input_ids": make_tokens(2, 40), "attention_mask": torch.arange(40) >= torch.tensor([[0], [7]])}
    expected = explain_backend(model, inputs)
    with torch.inference_mode():
        assert explain_backend(model, {name: x.clone() for name, x in inputs.items()}) == expected
        assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu", "mps"])
def test_generators_of_every_kind_of_device_are_left_as_they_were(kind, monkeypatch):
    states, device = [torch.zeros(1)], torch.device(kind)
    if kind != "cpu":
        of_kind = torch.get_device_module(kind)
        monkeypatch.setattr(of_kind, "get_rng_state", lambda given: (given, states[-1]))
        monkeypatch.setattr(of_kind, "set_rng_state", lambda state, given: states.append((given, state)))
    before = torch.get_rng_state()
    with kept_generators(device):
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert states[1:] == ([] if kind == "cpu" else [(device, (device, states[0]))])


@pytest.mark.parametrize("case", REASONS)
@torch.no_grad()
def test_why_the_c_is_passed_over(case, monkeypatch):
    name, options, run, reason = REASONS[case]
    monkeypatch.setattr("hf_linattn.ops.runtime.cpu.available", lambda: True)
    model = patch_model(make_model("llama", max_position_embeddings=256), {name: {"layers": [0], **options}}).eval()
    with recording() as decisions:
        run(next(iter(get_mechanisms(model).values())))
    assert decisions[-1].backend == "torch" and decisions[-1].passed_over["cpu"] == reason


def test_without_a_build_it_says_so(monkeypatch):
    monkeypatch.setattr("hf_linattn.ops.runtime.cpu.build", lambda: None)
    model = make_patched("performer", "llama")
    report = explain_backend(model, make_tokens(1, 20))
    assert {row.backend(x) for row in report.rows for x in ("forward", "backward", "decode")} == {"torch"}
    assert "forward, linear: not cpu (the C library is not built), layers 0, 1" in str(report)


def test_a_model_that_is_not_patched_is_refused():
    with pytest.raises(PatchError, match="not patched"):
        explain_backend(make_model("llama"), make_tokens(1, 5))
