"""Numbers at the edge of float32: huge keys to come, what is not finite, trained numbers of any size, running sums."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linattn import list_mechanisms
from hf_linattn.backends import use_backend
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer, Mechanism
from hf_linattn.ops.common import numerics
from tests.helpers import is_plain_pattern

LENGTH, AT = 45, 25
SMALL = {"block_size": 8, "window_size": 8, "bucket_size": 8, "num_buckets": 4, "num_features": 16}
SMALL |= {"num_landmarks": 7, "num_slots": 7, "num_codes": 7}
LEARNED = {"gate": True, "decay": "learned", "self_weight": "learned", "ridge": "learned", "sink_logit": "learned"}
FURTHER = {
    "mixed_chunk": [{"inside": "relu2"}, {"linear": "performer", "linear_options": {"decay": "learned"}}],
    "fusion": [{}, {"members": {"local": {}, "linear": {"decay": "learned"}}}],
    "gla": [{}],
    "hybrid": [{"linear": "linear", "linear_options": {"decay": "learned"}}, {"window_scale": "maximum"}],
    "synthesizer": [{}],
}
MATRICES = ("_map.", "projection", "kernel", "taps", "synthetic")  # as large as what they make
both_backends = pytest.mark.parametrize("backend", ["auto", "torch"])


def mechanisms_of(mode: str) -> list[str]:
    """Return the mechanisms that have a form, plain patterns but for two: all of them take the same way."""
    names = [name for name in list_mechanisms() if mode in MECHANISMS.get(name).modes]
    return [name for name in names if not is_plain_pattern(name) or name in ("streaming", "random_blocks")]


def make(name: str, causal: bool, backend: str = "auto", **options) -> Mechanism:
    """Return a mechanism for two query heads and one key/value head of 16 numbers, with small blocks."""
    layer = AttentionLayer(0, 2, 1, 16, causal, 0.25, torch.device("cpu"), torch.float32)
    kind = MECHANISMS.get(name)
    fields = {x.name for x in dataclasses.fields(kind.config_class)}
    known = {field: size for field, size in SMALL.items() if field in fields}
    made = kind(make_config(name, {**known, **options}), layer)
    use_backend(made, backend)
    return made.eval()


def make_heads() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, LENGTH, 16, generator=generator) for heads in (2, 1, 1)]


def past_of(mechanism: Mechanism, heads: list[Tensor], ids: Tensor | None) -> list[Tensor]:
    """Return the outputs before place AT and their gradients with respect to the heads there."""
    heads = [x.clone().requires_grad_() for x in heads]
    output = mechanism(*heads, None, ids)[0][:, :, :AT]
    return [output.detach(), *(x[:, :, :AT] for x in torch.autograd.grad(output.sin().sum(), heads))]


@pytest.mark.covering(2)
@both_backends
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", mechanisms_of("causal"))
def test_no_key_to_come_changes_what_was_before_however_large(name, packed, backend):
    mechanism, (query, key, value) = make(name, True, backend), make_heads()
    ids = (torch.arange(LENGTH) >= 17).long().expand(2, -1) if packed else None
    slopes = past_of(mechanism, [query, key, value], ids)
    for dtype, sizes in ((torch.float32, (1e30, 1e36, 3e38)), (torch.bfloat16, (3e38,))):
        heads = [x.to(dtype) for x in (query, key, value)]
        with torch.no_grad():
            want = mechanism(*heads, None, ids)[0][:, :, :AT]
        for size in sizes:
            huge = heads[1].clone()
            huge[:, :, AT] = huge[:, :, AT].sign() * size
            huge[:, :, AT + 12] = -size
            with torch.no_grad():
                got = mechanism(heads[0], huge, heads[2], None, ids)[0][:, :, :AT]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 2e-2)
    huge = key.clone()
    huge[:, :, AT] = huge[:, :, AT].sign() * 1e30
    if name not in ("taylor", "learned_exp"):  # whose later outputs overflow, and so do their gradients
        for got, want in zip(past_of(mechanism, [query, huge, value], ids), slopes, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "causal"), [(x, c) for c in (True, False) for x in mechanisms_of("causal" if c else "bidirectional")]
)
def test_the_matrix_of_half_precision_is_that_of_the_same_heads_in_full(name, causal):
    """A bucket, a code or a hard key that is chosen in half precision is another than the kernels choose."""
    delta = {"linear": "deltanet", "num_hard_keys": 5, "num_sink_tokens": 2} if name == "hybrid" and causal else {}
    mechanism, heads = make(name, causal, **delta), [x.bfloat16() for x in make_heads()]
    full = mechanism.attention_matrix(*(x.float() for x in heads[:2]), value=heads[2].float())
    with torch.autocast("cpu", torch.bfloat16):
        matrix = mechanism.attention_matrix(*heads[:2], value=heads[2])
    torch.testing.assert_close(matrix, full.bfloat16(), rtol=0, atol=0)


@pytest.mark.covering(2)
@both_backends
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["linear", "hedgehog", "learned_exp", "local", "hybrid"])
def test_pads_of_any_finite_size_change_nothing(name, causal, backend):
    mechanism, heads = make(name, causal, backend), make_heads()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :7], mask[1, 30:] = False, False
    real = mask[:, None, :, None]
    with torch.no_grad():
        want = mechanism(*heads, mask)[0] * real
        for size in (1e30, 3e38):
            got, _ = mechanism(*(torch.where(real, x, size) for x in heads), mask)
            torch.testing.assert_close(torch.where(real, got, 0.0), want, rtol=1e-4, atol=1e-4)


@pytest.mark.covering(1)
@both_backends
@pytest.mark.parametrize(
    ("name", "causal"), [(x, c) for c in (True, False) for x in mechanisms_of("causal" if c else "bidirectional")]
)
def test_what_is_not_finite_shows_where_it_is_seen(name, causal, backend):
    mechanism = make(name, causal, backend)
    for part, number in itertools.product(range(3), (torch.nan, torch.inf)):
        heads = make_heads()
        heads[part][:, :, AT] = number
        with torch.no_grad():
            output = mechanism(*heads)[0]
        assert not output[:, :, AT].isfinite().any(-1).any(), (part, number)
        if part == 0 and (causal or name != "nystrom"):  # whose landmarks are of all queries
            assert output[:, :, :AT].isfinite().all(), number


@pytest.mark.covering(1)
@both_backends
@pytest.mark.parametrize(
    ("name", "causal"), [(x, c) for c in (True, False) for x in mechanisms_of("causal" if c else "bidirectional")]
)
def test_a_row_that_is_not_finite_leaves_those_beside_it_alone(name, causal, backend):
    """Pads are numbers of no row: they were read from the first token of the first one."""
    mechanism, heads = make(name, causal, backend), make_heads()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 30:] = False
    with torch.no_grad():
        want = mechanism(*heads, mask)[0][1, :, :30]
        for number in (torch.nan, torch.inf):
            got = mechanism(*(torch.cat([x[:1].new_full(x[:1].shape, number), x[1:]]) for x in heads), mask)[0]
            torch.testing.assert_close(got[1, :, :30], want, rtol=1e-4, atol=1e-4)


def learned_of(name: str, causal: bool) -> list[dict]:
    """Return the options that give a mechanism trained numbers."""
    fields = {x.name for x in dataclasses.fields(MECHANISMS.get(name).config_class)}
    all_of_it = {k: v for k, v in LEARNED.items() if k in fields and not (k == "ridge" and causal)}
    return [all_of_it] * bool(all_of_it) + FURTHER.get(name, [])


NUMBERS = [
    (name, causal, options)
    for causal in (True, False)
    for name in mechanisms_of("causal" if causal else "bidirectional")
    for options in learned_of(name, causal)
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("backend", "sizes"),
    [("torch", (-3e38, -96.0, 60.0, 88.0, 550.0, 3e38)), ("auto", (-3e38, 88.0, 3e38))],
    ids=["torch", "auto"],
)
@pytest.mark.parametrize(("name", "causal", "options"), NUMBERS)
def test_a_trained_number_of_any_finite_size_gives_finite_outputs_and_gradients(name, causal, options, backend, sizes):
    mechanism = make(name, causal, backend, **options)
    numbers = {x: p for x, p in mechanism.named_parameters() if not any(matrix in x for matrix in MATRICES)}
    for (parameter, number), size in itertools.product(numbers.items(), sizes):
        before = number.detach().clone()
        number.data.fill_(size)
        heads = [x.requires_grad_() for x in make_heads()]
        output, _ = mechanism(*heads)
        gradients = torch.autograd.grad(output.sin().sum(), [*heads, number], allow_unused=True)
        for x in (output, *(x for x in gradients if x is not None)):
            assert x.isfinite().all(), (parameter, size)
        if causal:
            with torch.no_grad():
                _, state = mechanism(*(x[:, :, :-1] for x in heads))
                step, _ = mechanism(*(x[:, :, -1:] for x in heads), state=state)
            assert step.isfinite().all(), (parameter, size)
        number.data.copy_(before)


class Deterministic(TorchDispatchMode):
    """Raises where PyTorch would on a GPU, see `torch.use_deterministic_algorithms`."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "cumsum" and args[0].is_floating_point():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return function(*args, **(kwargs or {}))


