"""The twelve invariants, as functions of a `Case` that raise `InvariantError` where one does not hold.

They compare with an independent float64 reference or with a property; nothing is compared with itself.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, DynamicCache

from ..attention_modules import self_attention_modules
from ..mechanisms import Mechanism
from ..ops import reference as naive
from ..patching import get_mechanisms, original_attention, patch_model, unpatch_model
from .counters import elements_written, flops_of, largest_tensor
from .expectations import (
    LENGTH,
    expect,
    expect_close,
    expect_continued,
    expect_equal,
    expect_finite,
    expect_gradcheck,
    expect_growth,
    head_gradients,
)
from .models import KEY_VALUE_HEADS, Case, FedCase, positions_of, random_tokens, tiny_model

NOTHING = "nothing to check"
Invariant = Callable[[Case], str | None]  # `NOTHING` where a mechanism says nothing that could be false
INVARIANTS: dict[str, Invariant] = {}
# dynamo traces every architecture; the graphs of the backward pass, which are the mechanism's, take as long again
COMPILERS = {"llama": "aot_eager"}
CAUSAL_ONLY: set[str] = set()


def invariant(name: str, causal_only: bool = False) -> Callable[[Invariant], Invariant]:
    """Return a decorator that enters a check under `name`."""

    def enter(check: Invariant) -> Invariant:
        INVARIANTS[name] = check
        if causal_only:
            CAUSAL_ONLY.add(name)
        return check

    return enter


@invariant("1 causality", causal_only=True)
def check_causality(case: Case) -> None:
    """No past output changes when the future does, however large; the Jacobian is lower-triangular."""
    mechanism, cut = case.make(), 97
    query, key, value = case.heads(LENGTH)
    want, _ = mechanism(query, key, value)
    for size in (1.0, 8.0, 300.0):
        future = case.heads(LENGTH, size=size, seed=1)
        changed = [
            torch.cat([old[:, :, :cut], new[:, :, cut:]], 2)
            for old, new in zip((query, key, value), future, strict=True)
        ]
        got, _ = mechanism(*changed)
        expect_close(got[:, :, :cut], want[:, :, :cut], f"past outputs with the future scaled by {size:g}", 1e-12)
    heads = case.heads(7, batch=1)
    for index, name in enumerate(("query", "key", "value")):
        def output(x: Tensor, index: int = index) -> Tensor:
            return mechanism(*heads[:index], x, *heads[index + 1 :])[0].sum((0, 1, 3))

        jacobian = torch.autograd.functional.jacobian(output, heads[index]).abs().amax((1, 2, 4))
        expect(not jacobian.triu(1).any(), f"d output_i / d {name}_j is not zero for some j > i")
        expect(bool(jacobian.diagonal().any()), f"output does not depend on {name} at all")


@invariant("2 padding")
def check_padding(case: Case) -> None:
    """Left- and right-padded inputs give the outputs and gradients of the unpadded one, whatever the pads hold."""
    model = case.model()
    tokens = random_tokens(1, 71)

    def run(ids: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        logits = model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits[mask.bool()]
        (logits.sin().sum()).backward()
        return logits, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want, want_grads = run(tokens, torch.ones_like(tokens))
    for side in ("left", "right"):
        pad, none = random_tokens(1, 13, seed=5), torch.zeros(1, 13, dtype=torch.long)
        order = (lambda real, pads: [pads, real]) if side == "left" else (lambda real, pads: [real, pads])
        got, got_grads = run(torch.cat(order(tokens, pad), 1), torch.cat(order(torch.ones_like(tokens), none), 1))
        expect_close(got, want, f"{side}-padded logits")
        for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
            expect_close(got_grad, want_grad, f"{side}-padded gradient")


@invariant("3 batch independence")
def check_batch_independence(case: Case) -> None:
    """A row's output is the same alone and beside any neighbours, padded or not."""
    model = case.model()
    tokens = random_tokens(3, 83)
    mask = torch.ones_like(tokens)
    mask[1, :30] = 0
    mask[2, 50:] = 0
    with torch.no_grad():
        together = model(tokens, attention_mask=mask, position_ids=positions_of(mask)).logits
        for row in range(3):
            real = mask[row].bool()
            alone = model(tokens[row : row + 1, real]).logits[0]
            expect_close(together[row, real], alone, f"row {row} of a batch")
    query, key, value = case.heads(40, batch=2)
    mechanism = case.make()
    want, _ = mechanism(query, key, value)
    loud = [torch.cat([x[:1], 100 * x[1:]]) for x in (query, key, value)]
    expect_close(mechanism(*loud)[0][:1], want[:1], "a row beside a neighbour scaled by 100", 1e-12)


