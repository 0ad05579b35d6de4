"""One token of `hybrid` by Triton, many times in a row, against whole sequences in float64 and PyTorch's own steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_linattn import patch_model, set_backend
from hf_linattn.backends import use_backend
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer
from hf_linattn.ops.hybrid import triton as hybrid_triton
from hf_linattn.ops.hybrid import triton_decode as hybrid_step
from hf_linattn.ops.runtime import triton as launching
from hf_linattn.testing.counters import flops_of
from tests.helpers import make_tokens, pad
from tests.models import make_model
from tests.ops.triton_cases import COMPILING, require_fit

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 2, 1, 8, 6
DECAY: dict[str, Any] = {"linear_options": {"decay": "learned"}}
PERFORMER: dict[str, Any] = {"linear": "performer", "linear_options": {"num_features": 20, "decay": "learned"}}
CASES: dict[str, dict[str, Any]] = {
    "hedgehog": {"window_size": 5, "num_sink_tokens": 2},
    "performer": {"window_size": 4, "num_sink_tokens": 1, "linear": "performer"},
    "elu": {"window_size": 4, "num_sink_tokens": 1, "linear": "linear"},
    "bias": {"window_size": 3, "num_sink_tokens": 0, "linear": "t2r"},
    "decay": {"window_size": 4, "num_sink_tokens": 2, **DECAY},
    "decay beside log scales": {"window_size": 4, "num_sink_tokens": 1, **PERFORMER},
    "share beside a sink": {
        "window_size": 4, "num_sink_tokens": 1, "window_scale": "maximum", "sink_logit": "learned", **DECAY,
    },
    "sink": {"window_size": 3, "num_sink_tokens": 2, "sink_logit": "learned"},
    "no window": {"window_size": 1, "num_sink_tokens": 0, **PERFORMER},
    "no gate": {"window_size": 4, "num_sink_tokens": 1, "initial_share": 1, **DECAY},
    "sinks alone": {"window_size": 1, "num_sink_tokens": 3},
    "more sinks than window": {"window_size": 2, "num_sink_tokens": 3},
}


@pytest.fixture
def taken(monkeypatch):
    """The lengths of what the kernel reads."""
    found: list[int] = []
    own = hybrid_triton.step_attention

    def step(query: Tensor, *rest: Any) -> Any:
        found.append(query.shape[2])
        return own(query, *rest)

    monkeypatch.setattr(hybrid_triton, "step_attention", step)
    return found


def make(**options: Any) -> Any:
    """A layer of grouped queries whose parameters are different in every head."""
    layer = AttentionLayer(
        index=0, num_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, causal=True, scaling=0.6,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    given = {"initial_sink": 0.0, "initial_share": 0.5, **options}
    mechanism = MECHANISMS.get("hybrid")(make_config("hybrid", given), layer).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += 0.7 * torch.randn(parameter.shape, generator=generator)
    return mechanism


def make_heads(length: int, kind: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM)
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, h, length, size, generator=generator).to(kind) for h, size in shapes]


def tokens_at(heads: list[Tensor], position: Tensor) -> list[Tensor]:
    """Return one token of each row as a model has it: in the order [B, N, H, D], each part of a wider row."""
    found = []
    for number, x in enumerate(heads):
        rows = F.pad(x.transpose(1, 2).flatten(2), (0, 3 * number + 1))
        row = rows.gather(1, position[:, None, None].expand(-1, 1, rows.shape[2]))
        found.append(row[..., : -3 * number - 1].unflatten(2, (x.shape[1], -1)).transpose(1, 2))
    return found


@torch.no_grad()
def decode(mechanism: Any, heads: list[Tensor], lengths: tuple[int, ...], backend: str) -> tuple[Tensor, Any]:
    """Read a prompt of that many tokens in each row and all others that every row has; return outputs and state."""
    position, longest = torch.tensor(lengths), max(lengths)
    use_backend(mechanism, "torch")
    _, state = mechanism(*(x[:, :, :longest] for x in heads), torch.arange(longest) < position[:, None])
    use_backend(mechanism, backend)
    outputs = []
    for step in range(heads[0].shape[2] - longest):
        before, last = [x.clone() for x in state], state
        output, state = mechanism(*tokens_at(heads, position + step), state=state)
        assert all(map(torch.equal, before, last))  # another beam may go on from it
        assert [(x.dtype, x.shape) for x in state] == [(x.dtype, x.shape) for x in before]
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


@torch.no_grad()
def check(mechanism: Any, heads: list[Tensor], lengths: tuple[int, ...], tolerance: float) -> None:
    """Outputs are what the formula says in float64, and states what PyTorch comes to."""
    exact, wide = copy.deepcopy(mechanism).double(), [x.double() for x in heads]
    whole = exact.attention_matrix(*wide[:2]) @ wide[2].repeat_interleave(HEADS // KV_HEADS, dim=1)
    output, state = decode(mechanism, heads, lengths, "triton")
    assert output.dtype == heads[2].dtype
    for row, (got, first) in enumerate(zip(output.double(), lengths, strict=True)):
        want = whole[row, :, first : first + output.shape[2]]
        assert (got - want).abs().max() < tolerance * want.abs().max()
    known = decode(mechanism, heads, lengths, "torch")[1]
    for name in ("ring_key", "ring_value", "sink_key", "sink_value", "length"):
        assert torch.equal(getattr(state, name), getattr(known, name)), name
    got, want = (x.kv.double() * x.log_max.double().exp()[..., None, None] for x in (state, known))
    assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("name", CASES)
def test_steps_are_what_the_formula_says(taken, monkeypatch, name):
    """From an empty state and a short one: while sinks are filled, then the ring, then as two keys leave it."""
    if name in ("decay", "sink"):  # what a program finds by the number of a head of keys
        for count, of in ((4, "HEADS"), (2, "KV_HEADS")):
            monkeypatch.setitem(globals(), of, count)
    steps = CASES[name]["num_sink_tokens"] + CASES[name]["window_size"] + 1
    check(make(**CASES[name]), make_heads(2 + steps), (2, 0), 1e-5)
    assert taken == [1] * steps


@pytest.mark.parametrize("name", ["decay beside log scales", "more sinks than window"])
def test_programs_have_some_of_the_values_and_read_keys_part_by_part(taken, monkeypatch, name):
    """Two parts of the columns, two tiles of the ring, both with a rest."""
    monkeypatch.setattr(hybrid_step, "MOST_VALUES", 4)
    monkeypatch.setattr(hybrid_step, "NEAR_NUMBERS", 32)
    check(make(**CASES[name]), make_heads(10), (4, 2), 1e-5)
    assert taken == [1] * 6


@pytest.mark.parametrize("numbers", [8192, 256])
def test_a_wide_window(taken, monkeypatch, numbers):
    """Of one tile, and of four: it fills in one row, and keys leave it in the other."""
    monkeypatch.setattr(hybrid_step, "NEAR_NUMBERS", numbers)
    check(make(window_size=64, num_sink_tokens=4, **PERFORMER), make_heads(71), (66, 60), 1e-5)
    assert taken == [1] * 5


HALVES = [
    (torch.float16, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.bfloat16),
    (torch.float32, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stored"), HALVES, ids=str)
def test_heads_and_parameters_in_half_precision(taken, kind, stored):
    mechanism = make(window_size=3, num_sink_tokens=1, sink_logit="learned", **DECAY).to(stored)
    check(mechanism, make_heads(10, kind), (3, 4), 4e-3)
    assert taken == [1] * 6


def test_bfloat16(taken, monkeypatch):
    """Which the interpreter adds and multiplies, but makes no products of: a map without them."""
    monkeypatch.setattr(launching, "kinds", lambda: (torch.bfloat16,))
    mechanism = make(window_size=3, num_sink_tokens=1, linear="linear", **DECAY).bfloat16()
    check(mechanism, make_heads(10, torch.bfloat16), (3, 4), 2e-2)
    assert taken == [1] * 6


@pytest.mark.parametrize("size", [0.01, 12.0])
def test_weights_of_any_size(taken, size):
    """Which part has the largest weight changes from query to query, by as much as hundreds in the exponent."""
    heads = make_heads(12)
    heads[:2] = [x * size for x in heads[:2]]
    check(make(**CASES["performer"]), heads, (7, 3), 1e-3)
    assert taken == [1] * 5


def test_a_part_that_outweighs_the_other_by_far(taken):
    """Times e^150 in one head, e^-150 in another, whose products a float does not hold."""
    mechanism = make(**CASES["decay"])
    with torch.no_grad():
        mechanism.log_mix.copy_(torch.tensor([150.0, -150.0]))
    check(mechanism, make_heads(12), (10, 9), 1e-5)
    assert taken == [1] * 2


def test_features_that_do_not_meet_leave_the_window_alone(taken):
    """Weights of e^150 by the mix, and nothing by the features."""
    mechanism = make(window_size=3, num_sink_tokens=1, linear="linear", linear_options={"feature_map": "relu"})
    with torch.no_grad():
        mechanism.log_mix.fill_(150.0)
    query, key, value = make_heads(12)
    check(mechanism, [query.abs(), -key.abs(), value], (9, 8), 1e-5)
    assert taken == [1] * 3


def test_a_far_part_that_is_shut_has_no_weight(taken):
    mechanism = make(**CASES["decay"])
    mechanism.far_shut = True
    check(mechanism, make_heads(12), (9, 9), 1e-5)
    assert taken == [1] * 3


@pytest.mark.parametrize(
    ("options", "count", "training", "grad"),
    [({"linear": "taylor"}, 1, False, False), ({}, 2, False, False), ({}, 1, True, False), ({}, 1, False, True)],
)
def test_other_maps_more_tokens_training_and_gradients_are_left_to_pytorch(taken, options, count, training, grad):
    mechanism, results = make(window_size=3, num_sink_tokens=1, **options).train(training), []
    with torch.set_grad_enabled(grad):
        for backend in ("torch", "triton"):
            heads = make_heads(8)
            use_backend(mechanism, "torch")
            _, state = mechanism(*(x[:, :, :-count] for x in heads))
            use_backend(mechanism, backend)
            output, state = mechanism(*(x[:, :, -count:] for x in heads), state=state)
            assert output.requires_grad == grad
            results.append([output, *state])
    assert not taken
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_a_model_decodes_as_before(taken):
    """A batch of prompts of different lengths, whose steps come with a mask that hides nothing of the new token."""
    model = patch_model(make_model("llama"), "hybrid", window_size=4, num_sink_tokens=1).eval()
    ids, mask = pad([make_tokens(1, 9)[0], make_tokens(1, 3, seed=1)[0]], 0)
    generated = []
    for backend in ("torch", "triton"):
        set_backend(model, backend)
        generated.append(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False))
    assert torch.equal(*generated) and taken == [1] * 4 * model.config.num_hidden_layers


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 9])
@torch.no_grad()
def test_a_pad_leaves_the_state_as_it_is(case, length):
    mechanism, heads = make(**CASES[case]), make_heads(length + 1)
    use_backend(mechanism, "triton")
    state = mechanism(*(x[:, :, :length] for x in heads))[1]
    token, mask = [x[:, :, length:] for x in heads], torch.tensor([[True], [False]])
    whole, after = mechanism(*token, state=state)
    output, padded = mechanism(*token, mask, state=state)
    assert torch.equal(output[0], whole[0]) and not output[1].any()
    for got, want, before in zip(padded, after, state, strict=True):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], before[1])


def test_its_products_are_counted():
    counts = {}
    for backend in ("torch", "triton"):
        mechanism, heads = make(window_size=40, num_sink_tokens=4), make_heads(50)
        with torch.no_grad():
            use_backend(mechanism, "torch")
            _, state = mechanism(*(x[:, :, :49] for x in heads))
            use_backend(mechanism, backend)
            counts[backend] = flops_of(lambda m=mechanism, x=heads, s=state: m(*(y[:, :, 49:] for y in x), state=s))
    assert 0.5 < counts["triton"] / counts["torch"] < 1.5, counts


# compiles the kernels as they are launched on a GPU, once or all ways, and says how much shared memory each takes
PROGRAM = COMPILING + """
from types import SimpleNamespace
from hf_linattn.ops.hybrid.fused import HybridState
from hf_linattn.ops.hybrid import triton_decode as hybrid_step
from hf_linattn.ops.linear.types import FeatureMapSpec

