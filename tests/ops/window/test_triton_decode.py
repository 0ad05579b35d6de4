"""A window in decoding by Triton: tokens one by one, and what is kept of a prompt, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_linattn import explain_backend, patch_model, set_backend
from hf_linattn.backends import use_backend
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer, Mechanism
from hf_linattn.ops.window import triton_decode
from hf_linattn.testing.counters import flops_of
from tests.helpers import assert_close, make_tokens
from tests.models import make_model
from tests.ops.triton_cases import COMPILING, require_fit

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM, LENGTH = 2, 2, 1, 8, 6, 13
CASES = {
    "local": ("local", {"window_size": 5}),
    "one key": ("local", {"window_size": 1}),
    "never full": ("local", {"window_size": 20}),
    "sinks": ("streaming", {"window_size": 6, "num_sink_tokens": 3}),
    "sinks alone": ("streaming", {"window_size": 1, "num_sink_tokens": 4}),
    "a sink without value": ("streaming", {"window_size": 7, "num_sink_tokens": 2, "sink_logit": "learned"}),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles with a rest, of keys, of values and of what is copied."""
    for name, size in {"MOST_VALUES": 4, "NUMBERS": 64, "COPIED": 64}.items():
        monkeypatch.setattr(triton_decode, name, size)


def mechanism_of(case: str, dtype: torch.dtype) -> Mechanism:
    name, options = CASES[case]
    layer = AttentionLayer(
        index=0, num_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, causal=True,
        scaling=0.4, value_dim=VALUE_DIM, device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    mechanism = MECHANISMS.get(name)(make_config(name, options), layer).eval()
    for parameter in mechanism.parameters():
        parameter.data += torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
    return mechanism.to(dtype)


def heads_of(kind: torch.dtype) -> list[Tensor]:
    """Slices of one projection, as in models."""
    sizes, generator = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * VALUE_DIM), torch.Generator().manual_seed(3)
    parts = torch.randn(BATCH, LENGTH, sum(sizes), generator=generator).to(kind).split(sizes, -1)
    return [
        x.unflatten(-1, (-1, size)).transpose(1, 2) for x, size in zip(parts, (DIM, DIM, VALUE_DIM), strict=True)
    ]


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.parametrize("prompt", [1, 7])
@pytest.mark.parametrize("padded", ["", "left", "right"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_steps_behind_a_prompt_are_the_formula(case, padded, prompt, kind):
    mechanism, heads = mechanism_of(case, kind), heads_of(kind)
    use_backend(mechanism, "triton")
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    if padded:
        pads = prompt // 2 + (prompt == 1)
        real[1, slice(pads) if padded == "left" else slice(prompt - pads, prompt)] = False
    parts = [x.split([prompt, *[1] * (LENGTH - prompt)], 2) for x in heads]
    outputs, state = [], None
    for i, part in enumerate(zip(*parts, strict=True)):
        mask = real[:, :prompt] if padded and not i else None
        output, state = mechanism(*part, mask, state=state)
        outputs.append(output)
    wide = mechanism_of(case, torch.float64)
    wide.load_state_dict(mechanism.state_dict())
    query, key, value = (x.double() for x in heads)
    want = wide.attention_matrix(query, key, real) @ value.repeat_interleave(HEADS // KV_HEADS, dim=1)
    shown, got = real[:, None, :, None], torch.cat(outputs, 2).double()
    assert not got.masked_select(~shown).any()
    assert_close(got * shown, want * shown, 1e-5 if kind == torch.float32 else 4e-3)
    assert state.length.tolist() == real.sum(1).tolist()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 4, LENGTH])
@torch.no_grad()
def test_what_is_kept_is_what_pytorch_keeps(case, length):
    """Of rows that are whole, or end earlier; and after a token more, so that either may go on after the other."""
    mechanism, heads = mechanism_of(case, torch.float32), heads_of(torch.float32)
    number, half = torch.arange(length), torch.tensor([[0], [length // 2]])
    for mask in (None, number >= half, number < half + 1, (number > half) & (number < length - 1)):
        states = []
        for backend in ("triton", "torch"):
            use_backend(mechanism, backend)
            state = mechanism(*(x[:, :, :length] for x in heads), mask)[1]
            after = mechanism(*(x[:, :, -1:] for x in heads), state=state)[1]
            states.append((state, after))
        for got, want in zip(*states, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@torch.no_grad()
def test_a_step_leaves_the_state_before_it_as_it_is():
    mechanism, heads = mechanism_of("sinks", torch.float32), heads_of(torch.float32)
    use_backend(mechanism, "triton")
    state = mechanism(*(x[:, :, :-1] for x in heads))[1]
    before = [x.clone() for x in state]
    mechanism(*(x[:, :, -1:] for x in heads), state=state)
    assert all(map(torch.equal, state, before))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_pad_leaves_the_state_as_it_is(case):
    mechanism, heads = mechanism_of(case, torch.float32), heads_of(torch.float32)
    use_backend(mechanism, "triton")
    state = mechanism(*(x[:, :, :7] for x in heads))[1]
    token, mask = [x[:, :, 7:8] for x in heads], torch.tensor([[True], [False]])
    whole, after = mechanism(*token, state=state)
    output, padded = mechanism(*token, mask, state=state)
    assert torch.equal(output[0], whole[0]) and not output[1].any()
    for got, want, before in zip(padded, after, state, strict=True):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], before[1])


def test_gradients_are_those_of_other_operations():
    mechanism, heads = mechanism_of("sinks", torch.float32), heads_of(torch.float32)
    use_backend(mechanism, "triton")
    heads = [x.detach().requires_grad_() for x in heads]
    _, state = mechanism(*(x[:, :, :9] for x in heads))
    output, _ = mechanism(*(x[:, :, 9:10] for x in heads), state=state)
    (gradient,) = torch.autograd.grad(output.sum(), heads[2])
    assert bool((gradient[:, :, 9] != 0).any()) and bool((gradient[:, :, 8] != 0).any())


@torch.no_grad()
def test_a_model_writes_the_same_by_either():
    texts = []
    for backend in ("torch", "triton"):
        model = patch_model(make_model("llama"), "streaming", window_size=4, num_sink_tokens=2).eval()
        set_backend(model, backend)
        ids = make_tokens(2, 9)
        mask = (torch.arange(9) >= torch.tensor([[3], [0]])).long()
        texts.append(model.generate(ids, attention_mask=mask, max_new_tokens=7, do_sample=False))
    assert torch.equal(*texts)
    assert "triton" in str(explain_backend(model, ids))


@torch.no_grad()
def test_flops_of_a_step():
    mechanism, heads = mechanism_of("sinks", torch.float32), heads_of(torch.float32)
    use_backend(mechanism, "triton")
    state = mechanism(*(x[:, :, :-1] for x in heads))[1]
    counted = flops_of(lambda: mechanism(*(x[:, :, -1:] for x in heads), state=state))
    assert counted == 2 * BATCH * HEADS * (5 + 3 + 1) * (DIM + VALUE_DIM)


# compiles the kernels as they are launched on a GPU, once or all ways, and says how much shared memory each takes
PROGRAM = COMPILING + """
from hf_linattn.ops.window import triton_decode

triton_decode.launch, triton_decode.require_kernels = compile_kernel, lambda _: None
WAYS = [(torch.bfloat16, 128, 256, 4), (torch.float32, 256, 64, 0), (torch.bfloat16, 80, 1, 4)]
if sys.argv[1] == "once":
    WAYS, CAPABILITIES = WAYS[:2], CAPABILITIES[:1]
for kind, size, window, sinks in WAYS:
    heads = [torch.empty(1, h, 300, size, dtype=kind) for h in (4, 2, 2)]
    ends, sink = (torch.full((1,), 300), torch.empty(4)) if sinks else (None, None)
    state = triton_decode.keep_last(*heads[1:], sinks, sinks + window - 1, ends, ends)
    triton_decode.step_attention(*(x[:, :, :1] for x in heads), state, sinks, 0.1, sink, ends)
print(json.dumps(memory))
"""


@pytest.mark.exhaustive
def test_kernels_compile_for_gpus_and_fit_their_shared_memory():
    require_fit(PROGRAM, 12, least=0)