@invariant("4 decoding", causal_only=True)
def check_decoding(case: Case) -> None:
    """Full forward = prefill + steps = chunked prefill; beams reorder; padded batches decode like single rows."""
    model = case.model()
    tokens = random_tokens(2, 97)
    with torch.no_grad():
        want = model(tokens).logits
        for sizes in ([88] + [1] * 9, [64, 3, 20, 1, 9], [1] * 5 + [92]):
            cache, got, start = DynamicCache(), [], 0
            for size in sizes:
                got.append(model(tokens[:, start : start + size], past_key_values=cache, use_cache=True).logits)
                start += size
            expect_close(torch.cat(got, 1), want, f"logits in calls of {sizes[:3]} ... tokens")
        cache = DynamicCache()
        model(tokens[:, :60], past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.tensor([1, 0]))
        got_swapped = model(tokens[:, 60:].flip(0), past_key_values=cache, use_cache=True).logits
        expect_close(got_swapped, want[:, 60:].flip(0), "logits after the beams were swapped")
        kwargs: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        alone = [model.generate(tokens[r : r + 1, 10 * r :], use_cache=False, **kwargs)[:, -4:] for r in range(2)]
        mask = torch.ones_like(tokens)
        mask[1, :10] = 0
        for beams in (1, 3):
            batched = model.generate(tokens, attention_mask=mask, num_beams=beams, **kwargs)[:, -4:]
            if beams == 1:
                expect_equal(batched, torch.cat(alone), "greedy tokens of a left-padded batch with cache")
            else:
                full = model.generate(tokens, attention_mask=mask, num_beams=beams, use_cache=False, **kwargs)
                expect_equal(batched, full[:, -4:], "beam search with cache against without")
        mechanism, heads, real = case.make(), case.heads(23), (torch.arange(23) >= 10).expand(2, -1)
        want, state, parts = mechanism(*(x[:, :, 10:] for x in heads))[0], None, []
        for span in torch.arange(23).split(4):
            output, state = mechanism(*(x[:, :, span] for x in heads), real[:, span], None, state)
            parts.append(output)
        expect_close(torch.cat(parts, 2)[:, :, 10:], want, "output in pieces of which the first are pads alone")


