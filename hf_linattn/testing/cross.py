"""The invariants of cross-attention, under the numbers they have in self-attention. It has no order and no packing.

Queries and keys differ in number in all of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
)

from ..attention_modules import cross_attention_modules
from ..cache import EncoderStateLayer
from ..mechanisms.softmax import SoftmaxMechanism
from ..ops import reference as naive
from ..patching import original_attention, unpatch_model
from .counters import largest_tensor
from .expectations import (
    expect,
    expect_close,
    expect_equal,
    expect_finite,
    expect_gradcheck,
    expect_growth,
    head_gradients,
)
from .invariants import NOTHING, Invariant, check_exactness_limit, costs
from .models import Case, random_tokens, source_of, tiny_model

CROSS_INVARIANTS: dict[str, Invariant] = {}
LENGTH, TARGET = 71, 43  # of sources (where a model can choose) and of targets


def invariant(name: str) -> Callable[[Invariant], Invariant]:
    """Return a decorator that enters a check under `name`."""

    def enter(check: Invariant) -> Invariant:
        CROSS_INVARIANTS[name] = check
        return check

    return enter


def _run(model: PreTrainedModel, case: Case, **options: Any) -> Tensor:
    """Return the logits of two rows."""
    source = source_of(case.architecture, 2, LENGTH, model.dtype)
    return model(**source, decoder_input_ids=random_tokens(2, TARGET, seed=1), **options).logits


@invariant("2 padding")
def check_padding(case: Case) -> None:
    """Pads among the keys, wherever they stand and whatever they hold, change no output and get no gradient."""
    mechanism = case.make()
    query, key, value = (x.requires_grad_() for x in case.heads(LENGTH, batch=1))
    want, _ = mechanism(query, key, value)
    want_grads = head_gradients(want.sin(), (query, key, value))
    for before, middle, after in ((13, 0, 0), (0, 0, 13), (3, 4, 6)):
        real = torch.ones(LENGTH + 13, dtype=torch.bool)
        real[:before] = False
        real[before + 20 : before + 20 + middle] = False
        real[len(real) - after :] = False
        wide = [50 * torch.ones(*x.shape[:2], LENGTH + 13, x.shape[3], dtype=x.dtype) for x in (key, value)]
        for padded, x in zip(wide, (key, value), strict=True):
            padded[:, :, real] = x.detach()
            padded.requires_grad_()
        got, _ = mechanism(query, *wide, real[None])
        expect_close(got, want, f"output with {before}, {middle} and {after} pads")
        grads = head_gradients(got.sin(), (query, *wide))
        expect_close(grads[0], want_grads[0], "gradient of q beside pads")
        for name, grad, want_grad in zip("kv", grads[1:], want_grads[1:], strict=True):
            expect_close(grad[:, :, real], want_grad, f"gradient of {name} beside pads")
            expect(not grad[:, :, ~real].any(), f"a pad has a gradient of {name}")


@invariant("3 batch independence")
def check_batch_independence(case: Case) -> None:
    """A row's output is the same alone and beside any neighbours, padded or not."""
    mechanism = case.make()
    query, key, value = case.heads(LENGTH, batch=2)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :9] = False
    want, _ = mechanism(query[:1], key[:1], value[:1], mask[:1])
    loud = [torch.cat([x[:1], 100 * x[1:]]) for x in (query, key, value)]
    expect_close(mechanism(*loud, mask)[0][:1], want, "a row beside a neighbour scaled by 100", 1e-12)


