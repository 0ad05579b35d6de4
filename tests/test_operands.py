"""What does not fit together is refused by name before anything is computed: heads, masks, states, caches."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_linattn import OperandError, list_mechanisms
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer
from tests.helpers import each_of, make_patched, make_tokens

B, H, HKV, N, D = 2, 4, 2, 13, 8
CAUSAL = [name for name in list_mechanisms() if "causal" in MECHANISMS.get(name).modes]
each_mechanism = pytest.mark.parametrize("mechanism", each_of(CAUSAL))


def make_mechanism(name):
    layer = AttentionLayer(0, H, HKV, D, True, D**-0.5, torch.device("cpu"), torch.float32)
    return MECHANISMS.get(name)(make_config(name, {}), layer).eval()


def make_call():
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (B, H, N, D), "key": (B, HKV, N, D), "value": (B, HKV, N, D)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


MISFITS = {
    "rows of keys": ("key", lambda x: x[:1]),
    "rows of values": ("value", lambda x: x[:1]),
    "heads of values": ("value", lambda x: x[:, :1]),
    "tokens of values": ("value", lambda x: x[:, :, :-3]),
    "heads that do not divide": ("key", lambda x: x.repeat(1, 2, 1, 1)[:, :3]),
    "width of keys": ("key", lambda x: x[..., :-1]),
    "width of queries": ("query", lambda x: torch.cat([x, x], -1)),
    "fewer keys than queries": ("query", lambda x: torch.cat([x, x], 2)),
    "rows of a mask": ("key_padding_mask", lambda _: torch.ones(3, N, dtype=torch.bool)),
    "columns of a mask": ("key_padding_mask", lambda _: torch.ones(B, N + 1, dtype=torch.bool)),
    "columns of ids": ("sequence_ids", lambda _: torch.zeros(B, N + 5, dtype=torch.long)),
    "dimensions": ("query", lambda x: x[0]),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ["auto", "torch"])
@each_mechanism
def test_a_misfit_is_refused_by_name(mechanism, backend):
    made, call = make_mechanism(mechanism), make_call()
    made.backend = backend
    for what, (name, change) in MISFITS.items():
        wrong = {**call, name: change(call.get(name))}
        with pytest.raises(OperandError, match=name):
            made(**wrong)
        assert made.calls == 0, what


@each_mechanism
def test_a_call_without_rows_or_tokens_is_refused_by_name(mechanism):
    made, call = make_mechanism(mechanism), make_call()
    for nothing in (lambda x: x[:0], lambda x: x[:, :, :0]):
        with pytest.raises(OperandError, match=r"query and key .* must have a row and a token at least"):
            made(**{name: nothing(x) for name, x in call.items()})


def test_a_layer_that_pools_its_keys_is_refused_by_name():
    """As those of SegFormer, whose queries are more than the keys they see."""
    layer = AttentionLayer(0, H, HKV, D, False, D**-0.5, torch.device("cpu"), torch.float32)
    call = make_call()
    made = MECHANISMS.get("linear")(make_config("linear", {}), layer)
    with pytest.raises(OperandError, match="at least as many keys as queries: leave layers that pool"):
        made(call["query"], *(call[name][:, :, :5] for name in ("key", "value")))


@torch.no_grad()
@each_mechanism
def test_a_state_of_other_rows_is_refused_and_stays(mechanism):
    made, call = make_mechanism(mechanism), make_call()
    _, state = made(**{name: x[:1] for name, x in call.items()})
    if state is None:
        return
    before = copy.deepcopy(state)
    for tokens in (1, N):
        with pytest.raises(OperandError, match="has 1 rows, and 2 are to continue it"):
            made(**{name: x[:, :, :tokens] for name, x in call.items()}, state=state)
    assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True) if isinstance(x, torch.Tensor))


@torch.no_grad()
@pytest.mark.covering(1)
@pytest.mark.parametrize("new", [1, 9])
@pytest.mark.parametrize("rows", [2, 64])
@each_mechanism
def test_a_cache_of_other_rows_is_refused_and_goes_on(mechanism, rows, new):
    model, ids = make_patched("llama", mechanism), make_tokens(1, 11)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    other = copy.deepcopy(cache)
    with pytest.raises(Exception, match=r"rows|Sizes of tensors must match"):  # the latter where softmax is kept
        model(make_tokens(rows, new), past_key_values=cache)
    got, want = (model(ids[:, 8:], past_key_values=x).logits for x in (cache, other))
    assert torch.equal(got, want)


@torch.no_grad()
@each_mechanism
def test_a_mask_of_numbers_is_one_of_booleans(mechanism):
    """As tokenizers write it."""
    made, call = make_mechanism(mechanism), make_call()
    mask, ids = torch.arange(N)[None] > 2, (torch.arange(N)[None] > 6).long()
    for packed in ({}, {"sequence_ids": ids}):
        whole, real = (made(**call, **packed, key_padding_mask=x)[0] for x in (mask.long(), mask))
        assert torch.equal(whole, real)


@torch.no_grad()
@each_mechanism
def test_one_row_of_a_mask_or_of_ids_still_stands_for_all(mechanism):
    made, call = make_mechanism(mechanism), make_call()
    row = {"key_padding_mask": torch.arange(N)[None] > 2, "sequence_ids": (torch.arange(N)[None] > 6).long()}
    for name, x in row.items():
        one, all_rows = (made(**call, **{name: given})[0] for given in (x, x.expand(B, -1)))
        assert torch.equal(one, all_rows)