@invariant("5 packing")
def check_packing(case: Case) -> None:
    """Sequences packed into one row give what they give alone, next to neighbours of any size."""
    mechanism, lengths = case.make(), (1, 67, 5, 64, 13)
    query, key, value = case.heads(LENGTH)
    loud = torch.ones(LENGTH)
    loud[1:68] = 30.0
    query, key = query * loud[:, None], key * loud[:, None]
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths)).expand(2, -1)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 70:75] = False
    got, _ = mechanism(query, key, value, mask, ids)
    for part, span in enumerate(torch.arange(LENGTH).split(lengths)):
        want, _ = mechanism(query[:, :, span], key[:, :, span], value[:, :, span], mask[:, span])
        expect_close(got[:, :, span], want, f"packed sequence {part}")
    model, tokens = case.model(), random_tokens(2, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    with torch.no_grad():
        packed = model(tokens, position_ids=positions, use_cache=False).logits
        for part, span in enumerate(torch.arange(sum(lengths)).split(lengths)):
            expect_close(packed[:, span], model(tokens[:, span]).logits, f"logits of packed document {part}")
    if case.causal:
        expect_continued(mechanism, case.heads(11))


@invariant("6 determinism")
def check_determinism(case: Case) -> None:
    """Training mode without dropout equals evaluation; the seed fixes the result; global generators are untouched."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].copy()
    tokens = random_tokens(2, 45)
    first, second = case.model(), case.model()
    want = first(tokens).logits
    expect_equal(second(tokens).logits, want, "two models patched with one seed")
    second.train()
    expect_close(second(tokens, use_cache=False).logits, want, "training mode")
    expect(torch.equal(states[0], torch.get_rng_state()), "torch's global random state changed")
    expect(states[1] == random.getstate(), "python's global random state changed")
    after = np.random.get_state(legacy=False)["state"]["key"]
    expect(bool((states[2] == after).all()), "numpy's global random state changed")


@invariant("7 save and undo")
def check_save_and_undo(case: Case) -> None:
    """A saved model reloads bit for bit; unpatching restores every bit and key, also after an exception."""
    original = tiny_model(case.architecture, case.causal, torch.float32)
    tokens = random_tokens(2, 33)
    with torch.no_grad():
        want, keys = original(tokens).logits, list(original.state_dict())
        model = patch_model(original, case.mechanism, **case.options)
        patched = model(tokens).logits
        if case.architecture == "bert" or case.causal:  # a decoder turned bidirectional is so in memory only
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                auto = AutoModelForCausalLM if case.causal else AutoModelForMaskedLM
                expect_equal(auto.from_pretrained(folder).eval()(tokens).logits, patched, "logits after save and load")
        with original_attention(model):
            expect_equal(model(tokens).logits, want, "logits inside original_attention")
        expect_equal(model(tokens).logits, patched, "logits after original_attention")
        try:
            with original_attention(model):
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            expect_equal(model(tokens).logits, patched, "logits after an exception inside original_attention")
        unpatch_model(model)
        expect_equal(model(tokens).logits, want, "logits after unpatch_model")
        expect(list(model.state_dict()) == keys, "state-dict keys after unpatch_model")


@invariant("8 exactness limit")
def check_exactness_limit(case: Case) -> str | None:
    """At its stated limit it is softmax attention, beside its sink if it has one; else its error falls as stated."""
    length = 37
    query, key, value = case.heads(length, size=0.3)  # small logits: the regime in which errors fall as stated
    allowed, made = naive.allowed_pairs(query.shape[2], length, case.causal), case.make()
    matrix = naive.softmax_matrix(query, key, made.layer.scaling, allowed, sink=made.log_sink(query))
    want, limit = naive.attend(matrix, value), made.limit
    if limit.equal is None and limit.converging is None and not limit.kernel:
        return NOTHING
    if limit.equal is not None:
        got, _ = case.make(torch.float32, **limit.equal(length))(query.float(), key.float(), value.float())
        expect_close(got, want, "output at the exactness limit", 1e-5)
    if limit.converging is not None:
        option, (few, many), rate = limit.converging

        def error(setting: int) -> float:
            options: list[dict[str, Any]] = [{option: setting, "seed": seed} for seed in range(12)]
            outputs = [case.make(torch.float64, **chosen)(query, key, value)[0] for chosen in options]
            return float(np.mean([(output - want).square().mean().sqrt().item() for output in outputs]))

        ratio, expected = error(few) / error(many), (many / few) ** rate
        expect(
            0.7 * expected < ratio < 1.4 * expected,
            f"error fell by {ratio:.2f} from {option}={few} to {many}, stated {expected:.2f}",
        )
    if limit.kernel:
        own, matrix = case.make()(query, key, value)[0], case.make().attention_matrix(query, key, value=value)
        expect_close(own, naive.attend(matrix, value), "output against its kernel")
    return None


@invariant("9 reference")
def check_reference(case: Case) -> None:
    """Outputs and gradients match the float64 N x N reference, under padding and packing; gradcheck passes."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :9] = False
    mask[1, 140:] = False
    ids = (torch.arange(LENGTH) >= 77).long().expand(2, -1)
    for key_padding_mask, sequence_ids in ((None, None), (mask, None), (mask, ids)):
        mechanism = case.make()
        heads = [x.requires_grad_() for x in case.heads(LENGTH)]
        weight = torch.randn(heads[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        weight = weight * (mask if key_padding_mask is not None else torch.ones_like(mask))[:, None, :, None]
        got, _ = mechanism(*heads, key_padding_mask, sequence_ids)
        matrix = mechanism.attention_matrix(heads[0], heads[1], key_padding_mask, sequence_ids, heads[2])
        want = naive.attend(matrix, heads[2])
        real = mask if key_padding_mask is not None else torch.ones_like(mask)
        expect_close(got.transpose(1, 2)[real], want.transpose(1, 2)[real], "output against the reference")
        grads = head_gradients(got * weight, heads), head_gradients(want * weight, heads, "reference")
        for name, a, b in zip("qkv", *grads, strict=True):
            expect_close(a, b, f"gradient of {name} against the reference", 1e-8)
    expect_gradcheck(case)


@invariant("10 finite")
def check_finite(case: Case) -> None:
    """Outputs and gradients are finite in half precision, for large logits, masked rows and length 1."""
    expect_finite(case)
    half = case.model(torch.bfloat16)
    expect(bool(torch.isfinite(half(random_tokens(2, 31)).logits).all()), "bfloat16 model: logits not finite")


@invariant("11 linear cost")
def check_cost(case: Case) -> str | None:
    """No tensor of N^2 elements; FLOPs and what the backward pass writes double with the length, or as is stated."""
    made = case.make(torch.float32)
    if not made.subquadratic:
        return NOTHING
    length = 2048
    model, tokens = case.model(torch.float32), random_tokens(1, length)

    def train() -> None:
        model(tokens, use_cache=False).logits.logsumexp(-1).sum().backward()

    def decode() -> None:
        with torch.no_grad():
            model.generate(tokens, max_new_tokens=3, do_sample=False)

    for name, run in (("forward and backward", train), ("generate", decode)):
        if name == "generate" and not case.causal:
            continue
        largest = largest_tensor(run)
        expect(largest < length**2, f"{name} made a tensor of {largest} elements at N = {length}")
    # patterns that reach a thousand tokens back see less near the ends: at twice the length that is within 10 %
    options = json.dumps(dict(case.options))
    kind: Any = case.mechanism_class  # mypy thinks that classes have no hash
    flops, written = measure_costs(kind, case.causal, options, case.kv_heads, 2 * length)
    # less than 2 where a part is fixed, as a pseudo-inverse beside heads this narrow
    expect_growth("FLOPs", *flops, most=1.1 * made.growth, least=1.5)
    # gradients of fewer keys, as full ends count less
    expect_growth("what the backward pass writes", *written, most=1.1 * made.growth)
    return None


@functools.cache  # it is the same on architectures whose heads are alike
def measure_costs(
    kind: type[Mechanism], causal: bool, options: str, kv_heads: int, length: int
) -> list[tuple[int, int]]:
    """Return each of the `costs` of a mechanism at one length and at twice as much; `options` are JSON."""
    architecture = next(name for name, heads in KEY_VALUE_HEADS.items() if heads == kv_heads)
    case = FedCase(kind.config_class.mechanism, architecture, causal, json.loads(options))
    made = case.make(torch.float32)
    short, long = (costs(made, case.heads(n, 1, torch.float32)) for n in (length, 2 * length))
    return list(zip(short, long, strict=True))


def costs(mechanism: Mechanism, heads: Sequence[Tensor]) -> tuple[int, int]:
    """Return the FLOPs of the products in a forward, and the elements that its backward pass writes."""
    outputs: list[Tensor] = []
    heads = [x.requires_grad_() for x in heads]
    flops = flops_of(lambda: outputs.append(mechanism(*heads)[0]))
    return flops, elements_written(outputs[0].sum().backward)


@invariant("12 checkpointing and compile")
def check_transforms(case: Case) -> None:
    """Gradient checkpointing and a compiled attention module give the same outputs and gradients."""
    tokens = random_tokens(2, 70)

    def gradients(model: torch.nn.Module) -> tuple[Tensor, list[Tensor]]:
        model.train()
        logits = model(tokens, use_cache=False).logits
        logits.sin().sum().backward()
        return logits, [p.grad for p in model.parameters() if p.grad is not None]

    want, want_grads = gradients(case.model())
    for reentrant in (False, True):
        model = case.model()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        got, got_grads = gradients(model)
        expect_close(got, want, "logits with gradient checkpointing")
        for a, b in zip(got_grads, want_grads, strict=True):
            expect_close(a, b, "gradient with gradient checkpointing")
    model = case.model()
    torch.compiler.reset()
    *_, last = self_attention_modules(model).values()  # one: the others run the same code
    last.compile(backend=COMPILERS.get(case.architecture, "eager"))
    got, got_grads = gradients(model)
    expect_close(got, want, "logits of the compiled model")
    for a, b in zip(got_grads, want_grads, strict=True):
        expect_close(a, b, "gradient of the compiled model")
    expect(all(m.layer is not None for m in get_mechanisms(model).values()), "mechanisms are gone")