@invariant("4 decoding")
def check_decoding(case: Case) -> None:
    """Full forward = steps that read what the first kept; keys are kept no longer; beams reorder; generate agrees."""
    model, target = case.model(), random_tokens(2, TARGET, seed=1)
    source = source_of(case.architecture, 2, LENGTH, model.dtype)
    if case.architecture == "bart":
        source["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
        source["attention_mask"][1, 50:] = 0
    with torch.no_grad():
        want = model(**source, decoder_input_ids=target).logits
        for sizes in ([40, 1, 1, 1], [1] * 3 + [40], [17, 5, 21]):
            cache, got, start = EncoderDecoderCache(DynamicCache(), DynamicCache()), [], 0
            for size in sizes:
                part = target[:, start : start + size]
                got.append(model(**source, decoder_input_ids=part, past_key_values=cache, use_cache=True).logits)
                start += size
            expect_close(torch.cat(got, 1), want, f"logits in calls of {sizes[:3]} ... tokens")
        if not isinstance(case.make(), SoftmaxMechanism):
            for layer in cache.cross_attention_cache.layers:
                expect(isinstance(layer, EncoderStateLayer) and layer.state is not None, "the cache holds no state")
                expect(not layer._keys.numel(), "the cache holds the encoder's keys beside the state")
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        model(**source, decoder_input_ids=target[:, :20], past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = {name: x.flip(0) for name, x in source.items()}
        rest = target[:, 20:].flip(0)
        after = model(**swapped, decoder_input_ids=rest, past_key_values=cache, use_cache=True).logits
        expect_close(after, want[:, 20:].flip(0), "logits after the beams were swapped")
        for beams in (1, 3):
            options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "num_beams": beams}
            cached, full = (model.generate(**source, use_cache=use, **options) for use in (True, False))
            expect_equal(cached, full, f"generate with {beams} beams, with cache against without")


@invariant("6 determinism")
def check_determinism(case: Case) -> None:
    """Training mode without dropout equals evaluation; the seed fixes the result; torch's generator is untouched."""
    with torch.random.fork_rng(devices=[]):  # a model may draw from it in training, whether or not it drops a layer
        _run(tiny_model(case.architecture, False).train(), case, use_cache=False)
        drawn = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        first, second = case.model(), case.model()
        want = _run(first, case)
        expect_equal(_run(second, case), want, "two models patched with one seed")
        expect_close(_run(second.train(), case, use_cache=False), want, "training mode")
        expect(torch.equal(drawn, torch.get_rng_state()), "torch's global random state changed")


@invariant("7 save and undo")
@torch.no_grad()
def check_save_and_undo(case: Case) -> None:
    """A saved model reloads bit for bit; the original is there for a while, and comes back bit for bit."""
    original = tiny_model(case.architecture, False, torch.float32)
    want, keys = _run(original, case), list(original.state_dict())
    model = case.model(torch.float32)
    patched = _run(model, case)
    auto = AutoModelForSeq2SeqLM if case.architecture == "bart" else AutoModelForSpeechSeq2Seq
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        expect_equal(_run(auto.from_pretrained(folder).eval(), case), patched, "logits after save and load")
    with original_attention(model):
        expect_equal(_run(model, case), want, "logits inside original_attention")
    expect_equal(_run(model, case), patched, "logits after original_attention")
    unpatch_model(model)
    expect_equal(_run(model, case), want, "logits after unpatch_model")
    expect(list(model.state_dict()) == keys, "state-dict keys after unpatch_model")


invariant("8 exactness limit")(check_exactness_limit)


@invariant("9 reference")
def check_reference(case: Case) -> None:
    """Outputs and gradients match the float64 Nq x Nk reference, under padding; gradcheck passes."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :9] = False
    mask[1, 60:] = False
    for key_padding_mask in (None, mask):
        mechanism = case.make()
        heads = [x.requires_grad_() for x in case.heads(LENGTH)]
        got, _ = mechanism(*heads, key_padding_mask)
        want = naive.attend(mechanism.attention_matrix(heads[0], heads[1], key_padding_mask, None, heads[2]), heads[2])
        expect_close(got, want, "output against the reference")
        weight = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(3))
        grads = head_gradients(got * weight, heads), head_gradients(want * weight, heads, "reference")
        for name, a, b in zip("qkv", *grads, strict=True):
            expect_close(a, b, f"gradient of {name} against the reference", 1e-8)
    expect_gradcheck(case)


@invariant("10 finite")
def check_finite(case: Case) -> None:
    """Outputs and gradients are finite in half precision, for large logits, masked rows and one key."""
    expect_finite(case)
    half = case.model(torch.bfloat16)
    expect(bool(torch.isfinite(_run(half, case)).all()), "bfloat16 model: logits not finite")


@invariant("11 linear cost")
def check_cost(case: Case) -> str | None:
    """No tensor of Nq Nk elements; FLOPs and what the backward pass writes grow as stated when both lengths double."""
    made, length = case.make(torch.float32), 2048
    if not made.subquadratic:
        return NOTHING
    heads = [x.requires_grad_() for x in case.heads(length, 1, torch.float32)]
    largest = largest_tensor(lambda: made(*heads)[0].sum().backward())
    pairs = heads[0].shape[2] * heads[1].shape[2]
    expect(largest < pairs, f"a tensor of {largest} elements was made for {pairs} pairs")
    short, long = (costs(made, case.heads(n, 1, torch.float32)) for n in (2 * length, 4 * length))
    for what, a, b in zip(("FLOPs", "what the backward pass writes"), short, long, strict=True):
        expect_growth(what, a, b, most=1.1 * made.growth)
    return None


@invariant("12 checkpointing and compile")
def check_transforms(case: Case) -> None:
    """Gradient checkpointing and a compiled attention module give the same outputs and gradients."""

    def gradients(model: PreTrainedModel) -> tuple[Tensor, list[Tensor]]:
        logits = _run(model.train(), case, use_cache=False)
        logits.sin().sum().backward()
        return logits, [p.grad for p in model.parameters() if p.grad is not None]

    want, want_grads = gradients(case.model())
    checkpointed, compiled = case.model(), case.model()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    torch.compiler.reset()
    *_, last = cross_attention_modules(compiled).values()
    last.compile(backend="eager")
    for what, model in (("with gradient checkpointing", checkpointed), ("of the compiled model", compiled)):
        got, got_grads = gradients(model)
        expect_close(got, want, f"logits {what}")
        for a, b in zip(got_grads, want_grads, strict=True):
            expect_close(a, b, f"gradient {what}")