RUNNING = {  # mechanisms that sum up something from token to token or from block to block
    "linear": {"decay": "learned"}, "gla": {}, "deltanet": {"gate": True}, "vq": {},
    "hybrid": {"linear": "linear", "linear_options": {"decay": "learned"}},
}  # fmt: skip


@both_backends
@pytest.mark.parametrize(
    ("name", "causal"), [(x, c) for c in (True, False) for x in mechanisms_of("causal" if c else "bidirectional")
                         if x in RUNNING]
)  # fmt: skip
def test_a_deterministic_training_needs_no_cumsum(name, causal, backend, monkeypatch):
    """Nor do what calibration fits and the weights that transfer compares; all is the same but for rounding."""
    results = []
    for mode in (contextlib.nullcontext(), Deterministic()):
        mechanism, heads = make(name, causal, backend, **RUNNING[name]), [x.requires_grad_() for x in make_heads()]
        with mode:
            mechanism.prepare(*heads, None)
            output, _ = mechanism(*heads)
            weights = mechanism.attention_matrix(*heads[:2], value=heads[2])
            wanted = [*heads, *mechanism.parameters()]
            loss = output.sin().sum() + weights.sin().sum()
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        results.append([output, weights, *(x for x in gradients if x is not None)])
        monkeypatch.setattr(numerics, "refuses_cumsum", lambda _: True)
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", [1, 2, 7, 64])
@pytest.mark.parametrize("dim", [1, -1])
def test_sums_by_doubling_steps_are_running_sums(monkeypatch, dim, length):
    """With their gradients; what is not finite shows from its place on."""
    x = torch.randn(2, length, length, dtype=torch.float64, requires_grad=True)
    want, weight = x.cumsum(dim), torch.randn(2, length, length, dtype=torch.float64)
    monkeypatch.setattr(numerics, "refuses_cumsum", lambda _: True)
    got = numerics.running_sum(x, dim)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad((y * weight).sum(), x)[0] for y in (got, want)))
    assert numerics.running_sum(torch.tensor([1.0, torch.inf, 2.0])).tolist() == [1.0, torch.inf, torch.inf]