hybrid_step.launch, hybrid_step.require_kernels = compile_kernel, lambda _: None
OPTIONS[hybrid_step.step_hybrid] = dict(zip(CAPABILITIES, (hybrid_step.OPTIONS[x] for x in (False, True))))
WAYS = [
    (torch.bfloat16, 128, 64, False), (torch.bfloat16, 128, 64, True), (torch.float32, 256, 512, True),
    (torch.bfloat16, 80, 1, False),
]
if sys.argv[1] == "once":
    WAYS, CAPABILITIES = WAYS[1:2], CAPABILITIES[:1]
for kind, size, window, full in WAYS:
    def make(*groups):
        if full:
            weight = torch.empty(2, *groups, size, size)
            return FeatureMapSpec("exponential", weight, weight.new_empty(2, *groups, size), 1.0)
        return FeatureMapSpec("softmax_pair", torch.empty(2, *groups, size, size // 2, dtype=kind))
    heads = [torch.empty(1, h, 1, size, dtype=kind) for h in (4, 2, 2)]
    rows = [torch.empty(1, 2, count, size) for count in (window - 1, window - 1, 4, 4)]
    state = HybridState(*rows, torch.empty(1, 2, size, size + 1), torch.empty(1, 2), torch.zeros(1, dtype=torch.long))
    numbers = {"decay_rate": torch.empty(2), **{name: torch.empty(4) for name in ("window_log", "sink", "far_gate")}}
    numbers = {name: x if full else None for name, x in numbers.items()}
    weights = SimpleNamespace(reach=window - 1, scaling=1.0, log_mix=torch.empty(4, dtype=kind), **numbers)
    ends = torch.ones(1, dtype=torch.long) if full else None
    hybrid_step.step_attention(*heads, weights, [make(2), make()], state, ends)
    hybrid_step.remember(*heads[1:], window - 1, 4, ends, ends)
print(json.dumps(memory))
"""


@pytest.mark.exhaustive
def test_kernels_compile_for_gpus_and_fit_their_shared_memory():
    require_fit(PROGRAM, 16, least=0)
